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
        bool, typer.Option("--bytes", help="Read every shard and hold it against its index.")
    ] = False,
    data: Annotated[str, typer.Option("--data", help="Where the shards lie on this machine.")] = "",
    from_: Annotated[str, typer.Option("--from", help="Where the start weights lie on this machine.")] = "",
) -> None:
    """Check a run against its records, or recompute part of it. For example: vitctl verify runs/NAME --replay
    any

    The run is only read. Exit codes: 0 everything that was compared is as recorded; 2 something differs or is
    not proven (the last line says which), or an error that you can fix; 1 a bug of vitctl.
    """
    from vitctl.cli.show.console import CONSOLE
    from vitctl.cli.show.findings import FindingsScreen
    from vitctl.errors import LaunchError
    from vitctl.jobs.record.identity import run_of
    from vitctl.launch.run_folder import is_running
    from vitctl.verify.finding import REST
    from vitctl.verify.verify import verify as findings

    if is_running(run_of(run)):
        raise LaunchError(f"{run}: is running; verify it when it has ended")
    states, unchecked = set[str](), dict[str, None]()
    with FindingsScreen() as screen:
        options = {"steps": replay, "data": data, "weights": from_}
        for folder, found in findings(
            run, **options, scores=result, reads_bytes=bytes_, progress=screen.replaying
        ):
            states.add(found.state)
            unchecked |= {found.what: None} if found.state == "not checked" and found.what != REST else {}
            screen.show(found, "" if folder == run else f"{folder.relative_to(run)}")
    left_out = f"; not checked: {', '.join(unchecked)}" if unchecked else ""
    last = {"differs": "something differs", "not proven": "nothing differs; something is not proven"}
    failed = next((text for state, text in last.items() if state in states), "")
    text = failed or f"everything that was compared is as recorded{left_out}"
    CONSOLE.print(text, markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(2)  # as `compare`: 1 is a bug
