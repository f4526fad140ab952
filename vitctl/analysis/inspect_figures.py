"""The pictures of an analysis, drawn from its numbers.

Needs matplotlib; computes nothing but places and colours.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vitctl.analysis.attention_maps import AttentionLayer, uniform_distance
from vitctl.analysis.parameters import Components
from vitctl.system.figures import BLUE, GREY, INK, PALE, SERIES, label_text, new_figure, plain_axes

SIMILARITY_COLORS, MASK_COLORS = "viridis", "inferno"
_HEADING, _LINE = 0.46, 0.15  # inches over a picture, and for each line of facts
_LETTERS = 15.5  # of the facts that fit into an inch
_CELL = 0.026  # inches of a patch in a map of similarities, at least
_MOST_TICKS = 7


@dataclass(frozen=True)
class Heading:
    """Over a picture: what it shows, and of which weights, layer and images."""

    title: str
    facts: str


@dataclass(frozen=True)
class Panel:
    """Similarities of positions in one network.

    Args:
        title: above the panel.
        similarities: `[N, N]` of the patches of `grid`; without a grid, of relative offsets; None where there
            are none.
        grid: rows and columns.
        remark: in place of similarities.
    """

    title: str
    similarities: Tensor | None
    grid: tuple[int, int] | None = None
    remark: str = ""


@dataclass(frozen=True)
class RolledImage:
    """An image as the network sees it, with its attention rollout.

    Args:
        pixels: uint8 `[3, S, S]`.
        overlays: of the rollout with and without the identity term, uint8 `[3, S, S]`.
        masks: the same as `[rows, columns]`.
        caption: below the image: what it is, and what the network says.
    """

    pixels: Tensor
    overlays: tuple[Tensor, Tensor]
    masks: tuple[Tensor, Tensor]
    caption: str


def draw_filters(components: Components, heading: Heading) -> Any:
    """Draw principal components in rows of seven; grey is 0, and each is scaled separately.

    Paper: Figure 7 left
    """
    count = len(components.shares)
    columns = min(7, count)
    rows = math.ceil(count / columns)
    figure = _figure(max(4.2, 1.0 * columns), 1.13 * rows, heading)
    for number, panel in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        _bare(panel)
        if number < count:
            image = components.images[number]
            shown = (0.5 + 0.5 * image / image.abs().max()).permute(1, 2, 0).numpy()
            panel.imshow(shown, interpolation="none")
            _caption(panel, f"{number + 1}: {components.shares[number]:.1%}")
        else:
            panel.set_visible(False)
    return figure


def draw_position_similarity(panels: Sequence[Panel], heading: Heading) -> Any:
    """Draw a small map for each patch: how similar its position is to every other, on one scale.

    Paper: Figure 7 centre, Figure 10
    """
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    cells = max((one.grid[0] * (one.grid[0] + 1) for one in panels if one.grid), default=0)
    side = min(8.0, max(4.3, _CELL * cells)) if columns == 1 else 3.1
    figure = _figure(side * columns + 0.9, side * rows + (0.35 if len(panels) > 1 else 0), heading)
    axes = figure.subplots(rows, columns, squeeze=False)
    shown: Any = None
    for number, panel in enumerate(axes.flat):
        if number >= len(panels):
            panel.set_visible(False)
            continue
        one = panels[number]
        if one.title:
            panel.set_title(label_text(one.title), fontsize=9, color=INK)
        if one.similarities is None:
            _bare(panel)
            panel.set_box_aspect(1)
            remark = textwrap.fill(one.remark, 30)
            panel.text(
                0.5, 0.5, remark, ha="center", va="center", fontsize=8, color=PALE, transform=panel.transAxes
            )
        elif one.grid is None:
            shown = _offsets(panel, one.similarities)
        else:
            shown = _tiles(panel, one.similarities, one.grid)
    if shown is not None:
        _color_bar(figure, shown, axes, "cosine similarity", shrink=0.8, aspect=30, pad=0.02)
    return figure


def draw_attention_distance(
    layers: Sequence[AttentionLayer], distances: Tensor, image_size: int, heading: Heading
) -> Any:
    """Draw a dot for each head, over the depth of the network.

    Args:
        layers: all attentions.
        distances: `[layers, heads]` in pixels.
        image_size: in pixels.
        heading: above.

    Paper: Figure 7 right, Figure 11
    """
    figure = _figure(6.4, 3.9, heading)
    axes = figure.add_subplot()
    kinds = list(dict.fromkeys(layer.along for layer in layers))
    for number, kind in enumerate(kinds):
        own = [place for place, layer in enumerate(layers) if layer.along == kind]
        depth = (
            np.array([layers[place].depth for place in own], float) + (number - (len(kinds) - 1) / 2) * 0.24
        )
        values, colour = distances[own].numpy(), SERIES[number]
        name, mean = ("a head", "mean of the heads") if kind == "grid" else (f"a head, within {kind}s", None)
        axes.plot(depth, values.mean(axis=1), color=colour, linewidth=1.2, alpha=0.5, label=mean)
        dots = np.repeat(depth, values.shape[1])
        axes.scatter(
            dots, values.ravel(), 24, colour, linewidths=0.5, edgecolors="white", zorder=3, label=name
        )
        uniform = [uniform_distance(layers[place]) for place in own]
        style = {"color": PALE, "linestyle": (0, (4, 3)), "linewidth": 1.0}
        axes.plot(depth, uniform, **style, label="uniform attention" if kind == kinds[-1] else None)
    _label(axes, "depth of the network, blocks", "mean attention distance, pixels")
    axes.set_ylim(0, 1.06 * max(float(distances.max()), *map(uniform_distance, layers)))
    axes.set_xticks(_whole_ticks(max(layer.depth for layer in layers)))
    plain_axes(axes)
    axes.grid(axis="y", color=GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    right = axes.secondary_yaxis(
        "right", functions=(lambda y: 100 * y / image_size, lambda y: y * image_size / 100)
    )
    right.set_ylabel("of the image's width, %", fontsize=8, color=PALE)
    right.tick_params(labelsize=8, colors=PALE)
    right.spines["right"].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return figure


def draw_rollout(images: Sequence[RolledImage], heading: Heading) -> Any:
    """Draw a row for each image: the image, then overlay and mask with the identity term, and without it.

    Paper: Figure 6
    """
    names = ("image", "with identity", "mask", "without identity", "mask")
    side = 1.42
    below = 0.13 + 0.12 * max(one.caption.count("\n") for one in images)
    figure = _figure(side * len(names) + 0.75, (side + below) * len(images) + 0.2, heading)
    figure.get_layout_engine().set(hspace=0.0)
    axes = figure.subplots(len(images), len(names), squeeze=False)
    most = max(float(mask.max() / mask.mean()) for one in images for mask in one.masks)
    shown: Any = None
    for row, (one, panels) in enumerate(zip(images, axes, strict=True)):
        pictures = (one.pixels, one.overlays[0], None, one.overlays[1], None)
        for column, (panel, pixels) in enumerate(zip(panels, pictures, strict=True)):
            _bare(panel)
            if not row:
                panel.set_title(names[column], fontsize=8, color=INK)
            if pixels is not None:
                panel.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="antialiased")
                continue
            mask = one.masks[column // 2 - 1]
            relative = (mask / mask.mean()).numpy()
            shown = panel.imshow(relative, cmap=MASK_COLORS, vmin=0, vmax=most, interpolation="none")
            _caption(panel, f"peak {float(mask.max() / mask.mean()):.1f}")
        caption = "\n".join(_short(line, 23) for line in one.caption.splitlines())
        _caption(panels[0], caption)
    shrink = min(1.0, 3 / len(images))
    _color_bar(figure, shown, axes, "attention, 1 = uniform", shrink=shrink, aspect=25, pad=0.015)
    return figure


def draw_rollout_sheet(images: Sequence[RolledImage], heading: Heading) -> Any:
    """Draw many images in pairs: the image and its overlay with the identity term.

    Paper: Figure 14
    """
    pairs = min(4 if len(images) <= 24 else 6 if len(images) <= 60 else 8, len(images))
    rows = math.ceil(len(images) / pairs)
    side, gap, line = 0.95, 0.1, 0.17  # inches: an image, between pairs, a caption
    width, height = pairs * (2 * side + 0.03) + (pairs - 1) * gap, rows * (side + line)
    figure = _figure(width + 0.1, height, heading)
    axes = figure.add_subplot()
    axes.set_axis_off()
    for number, one in enumerate(images):
        row, column = divmod(number, pairs)
        left, top = column * (2 * side + 0.03 + gap), row * (side + line) + line
        axes.text(
            left, top - 0.03, _short(one.caption.splitlines()[0], 24), fontsize=6, color=PALE, va="baseline"
        )
        for x, pixels in ((left, one.pixels), (left + side + 0.03, one.overlays[0])):
            extent = (x, x + side, top + side, top)
            axes.imshow(pixels.permute(1, 2, 0).numpy(), extent=extent, interpolation="antialiased")
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_aspect("equal")
    return figure


def draw_pooling(
    planes: Sequence[tuple[str, Tensor]],
    labels: Tensor,
    class_names: Sequence[str],
    cosines: Tensor,
    heading: Heading,
) -> Any:
    """Draw the images in the plane of most variance of each representation, and the cosines between the two.

    Args:
        planes: name and `[N, 2]` of each.
        labels: `[N]`, which set the colour; negative: none.
        class_names: by label.
        cosines: `[N]`.
        heading: above.

    Paper: Appendix D.3
    """
    figure = _figure(8.6, 3.3, heading)
    axes = figure.subplots(1, len(planes) + 1)
    present = sorted({int(label) for label in labels.tolist() if label >= 0})
    is_named = 1 < len(present) <= 10
    for panel, (name, points) in zip(axes, planes, strict=False):
        x, y = points.numpy().T
        if is_named:
            colours = _colours(len(present))
            for colour, label in zip(colours, present, strict=True):
                own = labels.numpy() == label
                text = _short(class_names[label], 16)
                panel.scatter(x[own], y[own], 16, [colour], linewidths=0.4, edgecolors="white", label=text)
        else:
            panel.scatter(x, y, 16, BLUE, linewidths=0.4, edgecolors="white")
        _label(panel, "first principal component", "second principal component", name)
        plain_axes(panel)
    last = axes[-1]
    bins = min(20, max(5, len(cosines) // 6))
    last.hist(cosines.numpy(), bins=bins, color=BLUE, edgecolor="white", linewidth=0.6)
    last.axvline(float(cosines.mean()), color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    _label(last, f"cosine, mean {cosines.mean():.2f}", "images", "between the two")
    last.yaxis.get_major_locator().set_params(integer=True)
    plain_axes(last)
    if is_named:
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower center", ncols=min(5, len(names)), fontsize=8, frameon=False
        )
    return figure


def _figure(width: float, height: float, heading: Heading) -> Any:
    """Return a figure with a body of this size, in inches, and a heading over it."""
    lines = textwrap.wrap(heading.facts, int(_LETTERS * width), break_long_words=False) or [""]
    whole = height + _HEADING + _LINE * len(lines)
    figure = new_figure(width, whole)
    figure.get_layout_engine().set(rect=(0, 0, 1, height / whole), w_pad=0.03, h_pad=0.03)
    left = 0.08 / width
    figure.text(left, 1 - 0.1 / whole, heading.title, va="top", fontsize=11, fontweight="bold", color=INK)
    facts = "\n".join(map(label_text, lines))
    figure.text(left, 1 - 0.34 / whole, facts, va="top", fontsize=8, color=PALE, linespacing=1.3)
    return figure


def _tiles(axes: Any, similarities: Tensor, grid: tuple[int, int]) -> Any:
    """Return every patch's map in its place, with a gap of one cell between them."""
    rows, columns = grid
    maps = np.full((rows, rows + 1, columns, columns + 1), np.nan)
    maps[:, :rows, :, :columns] = (
        similarities.numpy().reshape(rows, columns, rows, columns).transpose(0, 2, 1, 3)
    )
    whole = maps.reshape(rows * (rows + 1), columns * (columns + 1))[:-1, :-1]
    shown = axes.imshow(whole, cmap=SIMILARITY_COLORS, vmin=-1, vmax=1, interpolation="none")
    for axis, count, name in ((axes.xaxis, columns, "column"), (axes.yaxis, rows, "row")):
        numbers = _whole_ticks(count)
        axis.set_ticks(
            [(number - 1) * (count + 1) + (count - 1) / 2 for number in numbers], [str(n) for n in numbers]
        )
        axis.set_label_text(f"{name} of the patch", fontsize=8, color=INK)
    _plain_image(axes)
    return shown


def _offsets(axes: Any, similarities: Tensor) -> Any:
    most = len(similarities) // 2
    extent = (-most - 0.5, most + 0.5, most + 0.5, -most - 0.5)
    shown = axes.imshow(
        similarities.numpy(), cmap=SIMILARITY_COLORS, vmin=-1, vmax=1, interpolation="none", extent=extent
    )
    _label(axes, "offset, tokens", "offset, tokens")
    axes.locator_params(nbins=5, integer=True)
    _plain_image(axes)
    return shown


def _label(axes: Any, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x, fontsize=8, color=INK)
    axes.set_ylabel(y, fontsize=8, color=INK)
    if title:
        axes.set_title(title, fontsize=9, color=INK)


def _caption(axes: Any, text: str) -> None:
    axes.set_xlabel(text, fontsize=7, color=PALE, labelpad=2)


def _color_bar(figure: Any, shown: Any, axes: Any, label: str, **place: float) -> None:
    bar = figure.colorbar(shown, ax=axes, **place)
    bar.set_label(label, fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.outline.set_visible(False)


def _plain_image(axes: Any) -> None:
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.spines[:].set_visible(False)


def _bare(axes: Any) -> None:
    """Remove ticks and frame, but not the label below."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _whole_ticks(count: int) -> list[int]:
    """Return some numbers from 1 to `count`, evenly spaced."""
    return list(range(1, count + 1, math.ceil(count / _MOST_TICKS)))


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return (
        [*SERIES][:count] if count <= len(SERIES) else [colormaps["tab10"](number) for number in range(count)]
    )


def _short(text: str, letters: int) -> str:
    return label_text(text if len(text) <= letters else f"{text[: letters - 1].rstrip()}…")
