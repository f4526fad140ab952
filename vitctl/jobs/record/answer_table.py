"""The answers of an evaluation: a row for each image, as .csv or .parquet."""

import csv
import hashlib
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitctl.data.datasets.readers.table import need_pyarrow, open_parquet, parquet_dicts
from vitctl.errors import CheckpointError, DataError, refuse
from vitctl.system import limits
from vitctl.system.files import atomic_write, parsing, read_bytes, write_csv
from vitctl.system.text import csv_cell, printable

_TEXTS = ("path", "truth", "answer")
COLUMNS = (*_TEXTS, "probability", "margin", "truth_probability")
PARQUET = ".parquet"
SUSPECTS = "suspects.csv"  # in the folder of an evaluation


def check_place(path: Path) -> list[str]:
    """Refuse a path that cannot be written to or would replace another file; warn about earlier answers."""
    refuse(
        DataError,
        (
            not path.parent.is_dir(),
            path,
            f"the folder {path.parent} does not exist",
            "create it, or name another",
        ),
        (
            os.path.lexists(path) and not path.is_file(),
            path,
            "is not a regular file",
            "give the name of a .csv or .parquet file",
        ),
    )
    if path.suffix == PARQUET:
        need_pyarrow(path)
    if not path.is_file():
        return []
    if path.suffix == PARQUET:
        names = open_parquet(path).schema_arrow.names
    else:
        with path.open(errors="replace") as old:
            names = old.readline(200).strip().split(",")
    if tuple(names) != COLUMNS:
        raise DataError(path, "is not a file of answers, and is not replaced", "give another name")
    return [f"{path}: the answers of an earlier evaluation are replaced"]


def write_answers(path: Path, rows: Sequence[Sequence[object]]) -> str:
    """Write rows of COLUMNS atomically, in the suffix's format; None is a missing number. Return a digest."""
    with atomic_write(path) as aside:
        if path.suffix == PARQUET:
            _write_parquet(aside, rows)
        else:
            write_csv(aside, [COLUMNS, *rows])
        return answers_digest(aside)


def _write_parquet(path: Path, rows: Sequence[Sequence[object]]) -> None:
    pyarrow = need_pyarrow(path)
    kinds = [pyarrow.string() if name in _TEXTS else pyarrow.float64() for name in COLUMNS]
    texts = [[printable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    table = pyarrow.table(
        dict(zip(COLUMNS, zip(*texts, strict=True), strict=True)),
        schema=pyarrow.schema([*zip(COLUMNS, kinds, strict=True)]),
    )
    pyarrow.parquet.write_table(table, path)


def answers_digest(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, limits.TABLE, error=CheckpointError)).hexdigest()


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Return the rows. Raises CheckpointError or DataError."""
    with parsing(path, CheckpointError, "not a file of answers of `vitctl evaluate --answers`"):
        if path.suffix == PARQUET:
            return [{name: row[name] for name in COLUMNS} for row in parquet_dicts(path, open_parquet(path))]
        text = read_bytes(path, limits.TABLE, error=CheckpointError).decode(errors="replace")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return [
            {
                name: row[name] if name in _TEXTS else float(row[name]) if row[name] else None
                for name in COLUMNS
            }
            for row in rows
        ]


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether the answer of a row is one of its true classes."""
    answer = _bare(row["answer"])  # earlier releases did not write \;
    return not {answer, answer.replace(r"\;", ";")}.isdisjoint(_classes(_bare(row["truth"] or "")))


def joined(classes: Iterable[str]) -> str:
    """Return class names as one cell: ; between them, and \\; for the ; of a name."""
    return ";".join(name.replace(";", r"\;") for name in classes)


def _classes(cell: str) -> list[str]:
    return [name.replace(r"\;", ";") for name in re.split(r"(?<!\\);", cell)]


def _bare(cell: str) -> str:
    """Return a cell without the quote that `csv_cell` puts before a formula."""
    return cell[1:] if csv_cell(cell[1:]) == cell else cell
