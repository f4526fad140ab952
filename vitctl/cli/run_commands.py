"""`vitctl report`, `vitctl compare` and `vitctl runs`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli import completion
from vitctl.system.text import bytes_text

RUNS = Path("runs")
app = typer.Typer(help="List, inspect, follow and clean up runs.", invoke_without_command=True)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder", autocompletion=completion.runs)]
In = Annotated[Path | None, typer.Option("--in", help="Folder of the runs")]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS",
            help="Run folders, the folder of a sweep, or a folder of runs such as quickstart",
            autocompletion=completion.runs,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write")] = Path("report.html"),
    images: Annotated[
        int | None,
        typer.Option(
            "--images",
            min=0,
            help="Test images to classify for examples and confusion; 0: none; default: up to 1,000, fewer "
            "for large models",
        ),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Title of the page")] = "",
) -> None:
    """Write a self-contained HTML report: curves, tables, examples and the provenance of every number.

    For example: vitctl report runs/NAME -o report.html
    """
    from vitctl.cli.show.console import say, waiting
    from vitctl.errors import writing
    from vitctl.report.html_report import write_report

    with waiting("reading the runs"), writing(out):
        size = write_report(runs, out, most_images=images, title=title, say=say)
    say(f"report: {out} ({bytes_text(size)}); open it in a browser")


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS",
            help="Folders of finished runs; the first is compared with each of the others",
            autocompletion=completion.runs,
        ),
    ],
) -> None:
    """Show results side by side, and whether they are comparable.

    For example: vitctl compare runs/a runs/b
    """
    from vitctl.cli.show.console import say, show_table
    from vitctl.errors import CheckpointError
    from vitctl.report.compare import compare_runs

    if len(runs) < 2:
        raise CheckpointError(f"{runs[0]}: give at least two runs to compare")
    if missing := [run for run in runs if not run.is_dir()]:
        raise CheckpointError(f"{missing[0]}: no such folder; give run folders, such as {RUNS}/NAME")
    result = compare_runs(runs)
    names = [run.name for run in runs]
    show_table(("number", *names), [(name, *map(_number, values)) for name, values in result.numbers])
    if result.differences:
        rows = [(name, *values) for name, values in result.differences]
        show_table(("differs", *names), rows, left=None)
    for reason in result.reasons:
        say(f"must not be compared: {reason}")
    if result.unrecorded:
        say(f"not recorded by any of them: {', '.join(result.unrecorded)}; score them again to record it")
    if result.reasons:
        raise typer.Exit(2)  # so that a script can detect it
    known = "as far as recorded, " * bool(result.unrecorded)
    say(f"{known}same images, split, labels and evaluation protocol: these numbers may be compared")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if isinstance(value, float) and 0 <= value <= 1 else f"{value:,}"


@app.callback()
def runs(context: typer.Context, in_: In = None) -> None:
    """List runs, the newest first.

    For example: vitctl runs

    The list includes the runs of sweeps.
    """
    if context.invoked_subcommand is None:
        _list(in_)


def _folder(context: typer.Context, in_: Path | None) -> Path | None:
    """Return --in, given after the command or before it: `vitctl runs --in FOLDER COMMAND`."""
    return in_ or (context.parent.params["in_"] if context.parent is not None else None)


def _list(folder: Path | None) -> None:
    from vitctl.cli.show.console import say
    from vitctl.cli.show.run_views import show_list
    from vitctl.errors import CheckpointError
    from vitctl.launch.listing import list_runs

    if folder is not None and not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of the runs with --in")
    lines = list_runs(folder or RUNS)
    if lines:
        show_list(lines, folder or RUNS)
    elif folder is None:
        say(f"no runs in {RUNS} yet; to make one: vitctl pretrain --recipe smoke")
    else:
        say(f"no runs in {folder}")


@app.command("list")
def list_command(context: typer.Context, in_: In = None) -> None:
    """List runs, as `vitctl runs` does.

    For example: vitctl runs list
    """
    _list(_folder(context, in_))


@app.command()
def show(run: Run) -> None:
    """Show one run, with its curves drawn in the terminal.

    For example: vitctl runs show runs/NAME
    """
    from vitctl.cli.show.run_views import show_run

    show_run(run)


@app.command()
def tail(run: Run) -> None:
    """Follow a run until it ends; Ctrl-C ends this command only.

    For example: vitctl runs tail runs/NAME
    """
    from vitctl.cli.show.run_views import tail as follow

    follow(run)


@app.command()
def clean(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS",
            help="Run folders; default: all that `vitctl runs` lists",
            autocompletion=completion.runs,
        ),
    ] = None,
    in_: In = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking")] = False,
) -> None:
    """Delete all checkpoints but the last and the best of each run.

    For example: vitctl runs clean

    Logs and results stay, and the run can still be resumed, scored and exported. Active runs are not touched.
    """
    from vitctl.cli.show.run_views import clean_runs
    from vitctl.launch.listing import list_runs

    chosen = runs or [line.folder for line in list_runs(_folder(context, in_) or RUNS)]
    clean_runs(chosen, yes=yes)
