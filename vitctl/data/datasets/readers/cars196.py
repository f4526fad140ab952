"""Stanford Cars: 196 makes, models and years."""

from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, file_items, load_mat, need
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat of Stanford Cars"
ANNOTATIONS = {
    "train": ("devkit/cars_train_annos.mat", "cars_train_annos.mat"),
    "test": ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat"),
}
NUM_CLASSES = 196


def read(root: Path) -> dict[str, Originals]:
    """Keys are file names without their extension, `00001`.

    Args:
        root: holds `cars_train/`, `cars_test/`, `devkit/` and `cars_test_annos_withlabels.mat`.

    Raises:
        DataError: files are missing or are not what their names say.
    """
    path = need(root, "devkit/cars_meta.mat", "cars_meta.mat", archive=ARCHIVE)
    class_names = tuple(str(name) for name in np.atleast_1d(load_mat(path, "class_names")[0]))
    if len(class_names) != NUM_CLASSES:
        raise DataError(f"{path}: {len(class_names)} class names, should be {NUM_CLASSES}")
    return {
        split: _split(
            need(root, f"cars_{split}", archive=ARCHIVE), need(root, *places, archive=ARCHIVE), class_names
        )
        for split, places in ANNOTATIONS.items()
    }


def _split(images: Path, path: Path, class_names: tuple[str, ...]) -> Originals:
    rows = np.atleast_1d(load_mat(path, "annotations")[0])
    if not {"class", "fname"} <= set(rows.dtype.names or ()):
        raise DataError(f"{path}: annotations should have the fields class and fname")
    labels = check_labels(np.array([int(number) - 1 for number in rows["class"]]), NUM_CLASSES, path)
    names = [str(name) for name in rows["fname"]]
    keys = [name.rpartition(".")[0] for name in names]
    return Originals(file_items(images, names, labels.tolist(), keys), class_names, "Stanford Cars")
