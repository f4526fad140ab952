"""What a plan says of memory by kind, the network and time, by arithmetic."""

from pathlib import Path
from typing import Any

import pytest

from vitctl.data.datasets.catalog import open_split
from vitctl.errors import RecipeError
from vitctl.jobs.plan import TrainingPlan, plan_training
from vitctl.jobs.resources import Link, Reading, fetched, parse_link, reading_of
from vitctl.models.flops import block_parameters
from vitctl.recipe.load import Override, load_recipe

P, BLOCK = 655_835_251, 19_677_440  # of H/14 with 18,291 classes; of a block
BLOCKS = 32 * BLOCK
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
    assert plan("ddp", nodes=1).sent_bytes == 0


def test_seconds__differ_by_how_gradients_are_added() -> None:
    plans = {how: plan(how) for how in HOW}
    longest = {how: max(one.seconds.values()) for how, one in plans.items()}
    assert len(set(longest.values())) == len({one.memory_bytes for one in plans.values()} | {0}) == 4
    lanes = plans.pop("lanes")
    for one in plans.values():
        assert one.seconds["network"] == one.sent_bytes / (25e9 / 8)
    # Lanes send the sums while the last leaf, which is the only one here, goes back, and after it.
    computed = plans["ddp"].seconds["computation"]
    assert lanes.seconds["computation and network"] == pytest.approx(
        computed / 3 + lanes.sent_bytes / (25e9 / 8)
    )
    assert plan("lanes", Link(400, 8)).seconds["computation and network"] == computed
    fast = plan("ddp", Link(400, 8))
    assert max(fast.seconds, key=lambda kind: fast.seconds[kind]) == "computation"
    flops = fast.training_flops / fast.steps
    for precision, peak in {"auto": 989, "bf16": 989, "float32": 67, "tf32": 494.5, "float64": 67}.items():
        one = plan("ddp", Link(400, 8), **{"machine.precision": precision})
        assert one.seconds["computation"] == flops / (0.4 * peak * 1e12 * 512)
    again = plan("ddp", Link(400, 8), **{"machine.checkpoint_blocks": True})
    assert again.seconds["computation"] == pytest.approx(4 / 3 * fast.seconds["computation"])
    attention = plan("ddp", Link(400, 8), **{"machine.checkpoint_blocks": "attention"})
    assert fast.seconds["computation"] < attention.seconds["computation"] < 1.2 * fast.seconds["computation"]
    assert again.memory["activations"] < attention.memory["activations"] < fast.memory["activations"]
    resnet = {"model.name": "R50x1", "model.pre_logits": False}
    with pytest.raises(RecipeError, match=r"'attention' is for Transformers, this network is .* 'resnet'"):
        plan("ddp", **{"machine.checkpoint_blocks": "attention", **resnet})


def test_zero1__divides_the_moments_and_gathers_the_weights() -> None:
    whole, cut = plan("ddp"), plan("ddp", **{"machine.sharding": "zero1"})
    assert cut.memory == whole.memory | {"moments": -(-8 * P // 512)}
    assert cut.sent_bytes == pytest.approx(1.5 * whole.sent_bytes)


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
