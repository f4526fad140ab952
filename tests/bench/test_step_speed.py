"""The numbers of `bench model` agree with each other, and with what they are made of."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.conftest import tiny_recipe
from tests.matrix import slow
from vitctl.bench import step_speed
from vitctl.bench.measuring import Budget
from vitctl.bench.step_speed import (
    _at_recipe_batch,
    bench_model,
    enlarged,
    largest_micro_batch,
    measured_recipe,
    one_step,
)
from vitctl.data.loader.batches import Batch
from vitctl.engine.journal import json_text
from vitctl.engine.runtime import alone
from vitctl.engine.trainer import Trainer
from vitctl.errors import LaunchError
from vitctl.models.flops import computed_flops, count_macs
from vitctl.models.variants import from_dict, variant
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Pretrain

DECIDING = {
    "network", "image_size", "data", "batch_size", "recipe_batch_size", "micro_batch", "optimizer",
    "averaging", "precision",
    "attention", "compile", "checkpoint_blocks", "sharding", "processes", "workers", "lanes", "log_trace",
    "machine"
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tiny_data: Path) -> dict[str, Any]:
    recipe = tiny_recipe(**{"data.path": str(tiny_data), "machine.precision": "float32"})
    return dict(json.loads(json_text(bench_model(recipe, Budget(2.0)))))


@pytest.mark.slow
def test_model__numbers_agree(measured: dict[str, Any]) -> None:
    m = measured
    assert m["images_per_second"] == pytest.approx(m["batch_size"] / m["seconds"], rel=1e-12)
    assert m["seconds"] == pytest.approx(sum(m["step_seconds"]) / m["steps"], rel=1e-9)
    assert sum(m["split"].values()) == pytest.approx(m["seconds"], rel=1e-12)
    assert set(m["split"]) == {"data", "forward", "backward", "optimizer", "log"}  # nothing is exchanged
    config = from_dict(m["network"])
    assert m["flops_per_image"] == computed_flops(config) < 6 * count_macs(config)
    assert m["tflops"] == pytest.approx(m["images_per_second"] * 1e-12 * computed_flops(config), rel=1e-12)
    assert m["mfu"] == pytest.approx(m["tflops"] / m["peak_tflops"], rel=1e-12)
    assert m["peak_tflops"] == m["matrix_tflops"]["float32"]
    assert m["mfu_against"].startswith("matrix products measured in this run, float32")


def test_model__everything_that_decides_the_numbers_is_told(measured: dict[str, Any]) -> None:
    assert set(measured) >= DECIDING
    assert measured["batch_size"] == measured["recipe_batch_size"] == 16
    assert (measured["precision"], measured["processes"], measured["stopped"]) == ("float32", 1, False)
    assert {"cpu", "cores", "threads", "memory_bytes", "versions", "platform"} <= set(measured["machine"])
    assert measured["peak_memory_bytes"] > 0


def test_model__noise_has_no_wait_for_data() -> None:
    found = bench_model(tiny_recipe(**{"data.synthetic": 100, "data.path": ""}), Budget(0.5))
    assert (found["data"], found["workers"], "data" in found["split"]) == ("noise", 0, False)


def test_recipe_batch__shares_what_is_done_once() -> None:
    """0.02 s an image and 1 s once: 100 images in 3 s, 1,000 in 21 s."""
    split = {"forward": 0.5, "backward": 1.5, "optimizer": 0.9, "log": 0.1}
    assert _at_recipe_batch(split, 100, 100) == pytest.approx(100 / 3)
    assert _at_recipe_batch(split, 100, 1000) == pytest.approx(1000 / 21)


def large(name: str = "B/16", **values: Any) -> tuple[Pretrain, Any]:
    loaded = load_recipe("in1k_b16", [("model.name", name), ("data.synthetic", 10_000), *values.items()])
    return loaded.recipe, variant(name, num_classes=1000)


def test_plan__a_part_of_an_update_where_the_whole_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_speed, "free_bytes", lambda _: 64 * 2**30)
    computation = alone(precision="float32", device="cpu")
    recipe, config = large()
    short, long = (measured_recipe(recipe, config, computation, seconds, None) for seconds in (60, 1e6))
    assert long.schedule.batch_size == 4096
    small = short.schedule.batch_size
    assert 1 <= small < 4096
    assert small % short.machine.micro_batch == 0
    # One image takes 2**n times less memory than half of 64 GiB.
    assert long.machine.micro_batch < 4096
    given = measured_recipe(recipe, config, computation, 60, 24)
    assert given.schedule.batch_size == 24
    fixed, _ = large(**{"machine.micro_batch": 3})
    assert measured_recipe(fixed, config, computation, 60, 24).machine.micro_batch == 3


def test_plan__what_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_speed, "free_bytes", lambda _: 4 * 2**30)
    recipe, config = large("H/14")
    with pytest.raises(LaunchError) as caught:
        measured_recipe(recipe, config, alone(precision="float32", device="cpu"), 60, None)
    assert "\n" not in str(caught.value)
    assert "4.0 GiB is free" in str(caught.value)


def test_model__out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."
        )

    monkeypatch.setattr("vitctl.bench.step_speed.with_training", fail)
    recipe = tiny_recipe(**{"data.synthetic": 100, "data.path": ""})
    with pytest.raises(LaunchError, match="does not fit into the free memory"):
        bench_model(recipe, Budget(1.0))


@pytest.mark.parametrize(("steps", "seconds"), [(6, 1e9), *slow((1, 0.0))])
def test_model__few_steps_have_a_note_and_no_search_after_the_time(
    monkeypatch: pytest.MonkeyPatch, tiny_data: Path, steps: int, seconds: float
) -> None:
    real = step_speed.measure_steps
    monkeypatch.setattr(step_speed, "matrix_rate", lambda *_: 1e9)
    monkeypatch.setattr(step_speed, "measure_steps", lambda one, _: real(one, Budget(0.0), least=steps))
    recipe = tiny_recipe(**{"data.path": str(tiny_data)})
    result = bench_model(recipe, Budget(seconds), batch_size=16)
    assert result["steps"] == steps
    enough = [int(number) for note in result["notes"] for number in re.findall(r"--seconds (\d+)", note)]
    assert enough == ([math.ceil(7 * result["seconds"] / 0.6)] if steps == 1 else [])
    assert (result["largest_micro_batch"] is None) == (seconds == 0)


def test_micro_batch__the_whole_share_is_tried_or_that_of_the_steps(prepared: Callable[..., Any]) -> None:
    """Without time it is the micro-batch of the measured steps."""

    def measure(one: Trainer) -> Any:
        batch = one_step(one)[0]
        short, _ = largest_micro_batch(one, batch, 1000, Budget(-1.0))
        return largest_micro_batch(one, batch, 16, Budget(1e9)), short, len(batch)

    (largest, known), short, num_images = prepared(measure)
    assert (largest.images, largest.tried, largest.bound) == (16, True, "batch")
    assert [one.images for one in known] == [1, 2, 4, 8, 16]
    assert (short.images, short.tried, short.bound) == (num_images, True, "time")


def test_micro_batch__a_planted_limit(prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds 11 images; none above the limit leaves a gradient behind, and no weight changes."""
    real = step_speed.gradient_seconds

    def limited(one: Trainer, micro_batches: Any) -> float:
        if len(micro_batches[0]) > 11:
            raise torch.OutOfMemoryError("planted")
        return real(one, micro_batches)

    def measure(one: Trainer) -> Any:
        before = {name: tensor.clone() for name, tensor in one.state.network.state_dict().items()}
        largest, _ = largest_micro_batch(one, one_step(one)[0], 16, Budget(1e9))
        after = one.state.network.state_dict()
        gradients = [p.grad for p in one.state.network.parameters()]
        return largest, gradients, all(torch.equal(before[name], after[name]) for name in before)

    monkeypatch.setattr(step_speed, "gradient_seconds", limited)
    largest, gradients, unchanged = prepared(measure)
    assert (largest.images, largest.tried, largest.bound) == (11, True, "memory")
    assert gradients == [None] * len(gradients)
    assert unchanged


def test_micro_batch__lanes_have_leaves_of_a_fixed_size(prepared: Callable[..., Any]) -> None:
    lanes = {"schedule.lanes": 4, "schedule.leaf_images": 4}
    found = prepared(lambda one: largest_micro_batch(one, one_step(one)[0], 16, Budget(1e9)), **lanes)
    assert found == (None, [])


def test_enlarged__the_same_images_again() -> None:
    rows = {
        name: torch.arange(3) + place for place, name in enumerate(("images", "labels", "weights", "samples"))
    }
    many = enlarged(Batch(**rows), 8)
    for name, values in rows.items():
        assert torch.equal(getattr(many, name), torch.cat([values] * 3)[:8])
