"""`vitctl report`: one page in one file, which needs nothing else: no network, no other file, no script of others."""

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vitctl import __version__
from vitctl.engine.journal import Record
from vitctl.errors import VitctlError
from vitctl.report.page.answers import confusion_section, counts_of, examples, worst_section
from vitctl.report.page.curves import overlaid, run_charts
from vitctl.report.page.found import Found, FoundRun, FoundSweep, find_all, inner_trainings
from vitctl.report.page.markup import Html, folded, join, raw, tag
from vitctl.report.page.origins import origin_section
from vitctl.report.page.pictures import Budget, inspect_pictures
from vitctl.report.page.results import main_number, result_tables, run_table, sweep_section, tiles
from vitctl.report.sweep_table import shared_words
from vitctl.system.files import write_text

MOST_BYTES = 3_000_000  # of a page; pictures and the details of runs are left out, and named, where it would be more
_PICTURES = 1_600_000
_WHOLE_RUNS = 12  # runs of a sweep that are shown with charts of their own
_MOST_ANSWERED = 6  # runs whose images are shown to their classifiers
_MOST_OVERLAID = 8
_ANSWERING = ("pretrain", "finetune", "evaluate")

Say = Callable[[str], None]


def write_report(folders: Sequence[Path], out: Path, *, most_images: int | None = None, title: str = "",
                 say: Say = lambda _: None) -> int:  # fmt: skip
    """Write a page about runs, whole or not at all.

    Args:
        folders: of runs, of sweeps, or of several runs.
        out: the file.
        most_images: test images that the classifier of a run answers for the page; 0: none; None: as many as take little time.
        title: of the page; "": made from the folders.
        say: called with a line about what takes time.

    Returns:
        its size in bytes.

    Raises:
        CheckpointError: a folder is no run.
    """
    found = find_all(folders)
    text = build_page(found, title or _title(folders), most_images=most_images, say=say)
    write_text(out, text)
    return len(text.encode(errors="backslashreplace"))


def build_page(found: Found, title: str, *, most_images: int | None = None, say: Say = lambda _: None) -> str:
    """The page as text. Arguments as for `write_report`."""
    budget, answered = Budget(_PICTURES), 0
    sections: list[tuple[str, str, Html]] = []
    for number, sweep in enumerate(found.sweeps):
        link = f"sweep{number}"
        sections.append((link, sweep.folder.name, _sweep(link, sweep, budget, most_images, say)))
    links = [f"run{number}" for number in range(len(found.runs))]
    size = 0
    for link, run in zip(links, found.runs, strict=True):
        may_answer = run.job in _ANSWERING and answered < _MOST_ANSWERED
        answered += may_answer
        content = _run(link, run, budget, most_images if may_answer else 0, say, is_brief=size > MOST_BYTES - _PICTURES)
        size += len(content)
        sections.append((link, run.name, content))
    runs = [run for run in found.runs]
    overview = _overview(runs, links) if len(runs) > 1 else None
    return _document(title, sections, overview)


def _document(title: str, sections: Sequence[tuple[str, str, Html]], overview: Html | None) -> str:
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
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
        tag("footer", tag("p", "One file, complete in itself: nothing is loaded from elsewhere. In a chart, the pointer or the arrow "
                               "keys read its values. Accuracies are of the split that the tables name.")),
        tag("script", raw(script)),
    )  # fmt: skip
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _overview(runs: Sequence[FoundRun], links: Sequence[str]) -> Html:
    trained = {run.name: run.records for run in runs if any(r.get("kind") == "train" for r in run.records)}
    charts = overlaid("all", dict(list(trained.items())[:_MOST_OVERLAID]))
    pair = tag("div", run_table(runs, links), *charts, class_="pair")
    return tag("section", tag("h2", "Overview", id="overview"), pair, aria_labelledby="overview")


def _sweep(link: str, sweep: FoundSweep, budget: Budget, most_images: int | None, say: Say) -> Html:
    """A sweep: its table, the curves of its runs in one chart, and each run; the classifier of the best answers images."""
    scores = {run.name: main_number(run)[1] for run in sweep.runs}
    known = {name: value for name, value in scores.items() if value is not None}
    best = max(known, key=lambda name: known[name]) if known else ""
    shown = sweep.runs[:_MOST_OVERLAID]
    curves = {name: run.records for name, run in zip(shared_words([r.name for r in shown]), shown, strict=True)} if shown else {}
    runs = [
        folded(
            run.name,
            _run(f"{link}-{number}", run, budget, most_images if run.name == best and run.job in _ANSWERING else 0, say,
                 level=3, is_brief=number >= _WHOLE_RUNS),
        )
        for number, run in enumerate(sweep.runs)
    ]  # fmt: skip
    more = f"The chart shows the first {_MOST_OVERLAID} of {len(sweep.runs)} runs." if len(sweep.runs) > _MOST_OVERLAID else None
    return tag(
        "section",
        tag("h2", f"Sweep: {sweep.folder.name}", id=f"{link}-h"),
        *sweep_section(link, sweep),
        _charts(overlaid(link, curves)),
        tag("p", more, class_="note") if more else None,
        tag("h3", "Its runs"),
        *runs,
        id=link,
        class_="run",
        aria_labelledby=f"{link}-h",
    )


def _run(link: str, run: FoundRun, budget: Budget, most_images: int | None, say: Say, *, level: int = 2,
         is_brief: bool = False) -> Html:  # fmt: skip
    def part(title: str, content: Sequence[Html]) -> Html | None:
        return join([tag(f"h{level + 1}", title), *content]) if content else None

    inner = inner_trainings(run.folder)
    charts = [] if is_brief else run_charts(link, run.records)
    answers = _answers(run, budget, most_images, say, part)
    pictures, unseen = inspect_pictures(run.folder, budget)
    kind = run.status if run.status in ("done", "failed") else "other"
    line = [f"{run.job or 'unknown job'} · recipe {run.recipe_name or 'unknown'} · ", tag("span", run.status, class_=f"state {kind}")]
    shown = [
        tag("p", *line),
        tag("p", run.result.error, class_="wrong") if run.result is not None and run.result.error else None,
        *(tag("p", f"Could not be read: {problem}", class_="note") for problem in run.problems),
        tiles(run),
        part("Results", result_tables(link, run)),
        part("Curves", [_charts(charts)] if charts else []),
        part("Trainings inside", _inner(link, inner)) if inner and not is_brief else None,
        answers,
        part("Pictures of the network", [tag("div", *pictures, class_="pictures")] if pictures else []),
        *(tag("p", f"Not shown: {problem}", class_="note") for problem in unseen),
        part("What these numbers belong to", [] if is_brief else origin_section(run)),
        tag("p", "The page has no room for the curves and the recipe of this run; make a page of it alone.", class_="note")
        if is_brief else None,
    ]  # fmt: skip
    own = {"id": link, "class_": "run", "aria_labelledby": f"{link}-h"} if level == 2 else {"id": link}
    return tag("section" if level == 2 else "div", tag(f"h{level}", run.name, id=f"{link}-h"), *shown, **own)


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
    return [_charts(charts)]


def _without_shared(names: Sequence[str]) -> list[str]:
    """Paths without the parts that all of them share, such as the learning rate of all tasks."""
    split = [name.split("/") for name in names]
    shared = set(split[0]).intersection(*split[1:]) if len(split) > 1 else set()
    return ["/".join(part for part in parts if part not in shared) or name for parts, name in zip(split, names, strict=True)]


def _answers(run: FoundRun, budget: Budget, most_images: int | None, say: Say,
             part: Callable[[str, Sequence[Html]], Html | None]) -> Html | None:  # fmt: skip
    """Predicted examples, confusion and worst classes; or a line that says why there are none."""
    if run.job not in _ANSWERING or run.status != "done" or "accuracy" not in run.metrics:
        return None
    found, why = None, "no images were asked for (--images 0), or the page shows those of other runs"
    if most_images != 0 and run.recipe is not None:
        from vitctl.report.page.predictions import predict_split

        say(f"{run.name}: answers of its classifier on test images")
        try:
            found = predict_split(run, most_images)
        except (VitctlError, OSError) as error:
            why = f"the run's data or weights cannot be opened any more: {error}"
    try:
        counts = counts_of(run.folder, found)
    except VitctlError as error:
        counts, why = [], str(error)
    note = tag("p", f"{found.split}: {found.remark}." if found else f"No sample images: {why}.", class_="note")
    classes = [tag("div", *confusion_section(counts), class_="pair"), *worst_section(counts, found, budget)] if counts else []
    return join([
        part("Classes", [note, *classes]),
        part("Examples", [examples(found, budget)]) if found is not None else None,
    ])  # fmt: skip


def _charts(charts: Sequence[Html]) -> Html:
    return tag("div", *charts, class_="charts") if charts else Html("")


def _title(folders: Sequence[Path]) -> str:
    names = [folder.resolve().name for folder in folders]
    return f"Report: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
