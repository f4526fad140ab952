"""Oxford-IIIT Pets: 37 breeds of cats and dogs."""

from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, class_list, file_items, need, read_fields
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "images.tar.gz and annotations.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/pets"
CLASS_NAMES = class_list("pets")
LISTS = {"train": "trainval.txt", "test": "test.txt"}


def read(root: Path) -> dict[str, Originals]:
    """Labels are those of the lists, whose order of breeds takes no notice of capitals.

    Some files named `.jpg` are PNG or GIF; their bytes stay as they are.

    Args:
        root: holds `images/<Breed>_<n>.jpg` and `annotations/{trainval,test}.txt`.

    Raises:
        DataError: files are missing, or a list is malformed.
    """
    images = need(root, "images", archive=ARCHIVE)
    lists = need(root, "annotations", archive=ARCHIVE)
    return {split: _split(images, lists / name) for split, name in LISTS.items()}


def _split(images: Path, path: Path) -> Originals:
    rows = [row for row in read_fields(path, 2) if not row[0].startswith("#")]
    try:
        labels = np.array([int(row[1]) - 1 for row in rows])
    except ValueError:
        raise DataError(
            f"{path}: the second column should be a class number, 1 to {len(CLASS_NAMES)}"
        ) from None
    labels = check_labels(labels, len(CLASS_NAMES), path)
    return Originals(
        file_items(images, [f"{row[0]}.jpg" for row in rows], labels.tolist()),
        CLASS_NAMES,
        "Oxford-IIIT Pets",
    )
