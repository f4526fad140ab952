"""[known]: bands of published numbers, and where a run is."""

import math

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from vitctl.recipe.known import FALSE_ALARMS, Comparison, Known, Point, bands, known_in_words, standing

MAE = (0.8363, 0.8366, 0.8352, 0.8346)


def made(*points: tuple[float, ...], seeds: int = 1, metric: str = "accuracy") -> Known:
    names = ("at", "value", "spread")
    some = [{"metric": metric, **dict(zip(names, point, strict=False))} for point in points]
    return Known.model_validate(
        {"source": "a paper", "seeds": seeds, "length": 100.0, "num_classes": 10, "points": some}
    )


def test_bands__prediction_interval_of_four_seeds_is_scipys() -> None:
    mean, spread = float(np.mean(MAE)), float(np.std(MAE, ddof=1))
    (band,) = bands(made((100.0, mean, spread), seeds=4), 100)["accuracy"]
    scale = spread / (mean * (1 - mean)) * math.sqrt(1 + 1 / 4)
    low, high = stats.t.interval(1 - FALSE_ALARMS, 3, loc=math.log(mean / (1 - mean)), scale=scale)
    assert [band.low, band.high] == pytest.approx([1 / (1 + math.exp(-low)), 1 / (1 + math.exp(-high))])


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_bands__an_honest_run_has_any_point_outside_as_seldom_as_said(correlation: float) -> None:
    """Recipes whose band comes from ten runs, and one more run of each; losses are log-normal."""
    generator, steps = np.random.default_rng(0), np.arange(10.0, 101.0, 10.0)
    flagged = 0
    for _ in range(1000):
        common = generator.normal(size=(11, 1)) * math.sqrt(correlation)
        noise = common + generator.normal(size=(11, len(steps))) * math.sqrt(1 - correlation)
        runs = np.exp(0.03 * noise) * 2
        rows = zip(steps, runs[:10].mean(0), runs[:10].std(0, ddof=1), strict=True)
        points = [tuple(map(float, row)) for row in rows]
        found = bands(made(*points, seeds=10, metric="loss"), 100)["loss"]
        flagged += any(band.place(value) != "inside" for band, value in zip(found, runs[10], strict=True))
    assert flagged / 1000 < 1 / 40


def test_bands__one_published_run_has_a_band_that_narrows_and_stays_a_share() -> None:
    found = bands(made((1.0, 0.02), (25.0, 0.5), (100.0, 0.8138)), 1000)["accuracy"]
    assert [band.step for band in found] == [10, 250, 1000]
    widths = [math.log(b.high / (1 - b.high)) - math.log(b.low / (1 - b.low)) for b in found]
    assert widths == pytest.approx([widths[2] * 10, widths[2] * 2, widths[2]])
    assert 0.80 < found[2].low < 0.8138 < found[2].high < 0.825
    assert 0 < found[0].low < 0.02 < found[0].high < 0.05


def test_comparison__says_since_when_and_resumes_from_the_log() -> None:
    known = made((10.0, 0.2, 0.01), (20.0, 0.3, 0.01), (50.0, 0.5, 0.01), (100.0, 0.6, 0.01), seeds=10)
    run = Comparison(known, 100, 100.0, 10)
    records = [{"step": 10, **run.of(10, accuracy=0.2)}, {"step": 20, **run.of(20, accuracy=0.1)}]
    assert run.of(30, accuracy=0.1) == {} and run.of(20, loss=0.1) == {}
    resumed = Comparison(known, 100, 100.0, 10, records)
    records.append({"step": 50, **resumed.of(50, accuracy=0.2)})
    found = [record["known"]["accuracy"] for record in records]
    assert [(one["place"], one["since"]) for one in found] == [("inside", 10), ("below", 20), ("below", 20)]
    assert "below" in known_in_words(records[-1]) and "20" in known_in_words(records[-1])
    assert standing(records) == "accuracy below since step 20"
    assert resumed.flagged and not Comparison(known, 100, 100.0, 10, records[:2]).flagged
    assert resumed.of(100, accuracy=0.6)["known"]["accuracy"]["since"] == 100


def test_comparison__numbers_of_one_step_are_compared_side_by_side() -> None:
    points = [{"metric": name, "at": 5.0, "value": 1.0, "spread": 0.1} for name in ("loss", "pixel_std")]
    known = Known.model_validate(
        {"source": "a paper", "seeds": 20, "length": 10.0, "num_classes": 2, "points": points}
    )
    run = Comparison(known, 10, 10.0, 2)
    record = {"step": 5, **run.of(5, loss=9.0, pixel_std=0.1, accuracy=0.5)}
    assert {name: found["place"] for name, found in record["known"].items()} == {
        "loss": "above",
        "pixel_std": "below",
    }
    assert run.flagged and Comparison(known, 10, 10.0, 2, [record]).flagged
    assert standing([record]) == "loss above since step 5; pixel_std below since step 5"


def test_bands__a_point_may_have_seeds_of_its_own() -> None:
    points = [
        {"at": 50.0, "value": 0.5, "spread": 0.01},
        {"at": 100.0, "value": 0.5, "spread": 0.01, "seeds": 3},
    ]
    table = {"source": "a paper", "seeds": 10, "length": 100.0, "num_classes": 2, "points": points}
    many, few = bands(Known.model_validate(table), 100)["accuracy"]
    halves = [stats.t.ppf(1 - FALSE_ALARMS / 4, n - 1) * 0.04 * math.sqrt(1 + 1 / n) for n in (10, 3)]
    assert [math.log(b.high / (1 - b.high)) for b in (many, few)] == pytest.approx(halves)
    with pytest.raises(ValidationError):
        Known.model_validate(table | {"points": [points[1] | {"seeds": 1}]})


@pytest.mark.parametrize(("length", "num_classes"), [(99.0, 10), (100.0, 11)])
def test_comparison__another_length_or_data_set_is_not_compared(length: float, num_classes: int) -> None:
    known = made((100.0, 0.6, 0.01), seeds=10)
    assert Comparison(known, 100, length, num_classes).of(100, accuracy=0.1) == {}


def test_comparison__a_number_that_is_not_finite_is_outside() -> None:
    run = Comparison(made((100.0, 2.0, 0.1), seeds=10, metric="loss"), 100, 100.0, 10)
    assert run.of(100, loss=math.nan)["known"]["loss"]["place"] == "above"


def test_known_in_words__a_forged_record_says_nothing() -> None:
    good = {"place": "inside", "since": 3, "band": [0.1, 0.2]}
    assert known_in_words({"known": {"accuracy": good}})
    for change in ({"place": "\x1b"}, {"since": "x"}, {"band": [1]}, {"band": "12"}, {"band": [1, "a"]}):
        assert known_in_words({"known": {"accuracy": good | change}}) == ""
    for known in ({"\x1b": good}, {"accuracy": "inside"}, "inside", [good]):
        assert known_in_words({"known": known}) == ""


@pytest.mark.parametrize(
    "values",
    [
        {"points": [{"at": 1.0, "value": 0.5}]},
        {"source": "a", "num_classes": 2, "length": 1.0, "points": [{"at": 2.0, "value": 0.5}]},
        {"source": "a", "num_classes": 2, "length": 1.0, "points": [{"at": 1.0, "value": 83.6}]},
        {
            "source": "a",
            "num_classes": 2,
            "length": 1.0,
            "points": [{"at": 1.0, "value": 0.5, "spread": 0.1}],
        },
    ],
)
def test_known__points_that_cannot_be_used_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Known.model_validate(values)
    assert Point(at=1.0, value=83.6, metric="loss").value == 83.6
