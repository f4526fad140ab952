"""Caltech101: 101 objects and a background class."""

from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import class_list, file_items, need
from vitctl.data.datasets.readers.fixed_classes import check_classes, image_names
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "101_ObjectCategories.tar.gz of caltech-101.zip from https://data.caltech.edu/records/mzrjq-6wc02"
CLASS_NAMES = class_list("caltech101")
_CAPITALS = {
    name.lower(): name for name in ("BACKGROUND_Google", "Faces", "Faces_easy", "Leopards", "Motorbikes")
}
FOLDERS = tuple(_CAPITALS.get(name, name) for name in CLASS_NAMES)
TRAIN_PER_CLASS = 30
_SEED = 1234
SPLIT_NAME = "caltech101(vitctl-v1)"


def read(root: Path) -> dict[str, Originals]:
    """30 images of each class are `train`, the others `test`.

    The split of the benchmark was drawn from directory listings in the order of one machine's disk, and
    cannot be drawn again. This one draws with the same seed from sorted listings, is named
    `caltech101(vitctl-v1)`, and its scores are close to, but not comparable bit for bit with, published ones.

    Args:
        root: holds `101_ObjectCategories/<Class>/image_0001.jpg`.

    Raises:
        DataError: files or classes are missing.
    """
    folder = need(root, "101_ObjectCategories", "caltech-101/101_ObjectCategories", archive=ARCHIVE)
    check_classes(folder, FOLDERS)
    labels = {name: label for label, name in enumerate(FOLDERS)}
    generator = np.random.RandomState(_SEED)
    chosen: dict[str, list[str]] = {"train": [], "test": []}
    for name in sorted(FOLDERS):
        files = image_names(folder / name)
        if len(files) <= TRAIN_PER_CLASS:
            raise DataError(f"{folder / name}: {len(files)} images, should be more than {TRAIN_PER_CLASS}")
        train = set(generator.choice(files, TRAIN_PER_CLASS, replace=False).tolist())
        for file in files:
            chosen["train" if file in train else "test"].append(f"{name}/{file}")
    return {
        split: Originals(
            file_items(folder, names, [labels[name.partition("/")[0]] for name in names]),
            CLASS_NAMES,
            f"Caltech101, split {SPLIT_NAME}",
        )
        for split, names in chosen.items()
    }
