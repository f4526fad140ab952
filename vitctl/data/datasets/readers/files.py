"""What readers of original files share: to find files, to list and to load them, and to read images late."""

import importlib
import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.writer.items import Item
from vitctl.errors import DataError
from vitctl.system import files
from vitctl.system.bounds import IMAGE_FILE, LIST_FILE, TABLE

ASSETS = Path(__file__).resolve().parents[2] / "assets"


def class_list(name: str) -> tuple[str, ...]:
    """The class names of a data set in label order, from the list that comes with vitctl."""
    return tuple((ASSETS / f"{name}_classes.txt").read_text(encoding="utf-8").splitlines())


def need(root: Path, *places: str, archive: str) -> Path:
    """The first of some places below `root` that exists.

    Args:
        root: folder that the user named.
        places: relative paths, the usual one first.
        archive: what holds it and where that is found, for the message.

    Raises:
        DataError: there is none.
    """
    for place in places:
        if (root / place).exists():
            return root / place
    raise DataError(f"{root}: {' or '.join(places)} is missing; unpack here: {archive}")


def file_items(
    folder: Path, names: Sequence[str], labels: Sequence[int], keys: Sequence[str] | None = None
) -> list[Item]:
    """Images that are files, read when they are asked for.

    Args:
        folder: where they lie.
        names: their paths in the folder.
        labels: one per image.
        keys: one per image; the names when not given.

    Raises:
        DataError: files are missing.
    """
    sizes = [file_size(folder / name) for name in names]
    absent = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if absent:
        raise DataError(
            f"{folder}: {len(absent):,} of {len(names):,} listed images are missing, the first is {absent[0]}"
        )
    return [
        Item(key, int(label), partial(read_bytes, folder / name), size)
        for key, name, label, size in zip(keys or names, names, labels, sizes, strict=True)
    ]


def file_size(path: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # a name with a zero byte in it names nothing
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """The bytes of a file, an image or a list.

    Raises DataError when it cannot be read, or is too large (None: for a list).
    """
    return files.read_bytes(path, LIST_FILE.limit if max_bytes is None else max_bytes, error=DataError)


def read_part(path: Path, offset: int, size: int) -> bytes:
    """`size` bytes from `offset` on.

    Raises DataError when that is too large, the file cannot be read, or ends before.
    """
    if size > IMAGE_FILE.limit:
        raise DataError(
            f"{path}: an image of {size} bytes at byte {offset}, should have at most {IMAGE_FILE.limit}"
        )
    try:
        with files.open_regular(path, error=DataError) as file:
            data = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) != size:
        raise DataError(f"{path}: ends within the {size} bytes from {offset} on; copy it again")
    return data


def read_lines(path: Path) -> list[str]:
    """The lines of a text file without blank ends; empty ones are left out.

    Raises DataError when it is no text.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: should be a text file") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def read_fields(path: Path, num_fields: int) -> list[list[str]]:
    """The words of every line. Raises DataError when a line has fewer than `num_fields`."""
    rows = [line.split() for line in read_lines(path)]
    short = next((row for row in rows if len(row) < num_fields), None)
    if short is not None:
        raise DataError(f"{path}: line {' '.join(short)!r} should have at least {num_fields} columns")
    return rows


def load_mat(path: Path, *names: str) -> list[np.ndarray]:
    """Variables of a MATLAB 5 file, without their axes of length one.

    Raises:
        DataError: it is no such file, as when a download stored a web page, or a variable is missing.
    """
    scipy_io = library("scipy.io")
    if (size := path.stat().st_size) > TABLE.limit:
        raise DataError(f"{path}: {size:,} bytes, should be at most {TABLE}")
    try:
        held = scipy_io.loadmat(path, squeeze_me=True, variable_names=names)
    except Exception as error:  # scipy raises many types for files that are something else
        raise DataError(
            f"{path}: not a MATLAB file, download it again ({' '.join(str(error).split())})"
        ) from None
    absent = [name for name in names if name not in held]
    if absent:
        raise DataError(f"{path}: has no variable {', '.join(absent)}")
    return [np.asarray(held[name]) for name in names]


def library(name: str) -> Any:
    """A module that only some readers need. Raises DataError with the line that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"this data set is read with {name.partition('.')[0]}: pip install 'vitctl[data]'"
        ) from None


def check_labels(labels: np.ndarray, num_classes: int, where: Path) -> np.ndarray:
    """The labels as int64 `[N]`. Raises DataError when one is not 0 to `num_classes` - 1."""
    labels = np.asarray(labels, np.int64).ravel()
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if wrong.size:
        raise DataError(
            f"{where}: {wrong.size:,} labels are out of range, the first is {wrong[0]} of "
            f"{num_classes} classes"
        )
    return labels
