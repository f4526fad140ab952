"""Images listed in a table: CSV, TSV, and parquet files with paths or with the encoded images themselves.

The columns are `path,label` or, where an image may have several classes, `path,labels`; perhaps `split` and
`group`.
"""

import csv
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitctl.data.datasets.readers.class_folder import SPLITS
from vitctl.data.datasets.readers.original_files import file_size, read_bytes
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError
from vitctl.system.files import CLASSES, TABLE, error_text, open_regular, parsing
from vitctl.system.text import one_line

_COLUMNS = ({"path", "label"}, {"path", "label", "split"}, {"path", "labels"}, {"path", "labels", "split"})
GROUP = "group"  # a column for data.group_by, which this reader passes over
_BETWEEN_LABELS = ";"
Row = Mapping[str, str]


def read_table(path: Path) -> dict[str, Originals]:
    """Read a list of images with its header line; `.tsv` files are split at tabs, others at commas.

    Labels are class names, sorted by code point, or all of them class numbers from 0. The column `labels` may
    hold several, as in `cat;dog`, and every image of the table counts as one that may have several classes.
    Paths are relative to the table; the path becomes the key. Rows without a split belong to `train`.

    Raises:
        DataError: columns, files or labels are wrong; one line for all missing files.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = []
    try:
        text = read_bytes(path, TABLE.limit).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        columns = list(reader.fieldnames or [])
        if set(columns) - {GROUP} not in _COLUMNS:
            raise DataError(
                f"{path}: columns are {one_line(','.join(columns)[:200])}, should be path,label or "
                f"path,label,split; if images may have several labels: labels, with values such as a;b"
            )
        for row in reader:
            if None in row or not all(row.get(name) for name in columns if name not in ("split", GROUP)):
                raise DataError(f"{path}: line {reader.line_num}: should have {len(columns)} filled columns")
            rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from None
    if not rows:
        raise DataError(f"{path}: lists no images")
    return _read_rows(path, rows)


def _read_rows(path: Path, rows: Sequence[Row]) -> dict[str, Originals]:
    """Read the images of a table's rows, which all have the same columns."""
    sizes = [file_size(path.parent / row["path"]) for row in rows]
    missing = [row["path"] for row, size in zip(rows, sizes, strict=True) if size is None]
    if missing:
        raise DataError(f"{path}: {len(missing)} of {len(rows)} files are missing, the first is {missing[0]}")
    several = "labels" in rows[0]
    joined = [] if several else [row for row in rows if _BETWEEN_LABELS in row["label"]]
    if joined:
        raise DataError(
            f"{path}: {len(joined):,} of {len(rows):,} values of the column 'label' have a ';', the first is "
            f"{joined[0]['label'][:100]!r}: name the column 'labels' if these are several labels, "
            f"or remove the ';'"
        )
    names = [_label_names(row["labels"]) if several else (_normal(row["label"]),) for row in rows]
    class_names = _class_names([name for given in names for name in given])
    numbers = {name: label for label, name in enumerate(class_names)}
    splits: dict[str, list[Item]] = {}
    for row, given, size in zip(rows, names, sizes, strict=True):
        split = (row.get("split") or "").strip() or "train"
        labels = tuple(numbers[name] for name in given)
        read = partial(read_bytes, path.parent / row["path"])
        item = Item(row["path"], labels if several else labels[0], read, size)
        splits.setdefault(SPLITS.get(split.lower(), split), []).append(item)
    return {
        split: Originals(items, class_names, str(path), is_user_data=True) for split, items in splits.items()
    }


def _label_names(text: str) -> tuple[str, ...]:
    """Return the classes of one image, each once, in the order given."""
    return tuple(dict.fromkeys(_normal(label) for label in text.split(_BETWEEN_LABELS) if label.strip()))


def _normal(label: str) -> str:
    """Strip a label: `007` and `7` are one class, and so are ` cat` and `cat`."""
    text = label.strip()
    return text.lstrip("0") or "0" if text.isascii() and text.isdecimal() else text


def _class_names(labels: list[str]) -> tuple[str, ...]:
    if all(label.isascii() and label.isdecimal() for label in labels):
        return _numbered(max((int(label) if len(label) < 12 else 10**12 for label in labels), default=0) + 1)
    return tuple(sorted(set(labels)))


def _numbered(num_classes: int) -> tuple[str, ...]:
    """Name classes by their numbers. Raises DataError if a label of a few digits claims millions of them."""
    if num_classes > CLASSES.limit:
        raise DataError(f"a label of {num_classes - 1}: {num_classes:,} classes, should be at most {CLASSES}")
    return tuple(str(label) for label in range(num_classes))


# Parquet, as Hugging Face lays it out: a column of encoded images, and one of labels whose names are in the
# file's metadata.

_IMAGE, _LABEL = ("image", "img", "jpg", "png"), ("label", "fine_label", "labels", "cls")
_WITH_WNID = re.compile(r"(.+)_n\d{8}(\.JPEG)")  # ImageNet's names there end with the class once more


def read_parquet(files: list[Path]) -> dict[str, Originals]:
    """Read images and labels. Files like `train-00000-of-00005.parquet` belong to the split they begin with.

    A column of lists gives every image several labels. A file that has paths instead of images is a table
    like any other.

    Rows can only be read by the group, so the images are written to a temporary file once, from which the
    shuffle reads. The key is the image's path if all are different, otherwise its number.

    Args:
        files: parquet files of one data set.

    Raises:
        DataError: pyarrow is missing, a file is damaged, or a column is missing.
    """
    if len(files) == 1 and set(open_parquet(files[0]).schema_arrow.names) in _COLUMNS:
        return _read_rows(files[0], _parquet_rows(files[0]))
    splits: dict[str, list[Path]] = {}
    for path in sorted(files):
        word = re.split(r"[-_.]", path.name)[0].lower()
        splits.setdefault(SPLITS.get(word, "train"), []).append(path)
    return {split: _read_images(paths) for split, paths in splits.items()}


def _parquet_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of paths as text, lists of labels joined."""
    rows: list[dict[str, str]] = []
    num_bytes = 0
    for row in parquet_dicts(path, open_parquet(path), batch_size=1024):
        if not row["path"] or row.get("label", row.get("labels")) in (None, []):
            raise DataError(f"{path}: should have a path and a label in every row")
        rows.append({name: _as_text(value) for name, value in row.items()})
        num_bytes += sum(map(len, rows[-1].values()))
        if num_bytes > TABLE.limit:  # a dictionary in the file makes much of little
            raise DataError(f"{path}: holds more than {TABLE} bytes of text")
    if not rows:
        raise DataError(f"{path}: lists no images")
    return rows


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return _BETWEEN_LABELS.join(map(str, value))
    return "" if value is None else str(value)


def _read_images(paths: list[Path]) -> Originals:
    """Read the parquet files of one split."""
    spool = _Spool()
    class_names: list[str] = []
    rows: list[tuple[str, int | tuple[int, ...], int, int]] = []
    for path in paths:
        table = open_parquet(path)
        image, label = _image_and_label(path, table.schema_arrow.names)
        names = _names_in_metadata(table.schema_arrow.metadata or {}, label)
        if class_names and names != class_names:
            raise DataError(f"{path}: its class names are not those of {paths[0].name}")
        class_names = names
        for row in parquet_dicts(path, table, batch_size=64, columns=[image, label]):
            stored, number = row[image], row[label]
            data, name = (
                (stored.get("bytes"), stored.get("path")) if isinstance(stored, dict) else (stored, "")
            )
            given = tuple(dict.fromkeys(number)) if isinstance(number, list) else (number,)
            if not isinstance(data, bytes) or not all(isinstance(one, int) for one in given):
                raise DataError(f"{path}: every row should hold an encoded image and a class number")
            key = _WITH_WNID.sub(r"\1\2", name or "")
            rows.append((key, given if isinstance(number, list) else number, spool.size, len(data)))
            spool.append(data)
    are_unique = len({key for key, *_ in rows}) == len(rows)
    items = [
        Item(key if are_unique else str(number), label, partial(spool.read, offset, size), size)
        for number, (key, label, offset, size) in enumerate(rows)
    ]
    labels = [item.label if isinstance(item.label, tuple) else (item.label,) for item in items]
    if not class_names:
        class_names = list(_numbered(max((max(given, default=0) for given in labels), default=0) + 1))
    for item, given in zip(items, labels, strict=True):
        if not all(-1 <= label < len(class_names) for label in given):
            raise DataError(
                f"{paths[0].parent}: image {one_line(item.key)} has label {item.label}, should be -1 to "
                f"{len(class_names) - 1}"
            )
    return Originals(items, tuple(class_names), str(paths[0].parent), is_user_data=True)


def _image_and_label(path: Path, columns: list[str]) -> tuple[str, str]:
    """Return the names of the columns with the images and with the labels."""
    chosen = []
    for what, usual in (("an image", _IMAGE), ("a label", _LABEL)):
        name = next((name for name in usual if name in columns), None)
        if name is None:
            raise DataError(
                f"{path}: lacks a column with {what} ({', '.join(usual)}); found: {', '.join(columns)}"
            )
        chosen.append(name)
    return chosen[0], chosen[1]


def _names_in_metadata(metadata: dict[bytes, bytes], label: str) -> list[str]:
    """Return the class names that Hugging Face's library stored; empty if there are none."""
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        return list(map(str, feature["names"] if "names" in feature else feature["feature"]["names"]))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return []


def need_pyarrow(path: Path) -> Any:
    """Return pyarrow. Raises DataError if it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: parquet needs pyarrow; install it with `pip install 'vitctl[data]'`"
        ) from None
    return pyarrow


def open_parquet(path: Path) -> Any:
    """Open a file. Raises DataError if pyarrow is missing or the file is damaged."""
    pyarrow = need_pyarrow(path)
    open_regular(path, error=DataError).close()
    try:
        with parsing(path, DataError, "not a complete parquet file"):
            file = pyarrow.parquet.ParquetFile(path)
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    except OSError as error:
        raise DataError(f"{path}: not a complete parquet file ({error_text(error)})") from None
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > TABLE.limit + path.stat().st_size:
        raise DataError(f"{path}: a row group of {largest:,} bytes, should be at most {TABLE}")
    return file


def parquet_dicts(path: Path, table: Any, **how: Any) -> Iterator[dict[str, Any]]:
    """Yield a file's rows. Damaged pages show only here, as errors of pyarrow or of the system."""
    try:
        with parsing(path, DataError, "damaged parquet file"):
            for batch in table.iter_batches(**how):
                yield from batch.to_pylist()
    except (OSError, MemoryError) as error:
        raise DataError(f"{path}: damaged parquet file ({error_text(error)})") from None


class _Spool:
    """Bytes in a nameless temporary file, which lives as long as an item that reads from it."""

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
