"""Images listed in a table: CSV, TSV, and parquet files with paths or with the encoded images themselves.

The columns are `path,label` or, if an image may have several classes, `path,labels`; optionally `split` and
`group`.
"""

import codecs
import csv
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from vitctl.data.datasets.readers.original_files import as_given, file_size, read_bytes
from vitctl.data.images.image_types import IMAGE_SUFFIXES
from vitctl.data.source.splits import JSON_LINES, ROLES, TABLES, table_delimiter
from vitctl.data.writer.intake import Doubt, Item, Originals, keep_doubt
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.files import error_text, open_regular, parse_json, parsing
from vitctl.system.text import one_edit_away, one_line, same_name

# Column names in other programs' tables: Hugging Face's imagefolder, Kaggle, pandas.
_USUAL = {
    "path": (
        "path", "file_name", "filename", "file", "file_path", "filepath", "image_path", "image_name", "image",
        "image_id", "img", "img_path", "id",
    ),
    "label": (
        "label", "class", "class_name", "label_name", "category", "target", "breed", "species", "diagnosis",
    ),
    "labels": ("labels", "tags", "classes"),
    "split": ("split", "subset"),
}  # fmt: skip
_WEAK = ("image_id", "id")  # a number of the row, where a column of files is there too
_NAMES = ("class_name", "label_name")  # of the classes that a column of numbers has too
_NUMBER_TOO = "label beside class_name"
_SPLITTING = ("is_valid", "is_test", "is_train", "fold", "partition", "set")  # of splits, in other forms
_KNOWN = {name for usual in _USUAL.values() for name in usual}
_SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".JPG", ".webp", ".tif", ".bmp")  # omitted in Kaggle's tables
FOLDERS = ("images", "image", "imgs", "img", "train", "data")  # next to a table, with its images
_SHOWN = 5  # folders that a message names
_BETWEEN_LABELS = ";"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?inf", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"(-?\d{1,18})(\.0*)?", re.ASCII)
Row = Mapping[str, Any]


def read_split_tables(tables: Mapping[str, Path], named: str = "") -> dict[str, Originals]:
    """Read one table in each split's folder, the layout of Hugging Face's imagefolder; see `read_table`."""
    folder = next(iter(tables.values())).parent.parent
    return _read_rows(
        folder / "table",
        [
            {**row, "path": os.path.join(table.parent.name, row["path"]), "split": split}
            for split, table in tables.items()
            for row in _searched(table, _table_rows(table, named))
        ],
    )


def read_table(path: Path, named: str = "") -> dict[str, Originals]:
    """Read a list of images with a header line, separated by commas, semicolons or tabs like its header.

    The columns are path, label or labels, and optionally split, or what other programs call them, see
    `_USUAL`; others are ignored. Labels are class names, sorted by code point, or all of them class numbers
    from 0; -1 means no label. The column `labels` may hold several, as in `cat;dog`; then every image of the
    table counts as one that may have several classes. Paths are relative to the table, or as in Kaggle's
    tables to a folder of images next to it, without extension; the path becomes the key. Rows without a split
    belong to `train`. All missing files are reported in one line. `named` says which columns are which, as
    --columns does.
    """
    return _read_rows(path, _table_rows(path, named))


def _table_rows(path: Path, named: str) -> list[Row]:
    rows = list[Row]()
    if path.suffix.lower() in JSON_LINES:
        return _json_rows(path, named)
    with parsing(path, DataError, "cannot be read as a table"):
        text = io.StringIO(read_bytes(path, limits.TABLE).decode("utf-8-sig"), newline="")
        delimiter = table_delimiter(path, text, partial(_is_header, named=named))
        delimiter = delimiter or max(",;\t", key=text.getvalue().partition("\n")[0].count)
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        columns = columns_of(path, reader.fieldnames or [], named)
        reader.fieldnames = list(columns)
        for row in reader:
            filled = [(row.get(name) or "").strip() for name in ("path", *_LABELS) if name in columns]
            if None in row or not all(filled):
                raise DataError(path, f"line {reader.line_num}: should have {len(columns)} filled columns")
            rows.append(row)
    return rows


_LABELS = ("label", "labels")
_ROLES = dict.fromkeys(("image", "path", "file", "id"), "path") | {"label": "label", "class": "label"}
_ROLES |= {"labels": "labels", "split": "split"}  # of --columns


def _json_rows(path: Path, named: str) -> list[Row]:
    """Return the rows of a table with one JSON object a line, which all have the same names."""
    rows, names = list[Row](), list[str]()
    for number, line in enumerate(read_bytes(path, limits.TABLE).splitlines(), 1):
        if not line.strip():
            continue
        found = parse_json(line.removeprefix(codecs.BOM_UTF8), f"{path}: line {number}", error=DataError)
        names = names or (list(found) if isinstance(found, dict) else [])
        if not isinstance(found, dict) or {*found} != {*names}:
            raise DataError(path, f"line {number} should be an object with the names of the first")
        row = dict(zip(columns_of(path, names, named), (found[name] for name in names), strict=True))
        if not row["path"] or row.get("label", row.get("labels")) in (None, "", []):
            raise DataError(path, f"line {number} should have a path and a label")
        rows.append({**row, "path": str(row["path"])})
    return rows


def _is_header(columns: Sequence[str], named: str = "") -> bool:
    """Return whether these are the columns of a table of paths."""
    try:
        return bool(columns_of(Path(), columns, named))
    except DataError:
        return False


def lists_images(path: Path, named: str = "") -> bool:
    """Return whether a file is a CSV or TSV table of images, by its header."""
    if path.suffix.lower() in JSON_LINES:
        with suppress(DataError, OSError):
            with open_regular(path, error=DataError) as file:
                line = file.readline(limits.RECIPE_LINE).removeprefix(codecs.BOM_UTF8)
            found = parse_json(line, path, error=DataError)
            return isinstance(found, dict) and _is_header(list(found), named)
        return False
    if path.suffix.lower() not in TABLES:
        return False
    with suppress(DataError, OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8-sig") as file:
        header = io.StringIO(file.readline(limits.RECIPE_LINE))
        return bool(table_delimiter(path, header, partial(_is_header, named=named)))
    return False


def lists_any(path: Path, named: str) -> bool:
    """Return whether a table of images lists one that is there."""
    with suppress(DataError):
        return any((path.parent / row["path"]).is_file() for row in _found(path, _table_rows(path, named)))
    return True


def names_an_image(path: Path) -> bool:
    """Return whether a cell at the start of a table is the file name of an image."""
    with suppress(OSError), open_regular(path, error=DataError) as file:
        text = file.read(limits.RECIPE_LINE).decode("utf-8", errors="replace")
        cells = {cell.strip(' "') for cell in re.split(r"[,;\t\r\n]", text)}
        return any(cell.lower().endswith(IMAGE_SUFFIXES) for cell in cells)
    return False


def parse_columns(named: str) -> dict[str, str]:
    """Return the names in `image=FILE,label=CLASS` by ours: path, label or labels, split."""
    parts = [part.partition("=") for part in named.split(",") if part.strip()]
    found = {_ROLES.get(role.strip().lower(), ""): name.strip() for role, _, name in parts}
    if "" in {*found, *found.values()} or len(found) < len(parts):
        text = "should be image=COLUMN,label=COLUMN or image=COLUMN,labels=COLUMN"
        raise DataError(f"--columns {named}", text, "split=COLUMN may follow, and each is given once")
    return found


def columns_of(path: Path, columns: Sequence[str], named: str = "") -> list[str]:
    """Return the columns by our names, path, label or labels, and split; others keep their names.

    Raises DataError if paths or labels are missing or ambiguous, or `named` names none.
    """
    plain = [re.sub(r"[\s-]+", "_", name.strip().lower()) for name in columns]
    if len({*plain}) < len(plain):
        raise DataError(path, f"two columns have the same name ({one_line(','.join(columns)[:200])})")
    given, exact = parse_columns(named), [name.strip() for name in columns]
    places = {ours: exact.index(name) for ours, name in given.items() if name in exact}
    if lacking := [name for ours, name in given.items() if ours not in places]:
        text = f"has no column {lacking[0]!r}, which --columns names"
        raise DataError(path, text, f"it has {one_line(', '.join(exact)[:200])}")
    plain = [f"{name} beside --columns" if name in given else name for name in plain]
    for ours, place in places.items():
        plain[place] = ours
    for ours, usual in _USUAL.items():
        if {ours, *(_LABELS if ours in _LABELS else ())} & {*given}:
            continue
        found = [name for name in usual if name in plain]
        found = [name for name in found if name not in _WEAK] or found
        if ours == "label" and len(found) == 2 and (by_name := [name for name in found if name in _NAMES]):
            plain[plain.index(next(name for name in found if name not in by_name))] = _NUMBER_TOO
            found = by_name
        if near := [name for name in plain if one_edit_away(name, [ours]) and name not in _KNOWN]:
            raise DataError(path, f"has a column {near[0]!r}", f"rename it, to {ours} if that is meant")
        if len(found) > 1:
            raise DataError(
                path,
                f"the columns {' and '.join(found)} may be the {ours}",
                "rename the others, or name one with --columns",
            )
        if len(found) == 1:
            plain[plain.index(found[0])] = ours
    if (odd := [name for name in _SPLITTING if name in plain]) and "split" not in plain:
        fix = "make it a column split with train, validation and test, or remove it"
        raise DataError(path, f"has a column {odd[0]!r}", fix)
    labels = [name for name in _LABELS if name in plain]
    if "path" not in plain or len(labels) != 1:
        raise DataError(
            path,
            f"columns are {one_line(','.join(columns)[:200])}, should be path,label or path,label,split",
            "name yours with --columns image=COLUMN,label=COLUMN; labels=COLUMN if images may have several, "
            "with values such as a;b",
        )
    return plain


def plain_folder(name: str) -> str:
    """Return what a folder is called, of `train_images` as of `Train`."""
    return name.lower().removesuffix("_images")


def _beside(path: Path) -> tuple[list[str], list[str]]:
    """Return the folders beside a table: those that are known to hold its images, and those that may.

    Those that are named like another split may not: the names in `train` and `test` are often alike.
    """
    known, names = (plain_folder(path.stem), *FOLDERS), [one.name for one in sorted(path.parent.glob("*/"))]
    others = [one for one in names if one[0] != "." and plain_folder(one) not in (*known, *ROLES)]
    return [one for one in names if plain_folder(one) in known], others


def _searched(path: Path, rows: Sequence[Row]) -> Sequence[Row]:
    """Return `_found`; where that lacks files, those of the only folder of any name that has them all."""
    found = _found(path, rows)
    if (path.parent / found[0]["path"]).is_file():
        return found
    all_in = [one for one in _beside(path)[1] if _are_in(one, path, rows[:1]) and _are_in(one, path, rows)]
    if len(all_in) > 1:
        text = f"its images may be those in {' or '.join(map(one_line, all_in))}"
        raise DataError(path, text, "write the folder that is meant into its paths")
    for folder in all_in:
        say_once(f"{path}: its images are taken from {one_line(folder)}, which has all of them")
    return _found(path, rows, *all_in)


def _are_in(folder: str, path: Path, rows: Sequence[Row]) -> bool:
    names = (row["path"] for row in _found(path, rows, folder))
    return all(name.startswith(folder + os.sep) and (path.parent / name).is_file() for name in names)


def _found(path: Path, rows: Sequence[Row], *others: str) -> Sequence[Row]:
    """Return the rows with actual file paths: a table may omit its image folder and the extension."""
    if not rows:
        raise DataError(path, "lists no images")
    ways = list(product(("", *_beside(path)[0], *others), _SUFFIXES))
    found = []
    for row in rows:
        name = os.path.normpath(row["path"])
        if not (path.parent / name).is_file():
            places = [os.path.join(folder, name + suffix) for folder, suffix in ways]
            there = [place for place in places if (path.parent / place).is_file()]
            if len(there) > 1:
                text = f"{one_line(row['path'])} may be {one_line(there[0])} or {one_line(there[1])}"
                raise DataError(path, text, "write the one that is meant")
            name = there[0] if there else name
        found.append({**row, "path": name})
    tops = {row["path"].partition(os.sep)[0].lower() for row in found}
    if "split" not in rows[0] and len(tops) > 1 and tops <= ROLES.keys():
        return [{**row, "split": row["path"].partition(os.sep)[0]} for row in found]
    return found


def _read_rows(path: Path, rows: Sequence[Row]) -> dict[str, Originals]:
    """Read the images of a table's rows, which all have the same columns."""
    rows = _searched(path, rows)
    sizes = [file_size(path.parent / row["path"]) for row in rows]
    missing = [row["path"] for row, size in zip(rows, sizes, strict=True) if size is None]
    if missing:
        text = f"{len(missing)} of {len(rows)} files are missing, the first is {missing[0]}"
        tried = [one_line(folder) for folders in _beside(path) for folder in folders]
        shown = ", ".join([*tried[:_SHOWN], *["..."] * (len(tried) > _SHOWN)])
        raise DataError(path, text, f"looked beside the table{f' and in {shown}' if tried else ''}")
    if _NUMBER_TOO in rows[0]:
        pairs = {(str(row["label"]), str(row[_NUMBER_TOO])) for row in rows}
        if not len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}):
            text = "its columns of class names and of labels do not agree"
            raise DataError(path, text, "remove the one that is not meant")
        say_once(f"{path}: classes are those of its column of names, in the order of these")
    several = "labels" in rows[0]
    labels = [row["labels" if several else "label"] for row in rows]
    joined = (
        [] if several else [one for one in labels if isinstance(one, list) or _BETWEEN_LABELS in str(one)]
    )
    if joined:
        raise DataError(
            path,
            f"{len(joined):,} of {len(rows):,} values of the column 'label' have a ';', the first "
            f"is {str(joined[0])[:100]!r}: name the column 'labels' if these are several labels, "
            "or remove the ';'",
        )
    names = [
        _label_names(_split_up(label) if several else label, f"{path}: {one_line(row['path'])}")
        for row, label in zip(rows, labels, strict=True)
    ]
    class_names, numbers = _class_names(path, names)
    splits: dict[str, list[Item]] = {}
    for row, given, size in zip(rows, names, sizes, strict=True):
        split = str(row.get("split") or "").strip() or "train"
        read = partial(read_bytes, path.parent / row["path"])
        item = Item(row["path"], _label(given, numbers, several=several), read, size)
        splits.setdefault(ROLES.get(split.lower(), split), []).append(item)
    doubts = _joined(class_names, "" if several else " and name the column 'labels'")
    return {
        split: Originals(items, class_names, str(path), is_user_data=True, doubts=doubts)
        for split, items in splits.items()
    }


@cache
def say_once(text: str) -> None:
    print(as_given(text), file=sys.stderr)


def _joined(class_names: Sequence[str], column: str) -> tuple[Doubt, ...]:
    """Return a doubt if a class name looks like several labels: other classes share its parts."""
    for mark in ",|":
        parts = {name: [part.strip() for part in name.split(mark)] for name in class_names}
        counts = Counter(part for own in parts.values() for part in {*own})
        for name, own in parts.items():
            if len(own) > 1 and any(counts[part] > 1 for part in own):
                text = f"class {name!r} looks like several labels, as other classes have parts of it: if they"
                text += f" are, put ';' for '{mark}'{column}; if it is one class,"
                return (keep_doubt(name, text),)
    return ()


def _label_names(value: Any, where: str) -> tuple[str, ...]:
    """Return an image's label, or a list of them, as text: `007` is `7`. Raises DataError without one."""
    names = []
    for one in value if isinstance(value, list) else [value]:
        text = same_name(str(one).strip())
        if not isinstance(one, str | int | float) or text.lower() in ("", "nan"):
            raise DataError(
                f"{where} has the label {one_line(repr(one)[:100])}", fix="give it a class, or -1 for none"
            )
        names.append(text.lstrip("0") or "0" if text.isascii() and text.isdecimal() else text)
    return tuple(names)


def _split_up(value: Any) -> Any:
    """Return the labels in a text such as `cat;dog` as a list, anything else unchanged."""
    if not isinstance(value, str):
        return value
    return [one for one in value.split(_BETWEEN_LABELS) if one.strip()] or [""]


def _class_names(path: Path, labels: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the classes of a column of labels, and the class number of each label; -1 for none."""
    names = sorted({label for given in labels for label in given} - {"-1"})
    numbers = {name: label for label, name in enumerate(names)}
    if all(map(_NUMBER.fullmatch, names)):
        whole = {name: _WHOLE.fullmatch(name) for name in names}
        numbers = {name: int(match[1]) for name, match in whole.items() if match and int(match[1]) >= -1}
        if odd := [name for name in names if name not in numbers]:
            raise DataError(
                path,
                f"the label {odd[0]} is not a class number, 0 or more, or -1 for none",
                "if it is a name, put a letter in front of all",
            )
        highest = max([0, *numbers.values()])
        if highest >= limits.CLASSES:  # a label of a few digits
            raise DataError(
                f"a label of {highest}: {highest + 1:,} classes, should be at most {limits.CLASSES:,}"
            )
        names = [str(label) for label in range(highest + 1)]
    return tuple(names), numbers | {"-1": -1}


def _label(given: Sequence[str], numbers: Mapping[str, int], *, several: bool) -> int | tuple[int, ...]:
    labels = tuple(dict.fromkeys(numbers[name] for name in given))
    return tuple(label for label in labels if label >= 0) if several else labels[0]


# Parquet in Hugging Face's layout: a column of encoded images, and one of labels, whose names are in the
# file's metadata.

_IMAGE, _LABEL = ("image", "img", "jpg", "png"), ("label", "fine_label", "labels", "cls")
_WITH_WNID = re.compile(r"(.+)_n\d{8}(\.JPEG)")  # ImageNet's names there repeat the class at the end


def read_parquet(files: list[Path], named: str = "") -> dict[str, Originals]:
    """Read images and labels. Files like `train-00000-of-00005.parquet` belong to the split they begin with.

    A column of lists gives every image several labels. A file that has paths instead of images is a table
    like any other. Rows can only be read by the group, so the images are written to a temporary file once,
    from which the shuffle reads. The key is the image's path if all are different, otherwise its number.
    """
    schema = open_parquet(files[0]).schema_arrow if len(files) == 1 else []
    names = [field.name for field in schema]
    image = parse_columns(named).get("path") or next(
        (one for one in names if one.strip().lower() == "path"), ""
    )
    if str(next((one.type for one in schema if one.name == image), "")).endswith("string") and _is_header(
        names, named
    ):
        return _read_rows(files[0], _parquet_rows(files[0], named))
    words = {path: re.split(r"[-_.]", path.name)[0].lower() for path in sorted(files)}
    others = [path for path, word in words.items() if word not in ROLES]
    if others and len(others) < len(words):
        raise DataError(
            others[0], "its name begins with no split, such as train or test", "rename or move it"
        )
    splits: dict[str, list[Path]] = {}
    for path, word in words.items():
        splits.setdefault(ROLES.get(word, "train"), []).append(path)
    return _read_images(splits, parse_columns(named))


def _parquet_rows(path: Path, named: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for cells in parquet_dicts(path, open_parquet(path), batch_size=1024):
        row = dict(zip(columns_of(path, [*cells], named), cells.values(), strict=True))
        if not row["path"] or row.get("label", row.get("labels")) in (None, []):
            raise DataError(path, "should have a path and a label in every row")
        rows.append({**row, "path": str(row["path"])})
        num_bytes += sum(len(str(value)) for value in row.values())
        if num_bytes > limits.TABLE:  # dictionary encoding can expand enormously
            raise DataError(path, f"holds more bytes of text than {limits.TABLE:,}")
    return rows


def _read_images(splits: Mapping[str, Sequence[Path]], chosen: Mapping[str, str]) -> dict[str, Originals]:
    """Read parquet files of images by split; the splits share their classes."""
    spool, first = _Spool(), next(iter(splits.values()))[0]
    stored_names = dict[tuple[str, ...], Path]()
    rows = {split: list[tuple[str, tuple[str, ...], bool, int, int]]() for split in splits}
    for split, path in ((split, path) for split, paths in splits.items() for path in paths):
        table = open_parquet(path)
        image, label = _image_and_label(path, table.schema_arrow.names, chosen)
        stored_names.setdefault(_names_in_metadata(table.schema_arrow.metadata or {}, label), path)
        if len(stored_names) > 1:
            raise DataError(path, f"its class names are not those of {first.name}")
        for row in parquet_dicts(path, table, batch_size=64, columns=[image, label]):
            stored, number = row[image], row[label]
            data, name = (
                (stored.get("bytes"), stored.get("path")) if isinstance(stored, dict) else (stored, "")
            )
            if not isinstance(data, bytes):
                raise DataError(path, "every row should hold an encoded image")
            key = _WITH_WNID.sub(r"\1\2", name or "")
            given = _label_names(number, f"{path}: image {one_line(key) or len(rows[split])}")
            rows[split].append((key, given, isinstance(number, list), spool.size, len(data)))
            spool.append(data)
    class_names = next(iter(stored_names))
    numbers = {str(label): label for label in range(-1, len(class_names))}
    if not class_names:
        class_names, numbers = _class_names(first, (given for own in rows.values() for _, given, *_ in own))
    found = {}
    for split, own in rows.items():
        are_unique, items = len({key for key, *_ in own}) == len(own), list[Item]()
        for number, (key, given, several, offset, size) in enumerate(own):
            key = key if are_unique else str(number)
            if odd := [label for label in given if label not in numbers]:
                raise DataError(
                    first.parent,
                    f"image {one_line(key)} has label {one_line(odd[0])}, should be -1 to "
                    f"{len(class_names) - 1}",
                )
            wanted = _label(given, numbers, several=several)
            items.append(Item(key, wanted, partial(spool.read, offset, size), size))
        found[split] = Originals(items, class_names, str(first.parent), is_user_data=True)
    return found


def _image_and_label(path: Path, columns: list[str], given: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of the columns with the images and with the labels."""
    chosen = []
    named = given.get("path"), given.get("label", given.get("labels"))
    for what, usual, one in (("an image", _IMAGE, named[0]), ("a label", _LABEL, named[1])):
        names = [one] if one else [*usual]
        name = next((name for name in names if name in columns), None)
        if name is None:
            raise DataError(
                path, f"lacks a column with {what} ({', '.join(names)}); found: {', '.join(columns)}"
            )
        chosen.append(name)
    return chosen[0], chosen[1]


def _names_in_metadata(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    """Return the class names stored by Hugging Face's library; empty if there are none."""
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        names = feature["names"] if "names" in feature else feature["feature"]["names"]
        return tuple(same_name(str(name)) for name in names)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return ()


def need_pyarrow(path: Path) -> Any:
    """Return pyarrow. Raises DataError if it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(
            path, "parquet needs pyarrow", "install it with `pip install 'vitctl[data]'`"
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
        raise DataError(path, f"not a complete parquet file ({error_text(error)})") from None
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > limits.TABLE + path.stat().st_size:
        raise DataError(path, f"a row group of {largest:,} bytes, should be at most {limits.TABLE:,}")
    return file


def parquet_dicts(path: Path, table: Any, **how: Any) -> Iterator[dict[str, Any]]:
    """Yield a file's rows. Damaged pages show only here, as errors of pyarrow or of the system."""
    try:
        with parsing(path, DataError, "damaged parquet file"):
            for batch in table.iter_batches(**how):
                yield from batch.to_pylist()
    except (OSError, MemoryError) as error:
        raise DataError(path, f"damaged parquet file ({error_text(error)})") from None


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
