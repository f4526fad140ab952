"""Exit codes, and errors of one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.conftest import TINY
from tests.matrix import slow
from vitctl import __version__
from vitctl.jobs import pretrain as jobs


def test_version(vitctl: Vitctl) -> None:
    said = vitctl("--version")
    assert (said.code, said.out) == (0, f"vitctl {__version__}\n")


def test_a_bug__is_not_hidden(vitctl: Vitctl, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(jobs, "pretrain", broken)
    said = vitctl("pretrain", "--recipe", TINY, "--data", tiny_data)
    assert said.code == 1
    *traced, last = said.err.splitlines()
    assert traced[0].startswith("Traceback") and traced[-1] == "ZeroDivisionError: a bug"
    assert last.startswith(
        "vitctl: this is a bug of vitctl (ZeroDivisionError); please report the lines above"
    )


def test_a_removed_working_folder__is_one_line(tmp_path: Path) -> None:
    """Libraries end in it without a word."""
    (tmp_path / "gone").mkdir()
    run = f'cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && "{sys.executable}" -m vitctl doctor'
    done = subprocess.run(["sh", "-c", run], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "vitctl: the working folder was removed; go to another one with cd\n",
    )


def test_an_interrupt__is_a_stop(vitctl: Vitctl, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "pretrain", interrupted)
    said = vitctl("pretrain", "--recipe", TINY, "--data", tiny_data)
    assert (said.code, said.err) == (3, "vitctl: stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("recipes", "list"), *slow((("recipes", "explain", "schedule.lanes"),), (("runs", "--in", "."),))],
)
def test_a_closed_pipe__ends_with_0_whatever_prints(words: tuple[str, ...], tmp_path: Path) -> None:
    """Rich and Click would end with 1; nobody reads a byte here, so that the first line already finds the
    pipe closed.
    """
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "vitctl", *words]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
