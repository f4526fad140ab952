"""`vitctl report`: one self-contained HTML file: no network, no other file, no third-party script.

This file decides what the page shows; the templates write it. Jinja2 escapes every value, and `_plain` shows
control characters and direction marks as escapes, because names and messages come from others.
"""

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vitctl import __version__
from vitctl.engine.journal import RUN_FILES, Record
from vitctl.errors import VitctlError
from vitctl.report.charts import FRAME, Block, overlaid, run_charts
from vitctl.report.class_tables import (
    Budget,
    Counts,
    confusion_blocks,
    examples,
    inspect_pictures,
    read_counts,
    worst_classes,
    wrong_answers,
)
from vitctl.report.result_tables import (
    MISSING,
    group,
    is_digest,
    number_of,
    paragraph,
    provenance_tables,
    repeating_command,
    result_blocks,
    run_table,
    sweep_table,
    tiles,
    value_text,
    warnings,
)
from vitctl.report.run_records import RunRecords, SweepRecords, inner_trainings, read_folders
from vitctl.report.sweep_table import shared_words
from vitctl.system.files import check_free, write_text
from vitctl.system.text import printable

if TYPE_CHECKING:  # needs torch
    from vitctl.report.answers import Answers

MAX_BYTES = 3_000_000  # of a page
_MAX_ANSWERED = 6  # runs whose classifiers are run on test images
_MAX_OVERLAID = 8  # lines per chart
_MAX_INNER = 24  # charts for the trainings inside a run
_CLASSIFIERS = ("pretrain", "finetune", "evaluate")
# Bytes of pictures, and runs with curves and recipe: tried in this order until the page is small enough.
_LIMITS = ((1_600_000, 24), (800_000, 8), (300_000, 1))
_TEMPLATE = Path(__file__).with_name("template")

Say = Callable[[str], None]


@dataclass
class _Page:
    """The remaining limits of a page, and the answers that were computed for it.

    Args:
        full_runs: number of further runs to show with curves and recipe.
        answers: by run folder; text is the reason if there are none.
        reason: why other runs have none.
    """

    budget: Budget
    full_runs: int
    answers: "dict[Path, Answers | str]"
    reason: str


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
        most_images: test images that a run's classifier answers for the page; 0: none; None: as many as take
            little time.
        title: of the page; "": made from the folders.
        say: called with a line about anything that takes time.

    Raises CheckpointError if a folder is not a run.
    """
    runs, sweeps = read_folders(folders)
    check_free("--out", out, [run.folder / name for run in runs for name in RUN_FILES], b"<!DOCTYPE html>")
    names = [folder.resolve().name for folder in folders]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    title = title or f"Report: {', '.join(names[:3])}{more}"
    best = [_best(sweep) for sweep in sweeps]
    asked = [run for run in (*runs, *best) if run is not None and _is_scored(run)][:_MAX_ANSWERED]
    answers = {run.folder: _ask(run, most_images, say) for run in asked if most_images != 0}
    reason = "the page shows those of other runs; make a page of this run alone"
    if most_images == 0:
        reason = "none were asked for (--images 0)"
    text, size = "", 0
    for pictures, full_runs in _LIMITS:
        text = _render(title, runs, sweeps, _Page(Budget(pictures), full_runs, answers, reason))
        size = len(text.encode(errors="backslashreplace"))
        if size <= MAX_BYTES:
            break
    write_text(out, text)
    return size


def _best(sweep: SweepRecords) -> RunRecords | None:
    values = [(number_of(run.job, run.metrics)[1], run) for run in sweep.runs]
    known = [(value, run) for value, run in values if value is not None]
    return max(known, key=lambda one: one[0])[1] if known else None


def _is_scored(run: RunRecords) -> bool:
    return run.job in _CLASSIFIERS and "accuracy" in run.metrics and run.status == "done"


def _ask(run: RunRecords, most_images: int | None, say: Say) -> "Answers | str":
    """Return the answers of a run's classifier, or why there are none."""
    if run.recipe is None:
        return "the recipe of the run cannot be read"
    from vitctl.report.answers import answer_split

    say(f"{run.name}: test images for its classifier")
    try:
        return answer_split(run, most_images)
    except (VitctlError, OSError) as error:
        return f"the weights or the data of the run cannot be opened any more ({error})"


def _render(title: str, runs: Sequence[RunRecords], sweeps: Sequence[SweepRecords], page: _Page) -> str:
    links = [f"run{number}" for number in range(len(runs))]
    trained = {run.name: run.records for run in runs if any(r.get("kind") == "train" for r in run.records)}
    charts = overlaid("all", dict(list(trained.items())[:_MAX_OVERLAID])) if len(trained) > 1 else []
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
        runs=[_run(link, run, page, folds=len(runs) > 1) for link, run in zip(links, runs, strict=True)],
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
    """Escape control characters and direction marks, show MISSING as a dash, and keep macro markup."""
    if value == MISSING:
        return "–"
    return value if hasattr(value, "__html__") else printable(str(value))


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _sweep(link: str, sweep: SweepRecords, page: _Page) -> dict[str, Any]:
    first = sweep.runs[:_MAX_OVERLAID]
    names = shared_words([run.name for run in first]) if first else []
    charts = overlaid(link, {name: run.records for name, run in zip(names, first, strict=True)})
    blocks = [sweep_table(sweep), *_charts(charts)]
    if len(sweep.runs) > _MAX_OVERLAID:
        text = f"The charts show the first {_MAX_OVERLAID} of {len(sweep.runs)} runs."
        blocks.append(paragraph(text, "note"))
    runs = [_run(f"{link}-{number}", run, page) for number, run in enumerate(sweep.runs)]
    return {"link": link, "name": sweep.folder.name, "blocks": blocks, "runs": runs}


def _run(link: str, run: RunRecords, page: _Page, *, folds: bool = False) -> dict[str, Any]:
    """Return the section of a run; `folds` what its results leave to tell."""
    is_full = page.full_runs > 0
    page.full_runs -= 1
    pictures, unseen = inspect_pictures(run.folder, page.budget)
    parts = {
        "Results": result_blocks(link, run),
        "Curves": _charts(run_charts(link, run.records)) if is_full else [],
        "Trainings inside": _inner(link, inner_trainings(run.folder)) if is_full else [],
    }
    if _is_scored(run):
        parts |= _answer_parts(run, page)
    parts["Pictures of the network"] = [group("pictures", pictures)] if pictures else []
    titles = sorted(filter(parts.get, parts), key=("Curves", "Trainings inside").__contains__)  # these last
    origins = run.recipe.origins.values() if run.recipe else ()
    return {
        "link": link,
        "run": run,
        "state": run.status if run.status in ("done", "failed") else "other",
        "error": run.result.error if run.result else "",
        "warnings": warnings(run),
        "tiles": tiles(run.job, run.metrics, run.provenance, run.records),
        "parts": {title: parts[title] for title in titles if title == "Results" or not folds},
        "folded": {title: parts[title] for title in titles if title != "Results" and folds},
        "unseen": unseen,
        "is_full": is_full,
        "provenance": provenance_tables(run),
        "again": repeating_command(run),
        "set_by": ", ".join(sorted({origin.partition(":")[0] for origin in origins})),
    }


def _charts(charts: Sequence[Block]) -> list[Block]:
    return [group("charts", charts)] if charts else []


def _inner(link: str, inner: dict[str, list[Record]]) -> list[Block]:
    """Return loss and accuracy of tasks, rates and seeds; each kind shares its charts."""
    charts = []
    for kind, same in groupby(inner, key=lambda name: name.partition("/")[0]):
        names = list(same)
        for begin in range(0, len(names), _MAX_OVERLAID):
            some = names[begin : begin + _MAX_OVERLAID]
            curves = {short: inner[name] for short, name in zip(shared_words(some, "/"), some, strict=True)}
            charts += overlaid(f"{link}-{kind}-{begin}", curves)
    blocks = _charts(charts[:_MAX_INNER])
    if (left := len(charts) - _MAX_INNER) > 0:
        text = f"{left} more charts are left out; log.jsonl of each training has their numbers."
        blocks.append(paragraph(text, "note"))
    return blocks


def _answer_parts(run: RunRecords, page: _Page) -> dict[str, list[Block]]:
    """Return confusions, worst classes and examples, or a line that says why there are none."""
    found = page.answers.get(run.folder, page.reason)
    answers = None if isinstance(found, str) else found
    note = f"No sample images: {found}." if isinstance(found, str) else f"{found.split}: {found.remark}."
    try:
        counts = read_counts(run.folder, answers)
    except VitctlError as error:
        counts, note = Counts(), f"{note} {error}."
    total = counts.total()
    if answers is not None and total not in (0, len(answers.rows)):
        note += f" The tables of classes count all {total:,} images of the evaluation."
    classes = [paragraph(note, "note")]
    if counts:
        classes.append(group("pair classes", confusion_blocks(counts)))
        classes.append(group("classes", worst_classes(counts, answers, page.budget)))
    return {
        "Classes": classes,
        "Wrong answers": wrong_answers(run, answers, page.budget),
        "Examples": [examples(answers, page.budget)] if answers is not None else [],
    }
