from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.datasets.conftest import labels
from vitctl.data.datasets.readers import dsprites
from vitctl.data.images.decode import decode
from vitctl.data.source.splits import md5_order
from vitctl.errors import DataError

FACTORS = (3, 6, 40, 32, 32)  # shape, scale, orientation, x, y
NUM_ROWS = 2050


def plant(root: Path, pixels: np.ndarray, **others: Any) -> None:
    """Packed as published, the pickled metadata included."""
    metadata = np.array({"author": "x"}, dtype=object)
    np.savez_compressed(root / dsprites.NAME, imgs=pixels, metadata=metadata, **others)


@pytest.fixture
def pixels() -> np.ndarray:
    """The white pixel of row n is pixel number n."""
    found = np.zeros((NUM_ROWS, 64, 64), np.uint8)
    found.reshape(NUM_ROWS, -1)[np.arange(NUM_ROWS), np.arange(NUM_ROWS)] = 1
    return found


@pytest.mark.parametrize("rows_at_once", [7, 4096])
def test_read__bits_become_black_and_white(
    rows_at_once: int, pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dsprites, "_ROWS_AT_ONCE", rows_at_once)
    plant(tmp_path, pixels)
    location, orientation = (
        dsprites.read(tmp_path, "location")["train"],
        dsprites.read(tmp_path, "orientation")["train"],
    )
    assert len(location.items) == len(orientation.items) == NUM_ROWS
    assert [labels(location)[str(row)] for row in (0, 31, 32, 64, 1023, 1024)] == [0, 0, 0, 1, 15, 0]
    assert [labels(orientation)[str(row)] for row in (0, 1023, 1024, 2049)] == [0, 0, 0, 0]
    for row in (0, 7, 2049):
        np.testing.assert_array_equal(decode(location.items[row].read())[:, :, 1], pixels[row] * 255)


def test_labels__equal_the_factors_of_every_row() -> None:
    factors = np.indices(FACTORS).reshape(5, -1)
    rows = np.arange(factors.shape[1])
    assert len(rows) == 737_280
    np.testing.assert_array_equal(dsprites.location_labels(rows), np.floor(factors[3] / 2))
    np.testing.assert_array_equal(dsprites.orientation_labels(rows), np.floor(factors[2] / 2.5))
    assert np.bincount(dsprites.orientation_labels(np.arange(40) * 1024)).tolist() == [3, 2] * 8


def test_labels__the_published_scores_of_guessing() -> None:
    """One location has 4,541 of the 73,728 test images, one orientation 5,491: what a constant answer scores."""
    order = md5_order(range(737_280), "train")
    assert dsprites.location_labels(order[:10]).tolist() == [0, 0, 7, 6, 7, 11, 7, 5, 6, 14]
    test = order[663_552:]
    assert np.bincount(dsprites.location_labels(test))[8] == 4541
    assert np.bincount(dsprites.orientation_labels(test))[0] == 5491


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((2, 32, 32), np.uint8), r"imgs is uint8 \(2, 32, 32\), should be uint8 \(N, 64, 64\)"),
        (np.zeros((2, 64, 64)), "imgs is float64"),
        (np.array([{}], dtype=object), "imgs is object"),
    ],
)
def test_read__refuses_other_arrays(pixels: np.ndarray, message: str, tmp_path: Path) -> None:
    plant(tmp_path, pixels)
    with pytest.raises(DataError, match=message):
        dsprites.read(tmp_path, "location")


def test_read__refuses_a_damaged_file(pixels: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"64x64.npz is missing; unpack here: .* from https"):
        dsprites.read(tmp_path, "location")
    plant(tmp_path, pixels)
    data = (tmp_path / dsprites.NAME).read_bytes()
    for damaged in (data[:-100], b"<html>", data[:200] + bytes(40) + data[240:]):
        (tmp_path / dsprites.NAME).write_bytes(damaged)
        with pytest.raises(DataError, match="not the images of dSprites"):
            dsprites.read(tmp_path, "location")
