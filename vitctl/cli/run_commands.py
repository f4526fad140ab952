"""`vitctl report`, `vitctl compare`, `vitctl verify` and `vitctl runs`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from vitctl.system.text import bytes_text

RUNS = Path("runs")
app = typer.Typer(help="List, inspect, follow and clean up runs.", invoke_without_command=True)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder")]
In = Annotated[Path | None, typer.Option("--in", help="Folder of the runs")]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS",
            help="Run folders, the folder of a sweep, or a folder of runs such as quickstart",
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
    """Write an HTML report: curves, tables, examples, provenance.

    The page is self-contained.

    For example: vitctl report runs/NAME -o report.html
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.console import say, waiting
    from vitctl.errors import writing

    with waiting("reading the runs"), writing(out):
        from vitctl.report.html_report import write_report

        size = write_report(runs, out, most_images=images, title=title, say=say)
    say(f"report: {out} ({bytes_text(size)}); open it in a browser")


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS",
            help="Folders of finished runs; each is compared with the first",
        ),
    ],
) -> None:
    """Show results side by side and check whether they are comparable.

    For example: vitctl compare runs/a runs/b
    Guide: docs/trust.md
    """
    from vitctl.cli.show.console import say, show_table, waiting
    from vitctl.errors import CheckpointError, refuse

    with waiting("starting"):
        from vitctl.report.compare import compare_runs

    missing = next((run for run in runs if not run.is_dir()), None)
    refuse(
        CheckpointError,
        (len(runs) < 2, runs[0], "give at least two runs to compare"),
        (missing, missing, "no such folder", f"give run folders, such as {RUNS}/NAME"),
    )
    result = compare_runs(runs)
    names = [run.name for run in runs]
    rows = [(name, *(_number(value, name) for value in values)) for name, values in result.numbers]
    show_table(("number", *names), rows)
    if result.are_seeds:
        show_table(("over seeds", "mean", "95 % of the mean"), [*_over_seeds(result.numbers)])
    if result.differences:
        rows = [(name, *values) for name, values in result.differences]
        show_table(("differs", *names), rows, left=None)
    for text in result.notes:
        say(text)
    for reason in result.reasons:
        say(f"must not be compared: {reason}")
    if result.unrecorded:
        say(f"not recorded by any of them: {', '.join(result.unrecorded)}; score them again to record it")
    if result.reasons:
        raise typer.Exit(2)  # lets a script detect it
    known = "as far as recorded, " * bool(result.unrecorded)
    say(f"{known}same images, split, labels and evaluation protocol: these numbers may be compared")


def _over_seeds(numbers: Sequence[tuple[str, list[float | str | None]]]) -> Iterator[tuple[str, str, str]]:
    """Yield the mean over seeds and its interval for numbers that differ; shares are clipped to 0 and 1."""
    from statistics import fmean

    from vitctl.engine.metrics import t_interval

    for name, values in numbers:
        found = [value for value in values if isinstance(value, int | float)]
        if len(found) == len(values) and len(set(found)) > 1:
            ends = t_interval(found)
            if all(0 <= value <= 1 for value in found):
                ends = [min(max(end, 0.0), 1.0) for end in ends]
            low, high = (_number(end, name) for end in ends)
            yield name, _number(fmean(found), name), f"{low} to {high}"


def _number(value: float | str | None, name: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if name.endswith(("nll", "brier")):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2%}" if 0 <= value <= 1 else f"{value:,.6g}"


def verify(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run folder, or the folder of a training run in it",
        ),
    ],
    replay: Annotated[
        str,
        typer.Option(
            "--replay",
            help="Recompute steps and compare every bit: 30, 1200:1210, any (a few at random) or all",
        ),
    ] = "",
    result: Annotated[
        bool, typer.Option("--result", help="Score the weights again and compare the counts")
    ] = False,
    bytes_: Annotated[
        bool, typer.Option("--bytes", help="Read every shard and check it against its index")
    ] = False,
    data: Annotated[str, typer.Option("--data", help="Path to the shards on this machine")] = "",
    from_: Annotated[str, typer.Option("--from", help="Path to the start weights on this machine")] = "",
) -> None:
    """Check a run against its records, or recompute part of it.

    The run is not changed. Exit codes: 0: everything compared is as recorded; 2: something differs or
    is not proven (the last line says which), or there is an error that you can fix; 1: a bug of vitctl.

    For example: vitctl verify runs/NAME --replay any
    Guide: docs/trust.md
    """
    from vitctl.cli.run_job import enter_start_folder
    from vitctl.cli.show.console import progress_of_steps, say, waiting
    from vitctl.engine.journal import RECIPE, run_of
    from vitctl.errors import LaunchError
    from vitctl.launch.run_folder import is_running

    with waiting("starting"):
        from vitctl.recipe.load import Override
        from vitctl.verify.finding import FAILS
        from vitctl.verify.run_check import verify as check

    if is_running(run_of(run)):
        raise LaunchError(run, "is still running", "verify it after it has ended")
    states, unchecked = set[str](), dict[str, None]()
    if (run_of(run) / RECIPE).is_file():
        here, given = Path.cwd(), [Override("data.path", data), Override("weights.source", from_)]
        _, (data_given, from_given) = enter_start_folder(run_of(run), given)
        run, data, from_ = here / run if Path.cwd() != here else run, data_given.value, from_given.value
    with progress_of_steps(prints=False) as progress:

        def replaying(first: int, last: int, step: int) -> None:
            progress("replaying", step - first + 1, last - first + 1)

        findings = check(
            run,
            steps=replay,
            data=data,
            weights=from_,
            scores=result,
            reads_bytes=bytes_,
            progress=replaying,
        )
        for folder, finding in findings:
            states.add(finding.state)
            unchecked |= {finding.what: None} if finding.state == "not checked" else {}
            inside = "" if folder == run else f"{folder.relative_to(run)}: "
            label = finding.state.upper() if finding.state in FAILS else finding.state
            say(f"{label:<12}{inside}{finding.what}: {finding.text}")
            progress("verifying", 0, 0)
    if "differs" in states:
        text = "something differs"
    elif "not proven" in states:
        text = "nothing differs; something is not proven"
    else:
        text = "everything that was compared is as recorded"
        text += f"; not checked: {', '.join(unchecked)}" if unchecked else ""
    say(text)
    if states & {"differs", "not proven"}:
        raise typer.Exit(2)  # as in `compare`: 1 means a bug


@app.callback()
def runs(context: typer.Context, in_: In = None) -> None:
    """List runs, the newest first.

    The list includes the runs of sweeps. `vitctl runs clean` also lists converted data that no run needs.

    For example: vitctl runs
    Guide: docs/own-data.md
    """
    if context.invoked_subcommand is not None:
        return
    from vitctl.cli.show.console import say
    from vitctl.cli.show.run_views import show_list
    from vitctl.errors import CheckpointError
    from vitctl.launch.listing import list_runs

    folder = in_ or RUNS
    if in_ is not None and not in_.is_dir():
        raise CheckpointError(in_, "no such folder", "give the folder of the runs with --in")
    if lines := list_runs(folder):
        show_list(lines, folder)
    else:
        first = "; to make one: vitctl pretrain --recipe smoke" * (in_ is None)
        say(f"no runs in {folder}{' yet' * (in_ is None)}{first}")


@app.command()
def show(run: Run) -> None:
    """Show one run, with its curves drawn in the terminal.

    For example: vitctl runs show runs/NAME
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.run_views import show_run

    show_run(run)


@app.command()
def tail(run: Run) -> None:
    """Follow a run until it ends; Ctrl-C ends this command only.

    For example: vitctl runs tail runs/NAME
    Guide: docs/own-data.md
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
        ),
    ] = None,
    in_: In = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking")] = False,
) -> None:
    """Delete all checkpoints but the last and the best of each run, and converted data that no run needs.

    Logs and results stay, and the run can still be resumed, scored and exported. Active runs are not touched,
    nor is the cache of a day, nor shards whose photographs are gone. RUNS alone leave converted data.

    For example: vitctl runs clean
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.run_views import clean_runs
    from vitctl.data.datasets.converted import list_converted
    from vitctl.launch.listing import list_runs, unused

    before = context.parent.params["in_"] if context.parent else None  # `vitctl runs --in FOLDER clean`
    root = in_ or before or RUNS
    chosen = runs or [line.folder for line in list_runs(root)]
    clean_runs(chosen, [] if runs else unused(list_converted(root), chosen), yes=yes)


@app.command()
def rm(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS", help="Run folders"),
    ],
) -> None:
    """Delete runs, without asking.

    A run that is active, or that a run beside it or under ./runs started from, is refused.

    For example: vitctl runs rm runs/NAME
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.console import say
    from vitctl.launch.listing import remove_run

    for run in runs:
        say(f"{run}: removed, {bytes_text(remove_run(run))} freed")
