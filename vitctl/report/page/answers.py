"""Predicted examples, confusion and worst classes of a classifier, as markup."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitctl.data.images.decode import BadSample, decode
from vitctl.errors import CheckpointError
from vitctl.report.page.markup import Html, join, scrolled, table, tag
from vitctl.report.page.pictures import Budget, thumbnail
from vitctl.report.page.results import share
from vitctl.system.files import read_bytes

if TYPE_CHECKING:
    from vitctl.report.page.predictions import Predictions

CONFUSION = "confusion.csv"
_MOST_CELLS, _MOST_CLASSES = 12, 60  # classes of a matrix with numbers, and of one in colours alone
_MOST_ACROSS = 4
_MOST_ROWS, _NUM_WORST, _SAMPLES = 12, 5, 4
_NUM_EXAMPLES = 12
_SHADES = 9
_MOST_FILE = 64 * 2**20


class Count(NamedTuple):
    """How many images of a class were answered as another, or as the same."""

    own: str
    answer: str
    images: int


def counts_of(folder: Path, found: "Predictions | None") -> list[Count]:
    """The confusions that an evaluation counted (confusion.csv), else those of the predictions."""
    if (folder / CONFUSION).is_file():
        text = read_bytes(folder / CONFUSION, _MOST_FILE, error=CheckpointError).decode(errors="replace")
        rows = list(csv.reader(text.splitlines()))[1:]
        return [Count(row[0], row[1], int(row[2])) for row in rows if len(row) == 3 and row[2].isdecimal()]
    if found is None:
        return []
    names = found.source.class_names
    pairs = Counter(zip(found.labels.tolist(), found.best[:, 0].tolist(), strict=True))
    return [
        Count(names[own], names[answer], number)
        for (own, answer), number in sorted(pairs.items())
        if own >= 0
    ]


def confusion_section(counts: Sequence[Count]) -> list[Html]:
    """The confusion matrix where it has few classes, and the most frequent confusions."""
    names = list(dict.fromkeys(name for one in counts for name in (one.own, one.answer)))
    cells = {(one.own, one.answer): one.images for one in counts}
    names = sorted(names, key=_natural)
    made = (
        [_matrix(names, cells)]
        if len(names) <= _MOST_CELLS
        else [_map(names, cells)]
        if len(names) <= _MOST_CLASSES
        else []
    )
    totals: Counter[str] = Counter()
    for one in counts:
        totals[one.own] += one.images
    wrong = sorted(
        (one for one in counts if one.own != one.answer), key=lambda one: (-one.images, one.own, one.answer)
    )
    rows = [
        (one.own, one.answer, f"{one.images:,}", share(one.images / totals[one.own]))
        for one in wrong[:_MOST_ROWS]
    ]
    if rows:
        made.append(
            table(
                "Most frequent confusions", ("class", "answered as", "images", "of the class"), rows, names=2
            )
        )
    return made


def worst_section(counts: Sequence[Count], found: "Predictions | None", budget: Budget) -> list[Html]:
    """The classes with the lowest accuracy, each with wrongly answered images where they can be read."""
    totals: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for one in counts:
        totals[one.own] += one.images
        right[one.own] += one.images * (one.own == one.answer)
    worst = sorted(totals, key=lambda name: (right[name] / totals[name], -totals[name], _natural(name)))[
        :_NUM_WORST
    ]
    rows = []
    for name in worst:
        if right[name] == totals[name]:
            continue
        pictures = _wrong_ones(name, found, budget) if found is not None else []
        shown = tag("div", *pictures, class_="thumbs") if pictures else "–"
        rows.append((name, share(right[name] / totals[name]), f"{right[name]:,} of {totals[name]:,}", shown))
    return [table("Worst classes", ("class", "accuracy", "correct", "wrong answers"), rows)] if rows else []


def examples(found: "Predictions", budget: Budget) -> Html:
    """Images with their answers: evenly spaced ones, half of them wrong where there are enough."""
    right = found.best[:, 0] == found.labels
    half = _NUM_EXAMPLES // 2
    wrong_ones, right_ones = np.flatnonzero(~right), np.flatnonzero(right)
    num_wrong = min(len(wrong_ones), max(half, _NUM_EXAMPLES - len(right_ones)))
    chosen = [*_spread(wrong_ones, num_wrong), *_spread(right_ones, _NUM_EXAMPLES - num_wrong)]
    return tag("ul", join(_example(found, sample, budget) for sample in sorted(chosen)), class_="examples")


def _example(found: "Predictions", sample: int, budget: Budget) -> Html | None:
    names = found.source.class_names
    own, answers = names[found.labels[sample]], found.best[sample][:3]
    is_right = bool(found.best[sample, 0] == found.labels[sample])
    picture = _picture(found, sample, f"a test image of class {own}", budget)
    if picture is None:
        return None
    bars = [_bar(names[answer], p) for answer, p in zip(answers, found.shares[sample].tolist(), strict=False)]
    verdict = tag("span", "✓ right" if is_right else "✗ wrong", class_="right" if is_right else "wrong")
    return tag("li", picture, tag("p", tag("strong", own), " ", verdict), tag("ol", *bars))


def _bar(name: str, probability: float) -> Html:
    said = f"probability of {name}"
    bar = tag("progress", value=f"{probability:.4f}", max=1, aria_label=said)
    return tag("li", tag("span", name, class_="name"), bar, tag("span", f"{probability:.0%}", class_="n"))


def _wrong_ones(name: str, found: "Predictions", budget: Budget) -> list[Html]:
    names = found.source.class_names
    if name not in names:
        return []
    samples = np.flatnonzero((found.labels == names.index(name)) & (found.best[:, 0] != found.labels))
    made = []
    for sample in samples[:_SAMPLES].tolist():
        answer = names[found.best[sample, 0]]
        picture = _picture(found, sample, f"class {name}, answered as {answer}", budget)
        if picture is not None:
            made.append(tag("figure", picture, tag("figcaption", f"as {answer}")))
    return made


def _picture(found: "Predictions", sample: int, alt: str, budget: Budget) -> Html | None:
    try:
        return thumbnail(decode(found.source.read(sample)), alt, budget)
    except (BadSample, OSError):
        return None


def _matrix(names: Sequence[str], cells: dict[tuple[str, str], int]) -> Html:
    """A table with numbers; the shade of a cell is its share of the class."""
    totals = {own: sum(cells.get((own, answer), 0) for answer in names) for own in names}
    head = [
        tag("th", tag("span", "class \\ answer"), scope="col"),
        *(tag("th", tag("span", name, title=name), scope="col", class_="n") for name in names),
    ]
    body = []
    for own in names:
        row = [tag("th", own, scope="row")]
        for answer in names:
            number = cells.get((own, answer), 0)
            shade = -(-_SHADES * number // totals[own]) if totals[own] else 0
            kind = "own" if own == answer else "off"
            row.append(tag("td", number or "", class_=f"{kind} h{shade}"))
        body.append(tag("tr", *row))
    caption = "Confusion: class (row) by answer (column)"
    kind = (
        "matrix long" if max(map(len, names)) > _MOST_ACROSS else "matrix"
    )  # longer names of columns stand upright
    whole = tag(
        "table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body), class_=kind
    )
    return scrolled(whole, caption)


def _map(names: Sequence[str], cells: dict[tuple[str, str], int]) -> Html:
    """The matrix of many classes in colours alone; the tables beside it have the numbers."""
    totals = {own: max(1, sum(cells.get((own, answer), 0) for answer in names)) for own in names}
    size, place = 8, {name: number for number, name in enumerate(names)}
    side = size * len(names)
    drawn = [tag("rect", x=0, y=0, width=side, height=side, class_="ground")]
    for (own, answer), number in sorted(cells.items()):
        hint = tag("title", f"{own} answered as {answer}: {number:,} of {totals[own]:,}")
        kind = "own" if own == answer else "off"
        drawn.append(
            tag("rect", hint, x=size * place[answer], y=size * place[own], width=size, height=size, class_=kind,
                fill_opacity=f"{0.15 + 0.85 * number / totals[own]:.2f}")
        )  # fmt: skip
    title = f"Confusion of {len(names)} classes: rows are classes, columns are answers"
    wrong = sum(number for (own, answer), number in cells.items() if own != answer)
    said = f"{title}. {wrong:,} of {sum(cells.values()):,} images lie off the diagonal; the table has the most frequent confusions."
    picture = tag("svg", *drawn, viewbox=f"0 0 {side} {side}", role="img", aria_label=said)
    return tag("figure", tag("figcaption", title), picture, class_="chart square")


def _spread(rows: np.ndarray, number: int) -> list[int]:
    """So many of the rows, evenly spaced."""
    number = min(number, len(rows))
    return [int(rows[n * len(rows) // number]) for n in range(number)]


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isascii() and name.isdecimal() and len(name) < 10 else (10**10, name)
