"""The sweep of `finetune`: which rate is taken, what it costs to be stopped."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import train_records, two_processes, worker
from tests.trained import CPU, SMALL, Job, do
from vitctl.data.loader.batches import Batch
from vitctl.engine.evaluation import Score
from vitctl.engine.update import TrainStep, Update
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs.lr_sweep import Trial, _check_same, best
from vitctl.launch.prepare_run import prepare_run
from vitctl.recipe.load import Override, load_recipe

LRS = (0.003, 0.1, 1e-6)
SWEEP = {
    "sweep.lrs": LRS,
    "sweep.train_split": "train[:50]",
    "sweep.eval_split": "train[50:]",
    "log.every_steps": 1,
}


def test_best__most_correct_and_the_first_of_equals() -> None:
    tried = [Trial(0.1, Score(3, 9)), Trial(0.3, Score(5, 9)), Trial(1.0, Score(5, 9))]
    assert best(tried).value == 0.3


def test_finetune__the_best_rate_of_the_kept_images_trains_on_all(job: Job, tmp_path: Path) -> None:
    swept = job("finetune", **SWEEP)
    alone = {
        lr: job("finetune", f"alone_{lr:g}", **{"optimizer.lr": lr, "data.train_split": "train[:50]",
                                                "data.eval_split": "train[50:]"})
        for lr in LRS
    }  # fmt: skip
    assert swept["metrics"]["sweep"] == {f"{lr:g}": alone[lr]["metrics"]["accuracy"] for lr in LRS}
    taken = max(LRS, key=lambda lr: alone[lr]["metrics"]["correct"])
    assert swept["provenance"]["lr"] == taken
    full = job("finetune", "full", **{"optimizer.lr": taken})
    assert "sweep" not in full["metrics"]
    assert swept["provenance"]["weights_sha256"] == full["provenance"]["weights_sha256"]
    assert (swept["metrics"]["correct"], swept["metrics"]["total"]) == (full["metrics"]["correct"], 23)
    assert swept["provenance"]["sweep"] == {"train_split": "train[:50]", "split": "train[50:]", "total": 20}
    folders = sorted((tmp_path / "run" / "sweep").iterdir())
    assert [folder.name for folder in folders] == ["lr_0.003", "lr_0.1", "lr_1e-06"]
    assert not any((folder / "checkpoints").exists() for folder in folders)
    assert "choose the learning rate" not in (tmp_path / "run" / "log.jsonl").read_text()
    job("finetune", "leaky", **SWEEP | {"sweep.lrs": LRS[:1], "sweep.eval_split": "test[:10]"})
    said = (tmp_path / "leaky" / "log.jsonl").read_text()
    assert "10 of the 23 scored images choose the learning rate" in said


@pytest.mark.slow
def test_finetune__two_processes_try_the_same_rates_and_take_the_same(
    job: Job, pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    one = job("finetune", "one", **SWEEP)
    values = {
        **CPU,
        **SMALL,
        **SWEEP,
        "data.path": str(tiny_data),
        "weights.source": str(pretrained),
        "machine.processes": 2,
    }
    folder = tmp_path / "two"
    prepare_run(load_recipe("finetune", [Override(key, value) for key, value in values.items()]), folder)
    assert two_processes(worker(folder), tmp_path / "shown.txt") == (0, 0)
    two = json.loads((folder / "result.json").read_text())
    assert two["metrics"] == one["metrics"]
    same = one["provenance"].keys() - {
        "weights_sha256",
        "recipe_sha256",
        "processes",
    }  # sums of two halves differ in the last bit
    assert {name: two["provenance"][name] for name in same} == {
        name: one["provenance"][name] for name in same
    }
    assert two["provenance"]["lr"] in LRS


@pytest.mark.slow
def test_finetune__stopped_in_the_second_rate_goes_on_there(
    job: Job, pretrained: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job("finetune", "whole", **SWEEP)
    values: dict[str, Any] = {
        **CPU,
        **SMALL,
        "data.path": str(tiny_data),
        "weights.source": str(pretrained),
        **SWEEP,
    }
    update, steps = TrainStep.update, []

    def update_and_signal(self: TrainStep, step: int, batches: list[Batch], stopped: bool) -> Update:
        steps.append(step)
        if len(steps) == 8:  # the next update tells all processes
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, step, batches, stopped)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "update", update_and_signal)
        stopped = do("finetune", tmp_path / "run", **values)
    assert (stopped["status"], steps) == ("stopped", [0, 1, 2, 3, 4, 5, 0, 1, 2])
    assert max(r["step"] for r in train_records(tmp_path / "run" / "sweep" / "lr_0.1")) == 3
    first = (tmp_path / "run" / "sweep" / "lr_0.003" / "log.jsonl").read_bytes()
    again = do("finetune", tmp_path / "run", **values)
    assert (again["metrics"], again["provenance"]) == (whole["metrics"], whole["provenance"])
    assert (tmp_path / "run" / "sweep" / "lr_0.003" / "log.jsonl").read_bytes() == first
    second = (tmp_path / "run" / "sweep" / "lr_0.1" / "log.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, second) if r["kind"] == "resume"] == [3]


@pytest.mark.slow
def test_finetune__a_score_of_other_weights_is_not_taken(job: Job, tmp_path: Path) -> None:
    job("finetune", **SWEEP)
    file = tmp_path / "run" / "sweep" / "lr_0.1" / "result.json"
    result = json.loads(file.read_text())
    assert len(result["provenance"]["from_sha256"]) == 64
    result["provenance"]["from_sha256"] = "0" * 64
    result["record"] = {}  # else its digest would tell that it was changed
    file.write_text(json.dumps(result))
    with pytest.raises(
        CheckpointError, match=r"sweep/lr_0\.1: holds a score of other from_sha256; remove it to train"
    ):
        job("finetune", **SWEEP)


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (
            {"sweep.lrs": (0.1, 0.1)},
            RecipeError,
            r"sweep\.lrs = \[0\.1, 0\.1\] should be distinct rates above 0",
        ),
        ({"sweep.train_split": "trian"}, DataError, "no split 'trian'"),
        ({"sweep.eval_split": "train[500:]"}, DataError, "500 is more than its 70 samples"),
    ],
)
def test_finetune__a_wrong_sweep_is_refused_before_anything_is_written(
    job: Job, tmp_path: Path, values: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        job("finetune", **{**SWEEP, **values})
    assert not (tmp_path / "run").exists()


def test_same__a_score_that_lacks_a_fact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a score of other protocol; remove it"):
        _check_same(tmp_path, {"seed": 0}, {"seed": 0, "protocol": "fine-tuning"})
