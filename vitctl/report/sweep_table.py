"""A sweep's results: what each run varied and reached, as a table, by seed, and as a plot.

Only the plot needs matplotlib.
"""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitctl.engine.journal import LOG, Record, read_records, write_run_json
from vitctl.jobs.record.result import read_result
from vitctl.recipe.load import leaves
from vitctl.system.figures import BLUE, GREY, SERIES, label_text, new_figure, plain_axes, save_figure
from vitctl.system.files import write_csv

TABLE, PLOT = "sweep", "sweep.png"
SEED = "seed"
_TITLE_LETTERS = 95
_LOG_RATIO = 8  # a wider range gets a logarithmic axis


@dataclass(frozen=True)
class Outcome:
    """A run of a sweep.

    Args:
        varied: dotted key -> value.
        status: "done", "stopped", "failed" or "waiting".
        value: of the compared metric; None before the run is finished.
        numbers: of its result, by dotted name.
        seconds: spent in training.
        error: one line, if it failed.
    """

    run: str
    recipe: str
    varied: Mapping[str, Any]
    status: str
    value: float | None
    numbers: Mapping[str, float]
    loss: float | None
    seconds: float | None
    error: str = ""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, with their values of the compared metric."""

    name: str
    recipe: str
    varied: Mapping[str, Any]
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Return the population standard deviation over the seeds; 0 for one seed."""
        return statistics.pstdev(self.values)


def outcome(folder: Path, recipe: str, varied: Mapping[str, Any], metric: str, error: str) -> Outcome:
    """Read the outcome of a run from its folder; `error` is that of a run that just failed, else ""."""
    result = read_result(folder)
    records = read_records(folder / LOG)
    steps = [record for record in records if record.get("kind") == "train"]
    numbers: dict[str, float] = {}
    if result is not None and result.status == "done":
        numbers = _logged(records) | _numbers(result.metrics)
    status = "stopped" if steps else "waiting"
    if result is not None:
        status = result.status
    if error:
        status = "failed"
    loss = steps[-1]["loss"] if steps else None
    value = numbers.get(metric)
    return Outcome(folder.name, recipe, varied, status, value, numbers, loss, _seconds(steps), error)


def _logged(records: Sequence[Record]) -> dict[str, float]:
    """Return the best accuracy of all evaluations and the last few-shot ones; a result's take precedence."""
    scores = [r["accuracy"] for r in records if r.get("kind") == "evaluate" and "accuracy" in r]
    best = {"best_accuracy": max(scores)} if scores else {}
    probed = [r for r in records if r.get("kind") == "fewshot" and {"shots", "accuracy"} <= r.keys()]
    return best | {f"{r['shots']}-shot": r["accuracy"] for r in probed}


def _seconds(steps: Sequence[Record]) -> float | None:
    """Return the training time between the logged steps, without evaluations and saves."""
    spent, before = 0.0, 0
    for record in steps:
        spent += (record["samples"] - before) / record["images_per_second"]
        before = record["samples"]
    return round(spent, 1) if steps else None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        ".".join(path): value
        for path, value in leaves(metrics)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def groups(outcomes: Sequence[Outcome]) -> list[Group]:
    """Return the finished runs grouped over seeds, in their order."""
    groups: dict[tuple[str, str], Group] = {}
    for one in outcomes:
        if one.value is None:
            continue
        varied = {key: value for key, value in one.varied.items() if key != SEED}
        seed = f"seed_{one.varied[SEED]}" if SEED in one.varied else ""
        name = "__".join(part for part in one.run.split("__") if part != seed) or Path(one.recipe).stem
        before = groups.get((one.recipe, name))
        values = (*before.values, one.value) if before else (one.value,)
        groups[one.recipe, name] = Group(name, one.recipe, varied, values)
    return list(groups.values())


def shared_words(names: Sequence[str], separator: str = "__") -> list[str]:
    """Return short names of runs, or of paths: parts that all of them share are left out."""
    split = [name.split(separator) for name in names]
    shared = set(split[0]).intersection(*split[1:]) if len(split) > 1 else set()
    between = ", " if separator == "__" else separator
    short = [between.join(part for part in parts if part not in shared) for parts in split]
    return [text or name for text, name in zip(short, names, strict=True)]


def write_sweep_table(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write OUT/sweep.json and OUT/sweep.csv, each atomically. Accuracies are shares 0..1."""
    write_run_json(out / f"{TABLE}.json", {"runs": [asdict(one) for one in outcomes]})
    keys = list(dict.fromkeys(key for one in outcomes for key in one.varied))
    numbers = list(dict.fromkeys(name for one in outcomes for name in one.numbers))
    # "loss" is that of the last training step.
    columns = ("eval_loss" if name == "loss" else name for name in numbers)
    lines: list[list[object]] = [["run", "recipe", *keys, "status", *columns, "loss", "seconds"]]
    lines += [
        [
            *(one.run, one.recipe, *(one.varied.get(key, "") for key in keys)),
            *(one.status, *(one.numbers.get(name, "") for name in numbers), one.loss, one.seconds),
        ]
        for one in outcomes
    ]
    write_csv(out / f"{TABLE}.csv", lines)


# The plot


def draw_sweep(groups: Sequence[Group], metric: str, title: str, out: Path) -> Path:
    """Write OUT/sweep.png atomically: lines over the number that varies, or one dot per run otherwise.

    Accuracies are in percent, other numbers unchanged; bars are one standard deviation over seeds.
    """
    scale = 100.0 if all(0 <= value <= 1 for group in groups for value in group.values) else 1.0
    key = numeric_axis(groups)
    heading = "\n".join(map(label_text, textwrap.wrap(title, _TITLE_LETTERS)))
    height = (3.6 if key else 0.9 + 0.34 * len(groups)) + 0.15 * heading.count("\n")
    figure = new_figure(6.4, height)
    axes = figure.add_subplot()
    label = f"{metric}, %" if scale == 100 else metric
    if key:
        _lines(axes, groups, key, scale, label)
    else:
        _rows(axes, groups, scale, label)
    return save_figure(figure, out / PLOT, heading)


def numeric_axis(groups: Sequence[Group]) -> str:
    """Return the only varied key if its values are numbers, else "". Recipes may vary, too."""
    keys = {key for group in groups for key in group.varied}
    if len(keys) != 1:
        return ""
    key = keys.pop()
    values = [group.varied.get(key) for group in groups]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return key if numbers and len(set(values)) > 1 else ""


def _lines(axes: Any, groups: Sequence[Group], key: str, scale: float, label: str) -> None:
    recipes = list(dict.fromkeys(group.recipe for group in groups))
    for number, recipe in enumerate(recipes):
        chosen = sorted((one for one in groups if one.recipe == recipe), key=lambda one: one.varied[key])
        x, y = [one.varied[key] for one in chosen], [scale * one.mean for one in chosen]
        style = {"color": SERIES[number % len(SERIES)], "marker": "o", "markersize": 4, "linewidth": 1.4}
        axes.errorbar(x, y, [scale * one.std for one in chosen], label=Path(recipe).stem, **style)
    values = sorted({group.varied[key] for group in groups})
    if values[0] > 0 and values[-1] / values[0] >= _LOG_RATIO:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    plain_axes(axes, x=key, y=label, grid="y")
    if len(recipes) > 1:
        axes.legend(fontsize=8, frameon=False)


def _rows(axes: Any, groups: Sequence[Group], scale: float, label: str) -> None:
    y = range(len(groups))
    means, errors = [scale * group.mean for group in groups], [scale * group.std for group in groups]
    axes.hlines(y, 0, 1, transform=axes.get_yaxis_transform(), color=GREY, linewidth=0.6)
    axes.errorbar(means, y, xerr=errors, fmt="o", color=BLUE, markersize=5, capsize=0, elinewidth=1.4)
    for row, mean in zip(y, means, strict=True):
        text = f"{mean:.1f}" if scale == 100 else f"{mean:.4g}"
        axes.annotate(text, (mean, row), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7)
    axes.set_yticks(y, [*map(label_text, shared_words([group.name for group in groups]))])
    axes.set_ylim(len(groups) - 0.4, -0.7)
    axes.margins(x=0.08)
    plain_axes(axes, x=label)
