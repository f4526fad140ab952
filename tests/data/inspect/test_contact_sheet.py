from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from vitctl.data.images.transforms import TrainTransform
from vitctl.data.inspect.overview import (
    _CELL,
    _MARGIN,
    _TITLE_HEIGHT,
    Cell,
    choose,
    draw_sheet,
    drawable,
    save,
    show_augmented,
)
from vitctl.data.inspect.overview import show_images as show
from vitctl.data.shards.index import Index
from vitctl.data.source.stores import ShardSource

MakeSplit = Callable[..., Index]
RED, BLUE = np.full((50, 50, 3), (250, 0, 0), np.uint8), np.full((20, 40, 3), (0, 0, 250), np.uint8)


def middle(page: Image.Image, number: int, columns: int) -> tuple[int, ...]:
    """The colour in the middle of a cell; cells are told apart by where their pixels change, not by what drew
    them.
    """
    row, column = divmod(number, columns)
    pitch = (page.width - 2 * _MARGIN - _CELL) // max(1, columns - 1)
    height = 0 if row == 0 else (page.height - _TITLE_HEIGHT - _MARGIN // 2) // 2
    pixel = page.getpixel((_MARGIN + column * pitch + _CELL // 2, _TITLE_HEIGHT + row * height + _CELL // 2))
    assert isinstance(pixel, tuple)
    return pixel


def test_draw_sheet__every_picture_stands_in_its_place() -> None:
    page = draw_sheet(
        [Cell(RED, "red"), Cell(BLUE, "blue"), Cell(BLUE, "x" * 99)],
        columns=2,
        title="all",
        subtitle="s" * 99,
    )
    assert [middle(page, number, 2) for number in range(3)] == [(250, 0, 0), (0, 0, 250), (0, 0, 250)]
    same = draw_sheet(
        [Cell(RED, "red"), Cell(BLUE, "blue"), Cell(BLUE, "x" * 99)],
        columns=2,
        title="all",
        subtitle="s" * 99,
    )
    assert same.tobytes() == page.tobytes()


def test_draw_sheet__captions_are_written_and_kept_within_their_cell() -> None:
    def page(caption: str) -> np.ndarray:
        return np.asarray(draw_sheet([Cell(RED, caption), Cell(RED, "")], columns=2, title=""))

    bare, long = page(""), page("a class with a very very long name, and more")
    changed = np.argwhere((bare != long).any(axis=2))
    assert len(changed) > 100
    assert changed[:, 0].min() >= _TITLE_HEIGHT + _CELL
    assert changed[:, 1].min() >= _MARGIN - 1 and changed[:, 1].max() <= _MARGIN + _CELL


def test_show_images__of_a_split_with_a_damaged_image(make_split: MakeSplit, tmp_path: Path) -> None:
    source = ShardSource(make_split(9, bad=(4,)))
    page = show(source, list(range(9)), columns=4, title="train")
    save(page, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as saved:
        assert saved.format == "PNG" and saved.size == page.size
    whole = show(ShardSource(make_split(9, "whole")), list(range(9)), columns=4, title="train")
    assert whole.size == page.size and whole.tobytes() != page.tobytes()


def test_show_augmented__shows_the_draws_of_training(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(3))
    pages = [show_augmented(source, [0, 2], TrainTransform(16), seed=seed, title="t") for seed in (0, 0, 1)]
    assert pages[0].tobytes() == pages[1].tobytes() != pages[2].tobytes()


def test_choose__is_the_same_for_the_same_seed() -> None:
    assert choose(100, 10, 3) == choose(100, 10, 3) != choose(100, 10, 4)
    assert len(set(choose(100, 10, 3))) == 10
    assert choose(4, 10, 0) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("Miniature Pinscher dog", "Miniature Pinscher dog"),
        ("Übergrößenträger 🐕 犬", "Ubergrossentrager [dog] [U+72AC]"),
        ("u\u0308 Łódź œuvre – naïve ½", "u Lodz oeuvre - naive 1⁄2"),
        ("Жук", "[U+0416][U+0443][U+043A]"),
        ("👩\u200d🚀", "[woman][rocket]"),
    ],
)
def test_drawable__has_no_letter_that_the_font_lacks(name: str, drawn: str) -> None:
    assert drawable(name) == drawn
    font = ImageFont.load_default(15)
    box = bytes(font.getmask("\uffff"))
    assert all(bytes(font.getmask(letter)) != box for letter in drawn)
