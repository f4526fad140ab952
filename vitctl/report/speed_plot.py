"""Fig. 12 and the right of Fig. 13 from the numbers of `vitctl bench model --resolutions`.

Needs matplotlib.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitctl.errors import RecipeError
from vitctl.system.figures import GREY, INK, PALE, SERIES, label_text, new_figure, plain_axes, save_figure
from vitctl.system.files import read_json
from vitctl.system.text import bytes_text

SPEEDS = "speed.json"  # the default of `bench model --resolutions`
_USUAL_SIDE = 224  # of Fig. 13
_MOST_BYTES = 16 << 20
_MARKERS = "osD^vP*X"


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
    """Images/s of each core and the largest batch against the resolution, and images/s against the cost of an
    image.

    Args:
        result: of `bench_resolutions`.
        path: the .png or .svg, written whole or not at all.

    Paper: Figures 12 and 13
    """
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    sides = sorted({cell["image_size"] for cell in cells})
    figure = new_figure(10.2, 3.7)
    speed, batch, cost = figure.subplots(1, 3)
    for number, name in enumerate(models):
        own = [cell for cell in cells if cell["model"] == name and cell["images_per_second"]]
        style = {
            "color": SERIES[number % len(SERIES)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 5,
        }
        style["linestyle"] = "-" if number < len(SERIES) else "--"
        speed.plot([], [], label=label_text(name), **style)
        _draw_line(
            speed, own, lambda cell: cell["images_per_second"] / result["cores"], _well_measured, style
        )
        fits = [cell for cell in own if cell["largest_batch"]]
        _draw_line(batch, fits, lambda cell: cell["largest_batch"], lambda cell: cell["largest_tried"], style)
        _draw_cost(cost, own, result, style, name)
    if not any(cell["largest_batch"] for cell in cells):
        hint = "no time to find it:\ngive more --seconds"
        batch.text(0.5, 0.5, hint, ha="center", fontsize=8, color=PALE, transform=batch.transAxes)
    core = result["core"]
    _axes(speed, f"images/s of a {core}", sides)
    _axes(batch, f"largest batch, {bytes_text(result['free_memory_bytes'])} free", sides)
    batch.set_xlim(speed.get_xlim())  # also where no batch is known
    weak = any(cell["images_per_second"] and not _well_measured(cell) for cell in cells)
    hollow = " (hollow: one image at a time)" if weak else ""
    speed.set_title(f"Fig. 12: speed{hollow}", fontsize=7 if hollow else 9, color=INK)
    batch.set_title("Fig. 12: memory (hollow: not tried, from bytes per image)", fontsize=7, color=INK)
    cost.set_title("the costs of Fig. 13: FLOPs and speed", fontsize=9, color=INK)
    number_decades(cost.xaxis)
    number_decades(cost.yaxis)
    cost.set_xlabel(f"GFLOPs of an image at {_side(sides)}", fontsize=8)
    cost.set_ylabel(f"images/s of a {core}", fontsize=8)
    cost.margins(0.18, 0.1)
    cost.grid(color=GREY, linewidth=0.6)
    cost.set_axisbelow(True)
    plain_axes(cost)
    figure.legend(
        *speed.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(8, len(models)),
        fontsize=7,
        frameon=False,
    )
    figure.suptitle(_title(result), x=0.01, ha="left", fontsize=8, color=PALE)
    return save_figure(figure, path)


def _well_measured(cell: Mapping[str, Any]) -> bool:
    return not cell["note"]


def _draw_line(
    panel: Any,
    cells: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float],
    measured: Callable[[Mapping[str, Any]], bool],
    style: Mapping[str, Any],
) -> None:
    """A value against the resolution: filled where it was measured, hollow where it was not, or says little."""
    lines = {key: what for key, what in style.items() if not key.startswith("marker")}
    panel.plot([cell["image_size"] for cell in cells], [value(cell) for cell in cells], **lines)
    for cell in cells:
        panel.plot(
            [cell["image_size"]],
            [value(cell)],
            mfc=_face(measured(cell), style),
            **{**style, "linestyle": ""},
        )


def _face(measured: bool, style: Mapping[str, Any]) -> str:
    return str(style["color"]) if measured else "white"


def _draw_cost(
    panel: Any,
    own: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    style: Mapping[str, Any],
    name: str,
) -> None:
    side = _side(sorted({cell["image_size"] for cell in result["cells"]}))
    for cell in own:
        if cell["image_size"] == side:
            at = (cell["gflops"], cell["images_per_second"] / result["cores"])
            face = _face(_well_measured(cell), style)
            panel.plot(*([value] for value in at), mfc=face, **{**style, "linestyle": ""})
            panel.annotate(label_text(name), at, (4, 3), textcoords="offset points", fontsize=6)


def _side(sides: Sequence[int]) -> int:
    """The resolution of the panel of costs: 224, or the nearest that was measured."""
    return min(sides, key=lambda side: abs(side - _USUAL_SIDE), default=_USUAL_SIDE)


def _axes(panel: Any, label: str, sides: Sequence[int]) -> None:
    panel.set_xscale("log")
    number_decades(panel.yaxis)
    panel.set_xticks(sides, [str(side) for side in sides])
    panel.xaxis.minorticks_off()
    panel.set_xlabel("resolution, pixels", fontsize=8)
    panel.set_ylabel(label, fontsize=8)
    panel.grid(color=GREY, linewidth=0.6)
    panel.set_axisbelow(True)
    plain_axes(panel)


def number_decades(axis: Any) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, 10 ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if not math.isfinite(axis.get_data_interval()[0]):  # an empty panel has no logarithms
        axis.set_ticks([])
        return
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _title(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    cores = f"{result['cores']} {result['core']}{'s' * (result['cores'] > 1)}"
    return label_text(
        f"forward passes, {result['precision']}, {machine['device_name']}, {cores}, torch "
        f"{machine['versions']['torch']}, "
        f"load {machine.get('load', 0):.1f}"
    )
