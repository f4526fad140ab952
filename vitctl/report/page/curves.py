"""The curves of a run, from its log.jsonl: loss, accuracy, few-shot, learning rate, speed, and what was
skipped.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vitctl.engine.journal import Record
from vitctl.report.page.chart import Line, line_chart
from vitctl.report.page.markup import Html
from vitctl.report.page.scale import Unit

Points = tuple[tuple[float, float], ...]


class _Curve(NamedTuple):
    """A field of the training records that is drawn; `only_if` says for which values it is worth a chart."""

    field: str
    title: str
    unit: Unit = "number"
    from_zero: bool = True
    only_if: Callable[[float], bool] = lambda _: True


_TRAINING = (
    _Curve("lr", "Learning rate"),
    _Curve("images_per_second", "Images per second"),
    _Curve("mfu", "MFU, share of the peak FLOP/s", "percent"),
    _Curve("data_wait", "Data-wait, share of the time", "percent"),
    _Curve("num_bad", "Bad samples so far", only_if=bool),
    _Curve("num_skipped", "Skipped updates so far", only_if=bool),
)


def points(records: Iterable[Record], kind: str, field: str) -> Points:
    """(step, value) of a field of the records of a kind, in the order of the steps; the last of equal steps
    counts.
    """
    found = {}
    for record in records:
        x, y = record.get("step"), record.get(field)
        if record.get("kind") == kind and isinstance(x, int | float) and isinstance(y, int | float):
            found[float(x)] = float(y)
    return tuple(sorted(found.items()))


def shot_points(records: Sequence[Record]) -> dict[int, Points]:
    """Few-shot accuracies during a training: shots -> (step, accuracy)."""
    probes = [
        r for r in records if r.get("kind") == "fewshot" and isinstance(r.get("shots"), int) and r.get("step")
    ]
    by_shots = {
        shots: [r for r in probes if r["shots"] == shots] for shots in sorted({r["shots"] for r in probes})
    }
    return {shots: points(own, "fewshot", "accuracy") for shots, own in by_shots.items()}


def run_charts(name: str, records: Sequence[Record]) -> list[Html]:
    """All charts of a training.

    Args:
        name: of ids in the page.
        records: of its log.
    """
    loss, scored = points(records, "train", "loss"), points(records, "evaluate", "accuracy")
    scored = tuple(point for point in scored if point[0] > 0)
    shots = [Line(f"{n}-shot", own, at) for at, (n, own) in enumerate(shot_points(records).items())]
    charts = [
        line_chart(f"{name}-loss", "Training loss", [Line("loss", loss)], log=_is_wide(loss)),
        _if_curve(f"{name}-accuracy", "Accuracy on the scored split", [Line("accuracy", scored, dots=True)]),
        _if_curve(f"{name}-shots", "Few-shot accuracy during training", shots),
    ]
    for curve in _TRAINING:
        values = points(records, "train", curve.field)
        if any(curve.only_if(y) for _, y in values):
            line = Line(curve.title.partition(",")[0], values)
            charts.append(
                line_chart(
                    f"{name}-{curve.field}", curve.title, [line], unit=curve.unit, from_zero=curve.from_zero
                )
            )
    return [chart for chart in charts if chart is not None]


def overlaid(name: str, trainings: Mapping[str, Sequence[Record]]) -> list[Html]:
    """Loss and accuracy of several trainings in one chart each."""
    if len(trainings) < 2:
        return []
    loss = [
        Line(key, points(records, "train", "loss"), at) for at, (key, records) in enumerate(trainings.items())
    ]
    scored = [
        Line(key, tuple(p for p in points(records, "evaluate", "accuracy") if p[0] > 0), at, dots=True)
        for at, (key, records) in enumerate(trainings.items())
    ]
    scored = [line for line in scored if line.points]
    wide = _is_wide([point for line in loss for point in line.points])
    charts = [
        line_chart(f"{name}-loss", "Training loss", [line for line in loss if line.points], log=wide),
        _if_curve(f"{name}-accuracy", "Accuracy on the scored split", scored),
    ]
    return [chart for chart in charts if chart is not None]


def _if_curve(name: str, title: str, lines: Sequence[Line]) -> Html | None:
    """A chart of accuracies, where one of them was measured more than once: a single one stands in the
    tables.
    """
    return (
        line_chart(name, title, lines, unit="percent")
        if any(len(line.points) > 1 for line in lines)
        else None
    )


def _is_wide(values: Sequence[tuple[float, float]]) -> bool:
    """Whether a loss covers more than two powers of ten, so that a linear axis would hide its end."""
    finite = [y for _, y in values if math.isfinite(y)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) > 100
