"""Building blocks of all networks: initialisation, freezing, recomputation and compilation."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitctl.errors import LaunchError
from vitctl.models.places import num_blocks, place

Generator = np.random.Generator | None  # None: weights are loaded next, so that none is drawn
Values = NDArray[Any]  # float32 or wider


def draw(weight: Tensor, fill: Callable[..., Values], generator: Generator, **scale: float) -> None:
    """Fill `weight` by `fill`, rounded once to float32: the same draws for every dtype, device and CPU."""
    if generator is None:
        return
    drawn = fill(tuple(weight.shape), generator, **scale).astype(np.float32, copy=False)
    weight.copy_(torch.from_numpy(drawn))


def normal(shape: Sequence[int], generator: np.random.Generator, std: float) -> Values:
    """Return draws of a normal distribution, float64, by a ziggurat: mostly products.

    torch's normal uses vectorised logarithms and cosines, whose last bits differ between processors. The
    ziggurat uses a logarithm, in float64, only beyond 3.65 deviations.
    """
    drawn = generator.standard_normal(tuple(shape))
    drawn *= std
    return drawn


def lecun_normal(shape: Sequence[int], generator: np.random.Generator) -> Values:
    """Return normal draws, rescaled to variance 1 / fan-in, float64; those beyond two deviations are drawn
    again.
    """
    drawn = generator.standard_normal(tuple(shape))
    while (outside := np.abs(drawn) > 2).any():
        drawn[outside] = generator.standard_normal(int(outside.sum()))
    drawn *= math.sqrt(1 / math.prod(shape[1:])) / 0.87962566103423978
    return drawn


def xavier_uniform(shape: Sequence[int], generator: np.random.Generator) -> Values:
    """Return uniform draws of variance 2 / (fan-in + fan-out) for a matrix `[out, in]`, float32."""
    drawn = generator.random(tuple(shape), dtype=np.float32)
    drawn *= 2
    drawn -= 1  # exact, as the product is: draws are multiples of 2^-24
    drawn *= np.float32(math.sqrt(6 / sum(shape)))
    return drawn


def plain_norm(*norms: nn.LayerNorm | nn.GroupNorm) -> None:
    for norm in norms:
        norm.weight.fill_(1)
        norm.bias.zero_()


def zero(*weights: Tensor | None) -> None:
    for weight in weights:
        if weight is not None:
            weight.zero_()


# of what torch's compiler would keep for the backward pass; its fused code recomputes the rest at little cost
KEPT = 0.9
# Loggers of torch that report missing tools or GPU cores in the middle of a run.
_ABOUT_MACHINE = ("torch.utils.cpp_extension", "torch._inductor.utils")
_RECOMPILES = (
    64  # a deep ResNet has units of 16 shapes, each for training, for evaluation and for a last small batch
)


_ENDS = ("represent", "answer")  # compiled parts whose outputs leave the network


class Block(nn.Module):
    """A layer that a network repeats: input and output are tokens, or maps."""


def run(block: nn.Module, inputs: tuple[Any, ...], checkpointed: bool) -> Tensor:
    """Return `block(*inputs)`; if `checkpointed`, inner values are recomputed in the backward pass."""
    if checkpointed and torch.is_grad_enabled():
        outputs: Tensor = checkpoint(block, *inputs, use_reentrant=False)
    else:
        outputs = block(*inputs)
    return outputs


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, in the order of the model."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def freeze(model: nn.Module, frozen: int) -> None:
    """Freeze all parameters up to this `place`; a negative one freezes nothing."""
    depth = num_blocks([name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        if place(name, depth) <= frozen:
            parameter.requires_grad_(False)


def train_mode(model: nn.Module) -> None:
    """Put a network, wrapped or not, into training mode, except layers and blocks that are frozen.

    A layer without parameters, such as dropout, follows the layer before it.
    """
    model.train()
    _quieten(model)


def _quieten(module: nn.Module) -> None:
    trains = True
    for child in module.children():
        own = [p.requires_grad for p in child.parameters()]
        trains = any(own) if own else trains
        if not trains:
            child.eval()
        elif not isinstance(child, Block):
            _quieten(child)


def compile_blocks(
    model: nn.Module,
    backend: str | Callable[..., Any] = "inductor",
    mode: bool | str = True,
    kept: float = KEPT,
) -> int:
    """Compile every outermost `Block` of `model` in place, and return their number.

    Equal blocks share one compilation, so a deep network compiles as fast as a shallow one. One batch size is
    compiled for training and one for scoring, the first that comes: code for a fixed size is faster, and the
    last, smaller batch is computed as if nothing were compiled. Cheap operations, such as GELU, are
    recomputed in the backward pass, unless `kept` is 1. Names in the state dictionary do not change.
    `mode`: of torch, True for its default. `compiled_parts` of a model are methods that are compiled too; of
    its loss, see `compile_loss`.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import torch.compiler.config as compiler

    dynamo.recompile_limit = max(
        dynamo.recompile_limit, _RECOMPILES
    )  # beyond it torch silently stops compiling
    functorch.activation_memory_budget = kept
    # Set by each library for itself otherwise: the order of sums, and who draws the random numbers.
    inductor.deterministic = torch.are_deterministic_algorithms_enabled()
    inductor.fallback_random = False
    # Code that torch cached for AVX2 would be compiled for AVX-512, whose vectors are twice as long: the
    # last one would end beyond its memory.
    cpu = torch.backends.cpu.get_cpu_capability()
    if cpu not in compiler.cache_key_tag:
        compiler.cache_key_tag += cpu
    for name in _ABOUT_MACHINE if "TORCH_LOGS" not in os.environ else ():
        logging.getLogger(name).setLevel(logging.ERROR)
    sizes = dict[tuple[bool, bool], int]()
    blocks = list(_outermost(model))
    for block in blocks:
        plain = type(block)._call_impl
        block._compiled_call_impl = partial(_at_one_size(plain, backend, mode, sizes), block)
    for name in getattr(model, "compiled_parts", ()):
        plain, ends = getattr(type(model), name), name in _ENDS
        setattr(model, name, partial(_at_one_size(plain, backend, mode, sizes, lasts=ends), model))
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.is_compiled = True  # type: ignore[assignment]  # no tensor
    return len(blocks)


def compile_loss(
    model: nn.Module,
    loss: Callable[..., Tensor],
    backend: str | Callable[..., Any] = "inductor",
    mode: bool | str = True,
) -> Callable[..., Tensor]:
    """Return a loss of a compiled model's outputs `[B, ...]`, compiled as its blocks are."""
    call = _at_one_size(lambda _, *given, **how: loss(*given, **how), backend, mode, {}, lasts=True)
    return partial(call, model)


def _at_one_size(
    plain: Callable[..., Tensor],
    backend: str | Callable[..., Any],
    mode: bool | str,
    sizes: dict[tuple[bool, bool], int],
    *,
    lasts: bool = False,
) -> Callable[..., Tensor]:
    """Return a layer that is compiled for one batch size in training and one in scoring, see `sizes`.

    With `lasts` its outputs are read after its next call, which overwrites those of a CUDA graph.
    """
    compiled = torch.compile(plain, backend=backend, dynamic=False, mode=None if mode is True else str(mode))

    def call(module: nn.Module, tokens: Tensor, *more: Any, **how: Any) -> Tensor:
        size = sizes.setdefault((module.training, torch.is_grad_enabled()), len(tokens))
        if len(tokens) != size:
            return plain(module, tokens, *more, **how)
        outputs = compiled(module, tokens, *more, **how)
        return outputs.clone() if lasts and mode is not True else outputs

    return call


@contextmanager
def compile_errors(check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Convert the compiler's errors to LaunchError; blocks are compiled when they first run.

    `check` is called before: a signal of the terminal also ends the compiler's processes.
    """
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        check()
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise LaunchError(
            "machine.compile",
            f"torch could not compile this model here ({said[:200]})",
            "set machine.compile = false, delete torch's cache (TORCHINDUCTOR_CACHE_DIR, by default "
            "/tmp/torchinductor_USER) if an earlier run was killed, or see all with TORCH_LOGS=+dynamo",
        ) from error


def _outermost(module: nn.Module) -> Iterator[Block]:
    for child in module.children():
        if isinstance(child, Block):
            yield child
        else:
            yield from _outermost(child)
