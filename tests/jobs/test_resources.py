"""What a plan says of memory by kind, the network and time, by arithmetic."""

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
from vitctl.jobs.resources import Link, Reading, fetched, parse_link, reading_of
from vitctl.models.flops import block_parameters, count_macs
from vitctl.models.roofline import Estimate, Step, estimate
from vitctl.recipe.load import Override, load_recipe

P, BLOCK = 655_835_251, 19_677_440  # of H/14 with 18,291 classes; of a block
BLOCKS = 32 * BLOCK
# Multiply-accumulates of an image, without those of the 256 tokens that the last block skips: their output,
# MLP and attention.
MACS = 167.319e9 - 256 * (1280**2 + 2 * 1280 * 5120 + 2 * 257 * 1280)
SLOW = Link(25, 1)
HOW: dict[str, dict[str, Any]] = {
    "ddp": {},
    "lanes": {"schedule.lanes": 64, "schedule.leaf_images": 8},
    "fsdp": {"machine.sharding": "fsdp"},
    "hsdp": {"machine.sharding": "hsdp", "machine.sharding_replicas": 64},
}


def plan(how: str, link: Link = SLOW, nodes: int = 64, **values: Any) -> TrainingPlan:
    given = {"machine.processes": 512, "machine.precision": "float32", **HOW[how], **values}
    recipe: Any = load_recipe("jft_h14", [Override(key, value) for key, value in given.items()]).recipe
    return plan_training(recipe, nodes=nodes, link=link)


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


def test_network__bytes_of_a_step_and_node() -> None:
    ring = 4 * P * 511 / 512
    assert plan("ddp").sent_bytes == 2 * ring
    assert plan("fsdp").sent_bytes == pytest.approx(3 * ring)  # weights twice, gradients once
    assert plan("hsdp").sent_bytes == 2 * 4 * P * 63 / 64  # gradients alone leave the node
    assert plan("fsdp", **{"machine.micro_batch": 4}).sent_bytes == pytest.approx(5 * ring)
    # A node has one subtree; its sum, and that of all, go around as in a ring of nodes.
    assert plan("lanes").sent_bytes == 2 * 4 * P * 63 / 64
    # The leaves of a node of 48 make up to four subtrees.
    assert plan("lanes", nodes=48, **{"machine.processes": 384}).sent_bytes == pytest.approx(
        5 * 4 * P * 47 / 48
    )
    assert plan("ddp", nodes=1).sent_bytes == 0


def test_seconds__differ_by_how_gradients_are_added() -> None:
    plans = {how: plan(how) for how in HOW}
    assert len({one.seconds.step for one in plans.values()}) == 3
    assert (
        plans["hsdp"].seconds == plans["lanes"].seconds
    )  # nodes complete sums, which go around between them
    assert len({one.memory_bytes for one in plans.values()}) == 3
    fast = plan("ddp", Link(400, 8))
    assert fast.seconds.step == fast.seconds.computation
    flops = 6 * MACS * 4096
    for precision, peak in {"float32": 67, "tf32": 494.5, "float64": 67}.items():
        one = plan("ddp", Link(400, 8), **{"machine.precision": precision})
        assert one.seconds.computation == pytest.approx(flops / (0.4 * peak * 1e12 * 512), rel=1e-5)
    again = plan("ddp", Link(400, 8), **{"machine.checkpoint_blocks": True})
    assert again.seconds.computation == pytest.approx(4 / 3 * fast.seconds.computation, rel=0.002)
    attention = plan("ddp", Link(400, 8), **{"machine.checkpoint_blocks": "attention"})
    assert fast.seconds.step < attention.seconds.step < 1.2 * fast.seconds.step
    assert again.memory["activations"] < attention.memory["activations"] < fast.memory["activations"]
    resnet = {"model.name": "R50x1", "model.pre_logits": False}
    with pytest.raises(RecipeError, match=r"'attention' is for Transformers, this network is .* 'resnet'"):
        plan("ddp", **{"machine.checkpoint_blocks": "attention", **resnet})


COMPUTED = 3 * 2 * MACS * 4096 / (0.4 * 67e12 * 512)  # seconds of a step, 8 images in each process
RING = 4 * P * 511 / 512 / (25e9 / 8)  # seconds in which a node sends a number of each weight once
SUMS = 2 * 4 * P * 63 / 64 / (25e9 / 8)  # the same twice, in a ring of nodes


@pytest.mark.parametrize(
    ("how", "values", "seconds"),
    [
        # Gradients go around twice while the last pass goes back: two thirds of it.
        ("ddp", {}, COMPUTED + 2 * RING - 2 / 3 * COMPUTED),
        ("ddp", {"machine.micro_batch": 4}, COMPUTED + 2 * RING - 2 / 3 * COMPUTED / 2),
        ("ddp", {"machine.micro_batch": 3}, COMPUTED + 2 * RING - 2 / 3 * COMPUTED / 3),
        ("lanes", {}, COMPUTED + SUMS - 2 / 3 * COMPUTED),
        (
            "lanes",
            {"schedule.leaf_images": 4},
            COMPUTED + SUMS - COMPUTED / 3,
        ),
        # The forward pass gathers weights, the backward pass does too, and sends gradients.
        ("fsdp", {}, 3 * RING),
        # Inside the nodes, weights cost no network; gradients go around as with ddp.
        ("hsdp", {}, COMPUTED + SUMS - 2 / 3 * COMPUTED),
        ("hsdp", {"machine.micro_batch": 2}, COMPUTED + SUMS - 2 / 3 * COMPUTED / 4),
    ],
)
def test_seconds__what_the_last_backward_pass_does_not_hide_is_added(
    how: str, values: dict[str, Any], seconds: float
) -> None:
    one = plan(how, **values)
    assert one.seconds.step == pytest.approx(seconds, rel=1e-5)
    assert one.seconds.computation == pytest.approx(COMPUTED, rel=1e-5)
    assert one.run_seconds == pytest.approx(1_035_644 * seconds, rel=1e-5)
    fast = plan(how, Link(400, 8), **values)  # computation hides all
    assert fast.seconds.step == pytest.approx(COMPUTED, rel=1e-5)


@pytest.mark.parametrize(
    ("how", "values", "most", "passes"),
    [
        # 512 leaves of 8 images on 384 processes: every third process has one, the others share the rest.
        ("lanes", {}, 16, 2),
        ("ddp", {}, 11, 1),  # 4096 / 384 = 10.67
        ("ddp", {"machine.micro_batch": 4}, 11, 3),
    ],
)
def test_seconds__all_wait_for_the_process_with_the_most_images(
    how: str, values: dict[str, Any], most: int, passes: int
) -> None:
    one = plan(how, nodes=48, **{"machine.processes": 384, **values})
    computed = most * 3 * 2 * MACS / (0.4 * 67e12)
    assert (one.most, one.seconds.computation) == (most, pytest.approx(computed, rel=1e-5))
    sent = one.sent_bytes / (25e9 / 8)
    assert one.seconds.step == pytest.approx(computed + sent - 2 / 3 * computed / passes, rel=1e-5)


def test_memory__of_a_leaf_with_more_images_than_the_mean_share() -> None:
    values = {"schedule.batch_size": 10, "schedule.lanes": 1, "schedule.leaf_images": 9}
    one = plan("ddp", nodes=1, **{"machine.processes": 2, **values})  # leaves of 9 and 1
    assert (one.micro_batch, one.fitting_micro_batch, one.ways, one.most) == (9, 9, (), 9)


def test_seconds__gathers_are_hidden_by_the_pass_they_belong_to() -> None:
    """With this link gathers fit into every pass, and the gradients of FSDP stick out of the last one."""
    speed = 2.5 * RING * 25e9 / 8 / COMPUTED  # bytes/s with which a ring takes 0.4 of the computation
    one = plan("fsdp", Link(speed * 8 / 1e9, 1))
    assert one.seconds.step == pytest.approx(COMPUTED * (0.4 + 0.8), rel=1e-5)  # forward, backward


def test_length__of_one_rate() -> None:
    """The rate of a GPU is that of `models.roofline`, and where it has none, 40 % of the peak."""
    arithmetic = plan("ddp", Link(400, 8), **{"machine.precision": "auto"})
    rate = estimate(arithmetic.config, "H100", Step(8, compiled=False))
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
    usual = plan("ddp", Link(400, 8), **given)
    blocks = 32 * (257 * 12 * 1280**2 + 2 * 257**2 * 1280) / count_macs(usual.config)  # of its pass
    for choice, more in ((1, blocks / 3), (2, blocks / 6), (5, blocks / 3 * 7 / 32), (99, blocks / 96)):
        again = plan("ddp", Link(400, 8), **given, **{"machine.checkpoint_blocks": choice})
        assert isinstance(usual.expected, Estimate) and isinstance(again.expected, Estimate)
        without = sum(usual.expected.seconds.values())
        longer = without + more * (without - usual.expected.seconds["optimizer"])
        assert 8 / again.expected.images_per_second == pytest.approx(longer)
        assert again.run_seconds == pytest.approx(1_035_644 * longer)


def expected_step(**values: Any) -> Step:
    one = plan("ddp", Link(400, 8), **{"machine.precision": "bf16", **values}).expected
    assert isinstance(one, Estimate)
    return one.step


def test_expected__the_step_is_that_of_the_recipe() -> None:
    usual = Step(8, compiled=False)
    assert expected_step() == usual
    assert expected_step(**{"machine.micro_batch": 3}) == replace(usual, passes=3)
    assert expected_step(**{"machine.compile": True}) == replace(usual, compiled=True)
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
def test_expected__attention_is_that_of_the_rule(attention: str, lanes: bool) -> None:
    values: dict[str, Any] = {"machine.attention": attention, **(HOW["lanes"] if lanes else {})}
    machine: Any = load_recipe("jft_h14", [Override("machine.attention", attention)]).recipe
    gpu = Computation(torch.device("cuda"), "bf16")
    chosen = attention_kernel(machine.machine, plan("ddp").config, gpu, lanes=lanes)
    assert expected_step(**values).plain == (chosen != "fused")


def test_cpu__no_hours_of_a_gpu_that_nobody_asked_for() -> None:
    recipe: Any = load_recipe("jft_h14", [Override("machine.device", "cpu")]).recipe
    alone, asked = plan_training(recipe), plan_training(recipe, device="A100")
    assert (alone.device, alone.seconds.computation, alone.ways) == ("", 0, ())
    assert alone.fitting_micro_batch == alone.micro_batch == 4096
    assert isinstance(alone.expected, str) and "'cpu'" in alone.expected
    assert asked.device == "A100" and asked.ways and isinstance(asked.expected, Estimate)


def test_length__shards_that_the_cache_holds_are_fetched_in_the_first_epoch(
    tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 images in batches of 16: the first epoch ends in the fifth of 20 steps."""
    reading = Reading(4, 2**30, 70, True)
    monkeypatch.setattr("vitctl.jobs.plan.reading_of", lambda _: reading)

    def of(gib: float) -> TrainingPlan:
        values = {"data.path": str(tiny_data), "data.cache_gib": gib}
        recipe: Any = load_recipe(str(TINY), [Override(key, value) for key, value in values.items()]).recipe
        return plan_training(recipe, link=Link(0.001, 1))

    whole, part, none = of(1.0), of(0.99), of(0.0)
    assert [one.fetching_steps for one in (whole, part, none)] == [5, 20, 20]
    data = 16 * 2**30 / 70 / (0.001e9 / 8)
    assert part.run_seconds == none.run_seconds == pytest.approx(20 * data)
    assert whole.run_seconds == pytest.approx(5 * data + 15 * whole.seconds.computation)


@pytest.mark.parametrize("how", HOW)
def test_float64__takes_twice_the_bytes(how: str) -> None:
    narrow, wide = plan(how), plan(how, **{"machine.precision": "float64"})
    assert wide.memory == pytest.approx({kind: 2 * size for kind, size in narrow.memory.items()}, abs=1)
    assert (wide.checkpoint_bytes, wide.sent_bytes) == (2 * narrow.checkpoint_bytes, 2 * narrow.sent_bytes)


def test_reading__of_the_shards_of_a_split(tiny_data: Path) -> None:
    reading = reading_of(open_split("train", path=str(tiny_data)))
    shards = sorted((tiny_data / "train").glob("*.tar"))
    assert reading == Reading(len(shards), sum(path.stat().st_size for path in shards), 70, False)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # 100,000 shards of 300 MB: without lanes, all 64 nodes fetch each.
        ({}, (64, 64, 64 * 300_000_000)),
        ({"schedule.lanes": 64}, (1, 4096, 64 * 300_000_000)),
        ({"data.lanes": 64}, (1, 4096, 64 * 300_000_000)),
        # Lanes that do not fit the nodes are fetched by two of them; a node keeps all that it reads.
        ({"data.lanes": 96}, (4 / 3, 4096, 2 * 64 * 300_000_000)),
        ({"data.lanes": 32}, (2, 2048, 64 * 300_000_000)),
        # The exact order visits shards at random in every lane.
        (
            {"data.order": "exact", "data.order_window_shards": None, "schedule.lanes": 64},
            (64, 4096, 100_000 * 300_000_000),
        ),
        (
            {"data.order": "exact", "data.order_window_shards": None, "data.cache_gib": 0.0},
            (1, 4096, 0),
        ),
        ({"data.order": "exact", "data.order_window_shards": None}, (64, 4096, 100_000 * 300_000_000)),
    ],
)
def test_fetched(values: dict[str, Any], expected: tuple[float, int, int]) -> None:
    given = {"data.order": "windowed", "data.order_window_shards": 32, "machine.processes": 512, **values}
    overrides = [Override(key, value) for key, value in given.items() if value is not None]
    recipe: Any = load_recipe("jft_h14", overrides).recipe
    read = fetched(recipe, Reading(100_000, 100_000 * 300_000_000, 303_000_000, True), 64)
    assert (read.amplification, read.shards, read.cache) == expected
    assert read.per_image == 100_000 * 300_000_000 / 303_000_000


def test_parse_link() -> None:
    assert parse_link("400x8") == Link() and parse_link("12.5x1") == Link(12.5, 1)
    assert Link(400, 8).bytes_per_second == 400e9
    for text in ("400", "x8", "0x8", "400x", "400x0", "-1x2"):
        with pytest.raises(RecipeError, match=f"--link {text}: should be"):
            parse_link(text)
