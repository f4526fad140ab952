"""[known] of a recipe: published results, the band around each point, and a run's position."""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from vitctl.recipe.sections import Section, knob

FALSE_ALARMS = 0.02  # share of honest runs with any point outside, if numbers are normal on their scale
_STRIKES = 2  # points outside that flag a run
# One run on ImageNet: the deviation of MAE's four seeds of B/16, 0.094 points at 83.57 %, as log-odds.
_LEAST_DEVIATION = 0.00094 / (0.8357 * (1 - 0.8357))
_ONE_RUN_FACTOR = 8.0
_NEAR = 0.01  # tolerance on a scored point's step: an epoch is seldom an integer number of steps
Metric = Literal["accuracy", "loss", "pixel_std"]
Place = Literal["inside", "below", "above"]


class Point(Section):
    """One published number. A spread of 0 means none, `seeds` of 0 means the table's."""

    metric: Metric = "accuracy"
    at: float = Field(gt=0)
    value: float = Field(ge=1e-9, le=1e9)
    spread: float = Field(0.0, ge=0, le=1e9)
    seeds: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _is_a_share(self) -> Self:
        return self._refusing(
            (
                self.metric == "accuracy" and self.value >= 1,
                f"accuracy = {self.value:g} should be a share below 1, e.g. 0.836 for 83.6 %",
            ),
        )


class Known(Section):
    """[known] Published results of this recipe, to compare a run with. No result depends on them."""

    source: str = knob("", "who measured it, and where it is published", max_length=300)
    seeds: int = knob(1, "runs behind each value and its spread", unit="runs", ge=1)
    unit: Literal["steps", "epochs"] = knob("steps", "unit of length and of each point's `at`")
    length: float = knob(
        0.0, "length of the published run; a run of another length is not compared; 0: no points", ge=0
    )
    num_classes: int = knob(0, "classes of its data; a run on others is not compared", ge=0)
    test_images: int = knob(
        0,
        "images that were scored, where their number widens the band of an accuracy without a spread: on "
        "10,000 the sampling error of 93 % is 0.26 points; 0: many",
        unit="images",
        ge=0,
    )
    points: Annotated[tuple[Point, ...], Field(strict=False)] = knob(
        (),
        "[{at = 100, value = 0.836, spread = 0.00094}]: metric (accuracy, or the logged loss or pixel_std of "
        "one batch), at, mean value, standard deviation over seeds (0: not published), and seeds if others",
        max_length=1000,
    )

    @model_validator(mode="after")
    def _points_are_of_the_run(self) -> Self:
        late = next((point.at for point in self.points if point.at > self.length), 0.0)
        return self._refusing(
            (
                self.points and not (self.source and self.num_classes),
                "points need source and num_classes: who measured them, on how many classes",
            ),
            (late, f"a point at {late:g} is after length = {self.length:g} {self.unit}"),
            (
                any(point.spread and (point.seeds or self.seeds) < 2 for point in self.points),
                "a spread needs seeds = 2 or more",
            ),
        )


@dataclass(frozen=True)
class Band:
    """The expected range of an honest run's number after a step."""

    step: int
    low: float
    high: float

    def place(self, value: float) -> Place:
        """Return the position of a number relative to the band; one that is not finite is above."""
        if value < self.low:
            return "below"
        return "inside" if value <= self.high else "above"


def bands(known: Known, total_steps: int) -> dict[str, list[Band]]:
    """Return the bands of a run of `total_steps`, by metric.

    A band is a prediction interval for one more run, on a scale where deviations are nearly symmetric and
    which ends where the metric does: log-odds of an accuracy, logarithm of the others.

    With a spread s from n runs it is t * s * sqrt(1 + 1/n), with Student's t of n - 1 degrees of freedom, as
    mean and spread are estimates themselves. t leaves out FALSE_ALARMS divided by the number of points, on
    both sides together. By Bonferroni's inequality at most FALSE_ALARMS of honest runs then have any point
    outside, however the points are correlated. Losses of single batches early in training have heavier tails
    than a normal distribution, which is why a run is flagged by its second point outside, see `Comparison`.

    An accuracy without a spread on few `test_images` has their sampling error too, a binomial deviation times
    the normal quantile of the same share, added by squares.

    Without a spread it is 8 * 0.0068 * sqrt(length / at) on that scale. 0.0068 is the deviation of MAE's
    seeds, 0.094 points at 83.57 %. The factor leaves room for another program: others' runs of big_vision's
    S/16 were up to 0.77 points from its 76.5, 6 such deviations. The root widens the band early, where curves
    are steep: 0.8 points at 81.4 % at the end, 1.2 to 3.4 for 2.0 after a hundredth of the run. This is a
    choice, not an estimate.
    """
    from scipy.special import ndtri, stdtrit

    made: dict[str, list[Band]] = {}
    for point in sorted(known.points, key=lambda point: point.at):
        share = 1 - point.value if point.metric == "accuracy" else 1.0
        if point.spread:
            seeds = point.seeds or known.seeds
            t = float(stdtrit(seeds - 1, 1 - FALSE_ALARMS / len(known.points) / 2))
            half = t * math.sqrt(1 + 1 / seeds) * point.spread / (point.value * share)
        else:
            half = _ONE_RUN_FACTOR * _LEAST_DEVIATION * math.sqrt(known.length / point.at)
            if known.test_images and point.metric == "accuracy":
                deviation = 1 / math.sqrt(known.test_images * point.value * (1 - point.value))
                half = math.hypot(half, ndtri(1 - FALSE_ALARMS / 2 / len(known.points)) * deviation)
        low, high = (_moved(point, sign * half) for sign in (-1, 1))
        made.setdefault(point.metric, []).append(
            Band(round(point.at / known.length * total_steps), low, high)
        )
    return made


def _moved(point: Point, by: float) -> float:
    if point.metric != "accuracy":
        return point.value * math.exp(by)
    return 1 / (1 + (1 - point.value) / point.value * math.exp(-by))


class Comparison:
    """Compares a run's numbers with [known] in the order of its steps; `length` is in [known]'s unit."""

    def __init__(
        self,
        known: Known,
        total_steps: int,
        length: float,
        num_classes: int,
        records: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        is_same = known.length == length and known.num_classes == num_classes
        self.bands = bands(known, total_steps) if known.points and is_same else {}
        self.last: dict[str, tuple[str, int]] = {}
        self.strikes = _STRIKES if sum(map(len, self.bands.values())) > 1 else 1
        self.outside: list[int] = []  # steps of points
        for record in records:
            for metric, found in compared(record).items():
                self._add(record["step"], metric, found.place)

    @property
    def flagged(self) -> bool:
        """Return whether to inspect the run: two points of any metric are outside, or the only one."""
        return len(self.outside) >= self.strikes

    def logs(self, step: int) -> bool:
        """Return whether a point applies to this step's batch, so that the step must be logged."""
        of_batches = [some for metric, some in self.bands.items() if metric != "accuracy"]
        return any(step == band.step for some in of_batches for band in some)

    def _add(self, step: int, metric: str, place: str) -> None:
        before, since = self.last.get(metric, ("", step))
        self.last[metric] = place, since if place == before else step
        if place != "inside":
            self.outside.append(step)

    def of(self, step: int, **numbers: float) -> dict[str, Any]:
        """Return a step's log.jsonl entry by metric: place, since when, and band; empty without points."""
        found: dict[str, dict[str, Any]] = {}
        for metric, value in numbers.items():
            share = _NEAR if metric == "accuracy" else 0.0  # steps of other points are logged
            near = [band for band in self.bands.get(metric, ()) if abs(band.step - step) <= share * band.step]
            if near:
                band = min(near, key=lambda band: abs(band.step - step))
                self._add(step, metric, band.place(value))
                place, since = self.last[metric]
                ends = [float(f"{end:.5g}") for end in (band.low, band.high)]
                found[metric] = {"place": place, "since": since, "band": ends}
        return {"known": found} if found else {}


class Compared(BaseModel):
    """A number and its band, as in log.jsonl."""

    place: Place
    since: int
    band: tuple[float, float]

    @property
    def since_step(self) -> str:
        """The step since when, as text; "" for a result without a step."""
        return f" since step {self.since:,}" if self.since else ""


_COMPARED = TypeAdapter(dict[Metric, Compared])


def compared(record: Mapping[str, Any]) -> dict[Metric, Compared]:
    """Return a record's comparisons by metric; empty if vitctl did not write the record."""
    with suppress(ValidationError):
        return _COMPARED.validate_python(record.get("known", {}))
    return {}


def known_in_words(record: Mapping[str, Any]) -> str:
    """Return a record's comparisons as text, such as `inside 72.9..75.2` for an accuracy in %; "" without."""
    texts = []
    for metric, found in compared(record).items():
        name, form = ("", "{:.1%}") if metric == "accuracy" else (f"{metric} ", "{:.4g}")
        ends = "..".join(form.format(end).rstrip("%") for end in found.band)
        texts.append(f"{name}{found.place} {ends}" + found.since_step * (found.place != "inside"))
    return ", ".join(texts)


def standing(records: Iterable[Mapping[str, Any]]) -> str:
    """Return a run's position from its log, as `accuracy inside since step 50`; "" if nothing is known."""
    last = {metric: found for record in records for metric, found in compared(record).items()}
    return "; ".join(f"{name} {last[name].place}{last[name].since_step}" for name in sorted(last))
