"""How fresh weights are drawn. Each function works in place; callers hold `torch.no_grad`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Generator = torch.Generator | None


def draw(weight: Tensor, fill: Callable[..., Tensor], generator: Generator, **scale: float) -> None:
    """Fill `weight` by `fill`, in float32 on the CPU: every dtype and device receives the same draws, rounded."""
    weight.copy_(fill(torch.empty(weight.shape, dtype=torch.float32), generator=generator, **scale))


def lecun_normal(weight: Tensor, generator: Generator) -> Tensor:
    """Fill with a normal cut at two standard deviations, then widened so that the variance is 1 / fan-in."""
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    return truncated_normal(weight, std, generator)


def truncated_normal(weight: Tensor, std: float, generator: Generator) -> Tensor:
    """Fill with a normal; draws beyond two standard deviations are drawn again.

    Torch has this too, and draws otherwise in other releases; a seed should mean the same weights in all of them.
    """
    bound = weight.new_tensor(2 * std).item()
    weight.normal_(0, std, generator=generator)
    while (outside := weight.abs() > bound).any():
        weight.copy_(torch.where(outside, torch.empty_like(weight).normal_(0, std, generator=generator), weight))
    return weight


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
