from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import labels
from vitctl.data.datasets.readers.patch_camelyon import read
from vitctl.data.images.decode import decode
from vitctl.errors import DataError

h5py = pytest.importorskip("h5py")
PIXELS = np.repeat(np.arange(3, dtype=np.uint8), 96 * 96 * 3).reshape(3, 96, 96, 3)


def plant(root: Path, word: str, num_labels: int = 3) -> None:
    with h5py.File(root / f"camelyonpatch_level_2_split_{word}_x.h5", "w") as file:
        file.create_dataset("x", data=PIXELS, compression="gzip")
    with h5py.File(root / f"camelyonpatch_level_2_split_{word}_y.h5", "w") as file:
        file["y"] = np.array([0, 1, 1], np.uint8)[:num_labels].reshape(-1, 1, 1, 1)


def test_read__salt_and_key_use_different_words(tmp_path: Path) -> None:
    for word in ("train", "valid", "test"):
        plant(tmp_path, word)
    splits = read(tmp_path)
    assert labels(splits["train"]) == {"train_0": 0, "train_1": 1, "train_2": 1}
    assert list(labels(splits["validation"])) == ["valid_0", "valid_1", "valid_2"]
    assert list(labels(splits["test"])) == ["test_0", "test_1", "test_2"]
    np.testing.assert_array_equal(decode(splits["test"].items[2].read()), PIXELS[2])


def test_read__refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"split_train_x.h5 is missing; unpack here: .* unpacked with gunzip"):
        read(tmp_path)
    plant(tmp_path, "train", num_labels=2)
    with pytest.raises(
        DataError, match=r"train_x.h5: x is \(3, 96, 96, 3\) for 2 labels, should be \(N, 96, 96, 3\)"
    ):
        read(tmp_path)
    second = tmp_path / "second"
    second.mkdir()
    plant(second, "train")
    (second / "camelyonpatch_level_2_split_train_y.h5").write_bytes(b"\x1f\x8b still packed")
    with pytest.raises(DataError, match=r"train_y.h5: not an HDF5 file with 'y'"):
        read(second)
