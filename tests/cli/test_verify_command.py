"""`vitctl verify` as it is typed: its lines, and its exit codes."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.launch.conftest import lock_held


def test_verify__an_honest_run(vitctl: Vitctl, pretrained: Path) -> None:
    said = vitctl("verify", pretrained, "--replay", "19:20", "--result", "--bytes")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert "ok          replay: steps 19 to 20: equal, bit for bit" in lines
    assert lines[-1] == "everything that was compared is as recorded"
    assert all(line.startswith("ok ") for line in lines[:-1])
    said = vitctl("verify", pretrained)
    assert said.code == 0
    unchecked = [line for line in said.out.splitlines() if line.startswith("not checked ")]
    assert unchecked == [
        "not checked shards: not read: --bytes checks every shard against its index",
        "not checked replay: no step was computed again: --replay any, A, A:B or all",
        "not checked score: no image was scored again: --result",
    ]
    assert said.out.endswith(
        "everything that was compared is as recorded; not checked: shards, replay, score\n"
    )


def test_verify__a_changed_run_ends_with_2(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    shutil.copytree(pretrained, tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text().replace('"time": 1', '"time": 2', 1))
    said = vitctl("verify", "run")
    assert (said.code, said.err) == (2, "")
    assert "DIFFERS     log: run/log.jsonl: has not the digest that the result names" in said.out
    assert said.out.splitlines()[-1] == "something differs"


def test_verify__what_cannot_be_compared_as_asked_ends_with_2(vitctl: Vitctl, pretrained: Path) -> None:
    said = vitctl("verify", pretrained, "--data", "gone", "--replay", "19:20")
    assert (said.code, said.err) == (2, "")
    assert (
        "NOT PROVEN  replay: steps 19 to 20: gone: no such folder; --data SHARDS names another place"
        in said.out
    )
    assert said.out.splitlines()[-1] == "nothing differs; something is not proven"


def test_verify__errors_are_one_line(vitctl: Vitctl, pretrained: Path) -> None:
    said = vitctl("verify", "gone")
    assert (said.code, said.err) == (
        2,
        "vitctl: gone: not a run, it has no recipe.toml; give a run folder, such as runs/NAME\n",
    )
    said = vitctl("verify", pretrained, "--replay", "30:40")
    assert (said.code, said.err.count("\n")) == (2, 1)
    with lock_held(pretrained):
        said = vitctl("verify", pretrained)
    assert (said.code, said.err) == (
        2,
        f"vitctl: {pretrained}: is still running; verify it after it has ended\n",
    )


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step_00000020", "log.jsonl", "trace.bin"])
def test_verify__a_part_of_a_run_names_the_run(vitctl: Vitctl, pretrained: Path, part: str) -> None:
    said = vitctl("verify", pretrained / part)
    text = f"vitctl: {pretrained / part}: a part of a run; give the run: vitctl verify {pretrained}\n"
    assert (said.code, said.out, said.err) == (2, "", text)
    said = vitctl("verify", pretrained / "seeds")
    text = f"vitctl: {pretrained / 'seeds'}: does not exist; give the run: vitctl verify {pretrained}\n"
    assert (said.code, said.out, said.err) == (2, "", text)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("foo", "should be a step such as 30, a range such as 1200:1210, any or all"),
        ("3:", "should be a step such as 30, a range such as 1200:1210, any or all"),
        ("5:3", "the first step comes after the last; did you mean 3:5?"),
        ("0:5", "steps count from 1"),
    ],
)
def test_verify__a_wrong_replay_is_refused_before_anything_is_read(
    vitctl: Vitctl, steps: str, words: str
) -> None:
    said = vitctl("verify", "gone", "--replay", steps)
    assert (said.code, said.out, said.err) == (2, "", f"vitctl: --replay {steps}: {words}\n")


def test_verify__steps_behind_the_last_are_refused_before_anything_is_checked(
    vitctl: Vitctl, pretrained: Path
) -> None:
    said = vitctl("verify", pretrained, "--replay", "19:30")
    assert (said.code, said.out) == (2, "")
    assert said.err == f"vitctl: --replay 19:30: {pretrained} has records of steps 1 to 20\n"
