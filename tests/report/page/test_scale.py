"""Axes: round ticks that hold the values, and positions against a computation by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.report.page.scale import axis, tick_text, written

VALUES = st.lists(
    st.floats(-1e9, 1e9, allow_subnormal=False).map(lambda v: round(v, 6)), min_size=1, max_size=20
)


@given(VALUES, st.booleans())
def test_axis__holds_every_value(values: list[float], from_zero: bool) -> None:
    made = axis(values, 0, 100, from_zero=from_zero)
    places = [made.at(value) for value in values]
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    assert 1 <= len(made.ticks) <= 12
    steps = np.diff(made.ticks)
    assert np.allclose(steps, steps[:1].repeat(len(steps)))


def test_axis__positions_are_linear_or_logarithmic() -> None:
    made = axis([0.0, 10.0], 50, 150)
    assert [made.at(v) for v in (0, 2.5, 10)] == [50, 75, 150]
    made = axis([0.001, 10.0], 0, 100, log=True)
    assert made.log
    assert [round(made.at(v), 6) for v in (0.001, 0.1, 10)] == [0, 50, 100]
    assert not axis([0.0, 10.0], 0, 1, log=True).log


def test_axis__shares_end_at_one() -> None:
    assert axis([0.31, 0.98], 0, 1, most=1.0).ticks[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.9732, "percent", "97.32%"), (1400, "steps", "1,400"), (0.03125, "number", "0.03125"), (math.inf, "number", "not finite"),
     (123456.7, "number", "123,457"), (3.1e-5, "number", "3.1e-05"), (2.0, "number", "2")],
)  # fmt: skip
def test_written(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.95, "percent", "95%"), (1400, "steps", "1.4k"), (2e6, "steps", "2M"), (0.0, "number", "0"), (0.0005, "number", "0.0005"),
     (1e-5, "number", "1e-05"), (0.1 + 0.2, "number", "0.3")],
)  # fmt: skip
def test_tick_text(value: float, unit: str, text: str) -> None:
    assert tick_text(value, unit) == text  # type: ignore[arg-type]
