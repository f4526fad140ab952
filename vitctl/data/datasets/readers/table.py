"""Images listed in a table: `path,label` or, where an image may be of several classes, `path,labels`; perhaps
`split`.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from vitctl.data.datasets.readers.class_folder import SPLITS
from vitctl.data.datasets.readers.files import file_size, read_bytes
from vitctl.data.writer.items import Item, Originals
from vitctl.errors import DataError
from vitctl.system.bounds import CLASSES, TABLE
from vitctl.system.text import one_line

COLUMNS = ({"path", "label"}, {"path", "label", "split"}, {"path", "labels"}, {"path", "labels", "split"})
_BETWEEN_LABELS = ";"
Row = Mapping[str, str]


def read_table(path: Path) -> dict[str, Originals]:
    """Read a list of images with its header line; `.tsv` files are split at tabs, others at commas.

    Labels are class names, sorted by code point, or all of them class numbers from 0. In a column `labels`
    there may be several, as in `cat;dog`, and every image of the table counts as one that may have several.
    Paths are relative to the table; the path becomes the key. Rows without a split belong to `train`.

    Raises:
        DataError: columns, files or labels are wrong; one line for all missing files.
    """
    return read_rows(path, _rows(path))


def read_rows(path: Path, rows: Sequence[Row]) -> dict[str, Originals]:
    """The rows of any table, see `read_table`.

    Args:
        path: of the table, for messages; the images lie below its folder.
        rows: column name to text, all with the same columns.
    """
    sizes = [file_size(path.parent / row["path"]) for row in rows]
    missing = [row["path"] for row, size in zip(rows, sizes, strict=True) if size is None]
    if missing:
        raise DataError(f"{path}: {len(missing)} of {len(rows)} files are missing, the first is {missing[0]}")
    several = "labels" in rows[0]
    joined = [] if several else [row for row in rows if _BETWEEN_LABELS in row["label"]]
    if joined:
        raise DataError(
            f"{path}: {len(joined):,} of {len(rows):,} values of the column 'label' have a ';', the first is "
            f"{one_line(joined[0]['label'][:100])!r}: name the column 'labels' if these are several labels, "
            f"or take the ';' out"
        )
    own = [_labels(row["labels"]) if several else (_normal(row["label"]),) for row in rows]
    class_names = _class_names([name for names in own for name in names])
    numbers = {name: label for label, name in enumerate(class_names)}
    splits: dict[str, list[Item]] = {}
    for row, names, size in zip(rows, own, sizes, strict=True):
        split = (row.get("split") or "").strip() or "train"
        labels = tuple(numbers[name] for name in names)
        item = Item(
            row["path"],
            labels if several else labels[0],
            partial(read_bytes, path.parent / row["path"]),
            size,
        )
        splits.setdefault(SPLITS.get(split.lower(), split), []).append(item)
    return {
        split: Originals(items, class_names, str(path), is_user_data=True) for split, items in splits.items()
    }


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with io.StringIO(_text(path), newline="") as file:
            reader = csv.DictReader(
                file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True
            )
            columns = list(reader.fieldnames or [])
            if set(columns) not in COLUMNS:
                raise DataError(
                    f"{path}: columns are {one_line(','.join(columns)[:200])}, should be path,label or "
                    f"path,label,split; "
                    "labels in place of label where an image may have several, as in a;b"
                )
            rows = []
            for row in reader:
                if None in row or not all(row.get(name) for name in columns if name != "split"):
                    raise DataError(
                        f"{path}: line {reader.line_num}: should have {len(columns)} filled columns"
                    )
                rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from None
    if not rows:
        raise DataError(f"{path}: lists no images")
    return rows


def _text(path: Path) -> str:
    return read_bytes(path, TABLE.limit).decode("utf-8-sig")


def _labels(text: str) -> tuple[str, ...]:
    """The classes of one image, each once, in the order given."""
    return tuple(dict.fromkeys(_normal(label) for label in text.split(_BETWEEN_LABELS) if label.strip()))


def numbered(num_classes: int) -> tuple[str, ...]:
    """Names of classes that have none but their numbers.

    Raises DataError where a label of a few digits claims millions of them.
    """
    if num_classes > CLASSES.limit:
        raise DataError(f"a label of {num_classes - 1}: {num_classes:,} classes, should be at most {CLASSES}")
    return tuple(str(label) for label in range(num_classes))


def _class_names(labels: list[str]) -> tuple[str, ...]:
    if all(label.isascii() and label.isdecimal() for label in labels):
        return numbered(max((int(label) if len(label) < 12 else 10**12 for label in labels), default=0) + 1)
    return tuple(sorted(set(labels)))


def _normal(label: str) -> str:
    """`007` and `7` are one class; so are ` cat` and `cat`."""
    text = label.strip()
    return text.lstrip("0") or "0" if text.isascii() and text.isdecimal() else text
