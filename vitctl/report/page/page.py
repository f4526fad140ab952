"""`vitctl report`: one page in one file, which needs nothing else: no network, no other file, no script of
others.
"""

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitctl import __version__
from vitctl.engine.journal import Record
from vitctl.errors import VitctlError
from vitctl.report.page.answers import confusion_section, counts_of, examples, worst_section
from vitctl.report.page.curves import overlaid, run_charts
from vitctl.report.page.found import Found, FoundRun, FoundSweep, find_all, inner_trainings
from vitctl.report.page.markup import Html, folded, join, raw, tag
from vitctl.report.page.origins import origin_section
from vitctl.report.page.pictures import Budget, inspect_pictures
from vitctl.report.page.results import main_number, result_tables, run_table, sweep_section, tiles, warnings
from vitctl.report.sweep_table import shared_words
from vitctl.system.files import write_text

if TYPE_CHECKING:
    from vitctl.report.page.predictions import Predictions

MOST_BYTES = 3_000_000  # of a page
_MOST_ANSWERED = 6  # runs whose test images are shown to their classifiers
_MOST_OVERLAID = 8  # lines of a chart
_MOST_INNER = 24  # charts of the trainings inside a run
_ANSWERING = ("pretrain", "finetune", "evaluate")

Say = Callable[[str], None]


@dataclass
class _Limits:
    """How much a page may show: bytes of pictures, and runs with their curves and recipe."""

    pictures: int
    whole_runs: int


# Tried in this order until the page is small enough.
_LIMITS = (_Limits(1_600_000, 24), _Limits(800_000, 8), _Limits(300_000, 1))


@dataclass
class _Page:
    """What the sections of a page share: what is left of its limits, and what was computed for it."""

    limits: _Limits
    most_images: int | None
    say: Say
    budget: Budget
    answers: "dict[Path, Predictions | str]"
    asked: int = 0
    shown: int = 0


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    most_images: int | None = None,
    title: str = "",
    say: Say = lambda _: None,
) -> int:
    """Write a page about runs, whole or not at all.

    Args:
        folders: of runs, of sweeps, or of several runs.
        out: the file.
        most_images: test images that the classifier of a run answers for the page; 0: none; None: as many as
            take little time.
        title: of the page; "": made from the folders.
        say: called with a line about what takes time.

    Returns:
        its size in bytes.

    Raises:
        CheckpointError: a folder is no run.
    """
    text = build_page(find_all(folders), title or _title(folders), most_images=most_images, say=say)
    write_text(out, text)
    return len(text.encode(errors="backslashreplace"))


def build_page(found: Found, title: str, *, most_images: int | None = None, say: Say = lambda _: None) -> str:
    """The page as text; pictures and the details of later runs are left out, and named, where it would be too
    large.

    Arguments as for `write_report`.
    """
    answers: dict[Path, Predictions | str] = {}
    text = ""
    for limits in _LIMITS:
        page = _Page(limits, most_images, say, Budget(limits.pictures), answers)
        text = _document(title, *_sections(found, page))
        if len(text.encode(errors="backslashreplace")) <= MOST_BYTES:
            break
    return text


def _sections(found: Found, page: _Page) -> tuple[list[tuple[str, str, Html]], Html | None]:
    """Link, name and content of each section, and the overview of several runs."""
    sections = [
        (f"sweep{number}", sweep.folder.name, _sweep(f"sweep{number}", sweep, page))
        for number, sweep in enumerate(found.sweeps)
    ]
    links = [f"run{number}" for number in range(len(found.runs))]
    sections += [
        (link, run.name, _run(link, run, page, asks=run.job in _ANSWERING))
        for link, run in zip(links, found.runs, strict=True)
    ]
    return sections, _overview(found.runs, links) if len(found.runs) > 1 else None


def _document(title: str, sections: Sequence[tuple[str, str, Html]], overview: Html | None) -> str:
    style, script = (
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="generator", content=f"vitctl {__version__}"),
        tag("title", title),
        tag("style", raw(style)),
    )
    items = [tag("li", tag("a", name, href=f"#{link}")) for link, name, _ in sections]
    contents = tag("nav", tag("ul", *items), aria_label="Runs of this page") if len(items) > 1 else None
    made = f"Made by vitctl {__version__} on {time.strftime('%Y-%m-%d %H:%M %Z')}."
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#main", class_="skip"),
        tag("header", tag("h1", title), tag("p", made, class_="soft"), contents),
        tag("main", overview, *(content for _, _, content in sections), id="main"),
        tag("footer", tag("p", "One file, complete in itself: nothing is loaded from elsewhere. In a chart, "
                               "the pointer or the arrow "
                               "keys read its values. Accuracies are of the images that the first "
                               "table names.")),
        tag("script", raw(script)),
    )  # fmt: skip
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _overview(runs: Sequence[FoundRun], links: Sequence[str]) -> Html:
    trained = {run.name: run.records for run in runs if any(r.get("kind") == "train" for r in run.records)}
    charts = overlaid("all", dict(list(trained.items())[:_MOST_OVERLAID]))
    pair = tag("div", run_table(runs, links), *charts, class_="pair")
    return tag("section", tag("h2", "Overview", id="overview"), pair, aria_labelledby="overview")


def _sweep(link: str, sweep: FoundSweep, page: _Page) -> Html:
    """A sweep: its table, the curves of its runs in one chart, and each run; the classifier of the best
    answers images.
    """
    known = {run.name: value for run in sweep.runs if (value := main_number(run)[1]) is not None}
    best = max(known, key=lambda name: known[name]) if known else ""
    shown = sweep.runs[:_MOST_OVERLAID]
    names = shared_words([run.name for run in shown]) if shown else []
    curves = {name: run.records for name, run in zip(names, shown, strict=True)}
    runs = []
    for number, run in enumerate(sweep.runs):
        asks = run.name == best and run.job in _ANSWERING
        runs.append(folded(run.name, _run(f"{link}-{number}", run, page, level=3, asks=asks)))
    more = f"The charts show the first {_MOST_OVERLAID} of {len(sweep.runs)} runs."
    return tag(
        "section",
        tag("h2", f"Sweep: {sweep.folder.name}", id=f"{link}-h"),
        *sweep_section(link, sweep),
        _charts(overlaid(link, curves)),
        tag("p", more, class_="note") if len(sweep.runs) > _MOST_OVERLAID else None,
        tag("h3", "Its runs"),
        *runs,
        id=link,
        class_="run",
        aria_labelledby=f"{link}-h",
    )


def _run(link: str, run: FoundRun, page: _Page, *, level: int = 2, asks: bool = False) -> Html:
    """A run. `level` is of its heading; `asks`: whether its classifier may answer images."""
    page.shown += 1
    whole = page.shown <= page.limits.whole_runs
    said = f"{run.job or 'unknown job'} · recipe {run.recipe_name or 'unknown'} · "
    state = run.status if run.status in ("done", "failed") else "other"
    charts = run_charts(link, run.records) if whole else []
    pictures, unseen = inspect_pictures(run.folder, page.budget)
    parts = (
        ("Results", result_tables(link, run)),
        ("Curves", [_charts(charts)] if charts else []),
        ("Trainings inside", _inner(link, inner_trainings(run.folder)) if whole else []),
        *(_answers(run, page, asks) if run.job in _ANSWERING and "accuracy" in run.metrics else ()),
        ("Pictures of the network", [tag("div", *pictures, class_="pictures")] if pictures else []),
        ("What these numbers belong to", origin_section(run) if whole else []),
    )
    left_out = (
        None
        if whole
        else "Its curves and its recipe are left out, so that the page stays small: make a page of it alone."
    )
    return tag(
        "section" if level == 2 else "div",
        tag(f"h{level}", run.name, id=f"{link}-h"),
        tag("p", said, tag("span", run.status, class_=f"state {state}")),
        tag("p", run.result.error, class_="wrong") if run.result is not None and run.result.error else None,
        *(tag("p", f"Could not be read: {problem}", class_="note") for problem in run.problems),
        *(tag("p", f"Warning: {warning}.", class_="wrong") for warning in warnings(run)),
        tiles(run),
        *(join([tag(f"h{level + 1}", title), *content]) for title, content in parts if content),
        *(tag("p", f"Not shown: {problem}", class_="note") for problem in unseen),
        tag("p", left_out, class_="note") if left_out else None,
        id=link,
        class_="run" if level == 2 else None,
        aria_labelledby=f"{link}-h" if level == 2 else None,
    )


def _inner(link: str, inner: dict[str, list[Record]]) -> list[Html]:
    """Loss and accuracy of tasks, rates and seeds; those of one kind share their charts."""
    groups: dict[str, dict[str, list[Record]]] = {}
    for name, records in inner.items():
        groups.setdefault(name.partition("/")[0], {})[name] = records
    charts = []
    for kind, group in groups.items():
        names = list(group)
        for begin in range(0, len(names), _MOST_OVERLAID):
            part = names[begin : begin + _MOST_OVERLAID]
            own = dict(zip(_without_shared(part), (group[name] for name in part), strict=True))
            name = f"{link}-{kind}-{begin}"
            charts += overlaid(name, own) or run_charts(name, next(iter(own.values())))[:2]
    more = (
        f"{len(charts) - _MOST_INNER} more charts are left out; log.jsonl of each training has their numbers."
    )
    note = [tag("p", more, class_="note")] if len(charts) > _MOST_INNER else []
    return [_charts(charts[:_MOST_INNER]), *note] if charts else []


def _without_shared(names: Sequence[str]) -> list[str]:
    """Paths without the parts that all of them share, such as the learning rate of all tasks."""
    split = [name.split("/") for name in names]
    shared = set(split[0]).intersection(*split[1:]) if len(split) > 1 else set()
    return [
        "/".join(part for part in parts if part not in shared) or name
        for parts, name in zip(split, names, strict=True)
    ]


def _answers(run: FoundRun, page: _Page, asks: bool) -> list[tuple[str, list[Html]]]:
    """Confusion, worst classes and predicted examples; or a line that says why they cannot be shown."""
    if run.status != "done":
        return []
    found = _predictions(run, page, asks)
    predictions = None if isinstance(found, str) else found
    try:
        counts = counts_of(run.folder, predictions)
    except VitctlError as error:
        counts, found = [], str(error)
    said = f"No sample images: {found}." if isinstance(found, str) else f"{found.split}: {found.remark}."
    total = sum(count.images for count in counts)
    if predictions is not None and total != len(predictions.labels):
        said += f" The tables of classes count all {total:,} images of the evaluation."
    classes = [tag("p", said, class_="note")]
    if counts:
        classes += [
            tag("div", *confusion_section(counts), class_="pair classes"),
            tag("div", *worst_section(counts, predictions, page.budget), class_="classes"),
        ]
    chosen = tag("p", "Chosen so that half of them are wrong, where there are so many.", class_="note")
    return [
        ("Classes", classes),
        ("Examples", [chosen, examples(predictions, page.budget)] if predictions else []),
    ]


def _predictions(run: FoundRun, page: _Page, asks: bool) -> "Predictions | str":
    """The answers of a run's classifier, computed once for a page; or why there are none."""
    if page.most_images == 0:
        return "none were asked for (--images 0)"
    if run.recipe is None:
        return "the recipe of the run cannot be read"
    if not asks or page.asked >= _MOST_ANSWERED:
        return "the page shows those of other runs; make a page of this run alone"
    page.asked += 1
    if run.folder not in page.answers:
        from vitctl.report.page.predictions import predict_split

        page.say(f"{run.name}: test images for its classifier")
        try:
            page.answers[run.folder] = predict_split(run, page.most_images)
        except (VitctlError, OSError) as error:
            page.answers[run.folder] = (
                f"the weights or the data of the run cannot be opened any more ({error})"
            )
    return page.answers[run.folder]


def _charts(charts: Sequence[Html]) -> Html:
    return tag("div", *charts, class_="charts") if charts else Html("")


def _title(folders: Sequence[Path]) -> str:
    names = [folder.resolve().name for folder in folders]
    return f"Report: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
