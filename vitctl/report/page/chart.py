"""Charts as SVG, drawn here: a few kB each, in the page's own colours, read by pointer, keyboard and screen
reader.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitctl.report.page.markup import Html, join, tag
from vitctl.report.page.scale import Axis, Unit, axis, tick_text, written

WIDTH, HEIGHT = 380, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 372, 10, 184
MOST_POINTS = 240  # of a line; between them the lowest and the highest of what lies there are kept
NUM_COLOURS = 8
_ROW, _MOST_LABEL = 22, 22
_TEXT_UP = 4  # from the middle of a letter to its base line


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, and its points in the order of x.

    Points that are not finite leave a gap.
    """

    name: str
    points: tuple[tuple[float, float], ...]
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
) -> Html | None:
    """A figure with one or several lines; None where no line has a finite point.

    Args:
        name: of its ids, unique in the page.
        title: above it.
        lines: to draw.
        x: what the horizontal axis is.
        unit: of the values.
        log_x, log: logarithmic axes, where the values allow it.
        from_zero: the vertical axis starts at 0.
    """
    most = MOST_POINTS if len(lines) < 3 else MOST_POINTS // 2
    kept = [Line(one.name, thinned(one.points, most), one.colour, one.dots) for one in lines]
    finite = [point for one in kept for point in one.points if all(map(math.isfinite, point))]
    if not finite:
        return None
    across = axis([p[0] for p in finite], _LEFT, _RIGHT, log=log_x, num_ticks=5, tight=True)
    top = 1.0 if unit == "percent" and max(p[1] for p in finite) <= 1 else math.inf
    up = axis([p[1] for p in finite], _BOTTOM, _TOP, log=log, from_zero=from_zero, most=top)
    drawn = [_drawn(one, across, up) for one in kept]
    frame = [
        _grid(across, up, unit),
        tag("text", x, x=(_LEFT + _RIGHT) / 2, y=HEIGHT - 3, class_="axis", text_anchor="middle"),
    ]
    cursor = tag("line", y1=_TOP, y2=_BOTTOM, x1=_LEFT, x2=_LEFT, class_="cursor", visibility="hidden")
    return _figure(
        name, title, _said(lines, x, unit), [*frame, *drawn, cursor], WIDTH, HEIGHT,
        legend=kept if len(kept) > 1 else (), data_x=x, data_unit=unit,
    )  # fmt: skip


def dot_chart(
    name: str, title: str, rows: Sequence[tuple[str, Mapping[str, float]]], *, unit: Unit = "percent"
) -> Html | None:
    """A row for each name, with a dot for each value, the first large: results beside those of others.

    Args:
        name: of its ids.
        title: above it.
        rows: name, and its values by the name of their series.
        unit: of the values.
    """
    rows = [(row, {key: v for key, v in values.items() if math.isfinite(v)}) for row, values in rows]
    values = [value for _, own in rows for value in own.values()]
    if not values:
        return None
    series = list(dict.fromkeys(key for _, own in rows for key in own))
    width, left = 420, 148
    bottom = 14 + _ROW * len(rows)
    most = 1.0 if unit == "percent" and max(values) <= 1 else math.inf
    across = axis(values, left, width - 16, num_ticks=4, most=most)
    drawn = [
        tag("line", x1=across.at(t), x2=across.at(t), y1=8, y2=bottom, class_="grid") for t in across.ticks
    ] + [
        tag("text", tick_text(t, unit), x=across.at(t), y=bottom + 16, class_="axis", text_anchor="middle")
        for t in across.ticks
    ]  # fmt: skip
    for number, (row, own) in enumerate(rows):
        y = 14 + _ROW * number + _ROW / 2
        drawn.append(
            tag("text", _short(row), x=left - 10, y=y + _TEXT_UP, class_="axis name", text_anchor="end")
        )
        if len(own) > 1:
            ends = [across.at(v) for v in own.values()]
            drawn.append(tag("line", x1=min(ends), x2=max(ends), y1=y, y2=y, class_="grid"))
        for at, key in reversed(list(enumerate(series))):
            if key in own:
                drawn.append(_dot(across.at(own[key]), y, at, f"{row}, {key}: {written(own[key], unit)}"))
    said = "; ".join(
        f"{row}: " + ", ".join(f"{key} {written(v, unit)}" for key, v in own.items()) for row, own in rows
    )
    legend = [Line(key, (), at, dots=True) for at, key in enumerate(series)] if len(series) > 1 else ()
    return _figure(name, title, said, drawn, width, bottom + 24, legend=legend, class_="broad")


def thinned(
    points: Sequence[tuple[float, float]], most: int = MOST_POINTS
) -> tuple[tuple[float, float], ...]:
    """At most about `most` points: of each part the first, the lowest and the highest, so that no spike is
    lost.
    """
    if len(points) <= most:
        return tuple(points)
    size = -(-len(points) // (most // 3))
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        part = range(begin, min(begin + size, len(points)))
        finite = [n for n in part if math.isfinite(points[n][1])]
        extremes = {f(finite, key=lambda n: points[n][1]) for f in (min, max)} if finite else set()
        kept += [
            points[n]
            for n in sorted(
                {begin, part[-1], *extremes} if begin + size >= len(points) else {begin, *extremes}
            )
        ]
    return tuple(kept)


def _drawn(line: Line, across: Axis, up: Axis) -> Html:
    pixels: list[tuple[float, float] | None] = [
        (across.at(x), up.at(y)) if math.isfinite(y) and (y > 0 or not up.log) else None
        for x, y in line.points
    ]
    path, moves = [], True
    for pixel in pixels:
        if pixel is not None:
            path.append(f"{'M' if moves else 'L'}{pixel[0]:.1f} {pixel[1]:.1f}")
        moves = pixel is None
    shown = [(p, pixel) for p, pixel in zip(line.points, pixels, strict=True) if pixel is not None]
    alone = line.dots or len(shown) <= 12
    return tag(
        "g",
        tag("path", d="".join(path), class_="line"),
        *(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.6, class_="dot") for _, (x, y) in shown if alone),
        class_=f"s{line.colour % NUM_COLOURS}",
        data_name=line.name,
        data_x=" ".join(f"{p[0]:.7g}" for p, _ in shown),
        data_y=" ".join(f"{p[1]:.6g}" for p, _ in shown),
        data_at=" ".join(f"{x:.1f},{y:.1f}" for _, (x, y) in shown),
    )


def _grid(across: Axis, up: Axis, unit: Unit) -> Html:
    rows = [
        join([
            tag("line", x1=_LEFT, x2=_RIGHT, y1=f"{up.at(t):.1f}", y2=f"{up.at(t):.1f}", class_="grid"),
            tag("text", tick_text(t, unit), x=_LEFT - 6, y=f"{up.at(t) + _TEXT_UP:.1f}", class_="axis", text_anchor="end"),
        ])
        for t in up.ticks
    ]  # fmt: skip
    columns = [
        tag(
            "text",
            tick_text(t, "steps"),
            x=f"{across.at(t):.1f}",
            y=_BOTTOM + 16,
            class_="axis",
            text_anchor="middle",
        )
        for t in across.ticks
    ]
    return join([*rows, *columns])


def _dot(x: float, y: float, series: int, said: str) -> Html:
    return tag(
        "circle", tag("title", said), cx=f"{x:.1f}", cy=f"{y:.1f}", r=5.5 if series == 0 else 4,
        class_=f"dot s{series % NUM_COLOURS}" + (" ring" if series else ""),
    )  # fmt: skip


def _figure(
    name: str, title: str, said: str, content: Sequence[Html], width: float, height: float, *,
    legend: Sequence[Line] = (), class_: str = "", **more: object,
) -> Html:  # fmt: skip
    heading, description = f"{name}-t", f"{name}-d"
    picture = tag(
        "svg",
        tag("desc", said, id=description),
        *content,
        viewbox=f"0 0 {width} {height:g}",
        role="img",
        aria_labelledby=heading,
        aria_describedby=description,
        tabindex="0" if more else None,
        class_="chart" if more else None,
        **more,
    )
    items = [tag("li", _swatch(one), one.name) for one in legend]
    return tag(
        "figure",
        tag("figcaption", title, id=heading),
        tag("ul", *items, class_="legend") if items else None,
        picture,
        tag("output", class_="reading", aria_live="polite") if more else None,
        class_=f"chart {class_}".strip(),
    )


def _swatch(line: Line) -> Html:
    mark = (
        tag("circle", cx=9, cy=6, r=4, class_="dot" + (" ring" if line.colour else ""))
        if line.dots and not line.points
        else tag("path", d="M0 6H18", class_="line")
    )
    group = tag("g", mark, class_=f"s{line.colour % NUM_COLOURS}")
    return tag("svg", group, viewbox="0 0 18 12", width=18, height=12, aria_hidden="true")


def _said(lines: Sequence[Line], x: str, unit: Unit) -> str:
    """The description for those who do not see the chart: beginning, end, lowest and highest of each line."""
    said = []
    for one in lines:
        points = [point for point in one.points if math.isfinite(point[1])]
        if not points:
            continue
        (first, last), low, high = (points[0], points[-1]), min(points, key=_y), max(points, key=_y)
        text = f"{one.name}: {written(first[1], unit)} at {x} {written(first[0], 'steps')}"
        if len(points) > 1:
            text += f", {written(last[1], unit)} at {x} {written(last[0], 'steps')}; "
            text += f"lowest {written(low[1], unit)}, highest {written(high[1], unit)}"
        said.append(text)
    return ". ".join(said)


def _y(point: tuple[float, float]) -> float:
    return point[1]


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LABEL else f"{text[: _MOST_LABEL - 1]}…"
