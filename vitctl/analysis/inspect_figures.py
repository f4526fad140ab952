"""The figures of an analysis, drawn from its numbers with matplotlib."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.utils import make_grid

from vitctl.analysis.attention_maps import AttentionLayer, uniform_distance
from vitctl.analysis.parameters import Components
from vitctl.system.figures import BLUE, INK, PALE, Heading, headed_figure, label_text, plain_axes

SIMILARITY_COLORS, MASK_COLORS = "viridis", "inferno"
_CELL = 0.026  # least size of a patch in a similarity map, inches
_MOST_TICKS = 7
_DASHES = (0, (4, 3))


class Panel(NamedTuple):
    """Similarities of positions in one network.

    Args:
        similarities: `[N, N]` of the patches of `grid`; without a grid, of relative offsets; None if there
            are none.
        grid: rows and columns.
        remark: shown in place of similarities.
    """

    title: str
    similarities: Tensor | None
    grid: tuple[int, int] | None = None
    remark: str = ""


def draw_filters(components: Components, heading: Heading) -> Any:
    """Draw principal components in rows of seven; grey is 0, and each is scaled separately.

    Paper: Figure 7 left
    """
    count = len(components.shares)
    columns = min(7, count)
    rows = math.ceil(count / columns)
    figure = headed_figure(max(4.2, 1.0 * columns), 1.13 * rows, heading)
    for number, panel in enumerate(_panels(figure, rows, columns, count)):
        image = components.images[number]
        _image(panel, 0.5 + 0.5 * image / image.abs().max(), interpolation="none")
        _caption(panel, f"{number + 1}: {components.shares[number]:.1%}")
    return figure


def draw_position_similarity(panels: Sequence[Panel], heading: Heading) -> Any:
    """Draw a small map for each patch: the similarity of its position to every other, on one scale.

    Paper: Figure 7 centre, Figure 10
    """
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    cells = max((one.grid[0] * (one.grid[0] + 1) for one in panels if one.grid), default=0)
    side = min(8.0, max(4.3, _CELL * cells)) if columns == 1 else 3.1
    figure = headed_figure(side * columns + 0.9, side * rows + (0.35 if len(panels) > 1 else 0), heading)
    drawn = _panels(figure, rows, columns, len(panels))
    shown: Any = None
    for one, axes in zip(panels, drawn, strict=True):
        if one.similarities is None:
            _bare(axes)
            axes.set_box_aspect(1)
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": PALE}
            axes.text(0.5, 0.5, textwrap.fill(one.remark, 30), transform=axes.transAxes, **style)
        else:
            shown = _similarities(axes, one.similarities, one.grid)
        plain_axes(axes, title=label_text(one.title))
        axes.spines[:].set_visible(False)
    if shown is not None:
        _color_bar(figure, shown, drawn, "cosine similarity", shrink=0.8, aspect=30, pad=0.02)
    return figure


def _similarities(axes: Any, similarities: Tensor, grid: tuple[int, int] | None) -> Any:
    """Draw every patch's map in its place, one cell apart; or the map of offsets."""
    style = {"cmap": SIMILARITY_COLORS, "vmin": -1, "vmax": 1, "interpolation": "none"}
    if grid is None:
        most = len(similarities) // 2
        edges = (-most - 0.5, most + 0.5, most + 0.5, -most - 0.5)
        plain_axes(axes, x="offset, tokens", y="offset, tokens")
        axes.locator_params(nbins=5, integer=True)
        return axes.imshow(similarities.numpy(), extent=edges, **style)
    rows, columns = grid
    maps = np.full((rows, rows + 1, columns, columns + 1), np.nan)
    by_patch = similarities.numpy().reshape(rows, columns, rows, columns)
    maps[:, :rows, :, :columns] = by_patch.transpose(0, 2, 1, 3)
    whole = maps.reshape(rows * (rows + 1), columns * (columns + 1))[:-1, :-1]
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        numbers = _whole_ticks(count)
        places = [(number - 1) * (count + 1) + (count - 1) / 2 for number in numbers]
        axis.set_ticks(places, map(str, numbers))
    plain_axes(axes, x="column of the patch", y="row of the patch")
    axes.tick_params(length=0)
    return axes.imshow(whole, **style)


def draw_attention_distance(
    layers: Sequence[AttentionLayer], distances: Tensor, image_size: int, heading: Heading
) -> Any:
    """Draw a dot for each head, over the depth of the network; `distances` are `[layers, heads]` in pixels.

    Paper: Figure 7 right, Figure 11
    """
    figure = headed_figure(6.4, 3.9, heading)
    axes = figure.add_subplot()
    depth = [layer.depth for layer in layers]
    axes.plot(depth, distances.mean(dim=1), color=BLUE, linewidth=1.2, alpha=0.5, label="mean of the heads")
    dots = np.repeat(depth, distances.shape[1])
    edge = {"linewidths": 0.5, "edgecolors": "white"}
    axes.scatter(dots, distances.ravel(), 24, BLUE, zorder=3, label="a head", **edge)
    uniform = uniform_distance(layers[0])
    axes.axhline(uniform, color=PALE, linestyle=_DASHES, linewidth=1.0, label="uniform attention")
    plain_axes(axes, x="depth of the network, blocks", y="mean attention distance, pixels", grid="y")
    ends = (float(distances.min()), float(distances.max()), uniform)
    axes.set_ylim(min(ends) - 0.02 * image_size, max(ends) + 0.02 * image_size)
    axes.set_xticks(_whole_ticks(len(layers)))
    share = (lambda y: 100 * y / image_size, lambda y: y * image_size / 100)
    plain_axes(axes.secondary_yaxis("right", functions=share), y="of the image's width, %")
    axes.legend(
        fontsize=8, frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3
    )
    return figure


def draw_rollout(
    pixels: Tensor,
    overlays: Sequence[Tensor],
    masks: Sequence[Tensor],
    captions: Sequence[str],
    heading: Heading,
) -> Any:
    """Draw a row for each image: the image, then overlay and mask with the identity term, and without it.

    Args:
        pixels: uint8 `[N, 3, S, S]`, as the network sees them.
        overlays: like `pixels`, with and without the identity term.
        masks: `[N, rows, columns]`, with and without the identity term.
        captions: below each image: what it is, and the network's prediction.

    Paper: Figure 6
    """
    names = ("image", "with skip paths", "attention", "without skip paths", "attention")
    side = 1.42
    below = 0.13 + 0.12 * max(one.count("\n") for one in captions)
    figure = headed_figure(side * len(names) + 0.75, (side + below) * len(pixels) + 0.2, heading)
    figure.get_layout_engine().set(hspace=0.0)
    axes = figure.subplots(len(pixels), len(names), squeeze=False)
    relative = [mask / mask.mean(dim=(1, 2), keepdim=True) for mask in masks]
    style = {"cmap": MASK_COLORS, "vmin": 0, "vmax": float(max(one.max() for one in relative))}
    for name, panel in zip(names, axes[0], strict=True):
        panel.set_title(name, fontsize=8, color=INK)
    for row, panels in enumerate(axes):
        _image(panels[0], pixels[row])
        _caption(panels[0], "\n".join(_short(line, 23) for line in captions[row].splitlines()))
        for place in range(2):
            _image(panels[2 * place + 1], overlays[place][row])
            mask = relative[place][row]
            shown = _image(panels[2 * place + 2], mask, interpolation="none", **style)
            _caption(panels[2 * place + 2], f"peak {float(mask.max()):.1f}")
    shrink = min(1.0, 3 / len(pixels))
    _color_bar(figure, shown, axes, "attention, 1 = uniform", shrink=shrink, aspect=25, pad=0.015)
    return figure


def draw_rollout_sheet(pixels: Tensor, overlays: Tensor, heading: Heading) -> Any:
    """Draw many images in pairs, uint8 `[N, 3, S, S]`: the image and its overlay with the identity term.

    Paper: Figure 14
    """
    count = len(pixels)
    pairs = min(4 if count <= 24 else 6 if count <= 60 else 8, count)
    both = torch.stack([pixels, overlays], dim=1).flatten(0, 1)
    sheet = make_grid(both, nrow=2 * pairs, padding=max(2, pixels.shape[-1] // 16), pad_value=255)
    width = 2.0 * pairs
    figure = headed_figure(width, width * sheet.shape[1] / sheet.shape[2], heading)
    _image(figure.add_subplot(), sheet)
    return figure


def _panels(figure: Any, rows: int, columns: int, count: int) -> list[Any]:
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes[count:]:
        panel.set_visible(False)
    return axes[:count]


def _image(axes: Any, pixels: Tensor, **style: Any) -> Any:
    """Draw `[3, rows, columns]` in colour, or `[rows, columns]`, without ticks."""
    _bare(axes)
    return axes.imshow((pixels.movedim(0, -1) if pixels.dim() == 3 else pixels).numpy(), **style)


def _bare(axes: Any) -> None:
    """Remove ticks and frame, but not the label below."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _caption(axes: Any, text: str) -> None:
    axes.set_xlabel(text, fontsize=7, color=PALE, labelpad=2)


def _color_bar(figure: Any, shown: Any, axes: Any, label: str, **place: float) -> None:
    bar = figure.colorbar(shown, ax=axes, **place)
    plain_axes(bar.ax, y=label)
    bar.outline.set_visible(False)


def _whole_ticks(count: int) -> list[int]:
    return list(range(1, count + 1, math.ceil(count / _MOST_TICKS)))


def _short(text: str, letters: int) -> str:
    return label_text(text if len(text) <= letters else f"{text[: letters - 1].rstrip()}…")
