import numpy as np

from vitctl.data.datasets.readers import shapes as glyphs
from vitctl.data.images.decode import decode


def test_picture__pure_function_of_seed_split_index() -> None:
    first = glyphs.glyph_picture("train", 7, seed=3)
    assert first.shape == (32, 32, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, glyphs.glyph_picture("train", 7, seed=3))
    for other in (("train", 7, 4), ("test", 7, 3), ("train", 67, 3)):
        assert not np.array_equal(first, glyphs.glyph_picture(*other))


def test_items__labels_keys_and_pixels() -> None:
    items = glyphs.glyph_items("train", 130, seed=0)
    assert [item.label for item in items] == [n % 60 for n in range(130)]
    assert len({item.key for item in items}) == 130
    assert np.array_equal(decode(items[117].read()), glyphs.glyph_picture("train", 117, seed=0))
    assert len(glyphs.GLYPH_NAMES) == glyphs.NUM_LETTERS == 60


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
