"""Charts: the drawn points are the values, no spike is lost, and the description tells beginning, end and
extremes.
"""

import math
import re

import numpy as np

from vitctl.report.page.chart import HEIGHT, MOST_POINTS, WIDTH, Line, dot_chart, line_chart, thinned


def attribute(markup: str, name: str) -> list[float]:
    found = re.search(rf'<g class=.*?data-{name}="([^"]*)"', markup)
    assert found is not None
    return [float(part) for part in re.split("[ ,]", found[1])]


def test_line_chart__points_lie_where_their_values_say() -> None:
    points = ((0.0, 0.0), (50.0, 5.0), (100.0, 10.0))
    made = line_chart("a", "Loss", [Line("loss", points)])
    assert made is not None
    assert attribute(made, "x") == [0, 50, 100]
    assert attribute(made, "y") == [0, 5, 10]
    pixels = np.array(attribute(made, "at")).reshape(-1, 2)
    assert np.allclose(np.diff(pixels, axis=0)[0], np.diff(pixels, axis=0)[1], atol=0.11)
    assert (pixels >= 0).all() and (pixels <= (WIDTH, HEIGHT)).all()
    assert pixels[0][1] > pixels[-1][1]
    assert "loss: 0 at step 0, 10 at step 100; lowest 0, highest 10" in made


def test_line_chart__what_is_not_finite_leaves_a_gap() -> None:
    made = line_chart("a", "Loss", [Line("loss", ((1.0, 3.0), (2.0, math.nan), (3.0, 1.0), (4.0, math.inf)))])
    assert made is not None
    path = re.search(r' d="([^"]*)"', made)
    assert path is not None
    assert path[1].count("M") == 2
    assert "L" not in path[1]
    assert "nan" not in made and "inf" not in made
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


def test_dot_chart__has_a_row_for_each_name_and_a_title_for_each_dot() -> None:
    made = dot_chart("a", "VTAB", [("pets", {"this run": 0.9, "paper": 0.92}), ("dtd", {"this run": 0.7})])
    assert made is not None
    assert re.findall(r"<circle[^>]*><title>([^<]*)</title>", made) == [
        "pets, paper: 92.00%", "pets, this run: 90.00%", "dtd, this run: 70.00%",
    ]  # fmt: skip
    assert dot_chart("a", "VTAB", []) is None
