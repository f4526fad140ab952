"""Parquet files as the Hugging Face hub keeps images: a column of bytes and paths, a column of labels."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitctl.data.datasets.class_folder import SPLITS
from vitctl.data.datasets.files import check_labels, library, read_lines
from vitctl.data.datasets.rows import Rows
from vitctl.data.shards import Originals
from vitctl.errors import DataError

_IMAGENET_PATH = re.compile(r"(n\d{8}_\d+|ILSVRC2012_val_\d{8})_n\d{8}(\.JPEG)")


class _Row(NamedTuple):
    """Where a row is (file, row group, row), the name of its image, and its label."""

    place: tuple[Path, int, int]
    name: str
    label: int


def read(root: Path, image: str = "image", label: str = "label") -> dict[str, Originals]:
    """Keys are the images' file names when they have them, and row numbers otherwise; rows without a label are left out.

    An ImageNet name that was given its wnid once more gets its old form back. Class names come from the files' own
    description or from `classes.txt`, never from the labels that occur.

    Args:
        root: holds `<split>-*.parquet` or `<split>/*.parquet`, at any depth.
        image: name of the column of images.
        label: name of the column of class numbers.

    Raises:
        DataError: there are no such files or columns, or no class names; pyarrow is not installed.
    """
    files: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.parquet")):
        word = path.name.partition("-")[0] if "-" in path.name else path.parent.name
        if word.lower() in SPLITS:
            files.setdefault(SPLITS[word.lower()], []).append(path)
    if not files:
        raise DataError(f"{root}: should hold files like train-00000-of-00001.parquet or train/0000.parquet")
    class_names = _class_names(root, next(iter(files.values()))[0], label)
    return {split: _split(paths, class_names, image, label) for split, paths in files.items()}


def original_name(path: str) -> str:
    """The file name in a path, and for ImageNet without the wnid that was put behind it."""
    name = path.rpartition("/")[2]
    match = _IMAGENET_PATH.fullmatch(name)
    return match[1] + match[2] if match else name


def _split(paths: list[Path], class_names: tuple[str, ...], image: str, label: str) -> Originals:
    rows = [row for path in paths for row in _rows(path, image, label)]
    kept = [number for number, row in enumerate(rows) if row.label != -1]
    labels = check_labels(np.array([rows[number].label for number in kept]), len(class_names), paths[0])
    names = [rows[number].name for number in kept]
    keys = names if all(names) and len(set(names)) == len(names) else [str(number) for number in kept]
    read_row = partial(_image, [rows[number].place for number in kept], image)
    return Originals(Rows(labels, read_row, keys.__getitem__), class_names, f"parquet, {paths[0].parent}")


def _rows(path: Path, image: str, label: str) -> Iterator[_Row]:
    file = _opened(path)
    for group in range(file.num_row_groups):
        try:
            for number, row in enumerate(file.read_row_group(group, columns=[label, f"{image}.path"]).to_pylist()):
                yield _Row((path, group, number), original_name((row[image] or {}).get("path") or ""), int(row[label]))
        except (KeyError, TypeError, ValueError) as error:
            columns = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path}: should have columns {image} and {label}, has {columns} ({error})") from None


def _class_names(root: Path, path: Path, label: str) -> tuple[str, ...]:
    described = (_opened(path).schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        names = json.loads(described)["info"]["features"][label]["names"]
    except (ValueError, KeyError, TypeError):
        if (root / "classes.txt").is_file():
            return tuple(read_lines(root / "classes.txt"))
        raise DataError(
            f"{path}: describes no classes; write their names to {root / 'classes.txt'}, one per line"
        ) from None
    return tuple(str(name) for name in names)


def _image(places: list[tuple[Path, int, int]], column: str, row: int) -> bytes:
    path, group, number = places[row]
    data = _group_images(path, group, column)[number].as_py()
    if not isinstance(data, bytes):
        raise DataError(f"{path}: image {number} of row group {group} has no bytes")
    return data


@lru_cache(maxsize=4)
def _group_images(path: Path, group: int, column: str) -> Any:
    """The bytes of a row group: reading one image costs as much as reading its neighbours."""
    table = _opened(path).read_row_group(group, columns=[f"{column}.bytes"])
    return library("pyarrow.compute").struct_field(table.column(column).combine_chunks(), "bytes")


@lru_cache(maxsize=64)
def _opened(path: Path) -> Any:
    parquet = library("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"{path}: not a whole Parquet file ({' '.join(str(error).split())})") from None
