"""How fresh weights are drawn: from NumPy's generator, by operations that every processor rounds alike."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Generator = np.random.Generator
Values = NDArray[Any]  # float32 or wider


def draw(weight: Tensor, fill: Callable[..., Values], generator: Generator, **scale: float) -> None:
    """Fill `weight` by `fill`, rounded once to float32: every dtype, device and processor receives the same
    draws.
    """
    drawn = fill(tuple(weight.shape), generator, **scale).astype(np.float32, copy=False)
    weight.copy_(torch.from_numpy(drawn))


def normal(shape: Sequence[int], generator: Generator, std: float) -> Values:
    """Return draws of a normal, float64.

    A ziggurat: a draw is one product of table and random integer, without the vectorised logarithm and cosine
    of torch's normal, whose last bits differ between processors. Only beyond 3.65 deviations it takes a
    logarithm, in float64.
    """
    drawn = generator.standard_normal(tuple(shape))
    drawn *= std
    return drawn


def lecun_normal(shape: Sequence[int], generator: Generator) -> Values:
    """Return draws of a normal cut at two standard deviations, then widened so that the variance is 1 /
    fan-in, float64.
    """
    return truncated_normal(shape, generator, math.sqrt(1 / math.prod(shape[1:])) / 0.87962566103423978)


def truncated_normal(shape: Sequence[int], generator: Generator, std: float) -> Values:
    """Return draws of a normal, float64; draws beyond two standard deviations are drawn again."""
    drawn = generator.standard_normal(tuple(shape))
    while (outside := np.abs(drawn) > 2).any():
        drawn[outside] = generator.standard_normal(int(outside.sum()))
    drawn *= std
    return drawn


def xavier_uniform(shape: Sequence[int], generator: Generator) -> Values:
    """Return draws of a uniform distribution with variance 2 / (fan-in + fan-out) of a matrix `[out, in]`,
    float32.
    """
    drawn = generator.random(tuple(shape), dtype=np.float32)
    drawn *= 2
    drawn -= 1  # exact, as the product is: draws are multiples of 2^-24
    drawn *= np.float32(math.sqrt(6 / sum(shape)))
    return drawn


def plain_norm(*norms: nn.LayerNorm | nn.GroupNorm) -> None:
    """Set scale 1 and bias 0."""
    for norm in norms:
        norm.weight.fill_(1)
        norm.bias.zero_()


def zero(*weights: Tensor | None) -> None:
    """Set to 0 every weight that is there."""
    for weight in weights:
        if weight is not None:
            weight.zero_()
