"""PatchCamelyon: patches of lymph node sections, with or without tumour in the centre."""

import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, library, need
from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.datasets.readers.rows import Rows
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError
from vitctl.system.parsing import parsing

ARCHIVE = "the six camelyonpatch_level_2_split_*.h5.gz from https://zenodo.org/records/2546921, unpacked with gunzip"
CLASS_NAMES = ("no tumour", "tumour")
WORDS = {"train": "train", "validation": "valid", "test": "test"}  # the word in files and keys


def read(root: Path) -> dict[str, Originals]:
    """Keys are `train_0`, `valid_0`, `test_0` ...

    Args:
        root: holds the six unpacked `.h5` files.

    Raises:
        DataError: files are missing or damaged, or h5py is not installed.
    """
    return {split: _split(root, word) for split, word in WORDS.items()}


def _split(root: Path, word: str) -> Originals:
    paths = {
        part: need(root, f"camelyonpatch_level_2_split_{word}_{part}.h5", archive=ARCHIVE) for part in "xy"
    }
    labels = check_labels(_opened(paths["y"], "y", os.getpid())[:], len(CLASS_NAMES), paths["y"])
    shape = _opened(paths["x"], "x", os.getpid()).shape
    if shape != (len(labels), 96, 96, 3):
        raise DataError(f"{paths['x']}: x is {shape} for {len(labels)} labels, should be (N, 96, 96, 3)")
    items = Rows(labels, partial(_png, paths["x"]), f"{word}_{{}}".format)
    return Originals(items, CLASS_NAMES, "PatchCamelyon")


def _png(path: Path, row: int) -> bytes:
    return encode_png(np.asarray(_opened(path, "x", os.getpid())[row]))


@lru_cache(maxsize=6)
def _opened(path: Path, name: str, process: int) -> Any:  # noqa: ARG001 - an open file must not be shared by two processes
    h5py = library("h5py")
    with parsing(path, DataError, f"not an HDF5 file with '{name}'"):
        return h5py.File(path, "r")[name]
