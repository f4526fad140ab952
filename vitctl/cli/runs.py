"""`vitctl report` and `vitctl runs`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli import completion
from vitctl.system.text import bytes_text

RUNS = Path("runs")
app = typer.Typer(help="List runs, show one, follow one, free disk space.", invoke_without_command=True)
In = Annotated[Path, typer.Option("--in", help="Folder of the runs.")]
Run = Annotated[Path, typer.Argument(help="Run folder.", autocompletion=completion.runs)]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, the folder of a sweep, or a folder of runs such as quickstart.",
            autocompletion=completion.runs,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page, one HTML file.")] = Path("report.html"),
    images: Annotated[
        int | None,
        typer.Option(
            "--images",
            min=0,
            help="Test images that each classifier answers for the page (examples, confusion); 0: none. "
            "Default: up to 1,000, fewer for large models.",
        ),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Title of the page.")] = "",
) -> None:
    """Write one page about runs that needs nothing else: curves, tables, examples, and what every number
    belongs to.

    For example: vitctl report runs/NAME -o report.html
    """
    from vitctl.cli.show.render import CONSOLE, waiting
    from vitctl.errors import writing
    from vitctl.report.html_report import write_report

    with waiting("reading the runs"), writing(out):
        size = write_report(
            runs,
            out,
            most_images=images,
            title=title,
            say=lambda text: CONSOLE.print(text, markup=False, soft_wrap=True),
        )
    CONSOLE.print(
        f"report: {out} ({bytes_text(size)}), to be opened in a browser", markup=False, soft_wrap=True
    )


@app.callback()
def list_(context: typer.Context, in_: In = RUNS) -> None:
    """List runs, the newest first. For example: vitctl runs

    Those of a folder, and of the sweeps in it. A run is running while a process holds its lock.
    """
    if context.invoked_subcommand is None:
        _list(in_)


def _folder(context: typer.Context) -> Path:
    """The --in of `vitctl runs --in FOLDER COMMAND`."""
    return Path(context.parent.params["in_"]) if context.parent is not None else RUNS


def _list(in_: Path) -> None:
    from vitctl.cli.show.render import CONSOLE
    from vitctl.cli.show.runs import show_list
    from vitctl.errors import CheckpointError
    from vitctl.launch.listing import list_runs

    if not in_.is_dir():
        raise CheckpointError(f"{in_}: no such folder; give the folder of the runs with --in")
    found = list_runs(in_)
    if not found:
        CONSOLE.print(f"no runs in {in_}", markup=False, soft_wrap=True)
        return
    show_list(found, in_)


@app.command("list")
def list_command(
    context: typer.Context,
    in_: Annotated[Path | None, typer.Option("--in", help="Folder of the runs.")] = None,
) -> None:
    """List runs, as `vitctl runs` does. For example: vitctl runs list"""
    _list(in_ or _folder(context))


@app.command()
def show(run: Run) -> None:
    """Show one run, with its curves drawn in the terminal. For example: vitctl runs show runs/NAME"""
    from vitctl.cli.show.runs import show_run

    show_run(run)


@app.command()
def tail(run: Run) -> None:
    """Follow a run until it ends; Ctrl-C ends this command alone. For example: vitctl runs tail runs/NAME"""
    from vitctl.cli.show.runs import tail as follow

    follow(run)


@app.command()
def clean(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders; default: all that `vitctl runs` lists.", autocompletion=completion.runs
        ),
    ] = None,
    in_: Annotated[Path | None, typer.Option("--in", help="Folder of the runs.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete checkpoints that are neither the last nor the best of their run. For example: vitctl runs clean

    Logs and results stay, and a run can still be resumed, scored and exported. A run that is running is not
    touched.
    """
    from vitctl.cli.show.runs import clean_runs
    from vitctl.launch.listing import list_runs

    clean_runs(runs or [line.folder for line in list_runs(in_ or _folder(context))], yes=yes)
