"""`vitctl doctor`, `quickstart`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.system.screen import ignore_output_errors


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
    """Run all steps on data that comes with vitctl: shards, pretrain, fewshot, finetune, vtab, export. Under 4 minutes on 2 cores."""
    from vitctl.cli.quickstart import run_quickstart

    ignore_output_errors()
    run_quickstart(out, seed)
