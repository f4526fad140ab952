"""What is measured is the training of a run, not a copy of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.bench.conftest import tiny_recipe
from vitctl.bench.measuring import Budget
from vitctl.bench.timed_steps import (
    LOG,
    WARM_UP,
    measure_steps,
    step_parts,
    with_images,
)
from vitctl.engine import runtime
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import BACKWARD, DATA, EXCHANGE, FORWARD, OPTIMIZER, PARTS, Clock
from vitctl.engine.trainer import Trainer

STEPS = 20  # of tiny.toml


def test_parts__every_moment_belongs_to_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, the second with two micro-batches; the third has begun and not ended."""
    clock = Clock(torch.device("cpu"))
    now = iter([0.0, 1.0, 3.0, 6.0, 9.0, 10.0, 15.0, 16.0, 18.0, 19.0, 21.0, 24.0, 25.0, 26.0, 31.0, 31.5])
    monkeypatch.setattr(runtime.time, "perf_counter", lambda: next(now))
    taken = []
    for parts in (PARTS, (DATA, FORWARD, BACKWARD, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER), (DATA,)):
        for part in parts:
            clock.switch(part)
        taken.append(clock.taken())
    first = {DATA: 1.0, FORWARD: 2.0, BACKWARD: 3.0, EXCHANGE: 3.0, OPTIMIZER: 1.0, LOG: 5.0}
    second = {DATA: 1.0, FORWARD: 2.0 + 2.0, BACKWARD: 1.0 + 3.0, EXCHANGE: 1.0, OPTIMIZER: 1.0, LOG: 5.0}
    assert step_parts(taken) == [first, second]


def test_steps__leave_the_weights_of_a_run(prepared: Callable[..., Any], one_process: Path) -> None:
    """After as many measured steps as the run has, weights have the run's bits, and every step a record."""

    def measure(one: Trainer) -> tuple[Any, dict[str, np.ndarray], int]:
        steps, _ = measure_steps(one, Budget(0.0), least=STEPS - WARM_UP)
        weights = one.state.network.state_dict()
        records = (one.log.folder / "steps.jsonl").read_text().splitlines()
        return steps, {name: tensor.numpy().copy() for name, tensor in weights.items()}, len(records)

    steps, weights, records = prepared(measure)
    trained = load_file(one_process / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors")
    assert set(weights) == set(trained)
    assert all(np.array_equal(weights[name], trained[name]) for name in trained)
    assert records == 1 + STEPS  # the start, and a line for each step
    assert [set(one) for one in steps] == [{*PARTS, LOG}] * (STEPS - WARM_UP)
    assert all(seconds > 0 for one in steps for seconds in one.values())


def test_steps__save_nothing_and_end_by_ctrl_c(prepared: Callable[..., Any]) -> None:
    stop = StopFlag()
    stop.raise_(2)

    def measure(one: Trainer) -> tuple[Any, bool]:
        steps, _ = measure_steps(one, Budget(1e9, stop), least=1)
        return steps, (one.log.folder / "checkpoints").exists()

    steps, saved = prepared(measure)
    assert len(steps) == 1
    assert not saved


def test_images__noise_where_a_known_set_is_not_here(tmp_path: Path) -> None:
    recipe, notes = with_images(tiny_recipe(**{"data.dataset": "imagenet", "data.path": ""}), tmp_path)
    assert recipe.data.synthetic
    assert notes == ["noise images: imagenet is not on this machine"]
