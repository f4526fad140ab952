from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import labels
from vitctl.data.datasets.readers.svhn import read
from vitctl.data.images.decode import decode
from vitctl.errors import DataError

scipy_io = pytest.importorskip("scipy.io")
PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 3), dtype=np.uint8)


def plant(root: Path, pixels: np.ndarray, digits: list[int]) -> None:
    for split in ("train", "test"):
        scipy_io.savemat(root / f"{split}_32x32.mat", {"X": pixels, "y": np.array(digits, np.uint8)[:, None]})


def test_read__ten_is_zero_and_the_last_axis_counts(tmp_path: Path) -> None:
    plant(tmp_path, PIXELS, [10, 1, 9])
    splits = read(tmp_path)
    assert set(splits) == {"train", "test"}
    assert labels(splits["train"]) == {"0": 0, "1": 1, "2": 9}
    np.testing.assert_array_equal(decode(splits["train"].items[2].read()), PIXELS[..., 2])


@pytest.mark.parametrize(
    ("pixels", "digits", "message"),
    [
        (PIXELS, [1, 2], r"X is uint8 \(32, 32, 3, 3\) for 2 labels, should be uint8 \(32, 32, 3, N\)"),
        (PIXELS.astype(float), [1, 2, 3], "X is float64"),
        (PIXELS, [1, 2, 11], "1 labels are out of range, the first is 11"),
    ],
)
def test_read__refuses(pixels: np.ndarray, digits: list[int], message: str, tmp_path: Path) -> None:
    plant(tmp_path, pixels, digits)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_read__names_the_file_and_its_home(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"train_32x32.mat is missing; unpack here: .*http://ufldl.stanford.edu"
    ):
        read(tmp_path)
