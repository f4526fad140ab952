"""Sets drawn by a formula: every picture is a pure function of seed, split and number."""

import numpy as np
import pytest

from vitctl.data.datasets.readers import shapes
from vitctl.data.datasets.readers import shapes as glyphs
from vitctl.data.images.decode import decode


@pytest.mark.parametrize("task", shapes.TASKS)
def test_items__labels_are_balanced_and_in_range(task: str) -> None:
    items = shapes.items(task, "train", 1000, seed=0)
    num_classes = len(shapes.TASKS[task].class_names)
    counts = np.bincount([item.label for item in items], minlength=num_classes)
    assert len(counts) == num_classes
    expected = 1000 / num_classes
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    assert len({item.key for item in items}) == 1000


@pytest.mark.parametrize("image_size", [32, 48])
def test_items__give_the_picture(image_size: int) -> None:
    item = shapes.items("all", "test", 3, seed=1, image_size=image_size)[2]
    picture = shapes.picture("all", "test", 2, seed=1, image_size=image_size)
    assert (picture.shape, picture.dtype) == ((image_size, image_size, 3), np.uint8)
    np.testing.assert_array_equal(decode(item.read()), picture)


def test_picture__is_a_function_of_seed_split_and_index() -> None:
    calls = [("train", 0, 0), ("train", 1, 0), ("train", 0, 1), ("test", 0, 0)]
    pictures = {shapes.picture("all", *call).tobytes() for call in calls for _ in range(2)}
    assert len(pictures) == len(calls)


def test_picture__the_shape_is_where_and_what_the_scene_says() -> None:
    for index in range(60):
        (shape,) = shapes.scene("colour", "train", index, seed=3)
        picture = shapes.picture("colour", "train", index, seed=3, image_size=64).astype(float) / 255
        y, x = ((np.array(shape.centre) + 1) * 32).astype(int)
        if shapes.SHAPES[shape.shape] == "crescent":  # open in the middle
            continue
        assert np.abs(picture[y, x] - shape.rgb).max() < 0.25


def test_letters__differ_and_fill_their_square() -> None:
    letters = glyphs.glyph_alphabet()
    assert len(letters) == glyphs.NUM_LETTERS
    for strokes in letters:
        assert 2 <= len(strokes) <= 4
        spans = strokes.max(axis=(0, 1)) - strokes.min(axis=(0, 1))
        assert abs(spans.max() - 2.0) < 1e-12
    inks = [glyphs._ink(0.7 * strokes, 0.1, 32) for strokes in letters]
    apart = [np.abs(a - b).mean() for i, a in enumerate(inks) for b in inks[:i]]
    assert min(apart) > 0.05


def test_glyph_picture__is_a_function_of_split_index_and_seed() -> None:
    calls = [("train", 7, 3), ("train", 7, 4), ("test", 7, 3), ("train", 67, 3)]
    assert len({glyphs.glyph_picture(*call).tobytes() for call in calls for _ in range(2)}) == len(calls)
    items = glyphs.glyph_items("train", 130, seed=0)
    assert [item.label for item in items] == [n % 60 for n in range(130)]
    assert np.array_equal(decode(items[117].read()), glyphs.glyph_picture("train", 117, seed=0))
