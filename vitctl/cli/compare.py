"""`vitctl compare`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli import completion


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of finished runs; the others are compared with the first.",
            autocompletion=completion.runs,
        ),
    ],
) -> None:
    """Show two or more results side by side, and whether they may be compared.

    For example: vitctl compare runs/a runs/b
    """
    from vitctl.cli.show.render import CONSOLE, show_table
    from vitctl.errors import CheckpointError
    from vitctl.report.compare import compare_runs

    if len(runs) < 2:
        raise CheckpointError(f"{runs[0]}: give at least two runs to compare")
    if missing := [run for run in runs if not run.is_dir()]:
        raise CheckpointError(f"{missing[0]}: no such folder; give run folders, such as {Path('runs')}/NAME")
    found = compare_runs(runs)
    header = ("", *(run.name for run in runs))
    show_table(("number", *header[1:]), [(name, *map(_number, values)) for name, values in found.numbers])
    if found.differences:
        show_table(
            ("differs", *header[1:]), [(name, *values) for name, values in found.differences], left=None
        )
    for reason in found.reasons:
        CONSOLE.print(f"must not be compared: {reason}", markup=False, soft_wrap=True)
    if found.unrecorded:
        CONSOLE.print(
            f"not recorded by any of them: {', '.join(found.unrecorded)}; score them again to record it",
            soft_wrap=True,
        )
    if not found.reasons:
        known = "as far as recorded, " * bool(found.unrecorded)
        CONSOLE.print(
            f"{known}same images, split, labels and evaluation protocol: these numbers may be compared",
            soft_wrap=True,
        )
    if found.reasons:
        raise typer.Exit(2)  # so that a script can detect it


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if isinstance(value, float) and 0 <= value <= 1 else f"{value:,}"
