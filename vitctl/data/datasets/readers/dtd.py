"""Describable Textures: 47 textures, 40 pictures of each in every split."""

from pathlib import Path

from vitctl.data.datasets.readers.files import class_list, file_items, need, read_lines
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "dtd-r1.0.1.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/dtd"
CLASS_NAMES = class_list("dtd")
LISTS = {"train": "train1.txt", "validation": "val1.txt", "test": "test1.txt"}


def read(root: Path) -> dict[str, Originals]:
    """The three splits of the first partition.

    Args:
        root: holds `dtd/images` and `dtd/labels`.

    Raises:
        DataError: files are missing, or a list names a class that does not exist.
    """
    folder = need(root, "dtd", archive=ARCHIVE)
    return {split: _split(folder, folder / "labels" / name) for split, name in LISTS.items()}


def _split(folder: Path, path: Path) -> Originals:
    names = read_lines(path)
    numbers = {name: label for label, name in enumerate(CLASS_NAMES)}
    unknown = next((name for name in names if name.partition("/")[0] not in numbers), None)
    if unknown is not None:
        raise DataError(f"{path}: {unknown} is of none of the {len(CLASS_NAMES)} classes")
    labels = [numbers[name.partition("/")[0]] for name in names]
    return Originals(file_items(folder / "images", names, labels), CLASS_NAMES, "DTD r1.0.1, partition 1")
