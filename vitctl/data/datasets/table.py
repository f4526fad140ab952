"""Images listed in a CSV or TSV file: `path,label` or `path,label,split`."""

import csv
from functools import partial
from pathlib import Path

from vitctl.data.datasets.class_folder import SPLITS
from vitctl.data.shards import Item, Originals
from vitctl.errors import DataError

_COLUMNS = ({"path", "label"}, {"path", "label", "split"})


def read_table(path: Path) -> dict[str, Originals]:
    """Read a list of images with its header line; `.tsv` files are split at tabs, others at commas.

    Labels are class names, sorted by code point, or all of them class numbers from 0. Paths are relative to the
    table; the path becomes the key. Rows without a split belong to `train`.

    Raises:
        DataError: columns, files or labels are wrong; one line for all missing files.
    """
    rows = _rows(path)
    missing = [row["path"] for row in rows if not (path.parent / row["path"]).is_file()]
    if missing:
        raise DataError(f"{path}: {len(missing)} of {len(rows)} files are missing, the first is {missing[0]}")
    class_names = _class_names([row["label"] for row in rows])
    numbers = {name: label for label, name in enumerate(class_names)}
    splits: dict[str, list[Item]] = {}
    for row in rows:
        split = row.get("split") or "train"
        read = partial(Path.read_bytes, path.parent / row["path"])
        item = Item(row["path"], numbers[_normal(row["label"])], read)
        splits.setdefault(SPLITS.get(split.lower(), split), []).append(item)
    return {split: Originals(items, class_names, str(path)) for split, items in splits.items()}


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            columns = reader.fieldnames or []
            if set(columns) not in _COLUMNS:
                raise DataError(f"{path}: columns are {','.join(columns)}, should be path,label or path,label,split")
            rows = []
            for row in reader:
                if None in row or not all(row.get(name) for name in ("path", "label")):
                    raise DataError(f"{path}: line {reader.line_num}: should have {len(columns)} filled columns")
                rows.append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from None
    if not rows:
        raise DataError(f"{path}: lists no images")
    return rows


def _class_names(labels: list[str]) -> tuple[str, ...]:
    if all(label.strip().isascii() and label.strip().isdecimal() for label in labels):
        return tuple(str(label) for label in range(max(map(int, labels)) + 1))
    return tuple(sorted({_normal(label) for label in labels}))


def _normal(label: str) -> str:
    """`007` and `7` are one class; so are ` cat` and `cat`."""
    text = label.strip()
    return str(int(text)) if text.isascii() and text.isdecimal() else text
