"""A curve drawn in the terminal with braille dots, or with stars where the terminal has no such letters."""

import math
from collections.abc import Sequence

from vitctl.report.charts import Unit, axis, tick_text

_EMPTY = 0x2800
# Bits of the eight dots of a braille letter: two columns, four rows from the top.
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LABEL = 8


def draw_curve(
    points: Sequence[tuple[float, float]],
    *,
    width: int,
    height: int,
    unit: Unit = "number",
    plain: bool = False,
) -> list[str]:
    """The lines of a chart, with labels at the left and below; none where no point is finite.

    Args:
        points: x and y, in the order of x.
        width, height: in letters, of everything and of the curve.
        unit: of y.
        plain: ASCII only.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return []
    across, rows = width - _LABEL - 1, height
    columns, dots = (across, rows) if plain else (2 * across, 4 * rows)
    horizontal = axis([x for x, _ in points], 0, columns - 1, tight=True)
    vertical = axis([y for _, y in points], dots - 1, 0, num_ticks=max(2, rows // 3))
    places = [(round(horizontal.at(x)), round(vertical.at(y))) for x, y in points]
    cells = {place for pair in zip(places, places[1:] or places, strict=False) for place in _between(*pair)}
    grid = _stars(cells, across, rows) if plain else _braille(cells, across, rows)
    labels = {
        round(vertical.at(tick) / (1 if plain else 4) - (0 if plain else 0.5)): tick
        for tick in vertical.ticks
    }
    mark, corner, line = ("|", "+", "-") if plain else ("┤", "└", "─")
    side = "|" if plain else "│"
    made = [
        f"{tick_text(labels[row], unit) if row in labels else '':>{_LABEL}}{mark if row in labels else side}{text}"
        for row, text in enumerate(grid)
    ]
    first, last = (tick_text(value, "steps") for value in (points[0][0], points[-1][0]))
    below = f"{first}{last:>{max(1, across - len(first))}}"
    return [*made, " " * _LABEL + corner + line * across, " " * (_LABEL + 1) + below]


def _between(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line."""
    steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
    return [
        (round(one[0] + (other[0] - one[0]) * n / steps), round(one[1] + (other[1] - one[1]) * n / steps))
        for n in range(steps + 1)
    ]


def _braille(cells: set[tuple[int, int]], across: int, rows: int) -> list[str]:
    grid = [[0] * across for _ in range(rows)]
    for x, y in cells:
        grid[y // 4][x // 2] |= _BITS[y % 4][x % 2]
    return ["".join(chr(_EMPTY + bits) if bits else " " for bits in row).rstrip() for row in grid]


def _stars(cells: set[tuple[int, int]], across: int, rows: int) -> list[str]:
    return ["".join("*" if (x, y) in cells else " " for x in range(across)).rstrip() for y in range(rows)]
