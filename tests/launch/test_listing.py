"""`vitctl runs`: what a run is, how far it is, and whether a process works on it."""

import os
import time
from pathlib import Path

import pytest

from tests.launch.conftest import lock_held
from tests.report.conftest import made_up
from vitctl.errors import LaunchError
from vitctl.jobs.record.result import RunResult
from vitctl.launch.listing import list_runs, read_line, size_on_disk
from vitctl.launch.run_folder import is_running, locked


def test_is_running__while_another_process_holds_the_lock(tmp_path: Path) -> None:
    run = made_up(tmp_path / "a", "smoke", None, 3)
    assert not is_running(run)
    with lock_held(run):
        for _ in range(2):  # asking does not release it
            assert is_running(run)
            assert read_line(run).state == "running"
        with pytest.raises(LaunchError, match="another vitctl is running"), locked(run):
            pass
    assert (run / ".lock").exists()
    assert not is_running(run)
    assert read_line(run).state == "interrupted"


def test_list__newest_first_with_those_of_sweeps(tmp_path: Path) -> None:
    old = made_up(tmp_path / "old", "smoke", RunResult("pretrain", "done", {"accuracy": 0.5}), 40)
    inner = made_up(tmp_path / "sw" / "lr_1", "smoke", RunResult("pretrain", "failed", error="no"), 3)
    new = made_up(tmp_path / "new", "smoke", None, 20)
    fresh = made_up(tmp_path / "fresh", "smoke", None)
    now = time.time()
    for age, run in enumerate((fresh, new, inner, old)):
        for path in (run / "result.json", run / "recipe.toml"):
            if path.exists():
                os.utime(path, (now - 60 * age, now - 60 * age))
    (tmp_path / "notes").mkdir()
    lines = list_runs(tmp_path)
    assert [(str(line.folder.relative_to(tmp_path)), line.state) for line in lines] == [
        ("fresh", "prepared"), ("new", "interrupted"), ("sw/lr_1", "failed"), ("old", "done"),
    ]  # fmt: skip
    assert [(line.step, line.total_steps) for line in lines] == [(0, 0), (20, 20), (3, 3), (40, 40)]
    assert [line.number for line in lines] == [None, 0.1, None, 0.5]
    assert lines[1].what == "accuracy so far"
    assert lines[3].recipe == "smoke"
    assert lines[3].num_bytes == sum(path.stat().st_size for path in old.iterdir())


def test_list__a_damaged_run_is_still_a_line(tmp_path: Path) -> None:
    run = made_up(tmp_path / "a", "smoke", None)
    (run / "result.json").write_text("{")
    (run / "recipe.toml").write_bytes(b"\xff\xfe job")
    (line,) = list_runs(tmp_path)
    assert (line.recipe, line.job, line.state, line.number) == ("", "", "prepared", None)


def test_size__follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 5000)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "large")
    (folder / "file").write_bytes(b"x" * 10)
    assert size_on_disk(folder) == 10 + (folder / "link").lstat().st_size
