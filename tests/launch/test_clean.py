"""`vitctl runs clean`: the last and the best checkpoint stay, a running run is not touched, and what stays
can be used.
"""

import shutil
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.launch.conftest import lock_held
from tests.trained import do
from vitctl.engine.journal import append_record
from vitctl.errors import CheckpointError, LaunchError
from vitctl.jobs.record.result import choose_weights
from vitctl.launch.listing import all_removals, plan_removal, remove, size_on_disk

LONG = {
    "schedule.total_steps": 12,
    "schedule.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 9,
}


@pytest.fixture(scope="module")
def long(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with six checkpoints, of which that of step 4 scored best."""
    folder = tmp_path_factory.mktemp("clean") / "long"
    do(TINY, folder, **{"data.path": str(tiny_data)}, **LONG)
    for step, correct in ((4, 22), (8, 21)):
        numbers = {"accuracy": correct / 23, "correct": correct, "total": 23}
        append_record(folder / "log.jsonl", {"kind": "evaluate", "step": step, **numbers})
    return folder


@pytest.fixture
def run(long: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(long, tmp_path / "run"))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def test_clean__the_last_and_the_best_stay(run: Path) -> None:
    assert steps(run) == [2, 4, 6, 8, 10, 12]
    before, files = size_on_disk(run), {path.name for path in run.iterdir()}
    plan = plan_removal(run)
    assert plan.kept == (4, 12)
    assert steps(run) == [2, 4, 6, 8, 10, 12]
    freed = remove(plan)
    assert steps(run) == [4, 12]
    assert freed == plan.num_bytes == before - size_on_disk(run) > 0
    assert {path.name for path in run.iterdir()} == files
    assert choose_weights(run, "best")[1].step == 4
    assert choose_weights(run)[1].step == 12
    assert plan_removal(run).folders == ()


def test_clean__what_the_result_describes_stays(run: Path) -> None:
    text = (run / "result.json").read_text()
    (run / "result.json").write_text(text.replace('"weights_step": 12', '"weights_step": 6'))
    assert plan_removal(run).kept == (4, 6, 12)


def test_clean__a_damaged_best_does_not_stand_for_the_best(run: Path) -> None:
    (run / "checkpoints" / "step_00000004" / "model.safetensors").write_bytes(b"")
    assert plan_removal(run).kept == (8, 12)


def test_clean__a_damaged_last_stays_with_the_whole_one_before_it(run: Path) -> None:
    (run / "checkpoints" / "step_00000012" / "state.json").unlink()
    remove(plan_removal(run))
    assert steps(run) == [4, 10, 12]


def test_clean__without_a_whole_checkpoint_nothing_goes(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/state.json"):
        path.unlink()
    assert plan_removal(run).folders == ()


def test_clean__a_running_run_is_not_touched(run: Path) -> None:
    plan = plan_removal(run)
    with lock_held(run):
        assert plan_removal(run).reason == f"{run} is running"
        with pytest.raises(LaunchError, match="another vitctl is running"):
            remove(plan)
    assert steps(run) == [2, 4, 6, 8, 10, 12]


def test_clean__trainings_inside_a_run_too(run: Path) -> None:
    inner = run / "sweep" / "lr_0.1"
    shutil.copytree(run / "checkpoints", inner / "checkpoints")
    plan = plan_removal(run)
    assert len(plan.folders) == 9
    remove(plan)
    assert sorted(path.name for path in (inner / "checkpoints").iterdir()) == ["step_00000012"]


def test_clean__another_run_inside_a_run_is_left_alone(run: Path) -> None:
    """It has a lock of its own, and its owner names it by itself."""
    inner = Path(shutil.copytree(run, run / "backup"))
    plan = plan_removal(run)
    assert not [folder for folder in plan.folders if folder.is_relative_to(inner)]
    remove(plan)
    assert steps(inner) == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(("damaged", "kept"), [(12, [4, 10, 12]), (4, [8, 12])])
def test_clean__damage_of_the_same_size_is_seen(run: Path, damaged: int, kept: list[int]) -> None:
    """Looked at by size alone, the damaged one stayed and the whole ones went."""
    file = run / "checkpoints" / f"step_{damaged:08d}" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    if damaged == 12:
        (run / "result.json").unlink()
    remove(plan_removal(run))
    assert steps(run) == kept


def test_clean__what_is_no_run_stays(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        plan_removal(tmp_path)
    (plan,) = all_removals([tmp_path])
    assert "not a run folder" in plan.reason
