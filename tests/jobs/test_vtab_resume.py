"""A table that was killed goes on where it was, and ends as the one that was not."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.jobs.vtab_killed import SEVENTH, interrupted
from tests.jobs.vtab_names import Catalog
from tests.trained import CPU, do
from vitctl.data.datasets import vtab_images
from vitctl.data.datasets.vtab import VTAB
from vitctl.errors import CheckpointError
from vitctl.launch.prepare_run import prepare_run
from vitctl.recipe.load import Override, load_recipe

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


def records(folder: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in (folder / RUN_7 / "log.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"]) for line in lines]


@pytest.fixture(scope="module")
def straight(speck: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table that nothing came between."""
    folder = tmp_path_factory.mktemp("straight") / "table"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vtab_images, "open_split", Catalog(whole_tests=False).open_split)
        return do("vtab", folder, **given(speck)), results(folder)


@pytest.mark.slow
def test_vtab__killed_in_task_seven_and_in_its_evaluation(
    straight: tuple[dict[str, Any], dict[str, Any]], speck: Path, tmp_path: Path
) -> None:
    """SIGKILL, three times over in the same folder: nothing can tidy up."""
    folder = prepared(tmp_path / "table", speck)
    logs: dict[Path, str] = {}
    said: list[tuple[str, int]] = []
    for where, more in (
        ("training", [("train", 1), ("train", 2), ("checkpoint", 2), ("train", 3)]),
        ("evaluation", [("resume", 2), ("train", 3), ("train", 4), ("checkpoint", 4)]),
        ("scored", [("resume", 4), ("evaluate", 4)]),
    ):
        line = [sys.executable, "-m", "tests.jobs.vtab_killed", str(folder), where]
        killed = warm.run(line, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        finished = sorted(folder.glob("tasks/**/result.json"))
        assert len(finished) == 6
        assert not (folder / "result.json").exists()
        said = (
            said[:-1] if where == "evaluation" else said
        ) + more  # step 3 came after the checkpoint: it is made again
        assert records(folder) == said
        own = {path: (path.parent / "log.jsonl").read_text() for path in finished}
        assert logs in ({}, own)  # finished tasks are not touched again
        logs = own

    again = do("vtab", folder, **given(speck))
    assert records(folder) == [*said, ("resume", 4)]
    assert again["metrics"] == straight[0]["metrics"]
    assert results(folder) == straight[1]


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


def test_vtab__a_result_of_other_data_is_not_taken(speck: Path, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    values = {**given(speck), "vtab.tasks": ("pets",)}
    do("vtab", folder, **values)
    path = folder / "tasks/pets/lr_0.01_steps_4/seed_0/result.json"
    result = json.loads(path.read_text())
    result["provenance"]["data_sha256"] = "0" * 64
    path.write_text(json.dumps(result))
    with pytest.raises(
        CheckpointError, match=r"seed_0: holds a score of other data_sha256; remove it to train it again, or"
    ):
        do("vtab", folder, **values)
