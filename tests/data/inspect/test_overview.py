"""A split at a glance: contact sheets and statistics."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from matplotlib.font_manager import findfont
from PIL import Image

from tests.data.conftest import encoded, store
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.inspect.overview import (
    _CELL,
    _MARGIN,
    _TITLE_HEIGHT,
    Cell,
    cell,
    choose,
    draw_sheet,
    measure,
    save,
    show_augmented,
)
from vitctl.data.shards.index import Index
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
from vitctl.system import figures
from vitctl.system.figures import drawable

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


def test_draw_sheet__of_a_split_with_a_damaged_image(make_split: MakeSplit, tmp_path: Path) -> None:
    source = ShardSource(make_split(9, bad=(4,)))
    page = draw_sheet([cell(source, sample) for sample in range(9)], columns=4, title="train")
    save(page, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as saved:
        assert saved.format == "PNG" and saved.size == page.size
    other = ShardSource(make_split(9, "whole"))
    whole = draw_sheet([cell(other, sample) for sample in range(9)], columns=4, title="train")
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
        ("Übergrößenträger 🐕 犬", "Ubergro[U+00DF]entrager [U+1F415] [U+72AC]"),
        ("u\u0308 Łódź œuvre – naïve ½", "u [U+0141]odz [U+0153]uvre [U+2013] naive 1⁄2"),
        ("Жук", "[U+0416][U+0443][U+043A]"),
    ],
)
def test_drawable__without_other_fonts_has_no_letter_that_the_font_lacks(
    monkeypatch: pytest.MonkeyPatch, name: str, drawn: str
) -> None:
    monkeypatch.setattr(figures, "_system_fonts", tuple)
    figures.font_path.cache_clear()
    text, font = drawable(name, 15)
    figures.font_path.cache_clear()
    assert text == drawn
    box = bytes(font.getmask("\uffff"))
    assert all(bytes(font.getmask(letter)) != box for letter in drawn)


def test_drawable__uses_a_font_of_the_machine_where_a_name_needs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a font that has a letter, a damaged one and one that has none, the first is taken."""
    dejavu = Path(findfont("DejaVu Sans"))
    (tmp_path / "a.ttf").write_bytes(b"no font")
    (tmp_path / "b.ttf").write_bytes(dejavu.read_bytes())
    monkeypatch.setattr(figures, "_FOLDERS", (str(tmp_path),))
    for cached in (figures._system_fonts, figures.font_path):
        cached.cache_clear()
    text, font = drawable("Übergröße Жук \U0010fffd", 15)
    plain, default = drawable("Übergröße", 15), drawable("dog", 15)
    for cached in (figures._system_fonts, figures.font_path):
        cached.cache_clear()
    assert (text, font.getname()[0]) == ("Übergröße Жук [U+10FFFD]", "DejaVu Sans")
    assert plain[0] == "Übergröße" and default[1].getname()[0] != "DejaVu Sans"


SIZES = [(10, 20), (10, 10), (30, 10), (12, 12)]
PICTURES = [
    np.random.default_rng(n).integers(0, 256, (*size, 3), dtype=np.uint8) for n, size in enumerate(SIZES)
]


def source(folder: Path, labels: list[int] | list[tuple[int, ...]]) -> ShardSource:
    items = [Item(str(n), label, partial(encode_png, PICTURES[n % 4])) for n, label in enumerate(labels)]
    return ShardSource(store(items, folder / "train", ("a", "b", "c")))


@pytest.mark.parametrize("workers", [0, 2])
def test_measure__equals_numpy_on_the_pictures(tmp_path: Path, workers: int) -> None:
    counted: list[int] = []
    found = measure(source(tmp_path, [0, 1, 1, -1]), workers=workers, done=counted.append)
    assert (found.num_images, found.num_classes, found.num_unlabelled, found.images_per_class) == (
        4,
        3,
        1,
        (1, 2, 0),
    )
    assert (found.num_sampled, found.num_unreadable, found.formats) == (4, 0, {"png": 4})
    assert found.widths == (10, 10, 11, 14, 20) and found.heights[0] == 10 and found.heights[-1] == 30
    assert found.aspects[0] == pytest.approx(1 / 3) and found.aspects[-1] == 2
    scaled = [picture.reshape(-1, 3) / 255 for picture in PICTURES]
    mean = np.mean([pixels.mean(axis=0) for pixels in scaled], axis=0)
    std = np.sqrt(np.mean([((pixels - mean) ** 2).mean(axis=0) for pixels in scaled], axis=0))
    assert found.mean == pytest.approx(mean.tolist(), abs=1e-6)
    assert found.std == pytest.approx(std.tolist(), abs=1e-6)
    assert found.mean_bytes == np.mean([len(encode_png(picture)) for picture in PICTURES])
    assert sum(counted) in (0, 4)


def test_measure__several_labels_count_in_each_class(tmp_path: Path) -> None:
    found = measure(source(tmp_path, [(0, 2), (1,), (), (2,)]), num_images=2)
    assert (found.images_per_class, found.num_unlabelled, found.num_sampled) == ((1, 1, 2), 1, 2)


def test_measure__bad_images_are_counted(tmp_path: Path) -> None:
    items = [
        Item("cut", 0, lambda: encode_png(PICTURES[0])[:60]),
        Item("whole", 0, lambda: encode_png(PICTURES[1])),
    ]
    found = measure(ShardSource(store(items, tmp_path / "train", ("a",))))
    assert (found.num_sampled, found.num_unreadable, found.formats) == (2, 1, {"png": 2})
    assert found.widths == (10,) * 5
    only = measure(ShardSource(store(items[:1], tmp_path / "bad", ("a",))))
    assert (only.num_unreadable, only.widths, only.mean) == (1, (), (0, 0, 0))


def test_measure__counts_photographs_that_exif_turns_and_measures_them_upright(tmp_path: Path) -> None:
    def photo(orientation: int) -> bytes:
        exif = Image.Exif()
        exif[0x0112] = orientation
        return encoded(Image.new("RGB", (20, 10)), "JPEG", exif=exif)

    items = [Item(str(n), 0, partial(photo, n)) for n in (1, 3, 6)]
    found = measure(ShardSource(store(items, tmp_path / "train", ("a",))))
    assert found.num_turned == 2
    assert (found.widths, found.heights) == ((10, 15, 20, 20, 20), (10, 10, 10, 15, 20))
