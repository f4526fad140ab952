"""Sets that are arrays, pickles or records: SVHN, PatchCamelyon, dSprites, smallNORB, digits, CIFAR, DMLab.

Arrays become lossless PNG. Images are encoded when they are read: there may be a million.
"""

import gzip
import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.original_files import (
    MissingOriginalsError,
    check_labels,
    library,
    load_mat,
    need,
    read_bytes,
    read_part,
)
from vitctl.data.images.decode import encode
from vitctl.data.source.splits import ROLES, TRAIN, md5_order
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError, refuse
from vitctl.system import limits
from vitctl.system.files import open_regular, parsing


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode pixels without loss: uint8 `[H, W]` or `[H, W, 3]`."""
    return encode(Image.fromarray(pixels), "PNG", compress_level=1)


def row_items(
    labels: np.ndarray, read: Callable[[int], bytes], key: Callable[[int], str] = str
) -> list[Item]:
    """Return a lazy item for each row of an array; keys default to row numbers."""
    return [Item(key(row), label, partial(read, row)) for row, label in enumerate(labels.tolist())]


def pixel_items(pixels: np.ndarray, labels: np.ndarray) -> list[Item]:
    """Return samples from pixels, uint8 `[N, H, W]` or `[N, H, W, 3]`, and labels, int64 `[N]`."""
    return row_items(labels, partial(_row_png, pixels))


_SPLIT = "|".join(ROLES)
_ARRAY = re.compile(rf"(?:({_SPLIT})_)?(images|x|labels|y)(?:_({_SPLIT}))?")


def read_pairs(path: Path) -> dict[str, Originals]:
    """Read arrays of images and labels: an `.npz` file, or `images.npy` or `x.npy` with `labels.npy` or
    `y.npy` beside it.

    Images are uint8 `[N, H, W]` or `[N, H, W, 3]`, labels class numbers `[N]` or `[N, 1]`. An `.npz` file may
    have splits, as in `train_images` or `x_train`; without any, all is `train`. Nothing is unpickled.

    Raises:
        DataError: arrays are missing, damaged, too large, of another type or of different lengths.
    """
    arrays = dict[str, np.ndarray]()
    with parsing(path, DataError, "not readable as arrays of numbers"):
        if path.suffix.lower() == ".npz":
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            most = path.stat().st_size * 100 + limits.UNPACKED
            if size > most:
                raise DataError(path, f"declares {size:,} bytes, more than the {most:,} that are unpacked")
            with np.load(path, allow_pickle=False) as packed:
                try:
                    arrays = {name: packed[name] for name in packed.files if _ARRAY.fullmatch(name.lower())}
                except MemoryError:
                    raise DataError(path, "declares arrays that do not fit into memory") from None
        else:
            other = {"images": "labels", "x": "y"}.get(path.stem.lower(), "")
            if not other or not path.with_stem(other).is_file():
                raise DataError(path, "should be images.npy with labels.npy beside it, or x.npy with y.npy")
            for file in (path, path.with_stem(other)):
                arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        first, kind, last = _ARRAY.fullmatch(name.lower()).groups()  # type: ignore[union-attr]
        part = parts.setdefault(ROLES.get(first or last, TRAIN), {})
        what = "images" if kind in ("images", "x") else "labels"
        if what in part:
            raise DataError(path, f"has {what} of a split twice, one of them as {name}", "leave one out")
        part[what] = array
    numbers = [one["labels"] for one in parts.values() if "labels" in one]
    highest = max((int(one.max(initial=-1)) for one in numbers if one.dtype.kind in "iu"), default=-1)
    names, splits = [str(label) for label in range(min(highest + 1, limits.CLASSES))], {}
    for split, one in parts.items():
        images, labels = one.get("images"), one.get("labels")
        is_fit = (
            images is not None
            and labels is not None
            and images.dtype == np.uint8
            and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3))
            and labels.dtype.kind in "iu"
            and labels.size == len(labels) == len(images) > 0
        )
        if not is_fit or images is None or labels is None:
            shown = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in arrays.items())
            fix = "save images as uint8 [N, H, W, 3] and labels as integers [N]"
            raise DataError(path, f"has {shown}, should have images and labels of each split", fix)
        found = check_labels(labels, len(names), path)
        splits[split] = Originals(pixel_items(images, found), tuple(names), str(path), is_user_data=True)
    if not splits:
        raise DataError(path, "has no arrays images and labels", "save them under these names")
    return splits


def _row_png(pixels: np.ndarray, row: int) -> bytes:
    return encode_png(np.ascontiguousarray(pixels[row]))


def read_svhn(root: Path) -> dict[str, Originals]:
    """Read the cropped digits of Street View House Numbers: `{train,test}_32x32.mat`.

    Keys are row numbers; the digit 0 is class 10 in the files and class 0 here.
    """
    splits = {}
    for split in ("train", "test"):
        path = need(root, f"{split}_32x32.mat")
        pixels, digits = load_mat(path, "X", "y")
        if pixels.shape != (32, 32, 3, digits.size) or pixels.dtype != "uint8":
            raise DataError(
                path,
                f"X is {pixels.dtype} {pixels.shape} for {digits.size} labels, should be uint8 "
                "(32, 32, 3, N)",
            )
        labels = check_labels(digits.astype(int), 11, path) % 10
        items = pixel_items(pixels.transpose(3, 0, 1, 2), labels)
        splits[split] = Originals(items, tuple("0123456789"), "SVHN, cropped digits")
    return splits


def read_patch_camelyon(root: Path) -> dict[str, Originals]:
    """Read the six unpacked `camelyonpatch_level_2_split_*.h5`; keys are `train_0`, `valid_0`, `test_0`."""
    words = {"train": "train", "validation": "valid", "test": "test"}  # in the names of files and keys
    return {split: _camelyon_split(root, word) for split, word in words.items()}


def _camelyon_split(root: Path, word: str) -> Originals:
    images, targets = (need(root, f"camelyonpatch_level_2_split_{word}_{part}.h5") for part in "xy")
    labels = check_labels(open_hdf5(targets, "y", os.getpid())[:], 2, targets)
    shape = open_hdf5(images, "x", os.getpid()).shape
    if shape != (len(labels), 96, 96, 3):
        raise DataError(images, f"x is {shape} for {len(labels)} labels, should be (N, 96, 96, 3)")

    def patch(row: int) -> bytes:
        return encode_png(np.asarray(open_hdf5(images, "x", os.getpid())[row]))

    return Originals(
        row_items(labels, patch, f"{word}_{{}}".format), ("no tumour", "tumour"), "PatchCamelyon"
    )


@lru_cache(maxsize=6)
def open_hdf5(path: Path, name: str, process: int) -> Any:  # noqa: ARG001 - one open file per process
    """Open an array of an HDF5 file, once for each process."""
    h5py = library("h5py")
    with parsing(path, DataError, f"not an HDF5 file with '{name}'"):
        return h5py.File(path, "r")[name]


DSPRITES_FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
_SPRITE_SIDE = 64
_SPRITES_AT_ONCE, _MAX_SPRITES = 4096, 737_280
# Row numbers `[N]` to bins of two of the 32 horizontal places, and of two and a half of the 40 orientations,
# so of three and two in turn. The factors of a row number are shape, scale, orientation, x, y; y varies
# fastest.
SPRITE_LABELS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "location": lambda rows: rows // 32 % 32 // 2,
    "orientation": lambda rows: rows // 1024 % 40 * 2 // 5,
}


def read_dsprites(root: Path, task: str) -> dict[str, Originals]:
    """Read dSprites as one split for `location` or `orientation`, each in 16 bins; keys are row numbers.

    Needs 0.4 GB of memory, one bit per pixel.
    """
    bits = read_sprites(need(root, DSPRITES_FILE))
    names = {"location": "x {} of 16", "orientation": "orientation {} of 16"}[task]

    def sprite(row: int) -> bytes:
        return encode_png(np.unpackbits(bits[row]).reshape(_SPRITE_SIDE, _SPRITE_SIDE) * np.uint8(255))

    items = row_items(SPRITE_LABELS[task](np.arange(len(bits))), sprite)
    return {"train": Originals(items, tuple(map(names.format, range(16))), f"dSprites, {task}")}


def read_sprites(path: Path) -> np.ndarray:
    """Return the images, uint8 `[N, 512]`, eight pixels to a byte; unpacked they would take 3 GB."""
    with (
        parsing(path, DataError, "not the images of dSprites"),
        zipfile.ZipFile(path) as archive,
        archive.open("imgs.npy") as file,
    ):
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"array format {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        sides = _SPRITE_SIDE, _SPRITE_SIDE
        refuse(
            ValueError,
            (
                shape[1:] != sides or by_columns or dtype != np.uint8,
                f"imgs is {dtype} {shape}, should be uint8 (N, {_SPRITE_SIDE}, {_SPRITE_SIDE})",
            ),
            (shape[0] > _MAX_SPRITES, f"{shape[0]:,} images, there are {_MAX_SPRITES:,}"),
        )
        pieces = []
        for _ in range(0, shape[0], _SPRITES_AT_ONCE):
            pixels = np.frombuffer(file.read(_SPRITES_AT_ONCE * _SPRITE_SIDE**2), np.uint8)
            pieces.append(np.packbits(pixels.reshape(-1, _SPRITE_SIDE**2), axis=1))
    bits = np.concatenate(pieces)
    if len(bits) != shape[0]:
        raise DataError(path, f"{len(bits):,} whole images, should be {shape[0]:,}")
    return bits


NORB_STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
_NORB_TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}


def read_smallnorb(root: Path, task: str) -> dict[str, Originals]:
    """Read smallNORB's left camera for the task `azimuth` or `elevation`; keys are row numbers."""
    degrees = {"azimuth": range(0, 360, 20), "elevation": range(30, 75, 5)}[task]
    names, splits = tuple(f"{task} {angle} degrees" for angle in degrees), {}
    for split, stem in NORB_STEMS.items():
        images, targets = (
            need(root, f"{stem}-{part}.mat", f"{stem}-{part}.mat.gz") for part in ("dat", "info")
        )
        pixels, info = read_norb(images), read_norb(targets)
        if pixels.shape[1:] != (2, 96, 96) or info.shape != (len(pixels), 4):
            raise DataError(
                root, f"images are {pixels.shape} and info {info.shape}, should be (N, 2, 96, 96) and (N, 4)"
            )
        labels = {"azimuth": info[:, 2] // 2, "elevation": info[:, 1]}[task]
        items = pixel_items(pixels[:, 0], check_labels(labels, len(names), targets))
        splits[split] = Originals(items, names, f"smallNORB, {task}")
    return splits


def read_norb(path: Path) -> np.ndarray:
    """Read a file in NORB's format: type, number of axes, at least three lengths, little-endian values."""
    with parsing(path, DataError, "not a complete NORB file"):
        data = _unpacked(path) if path.suffix == ".gz" else read_bytes(path, limits.TABLE)
        magic, num_axes = struct.unpack_from("<ii", data)
        lengths = struct.unpack_from(f"<{max(3, num_axes)}i", data, 8)
    dtype, shape, start = _NORB_TYPES.get(magic), lengths[:num_axes], 8 + 4 * len(lengths)
    if dtype is None or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise DataError(
            path,
            f"not a complete NORB file of bytes or integers (type {magic:#x}, shape {shape}, "
            f"{len(data)} bytes)",
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _unpacked(path: Path) -> bytes:
    with open_regular(path, error=DataError) as packed, gzip.GzipFile(fileobj=packed) as file:
        data = file.read(limits.TABLE + 1)
    if len(data) > limits.TABLE:
        raise DataError(path, f"holds more bytes than {limits.TABLE:,}")
    return data


DIGITS_SIZES = {"train": 1437, "test": 360}


def digit_items(split: str) -> list[Item]:
    """Return one split of the 1,797 hand-written digits that come with scikit-learn; needs no download.

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


# CIFAR-10 and CIFAR-100 from the Python release, whose pickles are read without running code


def read_cifar(
    root: Path, *, folder: str, splits: Mapping[str, tuple[str, ...]], prefix: str, source: str
) -> dict[str, Originals]:
    """Read the batches of a release; keys number the images across a split's files.

    Args:
        splits: split name to the names of its batches.
        prefix: of the entries `labels` and `label_names` in the files, as CIFAR-100 has two kinds of labels.
    """
    place = need(root, folder)
    path = need(place, "batches.meta", "meta")
    class_names = tuple(_text(name) for name in _entry(path, unpickle(path), f"{prefix}label_names"))
    found = {}
    for split, files in splits.items():
        batches = [_batch(need(place, name), f"{prefix}labels", len(class_names)) for name in files]
        pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        found[split] = Originals(pixel_items(pixels, labels), class_names, source)
    return found


def _batch(path: Path, entry: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    batch = unpickle(path)
    pixels = getattr(_entry(path, batch, "data"), "array", None)
    labels = check_labels(np.array(_entry(path, batch, entry)), num_classes, path)
    if pixels is None or pixels.shape != (len(labels), 3072):
        raise DataError(path, f"data should be an array of {len(labels)} rows of 3072 bytes")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _entry(path: Path, batch: dict[str, Any], name: str) -> Any:
    if name not in batch:
        raise DataError(path, f"has no '{name}', should be a file of the Python release")
    return batch[name]


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def unpickle(path: Path) -> dict[str, Any]:
    """Read a dictionary of numbers, texts, lists and byte arrays (as `Bytes`), without running code.

    Raises DataError if the file is damaged or holds anything else.
    """
    with parsing(path, DataError, "not a pickle of plain data"):
        entries = _PlainData(io.BytesIO(read_bytes(path)), encoding="bytes").load()
        return {_text(name): value for name, value in entries.items()}


class Bytes:
    """A stand-in for a NumPy array of bytes: `array` is uint8 of the pickled shape."""

    array: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Set NumPy's pickled array state: version, shape, type, column order, bytes."""
        _, shape, _, by_columns, data = state
        if by_columns:
            raise pickle.UnpicklingError("an array stored by columns")
        self.array = np.frombuffer(data, np.uint8).reshape(shape)


class _ByteType:
    """A stand-in for `numpy.dtype('u1')`, which refuses other types."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        if _text(name) != "u1":
            raise pickle.UnpicklingError(f"an array of type {_text(name)}, should be u1")

    def __setstate__(self, state: object) -> None:
        """Do nothing: bytes have no byte order."""


_STAND_INS = {
    "numpy.core.multiarray._reconstruct": lambda *_: Bytes(),
    "numpy._core.multiarray._reconstruct": lambda *_: Bytes(),
    "numpy.ndarray": Bytes,
    "numpy.dtype": _ByteType,
}


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for one of the four names that the files need; refuse every other name."""
        if f"{module}.{name}" not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _STAND_INS[f"{module}.{name}"]


# TFRecord files and the `tf.train.Example` messages in them, read without TensorFlow, as DMLab needs. A map
# is stored as a list of entries.

_HEADER = struct.Struct("<QI")  # length, and its checksum
_FOOTER_BYTES = 4  # checksum of the data


@cache
def _example_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    repeated = field.LABEL_REPEATED
    messages = {
        "Bytes": [field(name="value", number=1, label=repeated, type=field.TYPE_BYTES)],
        "Integers": [field(name="value", number=1, label=repeated, type=field.TYPE_INT64)],
        "Feature": [
            field(name="bytes", number=1, type_name=".tf.Bytes"),
            field(name="integers", number=3, type_name=".tf.Integers"),
        ],
        "Entry": [
            field(name="key", number=1, type=field.TYPE_STRING),
            field(name="value", number=2, type_name=".tf.Feature"),
        ],
        "Features": [field(name="entries", number=1, label=repeated, type_name=".tf.Entry")],
        "Example": [field(name="features", number=1, type_name=".tf.Features")],
    }
    types = [descriptor_pb2.DescriptorProto(name=name, field=fields) for name, fields in messages.items()]
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tf", syntax="proto3", message_type=types
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


def parse_example(data: bytes) -> dict[str, list[Any]]:
    """Return the features of a `tf.train.Example`: lists of bytes or of integers."""
    with parsing("a record", DataError, "not an Example message"):
        entries = _example_class().FromString(data).features.entries
        return {one.key: [*one.value.bytes.value, *one.value.integers.value] for one in entries}


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield offset and data of every record."""
    with open_regular(path, error=DataError) as file:
        while header := file.read(_HEADER.size):
            offset = file.tell()
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
            if length > limits.RECORD:
                raise DataError(path, f"a record of {length:,} bytes, should be at most {limits.RECORD:,}")
            data = file.read(length)
            if len(data) < length or len(file.read(_FOOTER_BYTES)) < _FOOTER_BYTES:
                raise DataError(path, f"truncated within the record at byte {offset}", "copy it again")
            yield offset, data


_DMLAB_CLASSES = tuple(f"reward sign and distance, class {number}" for number in range(6))


def read_dmlab(root: Path) -> dict[str, Originals]:
    """Read DMLab, `dmlab-{train,validation,test}.tfrecord-*`; keys are the field `filename`.

    All files are read through once, which takes as long as reading 3 GB.
    """
    return {split: _dmlab_split(root, split) for split in ("train", "validation", "test")}


def _dmlab_split(root: Path, split: str) -> Originals:
    paths = sorted(root.glob(f"dmlab-{split}.tfrecord*"))
    if not paths:
        raise MissingOriginalsError(root, f"dmlab-{split}.tfrecord* is missing")
    places: list[tuple[Path, int, int]] = []
    keys, labels = [], []
    for path in paths:
        for offset, data in records(path):
            example = parse_example(data)
            places.append((path, offset, len(data)))
            keys.append(_only(example, "filename", path).decode())
            labels.append(_only(example, "label", path))
    checked = check_labels(np.array(labels), len(_DMLAB_CLASSES), paths[0])

    def image(row: int) -> bytes:
        return bytes(_only(parse_example(read_part(*places[row])), "image", places[row][0]))

    return Originals(row_items(checked, image, keys.__getitem__), _DMLAB_CLASSES, "DMLab of the benchmark")


def _only(example: dict[str, list[Any]], name: str, path: Path) -> Any:
    values = example.get(name, [])
    if len(values) != 1:
        raise DataError(path, f"an example has {len(values)} values of '{name}', should have one")
    return values[0]
