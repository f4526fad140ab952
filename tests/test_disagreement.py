"""Processes that would resume from different numbers: all end with one line, or all follow process 0."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHORT, TINY, harmed, records, train_records, two_processes, worker
from tests.harmed import NEWEST
from tests.matrix import slow
from tests.trained import CPU, SMALL
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe

HOST = socket.gethostname()
TWO = {"machine.processes": 2}


def prepared(recipe: str | Path, folder: Path, **values: Any) -> Path:
    prepare_run(load_recipe(str(recipe), [Override(key, value) for key, value in values.items()]), folder)
    return folder


@pytest.fixture(scope="module")
def interrupted(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that lost the last: its newest checkpoints are those of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    work(prepared(TINY, folder, **SHORT, **{"data.path": str(tiny_data), "checkpoint.keep_last": 3}))
    shutil.rmtree(folder / "checkpoints" / "step_00000008")
    (folder / "result.json").unlink()
    return folder


def resumed(interrupted: Path, folder: Path, data: Path, **values: Any) -> Path:
    """A copy of the interrupted run, for two processes."""
    shutil.copytree(interrupted, folder)
    return prepared(
        TINY, folder, **SHORT, **TWO, **{"data.path": str(data), "checkpoint.keep_last": 3}, **values
    )


def harm(name: str, folder: Path) -> tuple[tuple[int, ...], list[str]]:
    """Harm a process of the run; return exit codes, and the last line of each process."""
    codes = two_processes(harmed(name, folder), folder / "out.txt")
    logs = [(folder / "logs" / f"rank_0{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    return codes, [log[-1] if log else "" for log in logs]


def refused(name: str, folder: Path) -> str:
    """Return the line with which both processes ended before the first step."""
    codes, said = harm(name, folder)
    assert codes == (2, 2)
    assert said[0] == said[1]
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    return said[0]


@pytest.mark.parametrize("sharding", ["none", *slow("fsdp")])
def test_resume__one_that_cannot_read_the_checkpoint(
    interrupted: Path, tiny_data: Path, tmp_path: Path, sharding: str
) -> None:
    folder = resumed(interrupted, tmp_path / "run", tiny_data, **{"machine.sharding": sharding})
    said = refused("unreadable", folder)
    assert said.startswith(f"vitctl: {folder / 'checkpoints' / NEWEST}: ")
    for part in ("ema.safetensors", f"process 1 on {HOST}", "all nodes see the same folder"):
        assert part in said
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000004", NEWEST]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [*slow("none"), "fsdp"])
def test_resume__one_that_reads_other_numbers(
    interrupted: Path, tiny_data: Path, tmp_path: Path, sharding: str
) -> None:
    folder = resumed(interrupted, tmp_path / "run", tiny_data, **{"machine.sharding": sharding})
    said = f"process 1 on {HOST} has different weights or optimizer state than process 0 on {HOST};"
    if sharding == "fsdp":  # from a checkpoint in parts
        assert two_processes(worker(folder), folder / "out.txt") == (0, 0)
        (folder / "result.json").unlink()
        said = "step_00000008: the processes hold other weights or optimizer state than were saved;"
    assert said in refused("other_numbers_read", folder)


def test_resume__one_that_sees_an_old_listing_follows_the_first(
    interrupted: Path, tiny_data: Path, tmp_path: Path
) -> None:
    folder = resumed(interrupted, tmp_path / "run", tiny_data)
    codes, _ = harm("old_listing", folder)
    assert codes == (0, 0)
    assert [record["step"] for record in records(folder, "resume")] == [6]
    straight = [record["loss"] for record in train_records(interrupted)]
    assert [record["loss"] for record in train_records(folder)] == pytest.approx(straight, rel=1e-9)


@pytest.mark.slow
def test_resume__all_pass_over_one_that_is_torn(interrupted: Path, tiny_data: Path, tmp_path: Path) -> None:
    folder = resumed(interrupted, tmp_path / "run", tiny_data)
    (folder / "checkpoints" / NEWEST / "optimizer.safetensors").unlink()
    assert two_processes(worker(folder), folder / "out.txt") == (0, 0)
    assert [record["step"] for record in records(folder, "resume")] == [4]
    assert (folder / "checkpoints" / f"torn_{NEWEST}").is_dir()
    straight = [record["loss"] for record in train_records(interrupted)]
    assert [record["loss"] for record in train_records(folder)] == pytest.approx(straight, rel=1e-9)


@pytest.mark.slow
def test_resume__the_first_sees_an_old_listing(interrupted: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Otherwise the run would silently resume from an older checkpoint."""
    folder = resumed(interrupted, tmp_path / "run", tiny_data)
    said = refused("old_listing_at_first", folder)
    assert f"{folder / 'checkpoints' / NEWEST}: seen by process 1 on {HOST} but not by process 0" in said


def test_start__what_was_chosen_before_is_told_by_the_first(tiny_data: Path, tmp_path: Path) -> None:
    own = {"machine.attention": "auto", "machine.micro_batch": -1}
    folder = prepared(TINY, tmp_path / "run", **SHORT, **TWO, **own, **{"data.path": str(tiny_data)})
    setting = {"share": 8, "device": "CPU", "precision": "float64", "micro_batch": 3}
    (folder / "micro_batch.json").write_text(json.dumps(setting))
    assert harm("blind_to_choices", folder)[0] == (0, 0)
    assert json.loads((folder / "micro_batch.json").read_text()) == setting


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("other_index", "data index"),
        *slow(("other_recipe", "recipe"), ("other_start_weights", "start weights")),
    ],
)
def test_start__another_recipe_index_or_weights(
    tiny_data: Path, tmp_path: Path, name: str, what: str
) -> None:
    folder = prepared(TINY, tmp_path / "run", **SHORT, **TWO, **{"data.path": str(tiny_data)})
    said = refused(name, folder)
    assert said.startswith(
        f"vitctl: process 1 on {HOST} has different {what} than process 0 on {HOST}; nothing was computed"
    )
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("recipe", ["finetune", *slow("fewshot", "evaluate")])
def test_start__other_weights_from_an_earlier_run(
    pretrained: Path,
    tiny_data: Path,
    tmp_path: Path,
    recipe: str,
) -> None:
    values = {
        **CPU,
        **(SMALL if recipe == "finetune" else {}),
        **({"fewshot.shots": (1,)} if recipe == "fewshot" else {}),
    }
    given = {"data.path": str(tiny_data), "weights.source": str(pretrained)}
    folder = prepared(recipe, tmp_path / "run", **values, **given, **TWO)
    said = refused("other_start_weights", folder)
    assert said.startswith(
        f"vitctl: process 1 on {HOST} has different start weights than process 0 on {HOST}; nothing was"
    )
