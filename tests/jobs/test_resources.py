"""What a plan says of memory by kind, data and time, by arithmetic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY
from vitctl.data.datasets.catalog import open_split
from vitctl.engine.computation import attention_kernel
from vitctl.engine.runtime import Computation
from vitctl.errors import RecipeError
from vitctl.jobs.plan import TrainingPlan, plan_training
from vitctl.jobs.resources import image_bytes, nodes_of_a_shard
from vitctl.models.flops import block_parameters, count_macs
from vitctl.models.roofline import Estimate, Step, estimate
from vitctl.recipe.load import Override, load_recipe

P, BLOCK = 655_835_251, 19_677_440  # of H/14 with 18,291 classes; of a block
BLOCKS = 32 * BLOCK
# Multiply-accumulates of an image, without those of the 256 tokens that the last block skips: their output,
# MLP and attention.
MACS = 167.319e9 - 256 * (1280**2 + 2 * 1280 * 5120 + 2 * 257 * 1280)
HOW: dict[str, dict[str, Any]] = {
    "ddp": {},
    "lanes": {"schedule.lanes": 64, "schedule.leaf_images": 8},
    "fsdp": {"machine.sharding": "fsdp"},
    "hsdp": {"machine.sharding": "hsdp", "machine.sharding_replicas": 64},
}


def plan(how: str, nodes: int = 64, **values: Any) -> TrainingPlan:
    given = {"machine.processes": 512, "machine.precision": "float32", **HOW[how], **values}
    recipe: Any = load_recipe("jft_h14", [Override(key, value) for key, value in given.items()]).recipe
    return plan_training(recipe, nodes=nodes)


def test_memory__by_kind() -> None:
    whole, cut = plan("ddp"), plan("fsdp")
    assert set(block_parameters(whole.config)) == {BLOCK} and whole.parameters == P
    state = {"weights": 4 * P, "gradients": 4 * P, "moments": 8 * P}
    assert {kind: whole.memory[kind] for kind in state} == state
    assert {kind: cut.memory[kind] for kind in state} == {kind: -(-n // 512) for kind, n in state.items()}
    # Two gathered blocks and their gradients, and what is in no block.
    assert cut.memory["buffers"] == 4 * (P - BLOCKS) + 2 * BLOCK * 8
    assert "buffers" not in whole.memory
    assert cut.memory["activations"] == whole.memory["activations"]
    # With several micro-batches the gradients are whole until the last.
    several = plan("fsdp", **{"machine.micro_batch": 4})
    assert several.memory["buffers"] == cut.memory["buffers"] + 4 * P
    assert (whole.copy_bytes, cut.copy_bytes) == (16 * P - 4 * P, 12 * P // 512)


def test_seconds__are_those_of_the_process_with_the_most_images() -> None:
    flops = 6 * MACS * 4096
    for precision, peak in {"float32": 67, "tf32": 494.5, "float64": 67}.items():
        one = plan("ddp", **{"machine.precision": precision})
        assert one.step_seconds == pytest.approx(flops / (0.4 * peak * 1e12 * 512), rel=1e-5)
        assert one.run_seconds == 1_035_644 * one.step_seconds
    # 512 leaves of 8 images on 384 processes: every third has one, the others share the rest; and
    # 4096 / 384 = 10.67
    for how, most in (("lanes", 16), ("ddp", 11)):
        one = plan(how, nodes=48, **{"machine.processes": 384})
        assert one.most == most
        assert one.step_seconds == pytest.approx(most * 6 * MACS / (0.4 * 67e12), rel=1e-5)


def test_seconds__of_blocks_that_are_computed_again() -> None:
    plain = plan("ddp")
    again = plan("ddp", **{"machine.checkpoint_blocks": True})
    assert again.step_seconds == pytest.approx(4 / 3 * plain.step_seconds, rel=0.002)
    attention = plan("ddp", **{"machine.checkpoint_blocks": "attention"})
    assert plain.step_seconds < attention.step_seconds < 1.2 * plain.step_seconds
    assert again.memory["activations"] < attention.memory["activations"] < plain.memory["activations"]
    resnet = {"model.name": "R50x1", "model.pre_logits": False}
    with pytest.raises(RecipeError, match=r"'attention' is for Transformers, this network is .* 'resnet'"):
        plan("ddp", **{"machine.checkpoint_blocks": "attention", **resnet})


def test_memory__of_a_leaf_with_more_images_than_the_mean_share() -> None:
    values = {"schedule.batch_size": 10, "schedule.lanes": 1, "schedule.leaf_images": 9}
    one = plan("ddp", nodes=1, **{"machine.processes": 2, **values})  # leaves of 9 and 1
    assert (one.micro_batch, one.fitting_micro_batch, one.ways, one.most) == (9, 9, (), 9)


def test_length__of_one_rate() -> None:
    """The rate of a GPU is that of `models.roofline`, and where it has none, 40 % of the peak."""
    arithmetic = plan("ddp", **{"machine.precision": "auto"})
    rate = estimate(arithmetic.config, "H100", Step(8, compiled=True))  # a long one
    assert arithmetic.expected == rate
    assert arithmetic.run_seconds == pytest.approx(1_035_644 * 8 / rate.images_per_second)
    given: dict[str, dict[str, Any]] = {
        "machine.precision": {"machine.precision": "tf32"},
        "ViTs": {"model.name": "R50x1", "model.pre_logits": False},
    }
    for why, values in given.items():
        one = plan("ddp", **{"machine.precision": "bf16", **values})
        assert isinstance(one.expected, str) and why in one.expected
        assert one.mfu == 0.4


def test_rate__of_blocks_that_are_computed_again() -> None:
    """The second forward pass of all blocks is a third more, but not of the optimizer's time."""
    given = {"machine.precision": "bf16", "machine.device": "auto"}
    usual = plan("ddp", **given)
    blocks = 32 * (257 * 12 * 1280**2 + 2 * 257**2 * 1280) / count_macs(usual.config)  # of its pass
    for choice, more in ((1, blocks / 3), (2, blocks / 6), (5, blocks / 3 * 7 / 32), (99, blocks / 96)):
        again = plan("ddp", **given, **{"machine.checkpoint_blocks": choice})
        assert isinstance(usual.expected, Estimate) and isinstance(again.expected, Estimate)
        without = sum(usual.expected.seconds.values())
        longer = without + more * (without - usual.expected.seconds["optimizer"])
        assert 8 / again.expected.images_per_second == pytest.approx(longer)
        assert again.run_seconds == pytest.approx(1_035_644 * longer)


def expected_step(**values: Any) -> Step:
    one = plan("ddp", **{"machine.precision": "bf16", **values}).expected
    assert isinstance(one, Estimate)
    return one.step


def test_expected__the_step_is_that_of_the_recipe() -> None:
    usual = Step(8, compiled=True)
    assert expected_step() == usual
    assert expected_step(**{"machine.micro_batch": 3}) == replace(usual, passes=3)
    assert expected_step(**{"machine.compile": False}) == replace(usual, compiled=False)
    sgd = {"optimizer.name": "sgd", "optimizer.beta2": 0.999}
    assert expected_step(**sgd) == replace(usual, slots=1)
    assert expected_step(**{"averaging.decay": 0.999}) == replace(usual, averaging=True)
    assert expected_step(**{"machine.checkpoint_blocks": 2}) == replace(
        usual, again=pytest.approx(0.5 / 3, rel=0.01)
    )
    for how, shards in (("fsdp", 512), ("hsdp", 8)):
        values = {"machine.sharding": how, "machine.sharding_replicas": 64 if how == "hsdp" else 1}
        assert expected_step(**values) == replace(usual, shards=shards)
    # 4,096 images do not fit at a time: the plan's passes are as large as fit.
    several = expected_step(**{"machine.processes": 1})
    assert several.images == 4096 > several.images / several.passes > 1


@pytest.mark.parametrize("attention", ["auto", "fused", "math"])
@pytest.mark.parametrize("lanes", [False, True])
def test_expected__attention_is_that_of_the_rule(
    attention: str, lanes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    values: dict[str, Any] = {"machine.attention": attention, **(HOW["lanes"] if lanes else {})}
    machine: Any = load_recipe("jft_h14", [Override("machine.attention", attention)]).recipe
    gpu = Computation(torch.device("cuda"), "bf16")
    chosen = attention_kernel(machine.machine, plan("ddp").config, gpu, lanes=lanes)
    assert expected_step(**values).plain == (chosen == "math")


def test_cpu__no_hours_of_a_gpu_that_nobody_asked_for() -> None:
    recipe: Any = load_recipe("jft_h14", [Override("machine.device", "cpu")]).recipe
    alone, asked = plan_training(recipe), plan_training(recipe, device="A100")
    assert (alone.device, alone.step_seconds, alone.ways) == ("", 0, ())
    assert alone.fitting_micro_batch == alone.micro_batch == 4096
    assert isinstance(alone.expected, str) and "'cpu'" in alone.expected
    assert asked.device == "A100" and asked.ways and isinstance(asked.expected, Estimate)


@pytest.mark.parametrize("how", HOW)
def test_float64__takes_twice_the_bytes(how: str) -> None:
    narrow, wide = plan(how), plan(how, **{"machine.precision": "float64"})
    assert wide.memory == pytest.approx({kind: 2 * size for kind, size in narrow.memory.items()}, abs=1)
    assert wide.checkpoint_bytes == 2 * narrow.checkpoint_bytes


def test_read__the_bytes_of_the_shards(tiny_data: Path) -> None:
    sizes = [path.stat().st_size for path in (tiny_data / "train").glob("*.tar")]
    recipe: Any = load_recipe(str(TINY), [Override("data.path", str(tiny_data))]).recipe
    assert image_bytes(open_split("train", path=str(tiny_data))) == sum(sizes) / 70
    assert plan_training(recipe, nodes=2).read == sum(sizes) / 70 * 16 / 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 64),
        ({"schedule.lanes": 64}, 1),
        ({"data.lanes": 64}, 1),
        ({"data.lanes": 96}, 4 / 3),  # lanes that do not fit the nodes are fetched by two of them
        ({"data.lanes": 32}, 2),
        ({"data.order": "exact", "data.order_window_shards": None, "schedule.lanes": 64}, 64),
        ({"data.order": "exact", "data.order_window_shards": None, "data.cache_gib": 0.0}, 1),
        ({"data.path": "shards"}, 1),
    ],
)
def test_nodes_of_a_shard(values: dict[str, Any], expected: float) -> None:
    given = {"data.order": "windowed", "data.order_window_shards": 32, "data.path": "https://a/b", **values}
    overrides = [Override(key, value) for key, value in given.items() if value is not None]
    recipe: Any = load_recipe("jft_h14", overrides).recipe
    assert nodes_of_a_shard(recipe, 64) == expected
