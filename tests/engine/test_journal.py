"""Records are whole lines, and none is lost to a crash but the torn one."""

import hashlib
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitctl.engine import journal
from vitctl.engine.journal import (
    Journal,
    append_record,
    begins,
    cut_after,
    end_of,
    never_raising,
    parse_records,
    read_records,
    read_run_json,
    write_run_json,
)


def test_journal__writes_and_reports(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    writer = Journal(tmp_path / "log.jsonl", seen.append)
    writer.write("train", step=1, loss=0.5)
    writer.write("evaluate", step=1, text="größer\nals")
    assert read_records(tmp_path / "log.jsonl") == seen
    assert [(r["kind"], r["step"]) for r in seen] == [("train", 1), ("evaluate", 1)]
    assert seen[0]["time"] > 1e9
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2


def test_journal__of_the_other_processes_is_silent(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    Journal(None, seen.append).write("train", step=1)
    assert seen == []
    assert list(tmp_path.iterdir()) == []


def test_read_lines__leaves_out_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_record(path, {"step": 1})
    path.write_text(path.read_text() + '{"step": 2, "lo')
    assert read_records(path) == [{"step": 1}]
    assert read_records(tmp_path / "none") == []
    assert parse_records('{"a": 1}\n\n{"b"\n{"c": 2}\n') == [{"a": 1}, {"c": 2}]


def test_journal__a_torn_line_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    Journal(path).write("resume", step=1)
    assert [r.get("kind", "old") for r in read_records(path)] == ["old", "resume"]


def test_cut_after__drops_later_steps_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for step in (0, 5, 10, 15):
        append_record(path, {"step": step, "text": "ü"})
    append_record(path, {"kind": "without a step"})
    path.write_text(path.read_text() + '{"st')
    cut_after(path, 10)
    assert [r.get("step") for r in read_records(path)] == [0, 5, 10, None]
    assert path.read_text().endswith('}\n{"st\n')  # a checkpoint may be saved with it
    cut_after(tmp_path / "none", 3)
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_write_json__old_or_new_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_run_json(path, {"a": 1})

    def crash(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(journal.os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        write_run_json(path, {"a": 2})
    assert '"a": 1' in path.read_text()


def written(path: Path, count: int = 6) -> Path:
    for step in range(1, count + 1):
        append_record(path, {"kind": "train", "step": step, "loss": step / 3})
    return path


def test_end__is_the_digest_that_anyone_can_compute_and_is_found_in_a_file_that_grew(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    content, end = path.read_bytes(), end_of(path)
    assert end == f"{len(content)}:{hashlib.sha256(content).hexdigest()}"
    path.write_bytes(content + b'{"kind": "train", "st')  # a crash
    append_record(path, {"kind": "train", "step": 7})
    later = end_of(path)
    append_record(path, {"kind": "train", "step": 8})
    cut_after(path, 7)
    assert begins(path, end) and begins(path, later)
    cut_after(path, 6)
    assert begins(path, end) and not begins(path, later)
    assert (end_of(tmp_path / "none"), begins(tmp_path / "none", end)) == ("", False)


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "edited": lambda lines: [*lines[:2], lines[2].replace(b"1.0", b"0.9"), *lines[3:]],
    "removed": lambda lines: [*lines[:2], *lines[3:]],
    "swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "repeated": lambda lines: [*lines[:3], lines[2], *lines[3:]],
    "inserted": lambda lines: [*lines[:3], b'{"kind": "train", "step": 9}', *lines[3:]],
    "cut": lambda lines: lines[:-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_end__is_not_that_of_a_changed_file(tmp_path: Path, change: str) -> None:
    path = written(tmp_path / "log.jsonl")
    end = end_of(path)
    assert begins(path, end)
    assert begins(path, "0" * 64)  # of an earlier release: nothing is known
    path.write_bytes(b"\n".join(CHANGES[change](path.read_bytes().splitlines())) + b"\n")
    assert not begins(path, end)


def test_writers__of_several_threads_leave_whole_lines(tmp_path: Path) -> None:
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
    assert len(read_records(path)) == len(path.read_bytes().splitlines()) == 101


def test_append_line__of_a_full_disk_is_no_record_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "log.jsonl", journal.os.write
    append_record(path, {"step": 1})
    with monkeypatch.context() as full:
        full.setattr(journal.os, "write", lambda descriptor, line: write(descriptor, line[:5]))
        with pytest.raises(OSError, match="No space left"):
            append_record(path, {"step": 2})
    append_record(path, {"step": 3})
    assert [r["step"] for r in read_records(path)] == [1, 3]


@pytest.mark.parametrize("most", [20_000, 2])
def test_journal__goes_on_without_a_log_and_writes_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Beyond a bound the oldest are lost, and counted."""
    monkeypatch.setattr(journal, "MOST_HELD", most)
    seen: list[dict[str, Any]] = []
    folder = tmp_path / "run"
    writer = Journal(folder / "log.jsonl", seen.append)
    writer.write("train", step=1)
    (folder / "log.jsonl").unlink()
    folder.rmdir()
    folder.write_text("in the way")
    for step in (2, 3):
        writer.write("train", step=step)
    warnings = [r["text"] for r in seen if r["kind"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{folder / 'log.jsonl'}: cannot be written (")
    folder.unlink()
    writer.write("train", step=4)
    lines = read_records(folder / "log.jsonl")
    if most > 2:
        assert [(r["kind"], r["step"]) for r in lines] == [("train", 2), ("train", 3), ("train", 4)]
        return
    assert [(r["kind"], r["step"]) for r in lines] == [("train", 3), ("train", 4), ("warning", 4)]
    assert "lost 1 record before this one, which could not be written" in lines[-1]["text"]


def test_watch__hands_everything_on_and_tells_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    batches, seen = [[1, 2], [3, 4], [5, 6], [7, 8]], list[dict[str, Any]]()
    writer = Journal(tmp_path / "log.jsonl", seen.append)
    handed = []
    for batch, then in zip(writer.watch(batches, "scoring", 15, 2), (4.0, 6.0, 6.5, 20.0), strict=True):
        handed.append(batch)
        now[0] = then
    assert handed == batches
    # after 4 images too soon, after 8 due, after 12 too soon, after 16 all are through
    [told] = read_records(tmp_path / "log.jsonl")
    assert (told["kind"], told["what"], told["done"], told["total"]) == ("progress", "scoring", 8, 15)
    assert [record["done"] for record in seen if record["kind"] == "now"] == [4, 8, 15]


def test_show_progress__at_most_once_a_second_and_never_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    seen: list[dict[str, Any]] = []
    writer = Journal(tmp_path / "log.jsonl", seen.append)
    for tenth in range(25):
        now[0] = 100 + tenth / 10
        writer.show_progress(step=tenth)
    writer.show_progress(at_once=True, text="compiling")
    assert [record.get("step", record.get("text")) for record in seen] == [0, 10, 20, "compiling"]
    assert {record["kind"] for record in seen} == {"now"}
    assert not (tmp_path / "log.jsonl").exists()
    Journal(None, seen.append).show_progress(step=1)
    assert len(seen) == 4


def test_json__has_no_bare_nan_and_gives_the_numbers_back(tmp_path: Path) -> None:
    """Any reader of JSON takes it; Python's own writes names that only Python reads."""
    numbers = [math.nan, math.inf, -math.inf, np.float64("nan"), 1.5, "text", None, True]
    write_run_json(tmp_path / "a.json", {"deep": [{"loss": number} for number in numbers]})
    append_record(tmp_path / "log.jsonl", {"step": 1, "loss": math.nan, "several": (math.inf, 1)})
    cut_after(tmp_path / "log.jsonl", 1)

    def strict(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=strict)
    assert [item["loss"] for item in found["deep"]] == [
        "NaN", "Infinity", "-Infinity", "NaN", 1.5, "text", None, True
    ]  # fmt: skip
    assert repr([item["loss"] for item in read_run_json(tmp_path / "a.json")["deep"]]) == (
        "[nan, inf, -inf, nan, 1.5, 'text', None, True]"
    )
    json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=strict)
    assert repr(read_records(tmp_path / "log.jsonl")) == "[{'step': 1, 'loss': nan, 'several': [inf, 1]}]"
    assert repr(parse_records('{"loss": NaN}')) == "[{'loss': nan}]"  # of an older vitctl


def test_read_lines__passes_over_what_others_wrote(tmp_path: Path) -> None:
    """`resume` ended with a traceback at each of these."""
    path = tmp_path / "log.jsonl"
    foreign = [
        json.dumps({"kind": "train", "step": 10**400}),
        "5",
        "[1]",
        "null",
        '"text"',
        '{"step": "x"}',
        '{"kind": 7}',
        "[" * 5000,
        "\x00",
        '{"step": null}',
        "1e999",
    ]
    path.write_text(
        "\n".join([json.dumps({"kind": "a", "step": 1}), *foreign, json.dumps({"kind": "b", "step": 9})])
        + "\n"
    )
    assert [r["kind"] for r in read_records(path)] == ["a", "b"]
    cut_after(path, 5)
    assert [r["kind"] for r in read_records(path)] == ["a"]
    path.write_bytes(b'{"kind": "long", "x": "' + b"x" * 2**24 + b'"}\n{"kind": "c"}\n')
    assert [r["kind"] for r in read_records(path)] == ["c"]


def test_append_line__of_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_record(path, {"key": "a\udcff", "step": 1})
    append_record(path, {"key": "b", "step": 2})
    assert [r["key"] for r in read_records(path)] == ["a\udcff", "b"]
    cut_after(path, 1)
    assert [r["key"] for r in read_records(path)] == ["a\udcff"]


def test_append_line__beside_a_line_that_another_process_is_still_writing_leaves_no_empty_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bad_samples.jsonl"
    path.write_text('{"step": 1')

    def end_it() -> None:
        with path.open("a") as file:
            file.write("}\n")

    other = threading.Timer(0.03, end_it)
    other.start()
    append_record(path, {"step": 2})
    other.join()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
