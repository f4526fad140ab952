"""Charts of the HTML report and the terminal: axes, numbers as text, and the curves of a run.

A chart is a `Block`: a dict of numbers and text that the macro of its `kind` in template/blocks.html draws as
SVG. Imports no torch or jinja2, because `vitctl runs` draws its curves on the same axes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vitctl.engine.journal import Record

Block = dict[str, Any]
Points = tuple[tuple[float, float], ...]
Unit = Literal["number", "percent", "steps"]

WIDTH, HEIGHT = 380, 216
FRAME = {"width": WIDTH, "height": HEIGHT, "left": 54, "right": 372, "top": 10, "bottom": 184}
MOST_POINTS = 240  # of a line
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_FEW_POINTS = 12  # lines with at most as many points have markers; shorter runs show no rates

# Fields of the training records to draw: field, title, unit.
_TRAINING: tuple[tuple[str, str, Unit], ...] = (
    ("lr", "Learning rate", "number"),
    ("images_per_second", "Images per second", "number"),
    ("mfu", "MFU, share of the peak FLOP/s", "percent"),
    ("data_wait", "Data-wait, share of the time", "percent"),
    ("num_bad", "Bad samples so far", "number"),
    ("num_skipped", "Skipped updates so far", "number"),
)


# Numbers as text


def number_text(value: float, unit: Unit = "number") -> str:
    """Write a number for a reading or a table: 97.32%, 1,400, 0.0312, 3.1e-05."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "percent":
        return f"{100 * value:.2f}%"
    if unit == "steps" or (value == int(value) and abs(value) < 1e7):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tick_text(value: float, unit: Unit = "number") -> str:
    """Write a short number at an axis: 95%, 1.4k, 0.03."""
    if unit == "percent":
        return f"{round(100 * value, 6):g}%"
    thousands_from = 1e4 if unit == "number" else 1e3
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (thousands_from, 1e3, "k")):
        if abs(value) >= least:
            return f"{round(value / size, 6):g}{letter}"
    if not value:
        return "0"
    return f"{round(value, 12):.6g}" if abs(value) >= 1e-4 else f"{value:.0e}"


# Axes


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels: `low` is at `begin`, `high` at `end`; `ticks` are the labelled values."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def axis(
    values: Sequence[float],
    begin: float,
    end: float,
    *,
    log: bool = False,
    from_zero: bool = False,
    most: float = math.inf,
    num_ticks: int = 4,
    tight: bool = False,
) -> Axis:
    """Return an axis with round ticks that covers all values.

    Args:
        values: finite; at least one.
        begin, end: pixels of its ends.
        log: logarithmic, if all values are above 0 and cover more than a power of ten.
        most: the largest possible value, such as 1 for shares.
        num_ticks: approximate number of intervals.
        tight: ends at the values, not at ticks.
    """
    low, high = min(values), max(values)
    if log and low > 0 and high / low > 10:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = -(-len(decades) // (num_ticks + 2))
        ticks = tuple(10.0**n for n in decades if not n % every)
        return Axis(10.0 ** decades[0], 10.0 ** decades[-1], begin, end, ticks, log=True)
    low = min(low, 0.0) if from_zero else low
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    wanted = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(r * power for r in _ROUND if r * power >= wanted * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    grid = [n * step for n in range(first, last + 1)]
    if tight:
        slack = 1e-9 * step
        inside = tuple(tick for tick in grid if low - slack <= tick <= high + slack)
        return Axis(low, high, begin, end, inside)
    top = min(grid[-1], most) if most > grid[0] else grid[-1]
    return Axis(grid[0], top, begin, end, tuple(tick for tick in grid if tick <= most + 1e-9))


# Charts


@dataclass(frozen=True)
class Line:
    """A line of a chart, its points in order of x. Points that are not finite leave a gap."""

    name: str
    points: Points
    colour: int = 0
    dots: bool = False


def line_chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    *,
    x: str = "step",
    unit: Unit = "number",
    log_x: bool = False,
    log: bool = False,
    from_zero: bool = False,
) -> Block | None:
    """Return a chart of lines, or None if none has two finite points; tables show single numbers.

    Args:
        name: prefix of its ids, unique in the page.
        x: label of the horizontal axis.
        log_x, log: logarithmic axes, if the values allow it.
        from_zero: the vertical axis starts at 0.
    """
    most = MOST_POINTS if len(lines) < 3 else MOST_POINTS // 2
    drawn = [replace(line, points=thinned(line.points, most)) for line in lines]
    finite = [point for line in drawn for point in line.points if all(map(math.isfinite, point))]
    if len(finite) < 2 or all(len(line.points) < 2 for line in lines):
        return None
    across = axis([p[0] for p in finite], FRAME["left"], FRAME["right"], log=log_x, num_ticks=5, tight=True)
    values = [p[1] for p in finite]
    largest = 1.0 if unit == "percent" and max(values) <= 1 else math.inf
    up = axis(values, FRAME["bottom"], FRAME["top"], log=log, from_zero=from_zero, most=largest)
    return {
        "kind": "lines",
        "id": name,
        "title": title,
        "description": _description(lines, x, unit),
        "x": x,
        "unit": unit,
        "rows": [(up.at(tick), tick_text(tick, unit)) for tick in up.ticks],
        "columns": [(across.at(tick), tick_text(tick, "steps")) for tick in across.ticks],
        "lines": [_pixels(line, across, up) for line in drawn],
        "legend": lines if len(lines) > 1 else (),
    }


def _pixels(line: Line, across: Axis, up: Axis) -> Block:
    path, shown, pen = [], [], "M"
    for x, y in line.points:
        if not math.isfinite(y) or (up.log and y <= 0):
            pen = "M"
            continue
        at = (f"{across.at(x):.1f}", f"{up.at(y):.1f}")
        path.append(f"{pen}{at[0]} {at[1]}")
        shown.append((x, y, at))
        pen = "L"
    return {
        "name": line.name,
        "colour": line.colour,
        "path": "".join(path),
        "dots": [at for _, _, at in shown] if line.dots or len(shown) <= _FEW_POINTS else [],
        "xs": " ".join(f"{x:.7g}" for x, _, _ in shown),
        "ys": " ".join(f"{y:.6g}" for _, y, _ in shown),
        "pixels": " ".join(",".join(at) for _, _, at in shown),
    }


def _description(lines: Sequence[Line], x: str, unit: Unit) -> str:
    """Describe a chart for a screen reader: first, last, lowest and highest value of each line."""
    parts = []
    for line in lines:
        points = [point for point in line.points if math.isfinite(point[1])]
        ends = dict.fromkeys(points[:1] + points[-1:])
        texts = [f"{number_text(y, unit)} at {x} {number_text(at, 'steps')}" for at, y in ends]
        values = sorted(y for _, y in points)
        if len(points) > 1:
            texts[-1] += f"; lowest {number_text(values[0], unit)}, highest {number_text(values[-1], unit)}"
        parts += [f"{line.name}: {', '.join(texts)}"] if texts else []
    return ". ".join(parts)


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> Points:
    """Keep about `most` points: the first, lowest and highest of each part, so that no spike is lost."""
    if len(points) <= most:
        return tuple(points)
    size = -(-len(points) // (most // 3))
    kept = {len(points) - 1}
    for begin in range(0, len(points), size):
        part = range(begin, min(begin + size, len(points)))
        finite = [n for n in part if math.isfinite(points[n][1])]
        kept.add(begin)
        if finite:
            kept |= {min(finite, key=lambda n: points[n][1]), max(finite, key=lambda n: points[n][1])}
    return tuple(points[n] for n in sorted(kept))


# Curves of a run, from its log.jsonl


def points(records: Iterable[Record], kind: str, field: str) -> Points:
    """Return (step, value) of a field of one kind of record, in order; the last of equal steps counts."""
    found = ((r.get("step"), r.get(field)) for r in records if r.get("kind") == kind)
    values = {
        float(x): float(y) for x, y in found if isinstance(x, int | float) and isinstance(y, int | float)
    }
    return tuple(sorted(values.items()))


def run_charts(name: str, records: Sequence[Record]) -> list[Block]:
    """Return all charts of a training's log; `name` is the prefix of their ids."""
    charts = overlaid(name, {"": records})
    probes = [r for r in records if r.get("kind") == "fewshot" and r.get("step")]
    shots = sorted({r["shots"] for r in probes if isinstance(r.get("shots"), int)})
    few = [
        Line(f"{n}-shot", points([r for r in probes if r.get("shots") == n], "fewshot", "accuracy"), colour)
        for colour, n in enumerate(shots)
    ]
    more = [line_chart(f"{name}-shots", "Few-shot accuracy during training", few, unit="percent")]
    for field, title, unit in _TRAINING:
        values = points(records, "train", field)
        if any(y for _, y in values) if field.startswith("num_") else len(values) > _FEW_POINTS:
            line = Line(title.partition(",")[0], values)
            more.append(line_chart(f"{name}-{field}", title, [line], unit=unit, from_zero=True))
    return charts + [chart for chart in more if chart is not None]


def overlaid(name: str, trainings: Mapping[str, Sequence[Record]]) -> list[Block]:
    """Return a chart of loss and one of accuracy, each with all trainings."""
    loss, scored = [], []
    for colour, (key, records) in enumerate(trainings.items()):
        loss.append(Line(key or "loss", points(records, "train", "loss"), colour))
        accuracy = tuple(point for point in points(records, "evaluate", "accuracy") if point[0] > 0)
        scored.append(Line(key or "accuracy", accuracy, colour, dots=True))
    values = [y for line in loss for _, y in line.points if math.isfinite(y)]
    is_wide = bool(values) and min(values) > 0 and max(values) / min(values) > 100  # else it hides its end
    charts = (
        line_chart(f"{name}-loss", "Training loss", [line for line in loss if line.points], log=is_wide),
        line_chart(
            f"{name}-accuracy",
            "Accuracy on the scored split",
            [o for o in scored if o.points],
            unit="percent",
        ),
    )
    return [chart for chart in charts if chart is not None]
