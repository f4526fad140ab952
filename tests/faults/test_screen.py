"""A screen that is closed, full or broken ends no run and changes neither its numbers nor its exit code."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import warm
from tests.conftest import paced
from tests.faults.conftest import (
    ENVIRONMENT,
    assert_same,
    command,
    prepared,
    records,
    resume,
    status,
    warnings,
)
from tests.matrix import slow
from vitctl.cli.show.render import Screen
from vitctl.engine.journal import append_record, never_raising, read_records
from vitctl.launch.launcher import Follower
from vitctl.launch.worker import work
from vitctl.system.screen import TolerantStream, ignore_output_errors, raise_output_error, restore_output

SHOWN = "progress cannot be shown any more"


def test_head__ends_no_run(tiny_data: Path, straight: Path, tmp_path: Path) -> None:
    """Standard output is a pipe that closes after five lines, standard error is full from the start."""
    folder = tmp_path / "run"
    with (
        open("/dev/full", "w") as full,
        warm.Popen(
            command(folder, tiny_data), stdout=subprocess.PIPE, stderr=full, text=True, env=ENVIRONMENT
        ) as process,
    ):
        assert process.stdout is not None
        first = [process.stdout.readline().split()[0] for _ in range(5)]
        assert first == ["pretrain:", "checking", "trained", "run", "reading"]
        process.stdout.close()
        assert process.wait(60) == 0
    assert status(folder) == "done"
    assert [text for text in warnings(folder) if SHOWN in text] == [
        f"{SHOWN} (Broken pipe); the run continues"
    ]
    assert_same(folder, straight)


def on_a_terminal(line: list[str], *, ignoring: bool, **variables: str) -> tuple[warm.Popen, int]:
    """A command with a terminal of its own; the terminal's other end."""
    ours, theirs = os.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignoring else signal.SIG_DFL)
    process = warm.Popen(
        line,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**ENVIRONMENT, **variables},
    )
    signal.signal(signal.SIGHUP, before)
    os.close(theirs)
    return process, ours


def test_terminal__progress_is_drawn_and_its_codes_are_not_shown(tiny_data: Path, tmp_path: Path) -> None:
    """Codes of the live view stood there as text, where it takes the place of standard output."""
    line = command(tmp_path / "run", tiny_data)
    process, ours = on_a_terminal(line, ignoring=False, TERM="xterm-256color", COLUMNS="80")
    shown = b""
    with suppress(OSError):  # the terminal is closed at the end
        while piece := os.read(ours, 65536):
            shown += piece
    assert process.wait(60) == 0
    os.close(ours)
    assert b"\x1b[2K" in shown and b"step 12/12" in shown
    assert b"\\x1b" not in shown and b"\\x0d" not in shown


@pytest.mark.parametrize("ignoring", [False, *slow(True)], ids=["saves and ends", "nohup continues"])
def test_closed_terminal(tiny_data: Path, straight: Path, tmp_path: Path, ignoring: bool) -> None:
    folder = tmp_path / "run"
    process, ours = on_a_terminal(paced(command(folder, tiny_data)), ignoring=ignoring)
    until = time.monotonic() + 60
    os.set_blocking(ours, False)
    while not records(folder, "train") and time.monotonic() < until:
        try:
            os.read(ours, 65536)  # a terminal that nobody reads would be full
        except BlockingIOError:
            time.sleep(0.002)
    os.close(ours)
    code = process.wait(60)
    if not ignoring and code == 3:  # the last step may be done before the signal is there
        assert status(folder) == "stopped"
        resume(folder)
    else:
        assert code == 0
    assert status(folder) == "done"
    assert_same(folder, straight)


class Broken(io.StringIO):
    """A terminal that refuses every write."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error

    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_run__a_report_that_fails_is_logged_once_and_ends_nothing(
    tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    def report(_: Any) -> None:
        raise KeyError("a bug")

    folder = prepared(tmp_path / "run", tiny_data)
    assert work(folder, report)["status"] == "done"
    assert [text for text in warnings(folder) if SHOWN in text] == [
        f"{SHOWN} (KeyError: 'a bug'); the run continues"
    ]
    assert_same(folder, straight)


def test_screen__of_a_broken_terminal_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the view that a thread redraws, and its end."""
    monkeypatch.setattr(sys, "stdout", Broken(OSError(5, "Input/output error")))
    ignore_output_errors()
    try:
        with Screen(tmp_path, Console(force_terminal=True)) as screen:
            report = never_raising(screen.report, tmp_path / "log.jsonl")
            for step in (1, 2):
                report({"kind": "warning", "step": step, "text": "said"})
            time.sleep(1.2)  # the view is redrawn every second
        raise_output_error()  # it was reported already
    finally:
        restore_output()
    assert [record["text"] for record in read_records(tmp_path / "log.jsonl")] == [
        f"{SHOWN} (Input/output error); the run continues"
    ]


@pytest.mark.parametrize(
    "error", [OSError(28, "full"), BrokenPipeError(32, "pipe"), ValueError("closed file")]
)
def test_tolerant_stream__never_fails(error: Exception) -> None:
    stream = TolerantStream(Broken(error))
    stream.write("a")
    stream.writelines(["a", "b"])
    print("a", file=stream, flush=True)
    assert stream.first_error is (error if isinstance(error, OSError) else None)


def test_follower__foreign_lines_and_a_folder_in_place_of_the_log_end_nothing(tmp_path: Path) -> None:
    seen: list[Any] = []
    follower = Follower(tmp_path / "log.jsonl", seen.append, tmp_path / "now.json")
    (tmp_path / "log.jsonl").mkdir()
    (tmp_path / "now.json").write_text("[1]")
    follower.poll()
    (tmp_path / "log.jsonl").rmdir()
    (tmp_path / "log.jsonl").write_text("5\n")
    follower.poll()
    append_record(tmp_path / "log.jsonl", {"kind": "train", "time": time.time()})
    follower.poll()
    assert [record["kind"] for record in seen] == ["train"]


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", *slow("1")])
def test_full__a_disk_that_takes_a_part_of_a_text_is_an_error(unbuffered: str, tmp_path: Path) -> None:
    """With PYTHONUNBUFFERED Python silently drops the rest of a short write; a limit of the file size causes
    one.
    """
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); sys.argv = ['vitctl', 'recipes', 'list']; "
        "from vitctl.cli.app import main; main()"
    )
    with (tmp_path / "out.txt").open("wb") as out:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.returncode == 2
    assert "standard output: file too large" in done.stderr
