"""`vitctl report`: one HTML file that needs nothing else: no network, no other file, no third-party script.

This file decides what the page shows; the templates write it. Jinja2 escapes every value, and `_plain` shows
control characters and direction marks as escapes, because names and messages come from others.
"""

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vitctl import __version__
from vitctl.engine.journal import RUN_FILES, Record
from vitctl.errors import VitctlError
from vitctl.report.charts import FRAME, Block, overlaid, run_charts
from vitctl.report.class_tables import (
    Budget,
    confusion_blocks,
    examples,
    inspect_pictures,
    read_counts,
    worst_classes,
)
from vitctl.report.result_tables import (
    group,
    is_digest,
    number_of,
    paragraph,
    provenance_tables,
    repeating_command,
    result_blocks,
    run_table,
    sweep_blocks,
    tiles,
    value_text,
    warnings,
)
from vitctl.report.run_records import RunRecords, SweepRecords, inner_trainings, read_folders
from vitctl.report.sweep_table import shared_words
from vitctl.report.wrong_answers import wrong_answers
from vitctl.system.files import check_free, write_text
from vitctl.system.text import printable

if TYPE_CHECKING:  # needs torch
    from vitctl.report.answers import Answers

MAX_BYTES = 3_000_000  # of a page
_MAX_ANSWERED = 6  # runs whose test images are shown to their classifiers
_MAX_OVERLAID = 8  # lines of a chart
_MAX_INNER = 24  # charts of the trainings inside a run
_CLASSIFIERS = ("pretrain", "finetune", "evaluate")
# Bytes of pictures, and runs with curves and recipe: tried in this order until the page is small enough.
_LIMITS = ((1_600_000, 24), (800_000, 8), (300_000, 1))
_TEMPLATE = Path(__file__).with_name("template")

Say = Callable[[str], None]


@dataclass
class _Page:
    """State shared by the sections of a page: the limits that are left, and the answers computed for it.

    Args:
        budget: for pictures.
        full_runs: number of runs that are still shown with curves and recipe.
        most_images, say: as for `write_report`.
        answers: of the classifiers, by run folder; text is the reason if there are none.
        num_asked: classifiers asked so far.
    """

    budget: Budget
    full_runs: int
    most_images: int | None
    say: Say
    answers: "dict[Path, Answers | str]" = field(default_factory=dict)
    num_asked: int = 0


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    most_images: int | None = None,
    title: str = "",
    say: Say = lambda _: None,
) -> int:
    """Write a page about runs, atomically, and return its size in bytes.

    Pictures and the details of later runs are left out, with a note, if the page would be too large.

    Args:
        folders: of runs, of sweeps, or of several runs.
        out: the file.
        most_images: test images that the classifier of a run answers for the page; 0: none; None: as many as
            take little time.
        title: of the page; "": made from the folders.
        say: called with a line about what takes time.

    Raises:
        CheckpointError: a folder is no run.
    """
    runs, sweeps = read_folders(folders)
    check_free("--out", out, [run.folder / name for run in runs for name in RUN_FILES], b"<!DOCTYPE html>")
    names = [folder.resolve().name for folder in folders]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    title = title or f"Report: {', '.join(names[:3])}{more}"
    answers: dict[Path, Answers | str] = {}
    text, size = "", 0
    for pictures, full_runs in _LIMITS:
        page = _Page(Budget(pictures), full_runs, most_images, say, answers)
        text = _render(title, runs, sweeps, page)
        size = len(text.encode(errors="backslashreplace"))
        if size <= MAX_BYTES:
            break
    write_text(out, text)
    return size


def _render(title: str, runs: Sequence[RunRecords], sweeps: Sequence[SweepRecords], page: _Page) -> str:
    links = [f"run{number}" for number in range(len(runs))]
    trained = {run.name: run.records for run in runs if any(r.get("kind") == "train" for r in run.records)}
    charts = overlaid("all", dict(list(trained.items())[:_MAX_OVERLAID]))
    style, script = ((_TEMPLATE / name).read_text("utf-8") for name in ("report.css", "report.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _environment().get_template("report.html").render(
        title=title,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        policy=policy,
        style=style,
        script=script,
        sweeps=[_sweep(f"sweep{number}", sweep, page) for number, sweep in enumerate(sweeps)],
        overview=group("pair", [run_table(runs, links), *charts]) if len(runs) > 1 else None,
        runs=[_run(link, run, page, run.job in _CLASSIFIERS) for link, run in zip(links, runs, strict=True)],
    ) + "\n"  # fmt: skip


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATE),
        autoescape=True,
        finalize=_plain,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["frame"] = FRAME
    made.filters["value_text"] = value_text
    made.tests["digest"] = is_digest
    return made


def _plain(value: Any) -> Any:
    """Show control characters and direction marks as escapes; leave the markup of macros as it is."""
    return value if hasattr(value, "__html__") else printable(str(value))


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _sweep(link: str, sweep: SweepRecords, page: _Page) -> dict[str, Any]:
    """Return a sweep: its table, the curves of its runs in one chart, and each run.

    The classifier of the best run answers images.
    """
    values = {run.name: number_of(run.job, run.metrics)[1] for run in sweep.runs}
    known = {name: value for name, value in values.items() if value is not None}
    best = max(known, key=lambda name: known[name], default="")
    first = sweep.runs[:_MAX_OVERLAID]
    names = shared_words([run.name for run in first]) if first else []
    charts = overlaid(link, {name: run.records for name, run in zip(names, first, strict=True)})
    blocks = [*sweep_blocks(link, sweep), *_charts(charts)]
    if len(sweep.runs) > _MAX_OVERLAID:
        text = f"The charts show the first {_MAX_OVERLAID} of {len(sweep.runs)} runs."
        blocks.append(paragraph(text, "note"))
    runs = [
        _run(f"{link}-{number}", run, page, asks=run.name == best and run.job in _CLASSIFIERS)
        for number, run in enumerate(sweep.runs)
    ]
    return {"link": link, "name": sweep.folder.name, "blocks": blocks, "runs": runs}


def _run(link: str, run: RunRecords, page: _Page, asks: bool) -> dict[str, Any]:
    """Return a run's section; `asks`: whether its classifier may answer images."""
    is_full = page.full_runs > 0
    page.full_runs -= 1
    pictures, unseen = inspect_pictures(run.folder, page.budget)
    parts = {
        "Results": result_blocks(link, run),
        "Curves": _charts(run_charts(link, run.records)) if is_full else [],
        "Trainings inside": _inner(link, inner_trainings(run.folder)) if is_full else [],
    }
    if run.job in _CLASSIFIERS and "accuracy" in run.metrics and run.status == "done":
        parts |= _answer_parts(run, page, asks)
    parts["Pictures of the network"] = [group("pictures", pictures)] if pictures else []
    origins = run.recipe.origins.values() if run.recipe else ()
    return {
        "link": link,
        "run": run,
        "state": run.status if run.status in ("done", "failed") else "other",
        "error": run.result.error if run.result else "",
        "warnings": warnings(run),
        "tiles": tiles(run),
        "parts": {title: blocks for title, blocks in parts.items() if blocks},
        "unseen": unseen,
        "is_full": is_full,
        "provenance": provenance_tables(run),
        "again": repeating_command(run),
        "set_by": ", ".join(sorted({origin.partition(":")[0] for origin in origins})),
    }


def _charts(charts: Sequence[Block]) -> list[Block]:
    return [group("charts", charts)] if charts else []


def _inner(link: str, inner: dict[str, list[Record]]) -> list[Block]:
    """Return loss and accuracy of tasks, rates and seeds; those of one kind share their charts."""
    kinds: dict[str, list[str]] = {}
    for name in inner:
        kinds.setdefault(name.partition("/")[0], []).append(name)
    charts = []
    for kind, names in kinds.items():
        for begin in range(0, len(names), _MAX_OVERLAID):
            some = names[begin : begin + _MAX_OVERLAID]
            curves = {short: inner[name] for short, name in zip(shared_words(some, "/"), some, strict=True)}
            prefix = f"{link}-{kind}-{begin}"
            charts += overlaid(prefix, curves) or run_charts(prefix, inner[some[0]])[:2]
    blocks = _charts(charts[:_MAX_INNER])
    if (left := len(charts) - _MAX_INNER) > 0:
        text = f"{left} more charts are left out; log.jsonl of each training has their numbers."
        blocks.append(paragraph(text, "note"))
    return blocks


def _answer_parts(run: RunRecords, page: _Page, asks: bool) -> dict[str, list[Block]]:
    """Return confusions, worst classes and examples, or a line that says why they cannot be shown."""
    reason = _ask(run, page, asks)
    answers = None if reason else page.answers[run.folder]
    assert not isinstance(answers, str)
    try:
        counts = read_counts(run.folder, answers)
    except VitctlError as error:
        counts, reason = [], str(error)
    text = f"No sample images: {reason}."
    if answers is not None and not reason:
        text = f"{answers.split}: {answers.remark}."
    total = sum(count.images for count in counts)
    if answers is not None and total != len(answers.labels):
        text += f" The tables of classes count all {total:,} images of the evaluation."
    classes = [paragraph(text, "note")]
    if counts:
        classes.append(group("pair classes", confusion_blocks(counts)))
        classes.append(group("classes", worst_classes(counts, answers, page.budget)))
    return {
        "Classes": classes,
        "Wrong answers": wrong_answers(run, answers, page.budget),
        "Examples": [examples(answers, page.budget)] if answers is not None else [],
    }


def _ask(run: RunRecords, page: _Page, asks: bool) -> str:
    """Compute the answers of a run's classifier, once for a page; return why there are none, or ""."""
    if page.most_images == 0:
        return "none were asked for (--images 0)"
    if run.recipe is None:
        return "the recipe of the run cannot be read"
    if not asks or page.num_asked >= _MAX_ANSWERED:
        return "the page shows those of other runs; make a page of this run alone"
    page.num_asked += 1
    if run.folder not in page.answers:
        from vitctl.report.answers import answer_split

        page.say(f"{run.name}: test images for its classifier")
        try:
            page.answers[run.folder] = answer_split(run, page.most_images)
        except (VitctlError, OSError) as error:
            reason = f"the weights or the data of the run cannot be opened any more ({error})"
            page.answers[run.folder] = reason
    answers = page.answers[run.folder]
    return answers if isinstance(answers, str) else ""
