"""`vitctl runs` and `vitctl runs clean`: what a run is, how far it is, whether a process works on it, and
which checkpoints may go.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.launch.conftest import lock_held
from tests.report.conftest import made_up
from tests.trained import do
from vitctl.engine.journal import append_record
from vitctl.errors import CheckpointError, LaunchError
from vitctl.jobs.record.result import RunResult, choose_weights
from vitctl.launch.listing import all_removals, list_runs, plan_removal, read_line, remove, size_on_disk
from vitctl.launch.run_folder import is_running, locked


def test_is_running__while_another_process_holds_the_lock(tmp_path: Path) -> None:
    run = made_up(tmp_path / "a", "smoke", None, 3)
    assert not is_running(run)
    with lock_held(run):
        for _ in range(2):  # the question does not release it
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
    assert (lines[1].what, lines[3].recipe) == ("accuracy so far", "smoke")
    assert lines[3].num_bytes == sum(path.stat().st_size for path in old.iterdir())


def test_list__a_damaged_run_is_still_a_line(tmp_path: Path) -> None:
    run = made_up(tmp_path / "a", "smoke", None)
    (run / "result.json").write_text("{")
    (run / "recipe.toml").write_bytes(b"\xff\xfe job")
    (line,) = list_runs(tmp_path)
    assert (line.recipe, line.job, line.state, line.number) == ("", "", "invalid", None)


def test_list__a_run_that_failed_before_its_first_step_hides_no_other(tmp_path: Path) -> None:
    made_up(tmp_path / "a", "smoke", None)
    (made_up(tmp_path / "b", "smoke", None) / "steps.jsonl").write_text('{"kind": "start", "step": 0}\n')
    assert {line.folder.name for line in list_runs(tmp_path)} == {"a", "b"}


def test_size__follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 5000)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "large")
    (folder / "file").write_bytes(b"x" * 10)
    assert size_on_disk(folder) == 10 + (folder / "link").lstat().st_size


@pytest.fixture(scope="module")
def long(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with six checkpoints; that of step 4 has the best score."""
    folder = tmp_path_factory.mktemp("clean") / "long"
    schedule = {"schedule.total_steps": 12, "schedule.warmup_steps": 1}
    saves = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
    do(TINY, folder, **{"data.path": str(tiny_data)}, **schedule, **saves)
    for step, correct in ((4, 22), (8, 21)):
        numbers = {"accuracy": correct / 23, "correct": correct, "total": 23}
        append_record(folder / "log.jsonl", {"kind": "evaluate", "step": step, **numbers})
    return folder


@pytest.fixture
def run(long: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(long, tmp_path / "run"))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_clean__the_last_and_the_best_stay(run: Path) -> None:
    assert steps(run) == [2, 4, 6, 8, 10, 12]
    before, files = size_on_disk(run), {path.name for path in run.iterdir()}
    plan = plan_removal(run)
    assert plan.kept == (4, 12)
    freed = remove(plan)
    assert steps(run) == [4, 12]
    assert freed == plan.num_bytes == before - size_on_disk(run) > 0
    assert {path.name for path in run.iterdir()} == files
    assert (choose_weights(run, "best")[1].step, choose_weights(run)[1].step) == (4, 12)
    assert plan_removal(run).folders == ()


def result_describes_step_6(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    result["provenance"]["weights_step"], result["record"] = 6, {}
    (run / "result.json").write_text(json.dumps(result))


def state_lost(step: int) -> Callable[[Path], None]:
    return lambda run: (run / "checkpoints" / f"step_{step:08d}" / "state.json").unlink()


def zeros_in(step: int) -> Callable[[Path], None]:
    """Damage that leaves the size of the file as it was."""

    def damage(run: Path) -> None:
        file = run / "checkpoints" / f"step_{step:08d}" / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
        if step == 12:
            (run / "result.json").unlink()

    return damage


def all_states_lost(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/state.json"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (result_describes_step_6, [4, 6, 12]),
        (zeros_in(4), [8, 12]),
        (zeros_in(12), [4, 10, 12]),
        (state_lost(12), [4, 10, 12]),
        (all_states_lost, [2, 4, 6, 8, 10, 12]),
    ],
    ids=["result", "damaged best", "damaged last", "torn last", "none complete"],
)
def test_clean__what_may_be_needed_stays(run: Path, change: Callable[[Path], None], kept: list[int]) -> None:
    change(run)
    remove(plan_removal(run))
    assert steps(run) == kept


def test_clean__a_running_run_is_not_touched(run: Path) -> None:
    plan = plan_removal(run)
    with lock_held(run):
        assert plan_removal(run).reason == f"{run} is running"
        with pytest.raises(LaunchError, match="another vitctl is running"):
            remove(plan)
    assert steps(run) == [2, 4, 6, 8, 10, 12]


def test_clean__trainings_inside_a_run_but_no_other_run_inside_it(run: Path) -> None:
    """Another run has a lock of its own."""
    other = Path(shutil.copytree(run, run / "backup"))
    inner = run / "sweep" / "lr_0.1"
    shutil.copytree(run / "checkpoints", inner / "checkpoints")
    plan = plan_removal(run)
    assert len(plan.folders) == 9
    remove(plan)
    assert (steps(inner), steps(other)) == ([12], [2, 4, 6, 8, 10, 12])


def test_clean__what_is_not_a_run_stays(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        plan_removal(tmp_path)
    (plan,) = all_removals([tmp_path])
    assert "not a run folder" in plan.reason
