"""`vitctl doctor`, `quickstart`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import typed


def doctor() -> None:
    """Check this installation and this machine, and show what training would use."""
    from vitctl.cli.show.render import CONSOLE, show_table
    from vitctl.launch.doctor import run_checks

    findings = run_checks()
    show_table(("", "", ""), [("ok" if f.ok else "!!", f.what, f.said) for f in findings], left=None)
    bad = [f for f in findings if not f.ok]
    CONSOLE.print(f"{len(bad)} of {len(findings)} need attention" if bad else "all is well")
    if bad:
        raise typer.Exit(2)


def quickstart(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for all output; a stopped quickstart is resumed.")
    ] = Path("quickstart"),
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
) -> None:
    """Run all steps on data that comes with vitctl: shards, pretrain, fewshot, finetune, vtab, export.

    Under 4 minutes on 2 cores.
    """
    ignore_output_errors()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = (
        f"; this machine is busy (load {load:.1f} on {cores} cores), so that it takes longer"
        if load > cores
        else ""
    )
    print(f"quickstart: about 4 minutes on 2 cores{busy}", flush=True)
    try:
        from vitctl.cli.quickstart import run_quickstart  # seconds

        run_quickstart(out, seed)
    except KeyboardInterrupt:
        again = f"vitctl quickstart --out {typed(out)}" + (f" --seed {seed}" if seed else "")
        print(f"vitctl: stopped; continue with: {again}", file=sys.stderr)
        raise typer.Exit(3) from None
