from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.cars196 import read
from vitctl.errors import DataError

scipy_io = pytest.importorskip("scipy.io")
NAMES = [f"Maker Model {number}" for number in range(196)]


def plant_annotations(path: Path, classes: list[int]) -> None:
    fields = [
        ("bbox_x1", "O"),
        ("bbox_y1", "O"),
        ("bbox_x2", "O"),
        ("bbox_y2", "O"),
        ("class", "O"),
        ("fname", "O"),
    ]
    rows = np.array([[(1, 2, 3, 4, number, f"{n:05d}.jpg") for n, number in enumerate(classes, 1)]], fields)
    scipy_io.savemat(path, {"annotations": rows})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "devkit").mkdir()
    scipy_io.savemat(tmp_path / "devkit/cars_meta.mat", {"class_names": np.array([NAMES], dtype=object)})
    plant_annotations(tmp_path / "devkit/cars_train_annos.mat", [14, 1, 196])
    plant_annotations(tmp_path / "cars_test_annos_withlabels.mat", [3])
    for name in ("train/00001", "train/00002", "train/00003", "test/00001"):
        plant(tmp_path / f"cars_{name}.jpg")
    return tmp_path


def test_read__labels_and_stems(root: Path) -> None:
    splits = read(root)
    assert labels(splits["train"]) == {"00001": 13, "00002": 0, "00003": 195}
    assert labels(splits["test"]) == {"00001": 2}
    assert splits["test"].class_names == tuple(NAMES)
    assert splits["test"].items[0].read() == (root / "cars_test/00001.jpg").read_bytes()


def test_read__refuses(root: Path) -> None:
    plant_annotations(root / "devkit/cars_train_annos.mat", [14, 197])
    with pytest.raises(
        DataError, match=r"cars_train_annos.mat: 1 labels are out of range, the first is 196 of 196"
    ):
        read(root)
    scipy_io.savemat(root / "devkit/cars_train_annos.mat", {"annotations": np.zeros((1, 3))})
    with pytest.raises(DataError, match="annotations should have the fields class and fname"):
        read(root)
    scipy_io.savemat(root / "devkit/cars_meta.mat", {"class_names": np.array([NAMES[:5]], dtype=object)})
    with pytest.raises(DataError, match=r"cars_meta.mat: 5 class names, should be 196"):
        read(root)
    (root / "devkit/cars_meta.mat").unlink()
    with pytest.raises(
        DataError, match=r"cars_meta.mat is missing; unpack here: cars_train.tgz, cars_test.tgz"
    ):
        read(root)
