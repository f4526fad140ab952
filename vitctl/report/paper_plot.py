"""Fig. 2 and Fig. 5 as plots: the paper's numbers filled, ours hollow beside them. Needs matplotlib."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitctl.models.configs import HybridConfig
from vitctl.models.variants import variant
from vitctl.recipe.load import load_recipe
from vitctl.recipe.paper import RESULTS
from vitctl.report.our_results import OurResults
from vitctl.report.paper_cells import is_resnet
from vitctl.report.paper_table import TABLE_9_RECIPES, Accuracy, Gpu, result_rows, task_rows
from vitctl.system.figures import GREY, INK, SERIES, new_figure, plain_axes, save_figure

_FIGURE_5 = "fig5"
_FAMILIES = {"ViT": ("o", SERIES[0]), "ResNet": ("s", SERIES[1]), "hybrid": ("^", SERIES[2])}
_ANY_GPU = Gpu("H100", 0.4)  # GPU-days are not shown
_BAR = 0.36


def draw_figure_2(ours: OurResults, path: Path) -> Path:
    """VTAB-1k by group: a panel each for the mean of 19 tasks and the three groups, a pair of bars for each network.

    Args:
        ours: results of our runs.
        path: the .png, written whole or not at all.

    Paper: Figure 2, with the means of Table 9
    """
    rows = task_rows("fig2", ours)
    figure = new_figure(8.4, 2.9)
    for number, (row, panel) in enumerate(zip(rows, figure.subplots(1, len(rows)), strict=True)):
        for place, one in enumerate(row.accuracies):
            _bars(panel, place, one, SERIES[place])
        means = [value for one in row.accuracies for value in (one.paper, _ours(one)[0]) if value is not None]
        panel.set_ylim(max(0, min(means) - 8), max(means) + 5)
        panel.set_xticks(range(len(TABLE_9_RECIPES)), [name.replace(" ", "\n") for name in TABLE_9_RECIPES])
        panel.set_title(row.name.capitalize(), fontsize=9, color=INK)
        if not number:
            panel.set_ylabel("top-1, %", fontsize=8)
        plain_axes(panel)
    figure.suptitle("Fig. 2: VTAB-1k; filled: the paper, hollow: ours", x=0.01, ha="left", fontsize=9, color=INK)
    return save_figure(figure, path)


def _bars(panel: Any, place: int, one: Accuracy, colour: str) -> None:
    for shift, value, deviation, style in (
        (-_BAR / 2, one.paper, None, {"color": colour}),
        (_BAR / 2, *_ours(one), {"facecolor": "none", "edgecolor": colour}),
    ):
        if value is not None:
            panel.bar(place + shift, value, _BAR * 0.9, yerr=deviation, **style)
            panel.annotate(
                f"{value:.1f}", (place + shift, value), (0, 2), textcoords="offset points", ha="center", fontsize=6
            )


def draw_figure_5(ours: OurResults, path: Path) -> Path:
    """Transfer against the cost of the pre-training on JFT-300M: the average of five sets, and ImageNet.

    Args:
        ours: results of our runs.
        path: the .png, written whole or not at all.

    Paper: Figure 5, with the numbers of Table 6
    """
    columns = RESULTS[_FIGURE_5].shown
    rows = result_rows(_FIGURE_5, columns, ours, _ANY_GPU)
    figure = new_figure(8.4, 3.9)
    for number, (column, panel) in enumerate(zip(columns, figure.subplots(1, len(columns)), strict=True)):
        panel.grid(color=GREY, linewidth=0.6)
        for family, (marker, colour) in _FAMILIES.items():
            own = [row for row in rows if family_of(row.recipe) == family]
            x = [row.paper_exaflops or row.cost.exaflops for row in own]
            panel.plot(
                x, [row.accuracies[number].paper for row in own], marker, color=colour, label=family, markersize=5
            )
            for at, row in zip(x, own, strict=True):
                value, deviation = _ours(row.accuracies[number])
                if value is not None:
                    panel.errorbar([at], [value], deviation, fmt=marker, color=colour, mfc="none", markersize=7)
        panel.set_xscale("log")
        panel.set_axisbelow(True)
        panel.set_xlabel("exaFLOPs of the pre-training", fontsize=8)
        panel.set_title(column, fontsize=9, color=INK)
        if not number:
            panel.set_ylabel("top-1, %", fontsize=8)
            panel.legend(fontsize=8, frameon=False)
        plain_axes(panel)
    figure.suptitle(
        "Fig. 5: transfer and cost; filled: the paper, hollow: ours", x=0.01, ha="left", fontsize=9, color=INK
    )
    return save_figure(figure, path)


def family_of(name: str) -> str:
    """ViT, ResNet or hybrid: the family that a pre-training recipe's network belongs to in Fig. 5."""
    if is_resnet(name):
        return "ResNet"
    model: Any = load_recipe(name).recipe
    return "hybrid" if isinstance(variant(model.model.name), HybridConfig) else "ViT"


def _ours(one: Accuracy) -> tuple[float | None, float | None]:
    return (one.ours.mean, one.ours.std) if one.ours else (None, None)


PLOTS: Mapping[str, Callable[[OurResults, Path], Path]] = {"fig2": draw_figure_2, _FIGURE_5: draw_figure_5}
