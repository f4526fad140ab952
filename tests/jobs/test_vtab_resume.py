"""A table that was stopped resumes and ends with the same numbers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.vtab_names import Catalog
from tests.trained import CPU, do
from vitctl.data.datasets import vtab_images
from vitctl.data.datasets.vtab import VTAB
from vitctl.engine import evaluation
from vitctl.engine.journal import BEFORE
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe

SEVENTH = "tasks/svhn/"
RUN_7 = f"{SEVENTH}lr_0.01_steps_4/seed_0"
VALUES = {
    **CPU,
    "machine.precision": "float32",
    "data.image_size": 8,
    "data.allow_partial": True,
    "schedule.batch_size": 4,
    "schedule.total_steps": 4,
    "schedule.warmup_steps": 1,
    "dropout": 0.3,
    "checkpoint.every_steps": 2,
    "checkpoint.background": False,
    "log.every_steps": 1,
    "evaluation.batch_size": 20,
    "vtab.tasks": tuple(task.name for task in VTAB[:8]),
    "vtab.sweep_lrs": (),
    "vtab.sweep_steps": (),
    "vtab.seeds": (0,),
}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vtab_images, "open_split", Catalog(whole_tests=False).open_split)


def given(speck: Path) -> dict[str, Any]:
    return {**VALUES, "weights.source": str(speck), "data.root": "none"}


def prepared(folder: Path, speck: Path) -> Path:
    prepare_run(load_recipe("vtab", [Override(key, value) for key, value in given(speck).items()]), folder)
    return folder


def results(folder: Path) -> dict[str, Any]:
    """Every run's result, which holds the digest of its weights, without the digests of its logs; and the
    table.
    """
    found = {
        str(path.relative_to(folder)): json.loads(path.read_text())
        for path in folder.glob("tasks/**/result.json")
    }
    assert len(found) == 8
    assert all(result.pop("record")["log.jsonl"] for result in found.values())
    return found | {"table.csv": (folder / "table.csv").read_text()}


@pytest.fixture(scope="module")
def straight(speck: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table that nothing came between."""
    folder = tmp_path_factory.mktemp("straight") / "table"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vtab_images, "open_split", Catalog(whole_tests=False).open_split)
        return do("vtab", folder, **given(speck)), results(folder)


def interrupted(folder: Path, where: str, number: int) -> None:
    """Do the job of a prepared folder, and get a signal in task seven's training or in its evaluation."""
    armed, agree = [0], evaluation.stop_together

    def report(record: dict[str, Any]) -> None:
        if not str(record.get("task", "")).startswith(SEVENTH):
            return
        if (where, record["kind"], record.get("step")) == ("training", "train", 3):
            os.kill(os.getpid(), number)
        if where == "evaluation" and record["kind"] == "checkpoint" and record["step"] == 4:
            armed[0] = 1

    def counted(*arguments: Any) -> None:
        if armed[0]:
            armed[0] += 1
        if armed[0] == 3:  # the second of the batches
            os.kill(os.getpid(), number)
        agree(*arguments)

    evaluation.stop_together = counted
    open_split, vtab_images.open_split = vtab_images.open_split, Catalog(whole_tests=False).open_split
    try:
        work(folder, report)
    finally:
        evaluation.stop_together, vtab_images.open_split = agree, open_split


@pytest.mark.slow
@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_vtab__a_signal_in_task_seven_saves_and_leaves(
    where: str, straight: tuple[dict[str, Any], dict[str, Any]], speck: Path, tmp_path: Path
) -> None:
    folder = prepared(tmp_path / "table", speck)
    interrupted(folder, where, signal.SIGTERM)
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    assert not (folder / RUN_7 / "result.json").exists()
    assert (folder / RUN_7 / "checkpoints" / "step_00000004").is_dir()  # the step under way is finished
    again = do("vtab", folder, **given(speck))
    assert again["metrics"] == straight[0]["metrics"]
    assert results(folder) == straight[1]


@pytest.mark.slow
def test_vtab__more_tasks_and_seeds_in_the_same_folder(speck: Path, tmp_path: Path) -> None:
    """A table grows: what is there is read back, the mean is labelled partial until all tasks are in."""
    folder = tmp_path / "table"
    one = do("vtab", folder, **{**given(speck), "vtab.tasks": ("pets",)})
    log = (folder / "tasks/pets/lr_0.01_steps_4/seed_0/log.jsonl").read_text()
    two = do("vtab", folder, **{**given(speck), "vtab.tasks": ("dtd", "pets"), "vtab.seeds": (0, 1)})
    assert (list(one["metrics"]["tasks"]), list(two["metrics"]["tasks"])) == (["pets"], ["dtd", "pets"])
    assert (folder / "tasks/pets/lr_0.01_steps_4/seed_0/log.jsonl").read_text() == log
    by_seed = two["metrics"]["tasks"]["pets"]["by_seed"]
    assert by_seed[0] == one["metrics"]["tasks"]["pets"]["mean"]
    assert two["metrics"]["tasks"]["pets"]["std"] == pytest.approx(
        abs(by_seed[0] - by_seed[1]) / 2, abs=1e-15
    )
    means = [sum(row["by_seed"][seed] for row in two["metrics"]["tasks"].values()) / 2 for seed in (0, 1)]
    assert two["metrics"]["std"] == pytest.approx(abs(means[0] - means[1]) / 2, abs=1e-15)
    assert two["metrics"]["partial"] is True


def test_vtab__of_a_finished_table_no_earlier_records_are_kept(speck: Path, tmp_path: Path) -> None:
    """A refused resume would write them again, however old they are. No training starts that forgets them."""
    values = given(speck) | {"vtab.tasks": ("pets",), "vtab.keep_checkpoints": True}
    do("vtab", tmp_path / "table", **values)
    prepare_run(load_recipe(str(tmp_path / "table/recipe.toml")), tmp_path / "table")
    assert (tmp_path / "table" / BEFORE).exists()
    work(tmp_path / "table")
    assert not (tmp_path / "table" / BEFORE).exists()
