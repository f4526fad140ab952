"""smallNORB: toys photographed from 9 elevations and 18 azimuths."""

import gzip
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, need, read_bytes
from vitctl.data.datasets.readers.rows import pixel_rows
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError
from vitctl.system.bounds import TABLE
from vitctl.system.files import open_regular
from vitctl.system.parsing import parsing

ARCHIVE = (
    "the six smallnorb-*.mat.gz from https://cs.nyu.edu/~ylclab/data/norb-v1.0-small, packed or unpacked"
)
STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
CLASS_NAMES = {
    "azimuth": tuple(f"azimuth {degrees} degrees" for degrees in range(0, 360, 20)),
    "elevation": tuple(f"elevation {degrees} degrees" for degrees in range(30, 75, 5)),
}
_LABEL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "azimuth": lambda info: info[:, 2] // 2,
    "elevation": lambda info: info[:, 1],
}
_TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}


def read(root: Path, task: Literal["azimuth", "elevation"]) -> dict[str, Originals]:
    """Pictures of the left camera; keys are row numbers.

    Args:
        root: holds the `dat` and `info` files of both splits.
        task: what the label says.

    Raises:
        DataError: files are missing or damaged.
    """
    return {split: _split(root, stem, task) for split, stem in STEMS.items()}


def _split(root: Path, stem: str, task: str) -> Originals:
    paths = {
        part: need(root, f"{stem}-{part}.mat", f"{stem}-{part}.mat.gz", archive=ARCHIVE)
        for part in ("dat", "info")
    }
    pixels, info = read_norb(paths["dat"]), read_norb(paths["info"])
    if pixels.shape[1:] != (2, 96, 96) or info.shape != (len(pixels), 4):
        raise DataError(
            f"{root}: images are {pixels.shape} and info {info.shape}, should be (N, 2, 96, 96) and (N, 4)"
        )
    labels = check_labels(_LABEL[task](info), len(CLASS_NAMES[task]), paths["info"])
    return Originals(pixel_rows(pixels[:, 0], labels), CLASS_NAMES[task], f"smallNORB, {task}")


def _unpacked(path: Path) -> bytes:
    with open_regular(path, error=DataError) as packed, gzip.GzipFile(fileobj=packed) as file:
        data = file.read(TABLE.limit + 1)
    if len(data) > TABLE.limit:
        raise DataError(f"{path}: holds more than {TABLE} bytes")
    return data


def read_norb(path: Path) -> np.ndarray:
    """Read a file in NORB's own format: type, number of axes, at least three lengths, then the values,
    little-endian.

    Raises:
        DataError: it is in another format, or cut short.
    """
    with parsing(path, DataError, "not a whole NORB file"):
        data = _unpacked(path) if path.suffix == ".gz" else read_bytes(path, TABLE.limit)
        magic, num_axes = struct.unpack_from("<ii", data)
        lengths = struct.unpack_from(f"<{max(3, num_axes)}i", data, 8)
    dtype, shape, start = _TYPES.get(magic), lengths[:num_axes], 8 + 4 * len(lengths)
    if dtype is None or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise DataError(
            f"{path}: not a whole NORB file of bytes or integers (type {magic:#x}, shape {shape}, "
            f"{len(data)} bytes)"
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape)
