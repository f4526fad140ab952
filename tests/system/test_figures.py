"""Figures are written whole, and the same twice."""

import re
from pathlib import Path

import pytest

from tests.matrix import slow
from vitctl.system.figures import can_plot, new_figure, plain_axes, save_figure

pytestmark = pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")


@pytest.mark.parametrize("name", ["a.svg", "a.PNG", *slow("a.png")])
def test_save__gives_the_same_bytes_and_nothing_beside(name: str, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        figure = new_figure(2, 1)
        axes = figure.add_subplot()
        axes.plot([1, 2, 3], clip_on=True)
        plain_axes(axes)
        found.append(save_figure(figure, tmp_path / name).read_bytes())
    assert found[0] == found[1]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert b"matplotlib" not in found[0] if name != "a.svg" else b"<dc:date>" not in found[0]


def test_save__a_figure_that_cannot_be_drawn_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("old")
    figure = new_figure(2, 1)
    figure.text(0, 0, "$\\nonsense{$")
    with pytest.raises(ValueError, match="nonsense"):
        save_figure(figure, tmp_path / "a.png")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "old")]


def test_save__an_svg_has_the_ink_of_the_readers_screen(tmp_path: Path) -> None:
    """Every colour of text and ground that it draws has one for dark screens."""
    figure = new_figure(2, 1)
    plain_axes(figure.add_subplot(), x="x", grid="y")
    svg = save_figure(figure, tmp_path / "a.svg").read_text()
    style, rest = svg.partition("<style")[2].split("</style>", 1)
    assert "prefers-color-scheme: dark" in style
    colours = {*re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", rest)}
    assert len(colours) >= 3 and colours <= {*re.findall(r": (#[0-9a-f]{6})\"", style)}
