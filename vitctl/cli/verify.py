"""`vitctl verify`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli import completion


def verify(
    run: Annotated[
        Path,
        typer.Argument(help="Run folder, or the folder of a training in it.", autocompletion=completion.runs),
    ],
    replay: Annotated[
        str,
        typer.Option(
            "--replay", help="Compute steps again and compare every bit: 1200:1210, any (a few at random) or all."
        ),
    ] = "",
    result: Annotated[bool, typer.Option("--result", help="Score the weights again and compare the counts.")] = False,
    bytes_: Annotated[bool, typer.Option("--bytes", help="Read every shard and hold it against its index.")] = False,
    data: Annotated[str, typer.Option("--data", help="Where the shards lie on this machine.")] = "",
    from_: Annotated[str, typer.Option("--from", help="Where the start weights lie on this machine.")] = "",
) -> None:
    """Hold a run against its records, or repeat a part of it. For example: vitctl verify runs/NAME --replay any

    The run is only read. Exit code 0: everything that was compared is as recorded; 1: something differs.
    """
    from vitctl.cli.show.render import CONSOLE, waiting
    from vitctl.errors import LaunchError
    from vitctl.jobs.record.identity import run_of
    from vitctl.jobs.verification.verify import verify as findings
    from vitctl.launch.run_folder import is_running

    if is_running(run_of(run)):
        raise LaunchError(f"{run}: is running; verify it when it has ended")
    failed = False
    with waiting("verifying"):
        for folder, found in findings(run, steps=replay, scores=result, reads_bytes=bytes_, data=data, weights=from_):
            failed |= found.state == "differs"
            inside = "" if folder == run else f"{folder.relative_to(run)}: "
            text = f"{found.state.upper() if found.state == 'differs' else found.state:<12}{inside}{found.what}: {found.text}"
            CONSOLE.print(text, markup=False, highlight=False, soft_wrap=True)
    CONSOLE.print("something differs" if failed else "everything that was compared is as recorded", markup=False)
    if failed:
        raise typer.Exit(1)
