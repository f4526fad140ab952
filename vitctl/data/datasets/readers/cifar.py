"""CIFAR-10 and CIFAR-100 from the Python release, whose pickles are read without running anything they name."""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.readers.arrays import pixel_rows
from vitctl.data.datasets.readers.files import check_labels, need, read_bytes
from vitctl.data.writer.intake import Originals
from vitctl.errors import DataError


def read_cifar(
    root: Path, *, folder: str, splits: Mapping[str, tuple[str, ...]], prefix: str, source: str
) -> dict[str, Originals]:
    """Read the batches of a release; keys are the numbers of the images, counted through a split's files.

    Args:
        root: holds the unpacked folder of the release.
        folder: its name.
        splits: split name to the names of its batches.
        prefix: of the entries `labels` and `label_names` in the files, as CIFAR-100 has two kinds of labels.
        source: name of the set, for the index.

    Raises:
        DataError: files are missing, damaged, or hold something other than plain data.
    """
    place = need(root, folder)
    path = need(place, "batches.meta", "meta")
    class_names = tuple(_text(name) for name in _entry(path, unpickle(path), f"{prefix}label_names"))
    found = {}
    for split, files in splits.items():
        batches = [_batch(need(place, name), f"{prefix}labels", len(class_names)) for name in files]
        pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        found[split] = Originals(pixel_rows(pixels, labels), class_names, source)
    return found


def _batch(path: Path, entry: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    batch = unpickle(path)
    pixels = getattr(_entry(path, batch, "data"), "array", None)
    labels = check_labels(np.array(_entry(path, batch, entry)), num_classes, path)
    if pixels is None or pixels.shape != (len(labels), 3072):
        raise DataError(f"{path}: data should be an array of {len(labels)} rows of 3072 bytes")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _entry(path: Path, batch: dict[str, Any], name: str) -> Any:
    if name not in batch:
        raise DataError(f"{path}: has no '{name}', should be a file of the Python release")
    return batch[name]


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def unpickle(path: Path) -> dict[str, Any]:
    """Read a dictionary of numbers, texts, lists and byte arrays; arrays become `Bytes`.

    No object is looked up by the names in the file. Raises DataError if the file is damaged or holds anything
    else.
    """
    try:
        entries = _PlainData(io.BytesIO(read_bytes(path)), encoding="bytes").load()
        return {_text(name): value for name, value in entries.items()}
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
