import numpy as np
import pytest

from vitctl.data.datasets.readers.rows import Rows, pixel_rows
from vitctl.data.images.decode import decode


def test_rows__behave_like_a_list() -> None:
    rows = Rows(np.array([5, 6, 7]), lambda row: bytes([row]), "k{}".format)
    assert len(rows) == 3
    assert [(item.key, item.label, item.read()) for item in rows] == [
        ("k0", 5, b"\0"),
        ("k1", 6, b"\1"),
        ("k2", 7, b"\2"),
    ]
    assert (rows[-1].key, [item.key for item in rows[1:]]) == ("k2", ["k1", "k2"])
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize("shape", [(4, 7, 9, 3), (4, 7, 9)])
def test_pixel_rows__lose_nothing(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    items = pixel_rows(pixels, np.arange(4))
    for row in range(4):
        wanted = pixels[row] if len(shape) == 4 else np.repeat(pixels[row][:, :, None], 3, axis=2)
        np.testing.assert_array_equal(decode(items[row].read()), wanted)
    assert [item.key for item in items] == ["0", "1", "2", "3"]
