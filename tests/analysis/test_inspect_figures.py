"""Pictures: every picture says what it shows, and shows the numbers that it was given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.matrix import slow
from vitctl.analysis.attention_maps import AttentionLayer
from vitctl.analysis.inspect_figures import (
    Panel,
    draw_attention_distance,
    draw_filters,
    draw_position_similarity,
    draw_rollout,
    draw_rollout_sheet,
)
from vitctl.analysis.parameters import principal_components
from vitctl.system.figures import Heading, save_figure

pytest.importorskip("matplotlib")
HEADING = Heading("A title", "weights  ·  a network  ·  some images")


def words(figure: Any) -> list[str]:
    """All texts of a figure, which is drawn for that."""
    from matplotlib.text import Text

    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def inside(figure: Any) -> bool:
    """Whether nothing that is drawn leaves the figure, by more than a hundredth of an inch."""
    figure.canvas.draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.01


def shown(axes: Any) -> np.ndarray:
    return np.asarray(axes.images[0].get_array())


@pytest.mark.parametrize("count", [*slow(28), 1])
def test_filters__grey_is_zero(count: int) -> None:
    components = principal_components(
        torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(0)), count
    )
    figure = draw_filters(components, HEADING)
    assert {"A title", "weights  ·  a network  ·  some images", f"1: {components.shares[0]:.1%}"} <= set(
        words(figure)
    )
    pictures = [axes for axes in figure.axes if axes.images]
    assert len(pictures) == count
    for axes, image in zip(pictures, components.images, strict=True):
        back = (shown(axes).transpose(2, 0, 1) - 0.5) * 2
        np.testing.assert_allclose(back * image.abs().max().item(), image.numpy(), atol=1e-12)
    assert inside(figure)


def test_positions__every_patch_has_its_map_in_its_place() -> None:
    rows, columns = 2, 3
    similarities = torch.arange(36, dtype=torch.float64).reshape(6, 6) / 36
    panels = [
        Panel("learned", similarities, (rows, columns)),
        Panel("none", None, remark="the network was built without position embedding"),
        Panel("relative", torch.eye(5, dtype=torch.float64)),
    ]
    figure = draw_position_similarity(panels, HEADING)
    texts = words(figure)
    assert {
        "learned",
        "none",
        "relative",
        "cosine similarity",
        "row of the patch",
        "column of the patch",
    } <= set(texts)
    assert "the network was built without position embedding" in [" ".join(text.split()) for text in texts]
    tiles = shown(figure.axes[0])
    for row, column in np.ndindex(rows, columns):
        top, left = row * (rows + 1), column * (columns + 1)
        expected = similarities[row * columns + column].reshape(rows, columns).numpy()
        np.testing.assert_array_equal(tiles[top : top + rows, left : left + columns], expected)
    assert figure.axes[0].images[0].get_clim() == figure.axes[2].images[0].get_clim() == (-1, 1)
    assert inside(figure)


def test_distance__a_dot_for_each_head_within_the_axes() -> None:
    layers = [AttentionLayer(depth, (4, 4), 0, 8) for depth in (1, 2, 3)]
    distances = torch.tensor([[1.0, 12.0], [5.0, 20.0], [15.0, 40.0]])
    figure = draw_attention_distance(layers, distances, 32, HEADING)
    axes = figure.axes[0]
    dots = np.concatenate([one.get_offsets() for one in axes.collections])
    assert sorted(map(tuple, dots.tolist())) == [(1, 1), (1, 12), (2, 5), (2, 20), (3, 15), (3, 40)]
    assert -1 < axes.get_ylim()[0] < 1 and 40 < axes.get_ylim()[1] < 42  # from the smallest to the largest
    assert {
        "mean attention distance, pixels",
        "a head",
        "uniform attention",
        "of the image's width, %",
    } <= set(words(figure))
    assert inside(figure)


def rolled(count: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Images, their overlays, and their masks."""
    pixels = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8)
    return pixels, [pixels // 2, pixels // 3], [torch.rand(count, 2, 2) + 0.1, torch.rand(count, 2, 2) + 0.1]


@pytest.mark.slow
def test_rollout__overlays_and_masks_relative_to_their_mean() -> None:
    pixels, overlays, masks = rolled(2)
    captions = ["a very long name of image 0\npredicted: owl", "b"]
    figure = draw_rollout(pixels, overlays, masks, captions, HEADING)
    for row in range(2):
        own = figure.axes[5 * row : 5 * row + 5]
        for place, image in ((0, pixels[row]), (1, overlays[0][row]), (3, overlays[1][row])):
            np.testing.assert_array_equal(shown(own[place]), image.permute(1, 2, 0).numpy())
        for place, mask in ((2, masks[0][row]), (4, masks[1][row])):
            np.testing.assert_allclose(shown(own[place]), (mask / mask.mean()).numpy(), rtol=1e-6)
    texts = words(figure)
    assert "a very long name of im…\npredicted: owl" in texts
    assert {"with skip paths", "without skip paths", "attention, 1 = uniform"} <= set(texts)
    assert inside(figure)


def test_sheet__has_every_image_beside_its_overlay() -> None:
    pixels, overlays, _ = rolled(30)
    figure = draw_rollout_sheet(pixels, overlays[0], HEADING)
    sheet = shown(figure.axes[0])
    assert sheet.shape == (5 * 18 + 2, 12 * 18 + 2, 3)  # six pairs in a row, 2 pixels between images
    for place, image in ((10, pixels[29]), (11, overlays[0][29])):  # the last of 30 pairs
        own = sheet[4 * 18 + 2 : 5 * 18, place * 18 + 2 : place * 18 + 18]
        np.testing.assert_array_equal(own, image.permute(1, 2, 0).numpy())
    assert inside(figure)


@pytest.mark.slow
def test_names__of_files_and_classes_are_shown_as_they_are(tmp_path: Path) -> None:
    """Two dollar signs would begin a formula, and an unknown command in it ends the drawing."""
    odd = "$\\frac{$ 잉어"
    heading = Heading("A title", f"{odd}  ·  {odd}")
    figures = [
        draw_rollout(*rolled(2), [odd, odd], heading),
        draw_position_similarity([Panel(odd, torch.eye(4), (2, 2))], heading),
    ]
    for number, figure in enumerate(figures):
        assert save_figure(figure, tmp_path / f"{number}.svg").stat().st_size > 1000
