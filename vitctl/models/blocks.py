"""The repeated layers of a network, as what activation checkpointing and compilation work on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A layer that a network repeats: one tensor in, one tensor out."""


def run(block: nn.Module, inputs: Tensor, checkpointed: bool) -> Tensor:
    """Return `block(inputs)`; when `checkpointed`, its inner values are recomputed in the backward pass, not kept."""
    if checkpointed and torch.is_grad_enabled():
        return checkpoint(block, inputs, use_reentrant=False)
    return block(inputs)


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile every outermost `Block` of `model` in place, and return their number.

    Equal blocks share one compilation, so that a deep network compiles as fast as a shallow one. Names in the state
    dictionary stay as they are.
    """
    blocks = list(_outermost(model))
    for block in blocks:
        block.compile(backend=backend)
    return len(blocks)


def _outermost(module: nn.Module) -> Iterator[Block]:
    for child in module.children():
        if isinstance(child, Block):
            yield child
        else:
            yield from _outermost(child)
