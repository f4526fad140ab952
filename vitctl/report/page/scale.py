"""Axes: round ticks, positions, and numbers as people write them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["number", "percent", "steps"]
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """Positions of values between two pixels.

    Args:
        low, high: values at the ends, low < high; above 0 on a logarithmic axis.
        begin, end: pixels.
        ticks: values with a label.
        log: whether the axis is logarithmic.
    """

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value)  # fmt: skip
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def axis(values: Sequence[float], begin: float, end: float, *, log: bool = False, from_zero: bool = False,
         most: float = math.inf, num_ticks: int = 4, tight: bool = False) -> Axis:  # fmt: skip
    """An axis that holds all values.

    Args:
        values: finite; at least one.
        begin, end: pixels of its ends.
        log: logarithmic where all values are above 0.
        from_zero: starts at 0.
        most: values end here by their nature, such as shares at 1.
        num_ticks: about how many intervals.
        tight: ends at the values, not at ticks.
    """
    low, high = min(values), max(values)
    if log and low > 0 and high / low > _ROUND[-1]:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = -(-len(decades) // (num_ticks + 2))
        ticks = tuple(10.0**n for n in decades if not n % every)
        return Axis(10.0 ** decades[0], 10.0 ** decades[-1], begin, end, ticks, log=True)
    low = min(low, 0.0) if from_zero else low
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    step = _step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if tight:
        ticks = tuple(
            n * step for n in range(first, last + 1) if low - 1e-9 * step <= n * step <= high + 1e-9 * step
        )
        return Axis(low, high, begin, end, ticks)
    ticks = tuple(tick for n in range(first, last + 1) if (tick := n * step) <= most + 1e-9)
    return Axis(
        first * step, min(last * step, most) if most > first * step else last * step, begin, end, ticks
    )


def _step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(r for r in _ROUND if r * power >= wanted * (1 - 1e-9)) * power


def written(value: float, unit: Unit = "number") -> str:
    """A number of a reading: 97.32 %, 1,400, 0.0312, 3.1e-05."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "percent":
        return f"{100 * value:.2f}%"
    if unit == "steps" or (value == int(value) and abs(value) < 1e7):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tick_text(value: float, unit: Unit = "number") -> str:
    """A short number at an axis: 95%, 1.4k, 0.03."""
    if unit == "percent":
        return f"{round(100 * value, 6):g}%"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4 if unit == "number" else 1e3, "k")):
        if abs(value) >= size:
            return f"{round(value / (1e3 if letter == 'k' else size), 6):g}{letter}"
    return f"{round(value, 12):.6g}" if value and abs(value) >= 1e-4 else "0" if not value else f"{value:.0e}"
