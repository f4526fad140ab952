"""Caltech-UCSD Birds 2011: 200 species."""

from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, file_items, need, read_fields
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "CUB_200_2011.tgz from https://data.caltech.edu/records/65de6-vp158"
SPLITS = {"train": "1", "test": "0"}  # what the list calls them
NUM_CLASSES = 200


def read(root: Path) -> dict[str, Originals]:
    """Keys are the names in the archive, `CUB_200_2011/images/001.Black_footed_Albatross/<file>`.

    Args:
        root: holds `CUB_200_2011/`.

    Raises:
        DataError: files are missing or malformed.
    """
    folder = need(root, "CUB_200_2011", archive=ARCHIVE)
    tables = {
        name: dict(row[:2] for row in read_fields(need(folder, f"{name}.txt", archive=ARCHIVE), 2))
        for name in ("classes", "images", "image_class_labels", "train_test_split")
    }
    if list(tables["classes"]) != [str(number) for number in range(1, NUM_CLASSES + 1)]:
        raise DataError(f"{folder / 'classes.txt'}: should number {NUM_CLASSES} classes from 1")
    for name in ("image_class_labels", "train_test_split"):
        if tables[name].keys() != tables["images"].keys():
            raise DataError(f"{folder / name}.txt: should number the same images as images.txt")
    return {split: _split(folder, tables, word) for split, word in SPLITS.items()}


def _split(folder: Path, tables: dict[str, dict[str, str]], word: str) -> Originals:
    numbers = [number for number, held in tables["train_test_split"].items() if held == word]
    path = folder / "image_class_labels.txt"
    try:
        labels = np.array([int(tables["image_class_labels"][number]) - 1 for number in numbers])
    except ValueError:
        raise DataError(f"{path}: the second column should be a class number, 1 to {NUM_CLASSES}") from None
    names = [tables["images"][number] for number in numbers]
    keys = [f"CUB_200_2011/images/{name}" for name in names]
    items = file_items(folder / "images", names, check_labels(labels, NUM_CLASSES, path).tolist(), keys)
    return Originals(items, tuple(tables["classes"].values()), "CUB-200-2011")
