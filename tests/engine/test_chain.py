"""Chained lines: a changed, removed or added line is found; what a crash left is not taken for one."""

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from vitctl.engine.journal import (
    Journal,
    append_record,
    cut_after,
    head,
    never_raising,
    read_chain,
    read_records,
)


def written(path: Path, count: int = 6) -> Path:
    for step in range(1, count + 1):
        append_record(path, {"kind": "train", "step": step, "loss": step / 3})
    return path


def recomputed(path: Path) -> str:
    """The digest of the last line, computed by hand from the documented rule."""
    before = ""
    for line in path.read_bytes().splitlines():
        body, _, rest = line.rpartition(b', "sha256": "')
        before = hashlib.sha256(before.encode() + body + b"}").hexdigest()
        assert rest.decode() == before + '"}'
    return before


@pytest.mark.parametrize("name", ["log.jsonl", "steps.jsonl"])
def test_lines__are_chained_by_a_rule_that_anyone_can_compute(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name)
    assert recomputed(path) == head(path) == read_chain(path).links[-1]
    assert (read_chain(path).broken_at, read_chain(path).num_torn, len(read_chain(path).links)) == (0, 0, 6)
    assert read_records(path) == [{"kind": "train", "step": step, "loss": step / 3} for step in range(1, 7)]


def test_lines__of_other_files_are_not(tmp_path: Path) -> None:
    assert (
        written(tmp_path / "bad_samples.jsonl", 1).read_text()
        == '{"kind": "train", "step": 1, "loss": ' + f"{1 / 3}}}\n"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b"1.0", b"0.9"), *lines[3:]], 3),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
        (lambda lines: [*lines[:3], b'{"kind": "train", "step": 9}', *lines[3:]], 4),
    ],
    ids=["edited", "removed", "swapped", "repeated", "inserted"],
)
def test_chain__names_the_line_that_does_not_follow(tmp_path: Path, change: Any, line: int) -> None:
    path = written(tmp_path / "log.jsonl")
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())) + b"\n")
    assert read_chain(path).broken_at == line


def test_chain__continues_after_a_torn_line_and_zeros(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", 3)
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')
    append_record(path, {"step": 4})
    path.write_bytes(path.read_bytes() + bytes(20_000))
    append_record(path, {"step": 5})
    found = read_chain(path)
    assert (found.broken_at, found.num_torn, len(found.links)) == (0, 2, 5)
    assert [record["step"] for record in read_records(path)] == [1, 2, 3, 4, 5]


def test_cut_after__links_anew_from_the_first_dropped_record_only(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", 4)
    append_record(path, {"kind": "warning", "step": 0, "text": "ü"})
    before = path.read_bytes().splitlines()
    cut_after(path, 2)
    after = path.read_bytes().splitlines()
    assert after[:2] == before[:2]
    assert [record["step"] for record in read_records(path)] == [1, 2, 0]
    assert read_chain(path).broken_at == 0
    assert recomputed(path) == head(path)


@pytest.mark.parametrize("edited", [1, 4])
def test_cut_after__does_not_hide_that_a_line_was_changed(tmp_path: Path, edited: int) -> None:
    path = written(tmp_path / "log.jsonl", 4)
    append_record(path, {"kind": "warning", "step": 0, "text": "one"})
    lines = path.read_bytes().splitlines()
    lines[edited] = lines[edited].replace(b'"loss"', b'"lass"').replace(b"one", b"two")
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert read_chain(path).broken_at == edited + 1
    cut_after(path, 3)
    assert read_chain(path).broken_at > 0


def test_writers__of_several_threads_make_one_chain(tmp_path: Path) -> None:
    """The journal, the thread that saves, and a report that failed append to one log."""
    path = tmp_path / "log.jsonl"
    journals = [Journal(path) for _ in range(4)]

    def write(journal: Journal, number: int) -> None:
        for step in range(25):
            journal.write("train", step=step, text=f"{number}")

    threads = [threading.Thread(target=write, args=(journal, n)) for n, journal in enumerate(journals)]
    for thread in threads:
        thread.start()

    def fails(_: Any) -> None:
        raise OSError("no")

    never_raising(fails, path)({"step": 3})
    for thread in threads:
        thread.join()
    found = read_chain(path)
    assert (len(found.links), found.broken_at, found.num_torn) == (101, 0, 0)
    assert all(isinstance(json.loads(line), dict) for line in path.read_bytes().splitlines())
