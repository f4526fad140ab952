"""Exit codes, and errors of one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.conftest import TINY
from vitctl import __version__
from vitctl.jobs import pretrain as jobs


def test_version(vitctl: Vitctl) -> None:
    said = vitctl("--version")
    assert (said.code, said.out) == (0, f"vitctl {__version__}\n")


def test_help__lists_the_commands(vitctl: Vitctl) -> None:
    said = vitctl("--help")
    assert said.code == 0
    for name in (
        "pretrain",
        "finetune",
        "resume",
        "fewshot",
        "vtab",
        "evaluate",
        "export",
        "recipes",
        "data",
        "quickstart",
    ):
        assert f" {name} " in said.out
    assert vitctl("-h") == said


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (["pretrain"], "Error: Missing option '--recipe' / '-r'."),
        (["frobnicate"], "Error: No such command 'frobnicate'."),
        (["recipes", "show", "smoke", "--oops"], "Error: No such option: --oops"),
        (["pretrain", "--recipe", "smoke", "--res", "x"], "Error: Invalid value for '--res'"),
        (["pretrain", "--recipe", "smok"], "vitctl: no recipe is called 'smok'; did you mean smoke?"),
        (
            ["pretrain", "--recipe", "smoke", "--set", "seed"],
            "vitctl: --set seed: write it as section.key=value",
        ),
        (
            ["pretrain", "--recipe", "smoke", "--precision", "fp8"],
            "vitctl: --precision: machine.precision = 'fp8' is not allowed",
        ),
        (
            ["pretrain", "--recipe", "smoke", "--data", "none"],
            "vitctl: none: no such folder",
        ),
        (
            ["finetune", "--recipe", "smoke"],
            "vitctl: recipe 'smoke' is for `vitctl pretrain`, not for `vitctl finetune`",
        ),
        (["resume", "none"], "vitctl: none: not a run folder, it has no recipe.toml"),
        (["data", "check", "none"], "vitctl: none: "),
        (["data", "shards", "none", "out"], "vitctl: none: no such file or folder"),
        (["evaluate", "--from", "none.safetensors"], "vitctl: none.safetensors: no such weights"),
        (["recipes", "explain", "lr"], "vitctl: no recipe has a key 'lr'; did you mean optimizer.lr?"),
    ],
)
def test_user_errors__exit_2_in_one_line_without_a_traceback(
    vitctl: Vitctl, tmp_path: Path, arguments: list[str], last: str
) -> None:
    said = vitctl(*arguments)
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith(last)
    assert "Traceback" not in said.err
    if last.startswith("vitctl"):
        assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


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


def test_an_interrupt__is_a_stop(vitctl: Vitctl, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "pretrain", interrupted)
    said = vitctl("pretrain", "--recipe", TINY, "--data", tiny_data)
    assert (said.code, said.err) == (3, "vitctl: stopped\n")


@pytest.mark.parametrize(
    "words", [("recipes", "list"), ("recipes", "explain", "schedule.lanes"), ("runs", "--in", ".")]
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


def test_a_closed_pipe__is_no_traceback() -> None:
    line = f"{sys.executable} -m vitctl recipes show jft_h14 | head -n 1; echo ${{PIPESTATUS[1]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("job = ")
