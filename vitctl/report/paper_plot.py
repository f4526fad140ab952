"""Figures 2, 3, 5 and 13 as plots: the paper's numbers filled, ours hollow beside them. Needs matplotlib."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitctl.models.configs import HybridConfig
from vitctl.models.variants import variant
from vitctl.recipe.load import load_recipe
from vitctl.recipe.paper import RESULTS
from vitctl.recipe.paper_vtab import OTHERS
from vitctl.report.our_results import OurResults
from vitctl.report.paper_cells import is_resnet
from vitctl.report.paper_table import TABLE_9_RECIPES, Accuracy, Gpu, ResultRow, result_rows, task_rows
from vitctl.report.speed_plot import SPEEDS, number_decades, read_speeds
from vitctl.system.figures import GREY, INK, PALE, SERIES, label_text, new_figure, plain_axes, save_figure

_FIGURE_5 = "fig5"
_FAMILIES = {"ViT": ("o", SERIES[0]), "ResNet": ("s", SERIES[1]), "hybrid": ("^", SERIES[2])}
_ANY_GPU = Gpu("H100", 0.4)  # GPU-days are not shown
_BAR = 0.36
_COLOURS_2 = dict(zip((*TABLE_9_RECIPES, *OTHERS), SERIES, strict=True))


def draw_figure_2(ours: OurResults, path: Path) -> Path:
    """VTAB-1k by group: a panel each for the mean of 19 tasks and the three groups, bars for each network.

    Args:
        ours: results of our runs.
        path: the .png, written whole or not at all.

    Paper: Figure 2, with the means of Table 9
    """
    rows = task_rows("fig2", ours)
    figure = new_figure(10.2, 2.9)
    for number, (row, panel) in enumerate(
        zip(rows, figure.subplots(1, len(rows), width_ratios=(3, 2, 2, 2)), strict=True)
    ):
        bars = dict(zip(TABLE_9_RECIPES, row.accuracies, strict=True))
        bars |= {name: Accuracy(value, None, None) for name, value in row.others.items() if value is not None}
        for place, (name, one) in enumerate(bars.items()):
            _bars(panel, place, one, _COLOURS_2[name])
        means = [value for one in bars.values() for value in (one.paper, _ours(one)[0]) if value is not None]
        panel.set_ylim(max(0, min(means) - 8), max(means) + 5)
        panel.set_xticks(range(len(bars)), [name.replace(" ", "\n") for name in bars])
        panel.set_title(row.name.capitalize(), fontsize=9, color=INK)
        if not number:
            panel.set_ylabel("top-1, %", fontsize=8)
        plain_axes(panel)
        panel.tick_params("x", labelsize=6)
    figure.suptitle(
        "Fig. 2: VTAB-1k; filled: published, hollow: ours", x=0.01, ha="left", fontsize=9, color=INK
    )
    return save_figure(figure, path)


def _bars(panel: Any, place: int, one: Accuracy, colour: str) -> None:
    for shift, value, deviation, style in (
        (-_BAR / 2 if one.ours else 0, one.paper, None, {"color": colour}),
        (_BAR / 2, *_ours(one), {"facecolor": "none", "edgecolor": colour}),
    ):
        if value is not None:
            panel.bar(place + shift, value, _BAR * 0.9, yerr=deviation, **style)
            panel.annotate(
                f"{value:.1f}",
                (place + shift, value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=5,
            )


def draw_figure_3(ours: OurResults, path: Path) -> Path:
    """Transfer to ImageNet from three data sets: a line for each ViT, and a band between the smallest and the
    largest BiT.

    Args:
        ours: results of our runs.
        path: the .png, written whole or not at all.

    Paper: Figure 3, with the numbers of Table 5
    """
    rows = {row.recipe: row.accuracies[0] for row in result_rows("fig3", ("ImageNet",), ours, _ANY_GPU)}
    figure = new_figure(6.4, 4.2)
    panel = figure.add_subplot()
    panel.grid(axis="y", color=GREY, linewidth=0.6)
    places = {"in1k": 0, "in21k": 1, "jft": 2}
    models: dict[str, dict[int, Accuracy]] = {}
    for recipe, one in rows.items():
        data_set, model, *_ = recipe.split("_")
        models.setdefault(model, {})[places[data_set]] = one
    bit = {name: models.pop(name) for name in ("r50x1", "r152x4")}
    for number, (name, by_place) in enumerate(sorted(models.items())):
        _line(panel, by_place, "o", SERIES[number], f"ViT-{name[0].upper()}/{name[1:]}")
    for (name, by_place), marker in zip(bit.items(), "vs", strict=True):
        _line(panel, by_place, marker, PALE, f"BiT {name.upper().replace('X', 'x')}")
    edges = [[_ours(one)[0] or math.nan for one in by_place.values()] for by_place in bit.values()]
    if not all(map(math.isnan, map(sum, zip(*edges, strict=True)))):
        panel.fill_between(
            [*places.values()], *edges, color=GREY, alpha=0.6, linewidth=0, zorder=0, label="BiT band, ours"
        )
        panel.vlines([*places.values()], *edges, color=GREY, linewidth=4, zorder=0)
    panel.set_xticks([*places.values()], ["ImageNet", "ImageNet-21k", "JFT-300M"])
    panel.set_axisbelow(True)
    panel.margins(x=0.12)
    panel.set_xlabel("pre-training", fontsize=8)
    panel.set_ylabel("ImageNet top-1, %", fontsize=8)
    panel.legend(fontsize=7, frameon=False, loc="lower right")
    plain_axes(panel)
    title = "Fig. 3: transfer to ImageNet; filled: Table 5 and BiT's Tables 1 and 2, hollow: ours"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK)
    return save_figure(figure, path)


def _line(panel: Any, by_place: Mapping[int, Accuracy], marker: str, colour: str, label: str) -> None:
    printed = {place: one.paper for place, one in by_place.items() if one.paper is not None}
    panel.plot([*printed], [*printed.values()], color=colour, linewidth=1.4)
    panel.plot([], [], marker, color=colour, label=label, markersize=5)
    for place, one in by_place.items():
        _point(panel, place, one, marker, colour)


def _point(panel: Any, x: float, one: Accuracy, marker: str, colour: str) -> None:
    """The paper's accuracy filled, ours hollow with its deviation."""
    if one.paper is not None:
        panel.plot([x], [one.paper], marker, color=colour, markersize=5)
    value, deviation = _ours(one)
    if value is not None:
        panel.errorbar([x], [value], deviation, fmt=marker, color=colour, mfc="none", markersize=7)


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
        for family, (marker, colour) in _FAMILIES.items():
            panel.plot([], [], marker, color=colour, label=family, markersize=5)
        for row in rows:
            _point(panel, _exaflops(row), row.accuracies[number], *_FAMILIES[family_of(row.recipe)])
        _cost_axis(panel, "exaFLOPs of the pre-training")
        panel.set_title(column, fontsize=9, color=INK)
        if not number:
            panel.set_ylabel("top-1, %", fontsize=8)
            panel.legend(fontsize=8, frameon=False)
    figure.suptitle(
        "Fig. 5: transfer and cost; filled: the paper, hollow: ours", x=0.01, ha="left", fontsize=9, color=INK
    )
    return save_figure(figure, path)


def draw_figure_13(ours: OurResults, path: Path) -> Path:
    """Axial networks: linear 5-shot on ImageNet against the FLOPs of the pre-training, and against images/s
    as measured here.

    Args:
        ours: results of our runs, and of `bench model --resolutions` in its folder.
        path: the .png, written whole or not at all.

    Raises:
        RecipeError: the measured numbers cannot be read.

    Paper: Figure 13
    """
    rows = result_rows("fig13", ("5-shot",), ours, _ANY_GPU)
    speeds, speed_label = read_speeds(ours.folder / SPEEDS)
    figure = new_figure(8.4, 3.9)
    flops, speed = figure.subplots(1, 2, sharey=True)
    for number, row in enumerate(rows):
        name, (marker, _) = (
            _pretrained_model(row.recipe),
            _FAMILIES["ResNet" if "R50" in row.recipe.upper() else "ViT"],
        )
        for panel, x in ((flops, _exaflops(row)), (speed, speeds.get(name))):
            if x is not None:
                _point(panel, x, row.accuracies[0], marker, SERIES[number])
        flops.plot([], [], marker, color=SERIES[number], label=name, markersize=5)
    _cost_axis(flops, "exaFLOPs of the pre-training")
    _cost_axis(speed, speed_label)
    flops.set_ylabel("ImageNet 5-shot, %", fontsize=8)
    flops.set_xlim(*_around([_exaflops(row) for row in rows]))
    if speeds:
        speed.set_xlim(*_around([*speeds.values()]))
    else:
        names = " ".join(_pretrained_model(row.recipe) for row in rows)
        hint = f"no speeds:\nvitctl bench model {names}\n--resolutions 224 --json {label_text(str(ours.folder / SPEEDS))}"
        speed.text(0.5, 0.5, hint, ha="center", fontsize=7, color=PALE, transform=speed.transAxes)
    figure.legend(loc="outside lower center", ncols=len(rows), fontsize=7, frameon=False)
    title = "Fig. 13: axial attention; filled: the paper (Table 8; it prints no other), hollow: ours"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK)
    return save_figure(figure, path)


def _around(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.5, max(values) * 1.5


def _exaflops(row: ResultRow) -> float:
    return row.paper_exaflops or row.cost.exaflops


def _cost_axis(panel: Any, label: str) -> None:
    number_decades(panel.xaxis)
    panel.grid(color=GREY, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_xlabel(label, fontsize=8)
    plain_axes(panel)


def family_of(name: str) -> str:
    """ViT, ResNet or hybrid: the family that a pre-training recipe's network belongs to in Fig. 5."""
    if is_resnet(name):
        return "ResNet"
    return "hybrid" if isinstance(variant(_pretrained_model(name)), HybridConfig) else "ViT"


def _pretrained_model(name: str) -> str:
    recipe: Any = load_recipe(name).recipe
    return str(recipe.model.name)


def _ours(one: Accuracy) -> tuple[float | None, float | None]:
    return (one.ours.mean, one.ours.std) if one.ours else (None, None)


PLOTS: Mapping[str, Callable[[OurResults, Path], Path]] = {
    "fig2": draw_figure_2,
    "fig3": draw_figure_3,
    _FIGURE_5: draw_figure_5,
    "fig13": draw_figure_13,
}
