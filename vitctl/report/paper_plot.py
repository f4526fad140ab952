"""Figures of the paper as plots, which need matplotlib.

Figures 2, 3, 5 and 13: the paper's numbers filled, ours hollow beside them. Figure 12: the numbers of
`vitctl bench model --resolutions`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitctl.errors import RecipeError
from vitctl.models.variants import HybridConfig, variant
from vitctl.recipe.paper import OTHERS, RESULTS, VTAB_MODELS
from vitctl.report.our_results import OurResults, is_resnet, pretraining_recipe
from vitctl.report.paper_table import Accuracy, Gpu, ResultRow, result_rows, task_rows
from vitctl.system.figures import GREY, PALE, SERIES, label_text, new_figure, plain_axes, save_figure
from vitctl.system.files import read_json
from vitctl.system.text import bytes_text, count_text

_FAMILIES = {"ViT": ("o", SERIES[0]), "ResNet": ("s", SERIES[1]), "hybrid": ("^", SERIES[2])}
_ANY_GPU = Gpu("H100", 0.4)  # GPU-days are not shown
_BAR = 0.36
_COST = "exaFLOPs of the pre-training"
SPEEDS = "speed.json"  # the default of `bench model --resolutions`
_USUAL_SIDE = 224  # of Fig. 13
_MOST_BYTES = 16 << 20
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
    """Draw a bar with its value above it, and return the value in a list; nothing without a value."""
    if value is None:
        return []
    panel.bar(x, value, _BAR * 0.9, yerr=deviation, **style)
    panel.annotate(f"{value:.1f}", (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=5)
    return [value]


def draw_figure_3(ours: OurResults, path: Path) -> Path:
    """Draw transfer to ImageNet from three data sets: a line for each ViT, and the band of BiT's ResNets.

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


def draw_figure_5(ours: OurResults, path: Path) -> Path:
    """Draw transfer against the cost of the pre-training on JFT-300M: the average of five sets, and ImageNet.

    Paper: Figure 5, with the numbers of Table 6
    """
    columns = RESULTS["fig5"].shown
    rows = result_rows("fig5", columns, ours, _ANY_GPU)
    figure = new_figure(8.4, 3.9)
    panels = figure.subplots(1, len(columns))
    for number, (column, panel) in enumerate(zip(columns, panels, strict=True)):
        for row in rows:
            _point(panel, _exaflops(row), row.accuracies[number], *_FAMILIES[family_of(row.recipe)])
        number_decades(panel.xaxis)
        plain_axes(panel, x=_COST, y="" if number else "top-1, %", title=column, grid="both")
    for family, (marker, colour) in _FAMILIES.items():
        panels[0].plot([], [], marker, color=colour, label=family, markersize=5)
    panels[0].legend(fontsize=8, frameon=False)
    return save_figure(figure, path, "Fig. 5: transfer and cost; filled: the paper, hollow: ours")


def draw_figure_13(ours: OurResults, path: Path) -> Path:
    """Draw axial networks: linear 5-shot against the FLOPs of pre-training, and against measured images/s.

    The speeds are those of `bench model --resolutions` in the folder of our runs.

    Raises:
        RecipeError: the measured numbers cannot be read.

    Paper: Figure 13
    """
    rows = result_rows("fig13", ("5-shot",), ours, _ANY_GPU)
    names = [pretraining_recipe(row.recipe).model.name for row in rows]
    speeds, speed_label = read_speeds(ours.folder / SPEEDS)
    figure = new_figure(8.4, 3.9)
    flops, speed = figure.subplots(1, 2, sharey=True)
    for row, name, colour in zip(rows, names, SERIES, strict=True):
        marker, _ = _FAMILIES["ResNet" if "R50" in row.recipe.upper() else "ViT"]
        _point(flops, _exaflops(row), row.accuracies[0], marker, colour)
        if name in speeds:
            _point(speed, speeds[name], row.accuracies[0], marker, colour)
        flops.plot([], [], marker, color=colour, label=name, markersize=5)
    number_decades(flops.xaxis)
    number_decades(speed.xaxis)
    plain_axes(flops, x=_COST, y="ImageNet 5-shot, %", grid="both")
    plain_axes(speed, x=speed_label, grid="both")
    flops.set_xlim(*_around([_exaflops(row) for row in rows]))
    if speeds:
        speed.set_xlim(*_around([*speeds.values()]))
    else:
        file = label_text(str(ours.folder / SPEEDS))
        hint = f"no speeds:\nvitctl bench model {' '.join(names)}\n--resolutions 224 --json {file}"
        speed.text(0.5, 0.5, hint, ha="center", fontsize=7, color=PALE, transform=speed.transAxes)
    figure.legend(loc="outside lower center", ncols=len(rows), fontsize=7, frameon=False)
    title = "Fig. 13: axial attention; filled: the paper (Table 8; it prints no other), hollow: ours"
    return save_figure(figure, path, title)


def _around(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.5, max(values) * 1.5


def _exaflops(row: ResultRow) -> float:
    return row.paper_exaflops or row.cost.exaflops


def family_of(name: str) -> str:
    """Return ViT, ResNet or hybrid: the family of a pre-training recipe's network in Fig. 5."""
    if is_resnet(name):
        return "ResNet"
    return "hybrid" if isinstance(variant(pretraining_recipe(name).model.name), HybridConfig) else "ViT"


# Each draws our results beside the paper's and writes the .png atomically.
PLOTS: Mapping[str, Callable[[OurResults, Path], Path]] = {
    "fig2": draw_figure_2,
    "fig3": draw_figure_3,
    "fig5": draw_figure_5,
    "fig13": draw_figure_13,
}


# Figure 12


def read_speeds(path: Path) -> tuple[dict[str, float], str]:
    """Read numbers of `bench model --resolutions`.

    Returns:
        images/s of a core at 224 pixels by model, and the label of their axis; no models if there is no such
        file.

    Raises:
        RecipeError: the file holds something else.
    """
    if not path.is_file():
        return {}, "images/s"
    result = read_json(path, _MOST_BYTES, error=RecipeError)
    try:
        cells = [
            cell
            for cell in result["cells"]
            if cell["image_size"] == _USUAL_SIDE and cell["images_per_second"]
        ]
        speeds = {
            str(cell["model"]): float(cell["images_per_second"]) / int(result["cores"]) for cell in cells
        }
        if not all(0 < speed < math.inf for speed in speeds.values()):
            raise ValueError
        return speeds, label_text(f"images/s of a {result['core']}, {result['machine']['device_name']}")
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise RecipeError(
            f"{path}: should hold numbers of `vitctl bench model --resolutions`; measure them again"
        ) from None


def draw_speed(result: Mapping[str, Any], path: Path) -> Path:
    """Draw speed and largest batch against the resolution, and speed against FLOPs, for each network.

    Values that were not measured, or that say little, are hollow.

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
        timed = [cell for cell in cells if cell["model"] == name and cell["images_per_second"]]
        rates = [(cell["image_size"], cell["images_per_second"] / cores, not cell["note"]) for cell in timed]
        fitting = [cell for cell in timed if cell["largest_batch"]]
        batches = [(cell["image_size"], cell["largest_batch"], cell["largest_tried"]) for cell in fitting]
        costs = [
            (cell["gflops"], cell["images_per_second"] / cores, not cell["note"])
            for cell in timed
            if cell["image_size"] == usual
        ]
        style = {"color": SERIES[number % len(SERIES)], "marker": _MARKERS[number % len(_MARKERS)]}
        line = "-" if number < len(SERIES) else "--"
        speed.plot([], [], label=label_text(name), markersize=5, linestyle=line, **style)
        _measured(speed, rates, line, style)
        _measured(batch, batches, line, style)
        _measured(cost, costs, "", style)
        for x, y, _ in costs:
            cost.annotate(label_text(name), (x, y), (4, 3), textcoords="offset points", fontsize=6)
    if not any(cell["largest_batch"] for cell in cells):
        hint = "no time to find it:\ngive more --seconds"
        batch.text(0.5, 0.5, hint, ha="center", fontsize=8, color=PALE, transform=batch.transAxes)
    for panel in (speed, batch):
        panel.set_xscale("log")
        number_decades(panel.yaxis)
        panel.set_xticks(sides, [str(side) for side in sides])
        panel.xaxis.minorticks_off()
    batch.set_xlim(speed.get_xlim())  # also where no batch is known
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
    figure.suptitle(_conditions(result), x=0.01, ha="left", fontsize=8, color=PALE)
    return save_figure(figure, path)


def _measured(
    panel: Any, points: Sequence[tuple[float, float, bool]], line: str, style: Mapping[str, str]
) -> None:
    """Draw a line through points (x, y, measured); hollow markers where it was not measured."""
    panel.plot([x for x, _, _ in points], [y for _, y, _ in points], color=style["color"], linestyle=line)
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


def _conditions(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    cores = f"{count_text(result['cores'], result['core'])}"
    return label_text(
        f"forward passes, {result['precision']}, {machine['device_name']}, {cores}, torch "
        f"{machine['versions']['torch']}, "
        f"load {machine.get('load', 0):.1f}"
    )
