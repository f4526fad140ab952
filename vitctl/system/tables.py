"""CSV files, safe to open in a spreadsheet and to print in a terminal."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitctl.system.files import write_text
from vitctl.system.text import csv_cell, printable

RAW_CSV = "VITCTL_CSV_AS_IT_IS"


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> Path:
    """Write a table atomically, in UTF-8 with Unix line ends.

    Text that a spreadsheet would read as a formula gets a leading quote, and control characters become
    escapes. VITCTL_CSV_AS_IT_IS=1 writes every cell unchanged, for programs.

    Args:
        path: of the file.
        rows: the first is the header.
    """
    return write_text(path, csv_text(rows))


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return the lines of a table as `write_csv` writes them."""
    safe = os.environ.get(RAW_CSV, "") in ("", "0")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [_safe(cell) if safe else cell for cell in row] for row in rows
    )
    return text.getvalue()


def _safe(cell: object) -> object:
    return csv_cell(printable(cell)) if isinstance(cell, str) else cell
