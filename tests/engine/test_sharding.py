"""How a network is cut over processes, shown with one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix import slow
from tests.models.tiny_models import TINY
from vitctl.engine.sharding import local, outermost_blocks, shard
from vitctl.models.blocks import Block
from vitctl.models.build import Model, build
from vitctl.models.kernels import Head, Linear

dist: Any = torch.distributed  # not all of it has types


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def noisy(name: str) -> Model:
    """A network in which every weight has a gradient."""
    model, generator = build(TINY[name]), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def seen(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Types of the weights that the layers of a network compute with under bf16 autocast, and of what enters
    its blocks.
    """
    found: dict[str, set[torch.dtype]] = {"head": set(), "linear": set(), "blocks": set(), "others": set()}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        kind = "head" if isinstance(module, Head) else "linear" if isinstance(module, Linear) else "others"
        found[kind] |= {parameter.dtype for parameter in module.parameters(recurse=False)}
        if isinstance(module, Block):
            found["blocks"].add(inputs[0].dtype)

    for module in model.modules():
        module.register_forward_pre_hook(note)
    compute(model)
    return found


def compute(model: nn.Module) -> None:
    """Two passes whose gradients are added up."""
    torch.manual_seed(0)
    for images in torch.randn(2, 2, 3, 32, 32):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images).square().sum()
        loss.backward()


@pytest.mark.parametrize("name", ["vit", "relative", "axial", "hybrid", "resnet v2"])
def test_shard__bf16_is_for_what_autocast_converts(name: str) -> None:
    model = build(TINY[name])
    shard(model, torch.device("cpu"), 1, gathers_bf16=True)
    found = seen(model)
    assert found["linear"] == (set() if name == "resnet v2" else {torch.bfloat16})
    assert found["head"] == {torch.float32}
    assert found["others"] == {torch.float32}
    assert found["blocks"] == (
        {torch.bfloat16} if name == "resnet v2" else {torch.float32}
    )  # what convolutions return


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["vit", "hybrid", *slow("relative", "axial", "resnet v2")])
def test_shard__of_every_family_gathered_in_bf16_has_the_same_bits(name: str, checkpointed: bool) -> None:
    plain, sharded = noisy(name), noisy(name)
    sharded.checkpoint_blocks = checkpointed
    shard(sharded, torch.device("cpu"), 1, gathers_bf16=True)
    compute(plain)
    compute(sharded)
    for (parameter, one), other in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert one.grad.std() > 0, parameter
        assert other.dtype == local(other.grad).dtype == torch.float32
        assert torch.equal(one.grad, local(other.grad)), parameter
        assert torch.equal(one, local(other)), parameter


@pytest.mark.parametrize("gathers_bf16", [False, True])
def test_shard__each_block_gathers_the_next_one(gathers_bf16: bool) -> None:
    model: Any = build(TINY["vit"])
    shard(model, torch.device("cpu"), 1, gathers_bf16=gathers_bf16)
    states = [
        (block.attention.qkv if gathers_bf16 else block)._get_fsdp_state()
        for block in outermost_blocks(model)
    ]
    assert len(states) > 1
    assert [state._states_to_forward_prefetch for state in states] == [*([state] for state in states[1:]), []]
