"""Figures of the paper as plots, which need matplotlib.

Figures 2, 3, 5 and 13: the paper's numbers filled, ours hollow. Figure 12: the numbers of `vitctl bench model
--resolutions`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitctl.models.variants import HybridConfig, variant
from vitctl.recipe.paper import OTHERS, RESULTS, VTAB_MODELS
from vitctl.report.our_results import OurResults, is_resnet, pretraining_recipe
from vitctl.report.paper_table import Accuracy, Gpu, result_rows, task_rows
from vitctl.system.figures import GREY, PALE, SERIES, label_text, new_figure, plain_axes, save_figure
from vitctl.system.text import bytes_text, count_text

_ANY_GPU = Gpu("H100", 0.4)  # any will do: GPU-days are not shown
_BAR = 0.36
_USUAL_SIDE = 224  # pixels of an image whose FLOPs are shown
_MARKERS = "osD^vP*X"
_MEMORY_TITLE = "Fig. 12: memory (hollow: not tried, from bytes per image)"


def draw_figure_2(ours: OurResults, path: Path) -> Path:
    """Draw VTAB-1k: a panel each for the mean of 19 tasks and the three groups, bars for each network.

    Paper: Figure 2, with the means of Table 9
    """
    rows = task_rows("fig2", ours)
    figure = new_figure(10.2, 2.9)
    panels = figure.subplots(1, len(rows), width_ratios=(3, 2, 2, 2))
    colours = dict(zip((*VTAB_MODELS, *OTHERS), SERIES, strict=True))
    for row, panel in zip(rows, panels, strict=True):
        bars = dict(zip(VTAB_MODELS, row.accuracies, strict=True))
        bars |= {name: Accuracy(value, None, None) for name, value in row.others.items() if value is not None}
        heights = []
        for place, (name, one) in enumerate(bars.items()):
            colour, shift = colours[name], _BAR / 2 if one.ours else 0
            heights += _bar(panel, place - shift, one.paper, None, {"color": colour})
            hollow = {"facecolor": "none", "edgecolor": colour}
            heights += _bar(panel, place + _BAR / 2, *_ours(one), hollow)
        panel.set_ylim(max(0, min(heights) - 8), max(heights) + 5)
        panel.set_xticks(range(len(bars)), [name.replace(" ", "\n") for name in bars])
        plain_axes(panel, title=row.name.capitalize(), y="" if panel is not panels[0] else "top-1, %")
        panel.tick_params("x", labelsize=6)
    return save_figure(figure, path, "Fig. 2: VTAB-1k; filled: published, hollow: ours")


def _bar(
    panel: Any, x: float, value: float | None, deviation: float | None, style: Mapping[str, str]
) -> list[float]:
    if value is None:
        return []
    panel.bar(x, value, _BAR * 0.9, yerr=deviation, **style)
    panel.annotate(f"{value:.1f}", (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=5)
    return [value]


def draw_figure_3(ours: OurResults, path: Path) -> Path:
    """Draw transfer to ImageNet from three data sets: a line per ViT, and the band of BiT's ResNets.

    Paper: Figure 3, with the numbers of Table 5
    """
    places = {"in1k": 0, "in21k": 1, "jft": 2}
    models: dict[str, dict[int, Accuracy]] = {}
    for row in result_rows("fig3", ("ImageNet",), ours, _ANY_GPU):
        data_set, model, *_ = row.recipe.split("_")
        models.setdefault(model, {})[places[data_set]] = row.accuracies[0]
    smallest, largest = models.pop("r50x1"), models.pop("r152x4")
    figure = new_figure(6.4, 4.2)
    panel = figure.add_subplot()
    for colour, (name, by_place) in zip(SERIES, sorted(models.items()), strict=False):
        _line(panel, by_place, "o", colour, f"ViT-{name[0].upper()}/{name[1:]}")
    _line(panel, smallest, "v", PALE, "BiT R50x1")
    _line(panel, largest, "s", PALE, "BiT R152x4")
    edges = [[_ours(by_place[at])[0] or math.nan for at in range(3)] for by_place in (smallest, largest)]
    if any(math.isfinite(low + high) for low, high in zip(*edges, strict=True)):
        style = {"color": GREY, "zorder": 0}
        panel.fill_between(range(3), *edges, alpha=0.6, linewidth=0, label="BiT band, ours", **style)
        panel.vlines(range(3), *edges, linewidth=4, **style)
    panel.set_xticks(range(3), ["ImageNet", "ImageNet-21k", "JFT-300M"])
    panel.margins(x=0.12)
    panel.legend(fontsize=7, frameon=False, loc="lower right")
    plain_axes(panel, x="pre-training", y="ImageNet top-1, %", grid="y")
    title = "Fig. 3: transfer to ImageNet; filled: Table 5 and BiT's Tables 1 and 2, hollow: ours"
    return save_figure(figure, path, title)


def _line(panel: Any, by_place: Mapping[int, Accuracy], marker: str, colour: str, label: str) -> None:
    printed = {place: one.paper for place, one in by_place.items() if one.paper is not None}
    panel.plot([*printed], [*printed.values()], color=colour, linewidth=1.4)
    panel.plot([], [], marker, color=colour, label=label, markersize=5)
    for place, one in by_place.items():
        _point(panel, place, one, marker, colour)


def _point(panel: Any, x: float, one: Accuracy, marker: str, colour: str) -> None:
    """Draw the paper's accuracy filled, ours hollow with its deviation."""
    if one.paper is not None:
        panel.plot([x], [one.paper], marker, color=colour, markersize=5)
    value, deviation = _ours(one)
    if value is not None:
        panel.errorbar([x], [value], deviation, fmt=marker, color=colour, mfc="none", markersize=7)


def _ours(one: Accuracy) -> tuple[float | None, float | None]:
    return (one.ours.mean, one.ours.std) if one.ours else (None, None)


def draw_costs(
    number: str,
    columns: tuple[str, ...],
    title: str,
    kind_of: Callable[[str], str],
    ours: OurResults,
    path: Path,
) -> Path:
    """Draw accuracies against pre-training cost: a panel for each column, a colour for each kind of recipe.

    Paper: Figure 5, transfer of networks trained on JFT-300M, with the numbers of Table 6; Figure 13 left,
    axial networks: the speeds of its right half are in the plot of `bench model --resolutions`
    """
    rows = result_rows(number, columns, ours, _ANY_GPU)
    kinds = dict.fromkeys(kind_of(row.recipe) for row in rows)
    style = {kind: (marker, colour) for kind, marker, colour in zip(kinds, _MARKERS, SERIES, strict=False)}
    figure = new_figure(4.2 * max(len(columns), 1.5), 3.9)
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for at, (column, panel) in enumerate(zip(columns, panels, strict=True)):
        for row in rows:
            flops = row.paper_exaflops or row.exaflops
            _point(panel, flops, row.accuracies[at], *style[kind_of(row.recipe)])
        number_decades(panel.xaxis)
        y = "" if at else "top-1, %"
        plain_axes(panel, x="exaFLOPs of the pre-training", y=y, title=column, grid="both")
    for kind, (marker, colour) in style.items():
        panels[0].plot([], [], marker, color=colour, label=kind, markersize=5)
    panels[0].legend(fontsize=8, frameon=False)
    return save_figure(figure, path, title)


def family_of(name: str) -> str:
    """Return ViT, ResNet or hybrid: the family of a pre-training recipe's network in Fig. 5."""
    if is_resnet(name):
        return "ResNet"
    return "hybrid" if isinstance(variant(pretraining_recipe(name).model.name), HybridConfig) else "ViT"


# Each draws our results next to the paper's and writes the .png atomically.
PLOTS: Mapping[str, Callable[[OurResults, Path], Path]] = {
    "fig2": draw_figure_2,
    "fig3": draw_figure_3,
    "fig5": partial(
        draw_costs,
        "fig5",
        RESULTS["fig5"].shown,
        "Fig. 5: transfer and cost; filled: the paper, hollow: ours",
        family_of,
    ),
    "fig13": partial(
        draw_costs,
        "fig13",
        ("5-shot",),
        "Fig. 13: axial attention; filled: the paper (Table 8; it prints no other), hollow: ours",
        lambda name: pretraining_recipe(name).model.name,
    ),
}


# Figure 12


def draw_speed(result: Mapping[str, Any], path: Path) -> Path:
    """Draw speed and largest batch against the resolution, and speed against FLOPs, for each network.

    Values that were not measured, or are unreliable, are hollow.

    Args:
        result: of `bench_resolutions`.
        path: the .png or .svg, written atomically.

    Paper: Figures 12 and 13
    """
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    cores, core = result["cores"], result["core"]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    sides = sorted({cell["image_size"] for cell in cells})
    usual = min(sides, key=lambda side: abs(side - _USUAL_SIDE), default=_USUAL_SIDE)
    figure = new_figure(10.2, 3.7)
    speed, batch, cost = figure.subplots(1, 3)
    for number, name in enumerate(models):
        timed = [
            {**cell, "rate": cell["images_per_second"] / cores, "is_sure": not cell["note"]}
            for cell in cells
            if cell["model"] == name and cell["images_per_second"]
        ]
        fitting = [cell for cell in timed if cell["largest_batch"]]
        at_usual = [cell for cell in timed if cell["image_size"] == usual]
        style = {"color": SERIES[number % len(SERIES)], "marker": _MARKERS[number % len(_MARKERS)]}
        line = "-" if number < len(SERIES) else "--"
        speed.plot([], [], label=label_text(name), markersize=5, linestyle=line, **style)
        _measured(speed, timed, ("image_size", "rate", "is_sure"), line, style)
        _measured(batch, fitting, ("image_size", "largest_batch", "largest_tried"), line, style)
        _measured(cost, at_usual, ("gflops", "rate", "is_sure"), "", style)
        for cell in at_usual:
            place = (cell["gflops"], cell["rate"])
            cost.annotate(label_text(name), place, (4, 3), textcoords="offset points", fontsize=6)
    if not any(cell["largest_batch"] for cell in cells):
        hint = "no time to find it:\ngive more --seconds"
        batch.text(0.5, 0.5, hint, ha="center", fontsize=8, color=PALE, transform=batch.transAxes)
    for panel in (speed, batch):
        panel.set_xscale("log")
        number_decades(panel.yaxis)
        panel.set_xticks(sides, [str(side) for side in sides])
        panel.xaxis.minorticks_off()
    batch.set_xlim(speed.get_xlim())  # even if no batch is known
    number_decades(cost.xaxis)
    number_decades(cost.yaxis)
    cost.margins(0.18, 0.1)
    weak = any(cell["images_per_second"] and cell["note"] for cell in cells)
    remark = " (hollow: one image at a time)" * weak
    free = bytes_text(result["free_memory_bytes"])
    rate, pixels = f"images/s of a {core}", "resolution, pixels"
    plain_axes(speed, x=pixels, y=rate, title=f"Fig. 12: speed{remark}", grid="both")
    plain_axes(batch, x=pixels, y=f"largest batch, {free} free", title=_MEMORY_TITLE, grid="both")
    plain_axes(cost, x=f"GFLOPs of an image at {usual}", y=rate, title="the costs of Fig. 13", grid="both")
    for panel in (speed, batch):
        panel.title.set_fontsize(7)
    figure.legend(loc="outside lower center", ncols=min(8, len(models)), fontsize=7, frameon=False)
    machine = result["machine"]
    conditions = label_text(
        f"forward passes, {result['precision']}, {machine['device_name']}, {count_text(cores, core)}, torch "
        f"{machine['versions']['torch']}, load {machine.get('load', 0):.1f}"
    )
    figure.suptitle(conditions, x=0.01, ha="left", fontsize=8, color=PALE)
    return save_figure(figure, path)


def _measured(
    panel: Any,
    cells: Sequence[Mapping[str, Any]],
    keys: tuple[str, str, str],
    line: str,
    style: Mapping[str, str],
) -> None:
    """Draw a line through cells; `keys` are x, y and whether it was measured: hollow if not."""
    points = [tuple(cell[key] for key in keys) for cell in cells]
    panel.plot([x for x, *_ in points], [y for _, y, _ in points], color=style["color"], linestyle=line)
    for x, y, measured in points:
        face = style["color"] if measured else "white"
        panel.plot([x], [y], mfc=face, markersize=5, linestyle="", **style)


def number_decades(axis: Any) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2, 5, 10 ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if not math.isfinite(axis.get_data_interval()[0]):  # an empty panel has no logarithms
        axis.set_ticks([])
        return
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
