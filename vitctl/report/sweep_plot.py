"""The plot of a sweep: lines over the number that varies, or one dot per run otherwise. Needs matplotlib."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitctl.report.sweep_table import Group, shared_words
from vitctl.system.figures import BLUE, GREY, INK, SERIES, label_text, new_figure, plain_axes, save_figure

PLOT = "sweep.png"
_TITLE_LETTERS = 95
_LOG_RATIO = 8  # a range wider than this gets a logarithmic axis


def draw_sweep(groups: Sequence[Group], metric: str, title: str, out: Path) -> Path:
    """Write OUT/sweep.png: accuracy in percent, other numbers as they are; bars are one standard deviation
    over seeds.

    Args:
        groups: finished runs, at least one.
        metric: their number.
        title: above the plot.
        out: folder of the sweep.

    Returns:
        the file, written whole or not at all.
    """
    scale = 100.0 if all(0 <= value <= 1 for group in groups for value in group.values) else 1.0
    axis = numeric_axis(groups)
    heading = "\n".join(map(label_text, textwrap.wrap(title, _TITLE_LETTERS)))
    height = (3.6 if axis else 0.9 + 0.34 * len(groups)) + 0.15 * heading.count("\n")
    figure = new_figure(6.4, height)
    axes = figure.add_subplot()
    label = f"{metric}, %" if scale == 100 else metric
    (_lines if axis else _rows)(axes, groups, axis, scale, label)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=9, color=INK)
    plain_axes(axes)
    return save_figure(figure, out / PLOT)


def numeric_axis(groups: Sequence[Group]) -> str:
    """The only varied key, if its values are numbers; '' otherwise. Recipes may vary too."""
    keys = {key for group in groups for key in group.varied}
    if len(keys) != 1:
        return ""
    key = keys.pop()
    values = [group.varied.get(key) for group in groups]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return key if numbers and len(set(values)) > 1 else ""


def _lines(axes: Any, groups: Sequence[Group], axis: str, scale: float, label: str) -> None:
    recipes = list(dict.fromkeys(group.recipe for group in groups))
    for number, recipe in enumerate(recipes):
        own = sorted(
            (group for group in groups if group.recipe == recipe), key=lambda group: group.varied[axis]
        )
        colour = SERIES[number % len(SERIES)]
        x, y = [group.varied[axis] for group in own], [scale * group.mean for group in own]
        error = [scale * group.std for group in own]
        axes.errorbar(
            x, y, error, color=colour, marker="o", markersize=4, linewidth=1.4, label=Path(recipe).stem
        )
    values = sorted({group.varied[axis] for group in groups})
    if values[0] > 0 and values[-1] / values[0] >= _LOG_RATIO:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(axis, fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.grid(axis="y", color=GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    if len(recipes) > 1:
        axes.legend(fontsize=8, frameon=False)


def _rows(axes: Any, groups: Sequence[Group], _axis: str, scale: float, label: str) -> None:
    y = range(len(groups))
    means, errors = [scale * group.mean for group in groups], [scale * group.std for group in groups]
    axes.hlines(y, 0, 1, transform=axes.get_yaxis_transform(), color=GREY, linewidth=0.6)
    axes.errorbar(means, y, xerr=errors, fmt="o", color=BLUE, markersize=5, capsize=0, elinewidth=1.4)
    for row, mean in zip(y, means, strict=True):
        text = f"{mean:.1f}" if scale == 100 else f"{mean:.4g}"
        axes.annotate(text, (mean, row), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7)
    axes.set_yticks(y, shared_words([group.name for group in groups]))
    axes.set_ylim(len(groups) - 0.4, -0.7)
    axes.margins(x=0.08)
    axes.set_xlabel(label, fontsize=8)
