"""`vitctl verify` as it is typed: its lines, and its exit codes."""

import shutil
from pathlib import Path

from tests.cli.conftest import Vitctl
from tests.launch.conftest import lock_held


def test_verify__an_honest_run(vitctl: Vitctl, pretrained: Path) -> None:
    said = vitctl("verify", pretrained, "--replay", "19:20", "--result", "--bytes")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert "ok          replay: steps 19 to 20: equal, bit for bit" in lines
    assert [line for line in lines if not line.startswith("ok ")] == ["everything that was compared is as recorded"]
    said = vitctl("verify", pretrained)
    assert said.code == 0
    unchecked = [line for line in said.out.splitlines() if line.startswith("not checked ")]
    assert unchecked == [
        "not checked shards: their bytes: --bytes holds every shard against its index",
        "not checked replay: no step was computed again: --replay any, A:B or all",
        "not checked score: no image was scored again: --result",
    ]


def test_verify__a_changed_run_ends_with_1(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    shutil.copytree(pretrained, tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text().replace('"time": 1', '"time": 2', 1))
    said = vitctl("verify", "run")
    assert (said.code, said.err) == (1, "")
    assert "DIFFERS     log: run/log.jsonl, line 1: does not follow the line before" in said.out
    assert said.out.splitlines()[-1] == "something differs"


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
    assert (said.code, said.err) == (2, f"vitctl: {pretrained}: is running; verify it when it has ended\n")
