"""From a recipe's sections to the engine."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG as SESSION_START_INFO
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.conftest import Run, train_records
from tests.trained import Job
from vitctl.data.loader import batches
from vitctl.engine import computation as kernels
from vitctl.engine.preemption import Stopped
from vitctl.engine.runtime import num_workers, tracker_config
from vitctl.engine.trainer import Trainer
from vitctl.errors import DataError, LaunchError
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Machine, TrainMachine


@pytest.mark.parametrize(
    ("asked", "device", "processes", "cores", "expected"),
    [
        (0, "cpu", 1, 8, 0),
        (3, "cuda", 1, 64, 3),
        (-1, "cpu", 1, 2, 1),
        (-1, "cpu", 1, 1, 1),
        (-1, "cpu", 1, 64, 8),
        (-1, "cuda", 1, 4, 4),
        (-1, "cuda", 1, 64, 8),
    ],
)
def test_num_workers(
    monkeypatch: pytest.MonkeyPatch, asked: int, device: str, processes: int, cores: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert num_workers(Machine(workers=asked), torch.device(device), processes) == expected


def test_num_workers__on_a_cpu_do_not_depend_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert num_workers(Machine(), torch.device("cpu"), 4) == 4


def test_train__on_the_cpu_of_a_machine_with_a_gpu_leaves_the_gpu_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, loader = list[bool](), batches.DataLoader

    def recorded(*args: Any, pin_memory: bool, **named: Any) -> Any:
        made.append(pin_memory)
        return loader(*args, pin_memory=False, **named)

    def seen_by_vitctl() -> bool:
        """Torch's own code would use it."""
        return str(sys._getframe(1).f_globals["__name__"]).startswith("vitctl.")

    def wait(*_: object) -> None:
        raise AssertionError("waits for a GPU")

    monkeypatch.setattr(batches, "DataLoader", recorded)
    monkeypatch.setattr(torch.cuda, "is_available", seen_by_vitctl)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    run("run", **{"machine.device": "cpu", "schedule.total_steps": 6})
    assert len(made) >= 2  # training and evaluation
    assert not any(made)


TRACKED = {"log.trackers": ("tensorboard",)}


def tracked(folder: Path) -> dict[str, EventAccumulator]:
    """What TensorBoard reads of each training of a run, by the folder of the training."""
    files = [
        path
        for path in folder.rglob("events.out.tfevents.*")
        if path.parent.parts[-2:] == ("tracking", "vitctl")
    ]
    assert len(files) == len({path.parent for path in files})
    return {
        str(path.parents[2].relative_to(folder)): EventAccumulator(str(path.parent)).Reload()
        for path in files
    }


def configuration(training: Path) -> dict[str, Any]:
    """The hyperparameters of a training, as TensorBoard's own plugin reads them."""
    [file] = (training / "tracking" / "vitctl").glob("*/events.out.tfevents.*")
    content = EventAccumulator(str(file)).Reload().PluginTagToContent("hparams")[SESSION_START_INFO]
    data = HParamsPluginData.FromString(content)
    values = data.session_start_info.hparams
    return {key: getattr(values[key], str(values[key].WhichOneof("kind"))) for key in values}


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folder of each tracker that is closed."""
    closed: list[str] = []
    finish = TensorBoardTracker.finish

    def told(tracker: TensorBoardTracker) -> None:
        finish(tracker)
        closed.append(tracker.logging_dir)

    monkeypatch.setattr(TensorBoardTracker, "finish", told)
    return closed


def test_trackers__tensorboard_gets_the_loss_the_accuracy_and_the_recipe(
    run: Run, finished: list[str]
) -> None:
    folder = run("a", **TRACKED, **{"schedule.total_steps": 6})
    [seen] = tracked(folder).values()
    assert {"loss", "lr", "grad_norm", "accuracy"} <= set(seen.Tags()["scalars"])
    assert [event.step for event in seen.Scalars("loss")] == list(range(1, 7))
    assert [event.step for event in seen.Scalars("accuracy")] == [6]
    recipe = load_recipe(str(folder / "recipe.toml")).recipe
    got, expected = configuration(folder), {"folder": str(folder), **tracker_config(recipe)}
    expected["machine.compile"] = False  # "auto" on a CPU
    assert got == {key: float(v) if type(v) is int else v for key, v in expected.items()}
    assert (got["optimizer.lr"], got["data.flip"], got["model.name"]) == (0.01, True, "Ti/4")
    assert got["log.trackers"] == '["tensorboard"]'
    assert len(expected) > 70
    assert finished == [str(folder / "tracking" / "vitctl")]


def test_trackers__are_closed_when_a_run_fails_or_is_stopped(
    run: Run, finished: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, error in enumerate((DataError("no"), Stopped())):
        monkeypatch.setattr(Trainer, "fit", Mock(side_effect=error))
        with suppress(DataError):
            run(str(number), **TRACKED)
        assert finished == [str(tmp_path / str(n) / "tracking" / "vitctl") for n in range(number + 1)]


@pytest.mark.slow
def test_trackers__each_rate_of_a_sweep_has_a_run_of_its_own(
    job: Job, finished: list[str], tmp_path: Path
) -> None:
    splits = {"sweep.train_split": "train[:50]", "sweep.eval_split": "train[50:]"}
    job("finetune", "a", **TRACKED, **splits, **{"sweep.lrs": (0.1, 0.01), "log.every_steps": 1})
    folder = tmp_path / "a"
    seen = tracked(folder)
    assert sorted(seen) == [".", "sweep/lr_0.01", "sweep/lr_0.1"]
    assert [[event.step for event in one.Scalars("loss")] for one in seen.values()] == [list(range(1, 7))] * 3
    assert [configuration(folder / "sweep" / f"lr_{lr:g}")["optimizer.lr"] for lr in (0.1, 0.01)] == [
        0.1,
        0.01,
    ]
    assert finished == [
        str(folder / name / "tracking" / "vitctl") for name in ("sweep/lr_0.1", "sweep/lr_0.01", "")
    ]


def test_trackers__one_that_is_not_there_is_one_line(run: Run) -> None:
    with pytest.raises(
        LaunchError, match=r"log\.trackers: tensorbord is not installed here, or unknown to accelerate"
    ):
        run("a", **{"log.trackers": ("tensorbord",)})


@pytest.mark.slow
def test_dropout__the_micro_batch_changes_the_result_and_is_named_in_it(run: Run) -> None:
    """Without dropout it changes nothing, which tests/test_golden.py holds."""
    short = {"schedule.total_steps": 3, "schedule.warmup_steps": 0}
    for knob in ("model.dropout", "model.drop_path"):
        folders = [run(f"{knob}_{n}", **short, **{knob: 0.5, "machine.micro_batch": n}) for n in (0, 5)]
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        assert [result["provenance"]["dropout_draws"] for result in results] == [
            {"processes": 1, "micro_batch": n, "compile": False} for n in (16, 5)
        ]
        losses = [[record["loss"] for record in train_records(folder)] for folder in folders]
        assert losses[0][1:] != pytest.approx(losses[1][1:], rel=1e-6)
    plain = json.loads((run("plain", **short) / "result.json").read_text())
    assert "dropout_draws" not in plain["provenance"]


def test_dropout__the_micro_batch_that_was_found_is_the_one_named(tmp_path: Path) -> None:
    machine = TrainMachine(micro_batch=-1, processes=2)
    recipe: Any = SimpleNamespace(machine=machine, schedule=SimpleNamespace(lanes=0, batch_size=32))
    (tmp_path / "micro_batch.json").write_text(
        '{"share": 8, "device": "CPU", "precision": "float32", "micro_batch": 3}'
    )
    config = SimpleNamespace(dropout=0.1)
    assert kernels.dropout_draws(recipe, config, tmp_path)["dropout_draws"]["micro_batch"] == 3
