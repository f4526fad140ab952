"""DMLab: frames of an agent in a maze, labelled by how near a good or a bad thing is."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, read_part
from vitctl.data.datasets.readers.rows import Rows
from vitctl.data.datasets.readers.tfrecord import parse_example, records
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "dmlab.tar.gz from https://storage.googleapis.com/dmlab-vtab/dmlab.tar.gz"
SPLITS = ("train", "validation", "test")
CLASS_NAMES = tuple(f"reward sign and distance, class {number}" for number in range(6))


def read(root: Path) -> dict[str, Originals]:
    """All files are read through once, which takes as long as reading 3 GB; keys are the field `filename`.

    Args:
        root: holds `dmlab-{train,validation,test}.tfrecord-*`.

    Raises:
        DataError: files are missing or damaged.
    """
    return {split: _split(root, split) for split in SPLITS}


def _split(root: Path, split: str) -> Originals:
    paths = sorted(root.glob(f"dmlab-{split}.tfrecord*"))
    if not paths:
        raise DataError(f"{root}: dmlab-{split}.tfrecord* is missing; unpack here: {ARCHIVE}")
    places: list[tuple[Path, int, int]] = []
    keys, labels = [], []
    for path in paths:
        for offset, data in records(path):
            example = parse_example(data)
            places.append((path, offset, len(data)))
            keys.append(_only(example, "filename", path).decode())
            labels.append(_only(example, "label", path))
    checked = check_labels(np.array(labels), len(CLASS_NAMES), paths[0])
    return Originals(
        Rows(checked, partial(_image, places), keys.__getitem__), CLASS_NAMES, "DMLab of the benchmark"
    )


def _image(places: list[tuple[Path, int, int]], row: int) -> bytes:
    example = parse_example(read_part(*places[row]))
    return bytes(_only(example, "image", places[row][0]))


def _only(example: dict[str, list[Any]], name: str, path: Path) -> Any:
    values = example.get(name, [])
    if len(values) != 1:
        raise DataError(f"{path}: an example has {len(values)} values of '{name}', should have one")
    return values[0]
