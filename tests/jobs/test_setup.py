"""From a recipe's sections to the engine."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Run
from vitctl.errors import LaunchError
from vitctl.jobs.setup import num_workers
from vitctl.recipe.sections import Machine


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
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    runtime: Any = SimpleNamespace(num_processes=processes, device=torch.device(device))
    assert num_workers(Machine(workers=asked), runtime) == expected


def test_trackers__tensorboard_gets_the_loss_and_the_accuracy(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run("a", **{"log.trackers": ("tensorboard",), "schedule.total_steps": 6})
    [events] = {path.parent for path in folder.rglob("events.out.tfevents.*") if path.parent.name == "tracking"}
    seen = EventAccumulator(str(events)).Reload()
    assert {"loss", "lr", "grad_norm", "accuracy"} <= set(seen.Tags()["scalars"])
    assert [event.step for event in seen.Scalars("loss")] == list(range(1, 7))
    assert [event.step for event in seen.Scalars("accuracy")] == [6]


def test_trackers__one_that_is_not_there_is_one_line(run: Run) -> None:
    with pytest.raises(LaunchError, match=r"log\.trackers: tensorbord is not installed here, or unknown to accelerate"):
        run("a", **{"log.trackers": ("tensorbord",)})
