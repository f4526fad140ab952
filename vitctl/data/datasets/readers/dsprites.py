"""dSprites: white shapes on black, asked where they are or how they are turned."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from vitctl.data.datasets.readers.files import need
from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.datasets.readers.rows import Rows
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError
from vitctl.system.parsing import parsing

NAME = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
ARCHIVE = f"{NAME} from https://github.com/google-deepmind/dsprites-dataset"
SIDE = 64
_ROWS_AT_ONCE, _MAX_ROWS = 4096, 737_280
CLASS_NAMES = {
    "location": tuple(f"x {cell} of 16" for cell in range(16)),
    "orientation": tuple(f"orientation {part} of 16" for part in range(16)),
}


def read(root: Path, task: Literal["location", "orientation"]) -> dict[str, Originals]:
    """All images as one split, `train`; keys are row numbers. Needs 0.4 GB of memory, one bit per pixel.

    Args:
        root: holds the `.npz` file.
        task: what the label says: `location` across, or `orientation`, each in 16 bins.

    Raises:
        DataError: the file is missing or damaged.
    """
    bits = _read_bits(need(root, NAME, archive=ARCHIVE))
    labels = LABELS[task](np.arange(len(bits)))
    return {"train": Originals(Rows(labels, partial(_png, bits)), CLASS_NAMES[task], f"dSprites, {task}")}


def location_labels(rows: np.ndarray) -> np.ndarray:
    """Row numbers `[N]` to bins of two of the 32 places across.

    The last factor of a row number is y, then x.
    """
    return rows // 32 % 32 // 2


def orientation_labels(rows: np.ndarray) -> np.ndarray:
    """Row numbers `[N]` to bins of two and a half of the 40 orientations, so of three and two in turn."""
    return rows // 1024 % 40 * 2 // 5


LABELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "location": location_labels,
    "orientation": orientation_labels,
}


def _read_bits(path: Path) -> np.ndarray:
    """The images, uint8 `[N, 512]`, eight pixels to a byte.

    They are 3 GB unpacked, so they pass by in pieces.
    """
    with (
        parsing(path, DataError, "not the images of dSprites"),
        zipfile.ZipFile(path) as archive,
        archive.open("imgs.npy") as file,
    ):
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"array format {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if shape[1:] != (SIDE, SIDE) or by_columns or dtype != np.uint8:
            raise ValueError(f"imgs is {dtype} {shape}, should be uint8 (N, {SIDE}, {SIDE})")
        if shape[0] > _MAX_ROWS:
            raise ValueError(f"{shape[0]:,} images, there are {_MAX_ROWS:,}")
        pieces = [_pack(file.read(_ROWS_AT_ONCE * SIDE**2)) for _ in range(-(-shape[0] // _ROWS_AT_ONCE))]
    bits = np.concatenate(pieces)
    if len(bits) != shape[0]:
        raise DataError(f"{path}: {len(bits):,} whole images, should be {shape[0]:,}")
    return bits


def _pack(data: bytes) -> np.ndarray:
    return np.packbits(np.frombuffer(data, np.uint8).reshape(-1, SIDE**2), axis=1)


def _png(bits: np.ndarray, row: int) -> bytes:
    return encode_png(np.unpackbits(bits[row]).reshape(SIDE, SIDE) * np.uint8(255))
