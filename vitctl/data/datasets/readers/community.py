"""The community's copy of VTAB-1k: lists of images that were written as JPEG again, with the labels of the
benchmark.
"""

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, file_items, need, read_bytes, read_lines
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError
from vitctl.system.files import leads_out

ARCHIVE = "vtab-1k.zip, the layout with train800.txt, val200.txt, train800val200.txt and test.txt in a folder per task"
LIST = "train800.txt"  # what a folder of a task is known by
SIZES = {"train800": 800, "val200": 200, "train800val200": 1000}
SOURCE = "VTAB-1k, community copy (JPEG again, not the original bytes)"
# What `vitctl data export-vtab1k` adds: where its images came from, and their original names.
NOTE, KEYS, FORMAT = "vitctl.json", "keys", "vitctl-vtab1k/1"


def read(folder: Path, num_classes: int, test_sizes: Collection[int]) -> dict[str, Originals]:
    """The splits `train800`, `val200`, `train800val200` and `test`; classes have numbers for names.

    A folder that `vitctl data export-vtab1k` wrote holds the original bytes, tells their source and their
    original keys. In others scores differ from those on original files where compression shows, as on
    CIFAR-100 and SVHN.

    Args:
        folder: of one task, with the four lists.
        num_classes: of the task.
        test_sizes: images that the test split may have.

    Raises:
        DataError: the lists are missing, of the wrong length, or name files or labels that do not exist.
    """
    source = _note_source(folder)
    splits = {split: _split(folder, split, num_classes, source) for split in (*SIZES, "test")}
    for split, originals in splits.items():
        wanted = {SIZES[split]} if split in SIZES else set(test_sizes)
        if len(originals.items) not in wanted:
            expected = " or ".join(f"{size:,}" for size in sorted(wanted))
            raise DataError(f"{folder / split}.txt: {len(originals.items):,} images, should be {expected}")
    return splits


def _split(folder: Path, split: str, num_classes: int, source: str) -> Originals:
    path = need(folder, f"{split}.txt", archive=ARCHIVE)
    rows = [line.rpartition(" ") for line in read_lines(path)]
    wrong = next((f"{name} {label}" for name, _, label in rows if not _is_sound(name, label)), None)
    if wrong is not None:
        raise DataError(f"{path}: line {wrong!r} should be like images/{split}/000000.jpg 7")
    labels = check_labels(np.array([int(label) for *_, label in rows], np.int64), num_classes, path).tolist()
    class_names = tuple(str(label) for label in range(num_classes))
    names, listed = [name for name, *_ in rows], folder / KEYS / f"{split}.txt"
    keys = read_lines(listed) if listed.is_file() else names
    if len(keys) != len(names):
        raise DataError(f"{listed}: {len(keys):,} names for {len(names):,} images")
    return Originals(file_items(folder, names, labels, keys), class_names, source)


def _note_source(folder: Path) -> str:
    path = folder / NOTE
    if not path.is_file():
        return SOURCE
    try:
        note = json.loads(read_bytes(path))
        source, form = str(note["source"]), note["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        source, form = "", ""
    if form != FORMAT:
        raise DataError(f"{path}: should be a note of the format {FORMAT}")
    return source


def _is_sound(name: str, label: str) -> bool:
    return bool(name) and not leads_out(name) and label.isascii() and label.isdigit()
