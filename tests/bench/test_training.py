"""What is measured is the training of a run, not a copy of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.bench.conftest import tiny_recipe
from vitctl.bench.budget import Budget
from vitctl.bench.clock import PHASES, total
from vitctl.bench.training import _WARM_UP, Prepared, Steps, measure_steps, with_images
from vitctl.engine.preemption import StopFlag

STEPS = 20  # of tiny.toml


def test_steps__leave_the_weights_of_a_run(prepared: Callable[..., Any], one_process: Path) -> None:
    """After as many measured steps as the run has, every weight has the run's bits: nothing is left out,
    nothing added.
    """

    def measure(one: Prepared) -> tuple[Steps, dict[str, np.ndarray]]:
        steps = measure_steps(one, Budget(0.0), least=STEPS - _WARM_UP)
        return steps, {
            name: tensor.numpy().copy() for name, tensor in one.trainer.unwrapped.state_dict().items()
        }

    steps, weights = prepared(measure)
    assert len(steps.split) == STEPS - _WARM_UP
    trained = load_file(one_process / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors")
    assert set(weights) == set(trained)
    assert all(np.array_equal(weights[name], trained[name]) for name in trained)


def test_steps__have_a_record_as_in_a_run(prepared: Callable[..., Any]) -> None:
    def measure(one: Prepared) -> list[str]:
        measure_steps(one, Budget(0.0), least=2)
        return (one.folder / "steps.jsonl").read_text().splitlines()

    assert len(prepared(measure)) == 1 + _WARM_UP + 2  # the start, and a line for each step


def test_steps__save_nothing_and_end_by_ctrl_c(prepared: Callable[..., Any]) -> None:
    stop = StopFlag()
    stop.raise_(2)

    def measure(one: Prepared) -> tuple[Steps, bool]:
        return measure_steps(one, Budget(1e9, stop), least=1), (one.folder / "checkpoints").exists()

    steps, saved = prepared(measure)
    assert len(steps.split) == 1
    assert not saved


def test_split__adds_up_to_the_steps(prepared: Callable[..., Any]) -> None:
    steps = prepared(lambda one: measure_steps(one, Budget(0.0), least=4))
    assert [set(one) for one in steps.split] == [set(PHASES)] * 4
    assert all(seconds > 0 for one in steps.split for seconds in one.values())
    sums = total(steps.split)
    assert sums == {name: sum(one[name] for one in steps.split) for name in PHASES}


def test_images__noise_where_a_known_set_is_not_here(tmp_path: Path) -> None:
    recipe, note = with_images(tiny_recipe(**{"data.dataset": "imagenet", "data.path": ""}), tmp_path)
    assert recipe.data.synthetic
    assert note == "noise images: imagenet is not here"
