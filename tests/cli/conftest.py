"""The command line in this process: its words, its exit code, a folder of its own."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vitctl.cli.app import main
from vitctl.cli.show.console import CONSOLE


@dataclass(frozen=True)
class Said:
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str


Vitctl = Callable[..., Said]


def words(line: str) -> list[str]:
    """Split a part of a command line as a shell does."""
    return shlex.split(line)


@pytest.fixture
def vitctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vitctl:
    """vitctl("pretrain", "--recipe", ...) as typed in tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(
        CONSOLE, "width", 120
    )  # it reads COLUMNS but once, when the first test of a process makes it

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["vitctl", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Said(caught.value.code, printed.out, printed.err)

    return run
