"""CIFAR-10 and CIFAR-100 from the Python release, whose pickles are read without running anything they name."""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, need, read_bytes
from vitctl.data.datasets.readers.rows import pixel_rows
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

_SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ARCHIVE = f"cifar-10-python.tar.gz or cifar-100-python.tar.gz from {_SITE}"


@dataclass(frozen=True)
class Release:
    """Where one of the two sets keeps its images, labels and class names."""

    title: str
    archive: str
    folder: str
    splits: Mapping[str, tuple[str, ...]]
    labels: str
    meta: str
    names: str
    num_classes: int


CIFAR10 = Release(
    title="CIFAR-10",
    archive=f"cifar-10-python.tar.gz from {_SITE}",
    folder="cifar-10-batches-py",
    splits={"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    labels="labels",
    meta="batches.meta",
    names="label_names",
    num_classes=10,
)
CIFAR100 = Release(
    title="CIFAR-100",
    archive=f"cifar-100-python.tar.gz from {_SITE}",
    folder="cifar-100-python",
    splits={"train": ("train",), "test": ("test",)},
    labels="fine_labels",
    meta="meta",
    names="fine_label_names",
    num_classes=100,
)


def read(root: Path, release: Release) -> dict[str, Originals]:
    """Keys are the numbers of the images, counted through all files of a split.

    Args:
        root: holds the unpacked folder of the release.
        release: `CIFAR10` or `CIFAR100`.

    Raises:
        DataError: files are missing, damaged, or hold something other than plain data.
    """
    folder = need(root, release.folder, archive=release.archive)
    path = need(folder, release.meta, archive=release.archive)
    class_names = tuple(_text(name) for name in _entry(path, unpickle(path), release.names))
    if len(class_names) != release.num_classes:
        raise DataError(f"{path}: {len(class_names)} class names, should be {release.num_classes}")
    return {split: _split(folder, release, files, class_names) for split, files in release.splits.items()}


def _split(folder: Path, release: Release, files: tuple[str, ...], class_names: tuple[str, ...]) -> Originals:
    batches = [_batch(need(folder, name, archive=release.archive), release) for name in files]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Originals(pixel_rows(pixels, labels), class_names, release.title)


def _batch(path: Path, release: Release) -> tuple[np.ndarray, np.ndarray]:
    held = unpickle(path)
    pixels = getattr(_entry(path, held, "data"), "array", None)
    labels = check_labels(np.array(_entry(path, held, release.labels)), release.num_classes, path)
    if pixels is None or pixels.shape != (len(labels), 3072):
        raise DataError(f"{path}: data should be an array of {len(labels)} rows of 3072 bytes")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _entry(path: Path, held: dict[str, Any], name: str) -> Any:
    if name not in held:
        raise DataError(f"{path}: has no '{name}', should be a file of the Python release")
    return held[name]


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def unpickle(path: Path) -> dict[str, Any]:
    """Read a dictionary of numbers, texts, lists and byte arrays. No object is looked up by the names in the
    file.

    Returns:
        the dictionary; arrays are `Bytes`.

    Raises:
        DataError: the file is damaged or holds anything else.
    """
    try:
        held = _PlainData(io.BytesIO(read_bytes(path)), encoding="bytes").load()
        return {_text(name): value for name, value in held.items()}
    except DataError:
        raise
    except Exception as error:  # damaged pickles raise whatever their opcodes trip over
        raise DataError(f"{path}: not a pickle of plain data ({' '.join(str(error).split())})") from None


class Bytes:
    """Stands for a NumPy array of bytes: `array` is uint8 of the pickled shape."""

    array: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take what NumPy pickles of an array: version, shape, type, column order, bytes."""
        _, shape, _, by_columns, data = state
        if by_columns:
            raise pickle.UnpicklingError("an array stored by columns")
        self.array = np.frombuffer(data, np.uint8).reshape(shape)


class _ByteType:
    """Stands for `numpy.dtype('u1')` and refuses to stand for others."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        if _text(name) != "u1":
            raise pickle.UnpicklingError(f"an array of type {_text(name)}, should be u1")

    def __setstate__(self, state: object) -> None:
        """Bytes have no byte order."""


def _reconstruct(*_: object) -> Bytes:
    return Bytes()


_STAND_INS = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.ndarray": Bytes,
    "numpy.dtype": _ByteType,
}


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of one of the four names that the files need; every other name is refused."""
        if f"{module}.{name}" not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _STAND_INS[f"{module}.{name}"]
