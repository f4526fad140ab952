from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.flowers102 import read
from vitctl.errors import DataError

scipy_io = pytest.importorskip("scipy.io")


def plant_lists(root: Path, numbers: list[int], **sets: list[int]) -> None:
    scipy_io.savemat(root / "imagelabels.mat", {"labels": np.array([numbers], np.uint8)})
    given = {"trnid": [2, 5], "valid": [1], "tstid": [3, 4, 6]} | sets
    scipy_io.savemat(root / "setid.mat", {name: np.array([ids], np.uint16) for name, ids in given.items()})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(1, 7):
        plant(tmp_path / f"jpg/image_{number:05d}.jpg", number)
    plant_lists(tmp_path, [77, 1, 102, 5, 77, 2])
    return tmp_path


def test_read__labels_by_image_number(root: Path) -> None:
    splits = read(root)
    assert {split: labels(originals) for split, originals in splits.items()} == {
        "train": {"image_00002.jpg": 0, "image_00005.jpg": 76},
        "validation": {"image_00001.jpg": 76},
        "test": {"image_00003.jpg": 101, "image_00004.jpg": 4, "image_00006.jpg": 1},
    }
    assert splits["train"].class_names[76] == "passion flower"
    assert splits["validation"].items[0].read() == (root / "jpg/image_00001.jpg").read_bytes()


def test_read__refuses_bad_lists(root: Path) -> None:
    plant_lists(root, [77, 1, 102, 5, 77, 2], tstid=[3, 7])
    with pytest.raises(DataError, match=r"setid.mat: image numbers run from 3 to 7, should be 1 to 6"):
        read(root)
    plant_lists(root, [77, 0, 103, 5, 77, 2])
    with pytest.raises(
        DataError, match=r"imagelabels.mat: 2 labels are out of range, the first is -1 of 102 classes"
    ):
        read(root)
    scipy_io.savemat(root / "imagelabels.mat", {"other": np.zeros(3)})
    with pytest.raises(DataError, match=r"imagelabels.mat: has no variable labels"):
        read(root)
    (root / "imagelabels.mat").unlink()
    with pytest.raises(
        DataError, match=r"imagelabels.mat is missing; unpack here: 102flowers.tgz, imagelabels.mat and"
    ):
        read(root)
