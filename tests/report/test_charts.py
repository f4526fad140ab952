"""Axes hold their values, drawn points are the values, no spike is lost, descriptions name the extremes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.matrix import each
from vitctl.report.charts import (
    HEIGHT,
    MOST_POINTS,
    WIDTH,
    Line,
    Unit,
    axis,
    line_chart,
    number_text,
    thinned,
    tick_text,
)

VALUES = st.lists(
    st.floats(-1e9, 1e9, allow_subnormal=False).map(lambda v: round(v, 6)), min_size=1, max_size=20
)


@given(VALUES, st.booleans())
def test_axis__holds_every_value(values: list[float], from_zero: bool) -> None:
    made = axis(values, 0, 100, from_zero=from_zero)
    assert all(-1e-6 <= made.at(value) <= 100 + 1e-6 for value in values)
    assert 1 <= len(made.ticks) <= 12
    steps = np.diff(made.ticks)
    assert np.allclose(steps, steps[:1].repeat(len(steps)))


def test_axis__positions_are_linear_or_logarithmic_and_shares_end_at_one() -> None:
    made = axis([0.0, 10.0], 50, 150)
    assert [made.at(v) for v in (0, 2.5, 10)] == [50, 75, 150]
    made = axis([0.001, 10.0], 0, 100, log=True)
    assert made.log
    assert [round(made.at(v), 6) for v in (0.001, 0.1, 10)] == [0, 50, 100]
    assert not axis([0.0, 10.0], 0, 1, log=True).log
    assert axis([0.31, 0.98], 0, 1, most=1.0).ticks[-1] == pytest.approx(1.0)


@each(
    ("value", "unit", "text", "tick"),
    [
        (0.9732, "percent", "97.32%", "97.32%"),
        (1400, "steps", "1,400", "1.4k"),
        (2e6, "steps", "2,000,000", "2M"),
        (0.03125, "number", "0.03125", "0.03125"),
        (123456.7, "number", "123,457", "123.457k"),
        (3.1e-5, "number", "3.1e-05", "3e-05"),
        (2.0, "number", "2", "2"),
        (0.0, "number", "0", "0"),
        (0.1 + 0.2, "number", "0.3", "0.3"),
    ],
)
def test_numbers_as_text(value: float, unit: Unit, text: str, tick: str) -> None:
    assert (number_text(value, unit), tick_text(value, unit)) == (text, tick)
    assert number_text(math.inf) == "not finite"


def test_line_chart__points_lie_where_their_values_say() -> None:
    made = line_chart("a", "Loss", [Line("loss", ((0.0, 0.0), (50.0, 5.0), (100.0, 10.0)))])
    assert made is not None
    [line] = made["lines"]
    assert (line["xs"], line["ys"]) == ("0 50 100", "0 5 10")
    pixels = np.array([pair.split(",") for pair in line["pixels"].split()], float)
    assert np.allclose(np.diff(pixels, axis=0)[0], np.diff(pixels, axis=0)[1], atol=0.11)
    assert (pixels >= 0).all() and (pixels <= (WIDTH, HEIGHT)).all()
    assert pixels[0][1] > pixels[-1][1]
    assert made["description"] == "loss: 0 at step 0, 10 at step 100; lowest 0, highest 10"


def test_line_chart__values_that_are_not_finite_leave_a_gap() -> None:
    made = line_chart("a", "Loss", [Line("loss", ((1.0, 3.0), (2.0, math.nan), (3.0, 1.0), (4.0, math.inf)))])
    assert made is not None
    assert made["lines"][0]["path"].count("M") == 2
    assert "L" not in made["lines"][0]["path"]
    assert "nan" not in str(made) and "inf" not in str(made)
    assert line_chart("a", "Loss", [Line("loss", ((1.0, math.nan),))]) is None


def test_thinned__keeps_the_lowest_the_highest_and_both_ends() -> None:
    rng = np.random.default_rng(0)
    points = [(float(n), float(y)) for n, y in enumerate(rng.normal(size=50_000))]
    points[12_345] = (12_345.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= 1.2 * MOST_POINTS
    assert set(kept) <= set(points)
    assert list(kept) == sorted(kept)
    assert {kept[0], kept[-1]} == {points[0], points[-1]}
    assert max(y for _, y in kept) == 99.0
    assert min(y for _, y in kept) == min(y for _, y in points)
