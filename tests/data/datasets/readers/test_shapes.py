"""Sets drawn by a formula: every picture is a pure function of seed, split and number."""

import numpy as np
import pytest

from vitctl.data.datasets.readers import shapes
from vitctl.data.datasets.readers import shapes as glyphs
from vitctl.data.images.decode import decode

AXIS = np.linspace(-1.6, 1.6, 401, dtype=np.float32)
Y, X = np.meshgrid(AXIS, AXIS, indexing="ij")


@pytest.mark.parametrize("task", shapes.TASKS)
def test_items__labels_are_balanced_and_in_range(task: str) -> None:
    items = shapes.items(task, "train", 1000, seed=0)
    num_classes = len(shapes.TASKS[task].class_names)
    counts = np.bincount([item.label for item in items], minlength=num_classes)
    assert len(counts) == num_classes
    expected = 1000 / num_classes
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    assert len({item.key for item in items}) == 1000


def test_scene__factors_are_within_their_classes() -> None:
    for index in range(300):
        for task in ("all", "orientation", "count"):
            for shape in shapes.scene(task, "train", index, seed=0):
                assert abs(shape.radius - shapes.SCALES[shape.scale]) <= 0.02
                turn = np.rad2deg(shape.angle) - shapes.ORIENTATIONS[shape.orientation]
                assert abs(turn) <= 15
                vertical, horizontal = (np.array(shape.centre) > 0.18).astype(int) - (
                    np.array(shape.centre) < -0.18
                )
                row, column = divmod(shape.location, 3)
                assert (vertical + 1, horizontal + 1) == (row, column)


def test_scene__counted_shapes_do_not_cover_each_other() -> None:
    for index in range(100):
        centres = [shape.centre for shape in shapes.scene("count", "train", index, seed=0)]
        for number, centre in enumerate(centres):
            others = np.array(centres[:number]).reshape(-1, 2)
            assert (np.hypot(*(others - centre).T) > 0.5).all()


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_fields__shapes_are_of_one_size(name: str) -> None:
    inside = shapes.FIELDS[name](X, Y) < 0
    area = inside.mean() * 3.2**2
    assert 1.0 < area < 3.2
    assert np.hypot(X, Y)[inside].max() < 1.25
    assert not inside[[0, -1]].any()
    assert not inside[:, [0, -1]].any()


@pytest.mark.parametrize("name", shapes.ORIENTED)
def test_fields__oriented_shapes_come_back_only_after_a_full_turn(name: str) -> None:
    field = shapes.FIELDS[name]
    upright = field(X, Y) < 0
    for degrees in range(45, 360, 45):
        cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
        turned = field(cos * X + sin * Y, cos * Y - sin * X) < 0
        assert (upright & turned).sum() < 0.85 * (upright | turned).sum()


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
