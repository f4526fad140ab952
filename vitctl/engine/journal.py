"""log.jsonl and its sisters: one line per record, whole lines only, cut back to the checkpoint on resume."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG = "log.jsonl"

Record = dict[str, Any]
Report = Callable[[Record], None]


def silent(_record: Record) -> None:
    """A report that nobody reads."""


def write_json(path: Path, value: Any) -> None:
    """Write aside, flush to disk, rename: a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def append_line(path: Path, record: Record) -> None:
    """Append one record in a single write, so that processes may share a file."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[Record]:
    """All whole records; a line torn by a crash is left out."""
    return parse_lines(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []


def parse_lines(text: str) -> list[Record]:
    """The records of the lines of `text` that are whole."""
    records = []
    for line in text.split("\n"):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def cut_after(path: Path, step: int) -> None:
    """Drop the records of steps later than `step`: the resumed run writes them again."""
    if path.exists():
        kept = [record for record in read_lines(path) if record.get("step", 0) <= step]
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), encoding="utf-8")
        aside.replace(path)


def _end_torn_line(path: Path) -> None:
    """A line torn by a crash must not swallow the next record."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


class Journal:
    """Writes records to a run's log.jsonl and hands them to whoever shows progress.

    Args:
        path: of log.jsonl; None writes nothing (all processes but the first).
        report: called with every record.
    """

    def __init__(self, path: Path | None, report: Report = silent) -> None:
        self.path = path
        self.report = report
        if path is not None:
            _end_torn_line(path)

    def write(self, kind: str, **values: Any) -> None:
        """One record; `kind` says what it is, `time` is added (seconds since 1970)."""
        record = {"kind": kind, **values, "time": round(time.time(), 3)}
        if self.path is not None:
            append_line(self.path, record)
            self.report(record)
