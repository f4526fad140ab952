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
            "--replay",
            help="Compute steps again and compare every bit: 30, 1200:1210, any (a few at random) or all.",
        ),
    ] = "",
    result: Annotated[
        bool, typer.Option("--result", help="Score the weights again and compare the counts.")
    ] = False,
    bytes_: Annotated[
        bool, typer.Option("--bytes", help="Read every shard and check it against its index.")
    ] = False,
    data: Annotated[str, typer.Option("--data", help="Path to the shards on this machine.")] = "",
    from_: Annotated[str, typer.Option("--from", help="Path to the start weights on this machine.")] = "",
) -> None:
    """Check a run against its records, or recompute part of it. For example: vitctl verify runs/NAME --replay
    any

    The run is only read. Exit codes: 0 everything that was compared is as recorded; 2 something differs or is
    not proven (the last line says which), or an error that you can fix; 1 a bug of vitctl.
    """
    from vitctl.cli.show.console import CONSOLE
    from vitctl.cli.show.findings import FindingsScreen
    from vitctl.engine.journal import run_of
    from vitctl.errors import LaunchError
    from vitctl.launch.run_folder import is_running
    from vitctl.verify.run_check import verify as check

    if is_running(run_of(run)):
        raise LaunchError(f"{run}: is running; verify it when it has ended")
    states, unchecked = set[str](), dict[str, None]()
    options = {"steps": replay, "data": data, "weights": from_}
    with FindingsScreen() as screen:
        for folder, found in check(
            run, **options, scores=result, reads_bytes=bytes_, progress=screen.replaying
        ):
            states.add(found.state)
            unchecked |= {found.what: None} if found.state == "not checked" else {}
            screen.show(found, "" if folder == run else f"{folder.relative_to(run)}")
    if "differs" in states:
        text = "something differs"
    elif "not proven" in states:
        text = "nothing differs; something is not proven"
    else:
        text = "everything that was compared is as recorded"
        text += f"; not checked: {', '.join(unchecked)}" if unchecked else ""
    CONSOLE.print(text, markup=False, soft_wrap=True)
    if states & {"differs", "not proven"}:
        raise typer.Exit(2)  # as `compare`: 1 is a bug
