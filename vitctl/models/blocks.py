"""The repeated layers of a network: the units of activation checkpointing and compilation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitctl.errors import LaunchError

# of what torch's compiler would keep for the backward pass; the rest is what its fused code computes again
# for nothing
_KEPT = 0.9
_RECOMPILES = (
    64  # a deep ResNet has units of 16 shapes, each for training, for evaluation and for a last small batch
)


class Block(nn.Module):
    """A layer that a network repeats: tokens or maps in, the same out."""


def run(block: nn.Module, inputs: tuple[Any, ...], checkpointed: bool) -> Tensor:
    """Return `block(*inputs)`; when `checkpointed`, its inner values are recomputed in the backward pass, not
    kept.
    """
    if checkpointed and torch.is_grad_enabled():
        outputs: Tensor = checkpoint(block, *inputs, use_reentrant=False)
    else:
        outputs = block(*inputs)
    return outputs


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile every outermost `Block` of `model` in place, and return their number.

    Equal blocks share one compilation, so that a deep network compiles as fast as a shallow one. Every batch
    size has its own: a run has two or three, and code for one size is the quicker. What is cheap, such as a
    GELU, is computed again in the backward pass, not kept. Names in the state dictionary stay as they are.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    dynamo.recompile_limit = max(
        dynamo.recompile_limit, _RECOMPILES
    )  # beyond it torch quietly stops to compile
    functorch.activation_memory_budget = min(functorch.activation_memory_budget, _KEPT)
    blocks = list(_outermost(model))
    for block in blocks:
        block.compile(backend=backend, dynamic=False)
    return len(blocks)


@contextmanager
def compile_errors() -> Iterator[None]:
    """Around the use of compiled blocks, which are compiled when they first run.

    Raises:
        LaunchError: torch's compiler failed, with the first line of what it said.
    """
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise LaunchError(
            f"machine.compile: torch could not compile this model here ({said[:200]}); set machine.compile "
            f"= false, "
            "or see the whole report with TORCH_LOGS=+dynamo"
        ) from error


def _outermost(module: nn.Module) -> Iterator[Block]:
    for child in module.children():
        if isinstance(child, Block):
            yield child
        else:
            yield from _outermost(child)
