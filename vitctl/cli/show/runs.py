"""What `vitctl runs` prints: the list, one run with its curves, a run as it goes on, and what a clean-up
frees.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

from vitctl.cli.show.curve import draw_curve
from vitctl.cli.show.render import CONSOLE, Screen, show_result, show_table
from vitctl.engine.journal import LOG, read_records
from vitctl.engine.run_files import RECIPE, RESULT
from vitctl.errors import CheckpointError, LaunchError
from vitctl.jobs.record.result import read_result
from vitctl.launch.errors import LOGS
from vitctl.launch.follower import Follower
from vitctl.launch.listing import RunLine, read_line
from vitctl.launch.run_folder import is_running
from vitctl.launch.worker import NOW
from vitctl.report.charts import Unit, points
from vitctl.system.parsing import parsing
from vitctl.system.text import bytes_text

_HEIGHT, _WIDEST = 9, 100
_BEFORE = 10  # records that `tail` begins with
_POLL_SECONDS = 0.5


def show_list(lines: Sequence[RunLine], root: Path) -> None:
    """A line for each run, the newest first; folders are told from `root` on."""
    rows = [
        (
            *(str(line.folder.relative_to(root)), line.recipe or "-", line.state, _steps(line)),
            *(_metric(line), _ago(line.when), bytes_text(line.num_bytes)),
        )
        for line in lines
    ]
    show_table(
        ("run", "recipe", "state", "step", "result", "updated", "size"), rows, left=("recipe", "state")
    )
    total = bytes_text(sum(line.num_bytes for line in lines))
    CONSOLE.print(escape(f"{len(lines)} run{'s' * (len(lines) > 1)} in {root}, {total}"), soft_wrap=True)


def show_run(folder: Path) -> None:
    """One run: its line, the curves of loss and accuracy, and its last warnings."""
    line, records = _read(folder), read_records(folder / LOG)
    facts = [
        ("recipe", f"{line.recipe or 'unknown'} ({line.job})"),
        ("state", line.state + (f", step {_steps(line)}" if line.step else "")),
        (line.what or ("loss so far" if line.loss is not None else "accuracy"), _metric(line)),
        ("last update", _when(line.when)),
        ("size on disk", bytes_text(line.num_bytes)),
    ]
    show_table(("", ""), facts, title=str(folder), left=None)
    plain = CONSOLE.options.ascii_only
    width = min(CONSOLE.width, _WIDEST)
    for kind, field in (("train", "loss"), ("evaluate", "accuracy")):
        values = [(x, y) for x, y in points(records, kind, field) if x > 0]
        unit: Unit = "percent" if kind == "evaluate" else "number"
        if len(values) > 1:
            drawn = draw_curve(values, width=width, height=_HEIGHT, unit=unit, plain=plain)
            CONSOLE.print(f"\n{field}", markup=False)
            for text in drawn:
                CONSOLE.print(text, markup=False, soft_wrap=True)
    warnings = [str(r.get("text")) for r in records if r.get("kind") == "warning"]
    for text in warnings[-3:]:
        CONSOLE.print(escape(f"warning: {text}"), soft_wrap=True)
    result = read_result(folder)
    if result is not None and result.error:
        CONSOLE.print(escape(f"failed: {result.error}"), soft_wrap=True)
    CONSOLE.print(escape(f"a page of it: vitctl report {folder}"), soft_wrap=True)


def tail(folder: Path) -> None:
    """The last records of a run, then each new one until no process holds its lock, then its result."""
    _read(folder)
    with Screen(folder) as screen:
        follower = Follower(folder / LOG, screen.report_foreign, folder / LOGS / NOW)
        for record in read_records(folder / LOG)[-_BEFORE:]:
            screen.report_foreign(record)
        while is_running(folder):
            follower.poll()
            time.sleep(_POLL_SECONDS)
        follower.poll()
    result = read_result(folder)
    if result is None:
        CONSOLE.print("no process works on this run; it has no result", markup=False)
    elif result.status == "done":
        with parsing(folder / RESULT, CheckpointError, "not a valid result of vitctl"):
            show_result(
                {
                    "job": result.job,
                    "metrics": result.metrics,
                    "provenance": result.provenance,
                    "files": result.files,
                },
                folder,
            )
    else:
        CONSOLE.print(escape(f"{result.status}{': ' * bool(result.error)}{result.error}"), soft_wrap=True)


def _read(folder: Path) -> RunLine:
    if not (folder / RECIPE).is_file():
        raise CheckpointError(f"{folder}: not a run folder; `vitctl runs` lists those under ./runs")
    return read_line(folder)


def _steps(line: RunLine) -> str:
    if not line.total_steps:
        return "-"
    return f"{line.step:,}" if line.step == line.total_steps else f"{line.step:,}/{line.total_steps:,}"


def _metric(line: RunLine) -> str:
    """The accuracy of a run; until it has one, its loss."""
    if line.number is not None:
        return f"{line.number:.2%}"
    return "-" if line.loss is None else f"loss {line.loss:.4g}"


def _ago(seconds: float) -> str:
    """How long ago, in the largest unit of which there is one."""
    age = max(0.0, time.time() - seconds)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if age >= size:
            return f"{age // size:.0f} {unit} ago"
    return "now"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def clean_runs(runs: Sequence[Path], *, yes: bool) -> None:
    """Say what can go of each run, ask, and delete it.

    Raises:
        CheckpointError: there is nobody to ask, and `yes` was not given.
    """
    from vitctl.launch.clean import all_removals, remove

    plans = all_removals(runs)
    for plan in plans:
        if plan.reason:
            CONSOLE.print(escape(f"not touched: {plan.reason}"), soft_wrap=True)
    found = [plan for plan in plans if plan.folders]
    if not found:
        CONSOLE.print("nothing to delete: every checkpoint is the last or the best of its run", markup=False)
        return
    rows = [
        (str(p.run), f"{len(p.folders)}", bytes_text(p.num_bytes), ", ".join(map(str, p.kept))) for p in found
    ]
    show_table(("run", "checkpoints to delete", "frees", "steps that stay"), rows, left=("steps that stay",))
    total = sum(plan.num_bytes for plan in found)
    number = sum(len(p.folders) for p in found)
    question = f"delete {number} checkpoint{'s' * (number > 1)}, {bytes_text(total)}?"
    if not yes:
        if not sys.stdin.isatty():
            raise CheckpointError(f"{question} nobody can be asked here; add --yes")
        typer.confirm(question, abort=True)
    freed = 0
    for plan in found:
        try:
            freed += remove(plan)
        except LaunchError as error:
            CONSOLE.print(escape(f"not touched: {error}"), soft_wrap=True)
    CONSOLE.print(f"freed {bytes_text(freed)}", markup=False)
