"""Hugging Face's parquet files: a column of encoded images, and one of labels whose names stand in the file's
metadata.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vitctl.data.datasets.readers.class_folder import SPLITS
from vitctl.data.datasets.readers.table import COLUMNS, numbered, read_rows
from vitctl.data.writer.items import Item, Originals
from vitctl.errors import DataError
from vitctl.system.bounds import TABLE
from vitctl.system.files import open_regular
from vitctl.system.parsing import error_text, parsing
from vitctl.system.text import one_line

_IMAGE, _LABEL = ("image", "img", "jpg", "png"), ("label", "fine_label", "labels", "cls")
_WITH_WNID = re.compile(r"(.+)_n\d{8}(\.JPEG)")  # ImageNet's names there carry the class once more


def read_parquet(files: list[Path]) -> dict[str, Originals]:
    """Read images and labels; `train-00000-of-00005.parquet` and its like belong to the split they begin
    with.

    A column of lists gives every image several labels. A file that has paths in place of images is a table
    like any other.

    Rows can only be read by the group, so the images are laid out once in a temporary file, from which the
    shuffle reads. The key is the image's own path where all have different ones, else its number.

    Args:
        files: parquet files of one data set.

    Raises:
        DataError: pyarrow is missing, a file is damaged, or a column is not there.
    """
    if len(files) == 1 and set(open_table(files[0]).schema_arrow.names) in COLUMNS:
        return read_rows(files[0], _listed(files[0]))
    splits: dict[str, list[Path]] = {}
    for path in sorted(files):
        word = re.split(r"[-_.]", path.name)[0].lower()
        splits.setdefault(SPLITS.get(word, "train"), []).append(path)
    return {split: _read_split(paths) for split, paths in splits.items()}


def _listed(path: Path) -> list[dict[str, str]]:
    """The rows of a table of paths as text, lists of labels joined."""
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for batch in _reading(
        path, open_table(path).iter_batches(batch_size=1024)
    ):  # a dictionary makes much of little
        rows += (new := batch.to_pylist())
        num_bytes += sum(len(value) for row in new for value in row.values() if isinstance(value, str | list))
        if num_bytes > TABLE.limit:
            raise DataError(f"{path}: holds more than {TABLE} bytes of text")
    if not rows or not all(
        row["path"] and row.get("label", row.get("labels")) not in (None, []) for row in rows
    ):
        raise DataError(f"{path}: should have a path and a label in every row")
    return [
        {
            name: ";".join(map(str, value))
            if isinstance(value, list)
            else ""
            if value is None
            else str(value)
            for name, value in row.items()
        }
        for row in rows
    ]


def _read_split(paths: list[Path]) -> Originals:
    spool = _Spool()
    names: list[str] = []
    rows: list[tuple[str, int | tuple[int, ...], int, int]] = []
    for path in paths:
        class_names, images = _open(path)
        if names and class_names != names:
            raise DataError(f"{path}: its class names are not those of {paths[0].name}")
        names = class_names
        with parsing(path, DataError, "not a whole parquet file"):
            for data, name, label in images:
                rows.append((_WITH_WNID.sub(r"\1\2", name), label, spool.size, len(data)))
                spool.append(data)
    unique = len({name for name, *_ in rows}) == len(rows)
    items = [
        Item(name if unique else str(number), label, partial(spool.read, offset, size), size)
        for number, (name, label, offset, size) in enumerate(rows)
    ]
    names = names or list(numbered(max(map(_largest, items), default=0) + 1))
    for item in items:
        given = item.label if isinstance(item.label, tuple) else (item.label,)
        if not all(-1 <= label < len(names) for label in given):
            raise DataError(
                f"{paths[0].parent}: image {one_line(item.key)} has label {item.label}, should be -1 to "
                f"{len(names) - 1}"
            )
    return Originals(items, tuple(names), str(paths[0].parent), is_user_data=True)


def _largest(item: Item) -> int:
    return max(item.label, default=0) if isinstance(item.label, tuple) else item.label


def _open(path: Path) -> tuple[list[str], Iterator[tuple[bytes, str, int | tuple[int, ...]]]]:
    """Class names, empty when the file has none, and each row's image, name and label, or labels."""
    table = open_table(path)
    columns = table.schema_arrow.names
    image, label = (next((name for name in usual if name in columns), None) for usual in (_IMAGE, _LABEL))
    if image is None or label is None:
        missing = f"an image ({', '.join(_IMAGE)})" if image is None else f"a label ({', '.join(_LABEL)})"
        raise DataError(f"{path}: lacks a column with {missing}; found: {', '.join(columns)}")
    return _class_names(table.schema_arrow.metadata or {}, label), _rows(path, table, image, label)


def open_table(path: Path) -> Any:
    """The opened file. Raises DataError when pyarrow is missing or the file is damaged."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: parquet needs pyarrow; install it with `pip install 'vitctl[data]'`"
        ) from None
    open_regular(path, error=DataError).close()
    try:
        with parsing(path, DataError, "not a whole parquet file"):
            file = pyarrow.parquet.ParquetFile(path)
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    except OSError as error:
        raise DataError(f"{path}: not a whole parquet file ({error_text(error)})") from None
    if (
        largest := max((group.total_byte_size for group in groups), default=0)
    ) > TABLE.limit + path.stat().st_size:
        raise DataError(f"{path}: a row group of {largest:,} bytes, should be at most {TABLE}")
    return file


def _class_names(metadata: dict[bytes, bytes], label: str) -> list[str]:
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        return list(map(str, feature["names"] if "names" in feature else feature["feature"]["names"]))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return []


def _rows(
    path: Path, table: Any, image: str, label: str
) -> Iterator[tuple[bytes, str, int | tuple[int, ...]]]:
    for batch in _reading(path, table.iter_batches(batch_size=64, columns=[image, label])):
        for found, given in zip(
            batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True
        ):
            data, name = (found.get("bytes"), found.get("path")) if isinstance(found, dict) else (found, None)
            number = tuple(dict.fromkeys(given)) if isinstance(given, list) else given
            if not isinstance(data, bytes) or not _is_label(number):
                raise DataError(f"{path}: a row holds no encoded image with a whole number, should hold both")
            yield data, name or "", number


def _reading(path: Path, batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; a file whose pages are damaged says so only here. pyarrow's own errors are Python's,
    or come from them.
    """
    try:
        with parsing(path, DataError, "damaged parquet file"):
            yield from batches
    except (OSError, MemoryError) as error:
        raise DataError(f"{path}: damaged parquet file ({error_text(error)})") from None


def _is_label(number: Any) -> bool:
    return (
        all(isinstance(one, int) for one in number) if isinstance(number, tuple) else isinstance(number, int)
    )


class _Spool:
    """Bytes laid out in a nameless temporary file, which lives as long as an item that reads from it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self.size = 0

    def append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self.size += len(data)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)

    def __del__(self) -> None:
        self._file.close()
