"""Data sets that come as arrays: SVHN, PatchCamelyon, dSprites, smallNORB, scikit-learn's digits.

Their images become PNG, which loses nothing. Samples are made when they are asked for: there may be a million.
"""

import gzip
import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.files import check_labels, library, load_mat, need, read_bytes
from vitctl.data.source.splits import md5_order
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError
from vitctl.system.files import TABLE, open_regular, parsing


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode pixels without loss: uint8 `[H, W]` or `[H, W, 3]`."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Item]):
    """A sequence of items without a list of them.

    Args:
        labels: int64 `[N]`.
        read: row number to the bytes of the image.
        key: row number to the key; its decimal text if not given.
    """

    labels: np.ndarray
    read: Callable[[int], bytes]
    key: Callable[[int], str] = str

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    @overload
    def __getitem__(self, row: int) -> Item: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Item]: ...

    def __getitem__(self, row: int | slice) -> Item | Sequence[Item]:
        """Return the item of a row, or a list of them. Raises IndexError after the last."""
        number = range(len(self))[row]
        if isinstance(number, range):
            return [self[one] for one in number]
        return Item(self.key(number), int(self.labels[number]), partial(self.read, number))


def pixel_rows(pixels: np.ndarray, labels: np.ndarray) -> Rows:
    """Return samples from pixels, uint8 `[N, H, W]` or `[N, H, W, 3]`, and labels, int64 `[N]`."""
    return Rows(labels, partial(_pixels_png, pixels))


def _pixels_png(pixels: np.ndarray, row: int) -> bytes:
    return encode_png(np.ascontiguousarray(pixels[row]))


def read_svhn(root: Path) -> dict[str, Originals]:
    """Read the cropped digits of Street View House Numbers: `{train,test}_32x32.mat`.

    Keys are row numbers; the digit 0 is class 10 in the files and class 0 here.
    """
    return {split: _svhn_split(need(root, f"{split}_32x32.mat")) for split in ("train", "test")}


def _svhn_split(path: Path) -> Originals:
    pixels, digits = load_mat(path, "X", "y")
    if pixels.shape != (32, 32, 3, digits.size) or pixels.dtype != "uint8":
        raise DataError(
            f"{path}: X is {pixels.dtype} {pixels.shape} for {digits.size} labels, should be uint8 (32, "
            f"32, 3, N)"
        )
    labels = check_labels(digits.astype(int), 11, path) % 10
    return Originals(
        pixel_rows(pixels.transpose(3, 0, 1, 2), labels), tuple("0123456789"), "SVHN, cropped digits"
    )


def read_patch_camelyon(root: Path) -> dict[str, Originals]:
    """Read the six unpacked `camelyonpatch_level_2_split_*.h5`; keys are `train_0`, `valid_0`, `test_0` ..."""
    words = {"train": "train", "validation": "valid", "test": "test"}  # in the names of files and keys
    return {split: _camelyon_split(root, word) for split, word in words.items()}


def _camelyon_split(root: Path, word: str) -> Originals:
    images, targets = (need(root, f"camelyonpatch_level_2_split_{word}_{part}.h5") for part in "xy")
    labels = check_labels(open_hdf5(targets, "y", os.getpid())[:], 2, targets)
    shape = open_hdf5(images, "x", os.getpid()).shape
    if shape != (len(labels), 96, 96, 3):
        raise DataError(f"{images}: x is {shape} for {len(labels)} labels, should be (N, 96, 96, 3)")
    items = Rows(labels, partial(_camelyon_png, images), f"{word}_{{}}".format)
    return Originals(items, ("no tumour", "tumour"), "PatchCamelyon")


def _camelyon_png(path: Path, row: int) -> bytes:
    return encode_png(np.asarray(open_hdf5(path, "x", os.getpid())[row]))


@lru_cache(maxsize=6)
def open_hdf5(path: Path, name: str, process: int) -> Any:  # noqa: ARG001 - two processes must not share an open file
    """Open an array of an HDF5 file, once for each process."""
    h5py = library("h5py")
    with parsing(path, DataError, f"not an HDF5 file with '{name}'"):
        return h5py.File(path, "r")[name]


DSPRITES_FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
_SPRITE_SIDE = 64
_SPRITES_AT_ONCE, _MAX_SPRITES = 4096, 737_280
# Row numbers `[N]` to bins of two of the 32 places across, and of two and a half of the 40 orientations, so of
# three and two in turn. The factors of a row number are shape, scale, orientation, x, y; y varies fastest.
SPRITE_LABELS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "location": lambda rows: rows // 32 % 32 // 2,
    "orientation": lambda rows: rows // 1024 % 40 * 2 // 5,
}


def read_dsprites(root: Path, task: str) -> dict[str, Originals]:
    """Read dSprites as one split; keys are row numbers. Needs 0.4 GB of memory, one bit per pixel.

    Args:
        root: holds the `.npz` file.
        task: `location` across, or `orientation`, each in 16 bins.
    """
    bits = read_sprites(need(root, DSPRITES_FILE))
    names = {"location": "x {} of 16", "orientation": "orientation {} of 16"}[task]
    items = Rows(SPRITE_LABELS[task](np.arange(len(bits))), partial(_sprite_png, bits))
    return {"train": Originals(items, tuple(map(names.format, range(16))), f"dSprites, {task}")}


def read_sprites(path: Path) -> np.ndarray:
    """Return the images, uint8 `[N, 512]`, eight pixels to a byte. They are 3 GB unpacked, so pass in pieces."""
    with (
        parsing(path, DataError, "not the images of dSprites"),
        zipfile.ZipFile(path) as archive,
        archive.open("imgs.npy") as file,
    ):
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"array format {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if shape[1:] != (_SPRITE_SIDE, _SPRITE_SIDE) or by_columns or dtype != np.uint8:
            raise ValueError(f"imgs is {dtype} {shape}, should be uint8 (N, {_SPRITE_SIDE}, {_SPRITE_SIDE})")
        if shape[0] > _MAX_SPRITES:
            raise ValueError(f"{shape[0]:,} images, there are {_MAX_SPRITES:,}")
        size = _SPRITES_AT_ONCE * _SPRITE_SIDE**2
        pieces = [_packed(file.read(size)) for _ in range(-(-shape[0] // _SPRITES_AT_ONCE))]
    bits = np.concatenate(pieces)
    if len(bits) != shape[0]:
        raise DataError(f"{path}: {len(bits):,} whole images, should be {shape[0]:,}")
    return bits


def _packed(data: bytes) -> np.ndarray:
    return np.packbits(np.frombuffer(data, np.uint8).reshape(-1, _SPRITE_SIDE**2), axis=1)


def _sprite_png(bits: np.ndarray, row: int) -> bytes:
    return encode_png(np.unpackbits(bits[row]).reshape(_SPRITE_SIDE, _SPRITE_SIDE) * np.uint8(255))


NORB_STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
_NORB_TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}


def read_smallnorb(root: Path, task: str) -> dict[str, Originals]:
    """Read the pictures of smallNORB's left camera; keys are row numbers.

    Args:
        root: holds the `dat` and `info` files of both splits, packed or not.
        task: `azimuth` or `elevation`.
    """
    return {split: _norb_split(root, stem, task) for split, stem in NORB_STEMS.items()}


def _norb_split(root: Path, stem: str, task: str) -> Originals:
    images, targets = (need(root, f"{stem}-{part}.mat", f"{stem}-{part}.mat.gz") for part in ("dat", "info"))
    pixels, info = read_norb(images), read_norb(targets)
    if pixels.shape[1:] != (2, 96, 96) or info.shape != (len(pixels), 4):
        raise DataError(
            f"{root}: images are {pixels.shape} and info {info.shape}, should be (N, 2, 96, 96) and (N, 4)"
        )
    labels = {"azimuth": info[:, 2] // 2, "elevation": info[:, 1]}[task]
    degrees = {"azimuth": range(0, 360, 20), "elevation": range(30, 75, 5)}[task]
    names = tuple(f"{task} {angle} degrees" for angle in degrees)
    items = pixel_rows(pixels[:, 0], check_labels(labels, len(names), targets))
    return Originals(items, names, f"smallNORB, {task}")


def read_norb(path: Path) -> np.ndarray:
    """Read a file in NORB's format: type, number of axes, at least three lengths, little-endian values.

    Raises:
        DataError: it is in another format, or cut short.
    """
    with parsing(path, DataError, "not a complete NORB file"):
        data = _unpacked(path) if path.suffix == ".gz" else read_bytes(path, TABLE.limit)
        magic, num_axes = struct.unpack_from("<ii", data)
        lengths = struct.unpack_from(f"<{max(3, num_axes)}i", data, 8)
    dtype, shape, start = _NORB_TYPES.get(magic), lengths[:num_axes], 8 + 4 * len(lengths)
    if dtype is None or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise DataError(
            f"{path}: not a complete NORB file of bytes or integers (type {magic:#x}, shape {shape}, "
            f"{len(data)} bytes)"
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _unpacked(path: Path) -> bytes:
    with open_regular(path, error=DataError) as packed, gzip.GzipFile(fileobj=packed) as file:
        data = file.read(TABLE.limit + 1)
    if len(data) > TABLE.limit:
        raise DataError(f"{path}: holds more than {TABLE} bytes")
    return data


DIGITS_SIZES = {"train": 1437, "test": 360}


def digit_items(split: str) -> list[Item]:
    """Return one split of the 1,797 hand-written digits that come with scikit-learn, which need no download.

    The scans have 8x8 pixels of 17 grey levels; they are enlarged to 32x32 with a bicubic filter. The first
    1,437 in md5 order are the training split, the other 360 the test split.

    Source: scikit-learn `load_digits`, the test set of UCI "Optical Recognition of Handwritten Digits".
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = md5_order(range(len(digits.images)), "train")
    chosen = {"train": order[: DIGITS_SIZES["train"]], "test": order[DIGITS_SIZES["train"] :]}[split]
    return [
        Item(f"digit_{number:04d}", int(digits.target[number]), partial(_digit_png, digits.images[number]))
        for number in chosen
    ]


def _digit_png(scan: np.ndarray) -> bytes:
    grey = np.round(scan * (255 / 16)).astype(np.uint8)
    enlarged = np.asarray(Image.fromarray(grey).resize((32, 32), Image.Resampling.BICUBIC))
    return encode_png(np.repeat(enlarged[:, :, None], 3, axis=2))
