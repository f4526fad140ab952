"""Polyak averaging of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitctl.engine.distributed.sharding import like, local


class Average:
    """ema = decay * ema + (1 - decay) * weights, after each step, for every parameter.

    The start weights keep a share of decay ** steps. With `debias` they are left out, and the other shares
    are rescaled to sum to 1: the weights after the first step are the first average.

    Args:
        model: its weights are the first average.
        decay: in [0, 1).
        debias: leave the start weights out.

    Paper: Section 4.1 (0.9999 for the runs at 512 and 518).
    """

    def __init__(self, model: nn.Module, decay: float, *, debias: bool = False) -> None:
        self.decay, self.debias = decay, debias
        # whether `averaged` has exchanged the weights of the model and the averages, or some of them
        self.is_swapped = False
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
        first = local(next(iter(self.tensors.values())))
        self.updates = torch.zeros((), dtype=torch.float64, device=first.device)

    @torch.no_grad()
    def update(self, model: nn.Module, is_finite: Tensor) -> None:
        """One step, after the optimizer's. Nothing waits for the device.

        Args:
            model: with the new weights.
            is_finite: bool, a scalar; false: the optimizer skipped its step, and so does this.
        """
        self.updates += is_finite
        share = torch.full_like(self.updates, 1.0 - self.decay)
        if self.debias:
            share = share / (1.0 - self.decay**self.updates)
        own = [local(tensor) for tensor in self.tensors.values()]
        weights = [local(p.detach()) for p in model.parameters()]
        taken = torch.where(is_finite, share, 0.0).to(own[0].dtype)
        torch._foreach_lerp_(own, weights, [taken] * len(own))

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Continue from saved averages after `updates` updates."""
        self.updates.fill_(updates)
        for name, own in self.tensors.items():
            if name in tensors:
                own.copy_(like(tensors[name], own))


@contextmanager
def averaged(model: nn.Module, average: Average | None) -> Iterator[None]:
    """Within the block the model has its averaged weights."""
    if average is not None:
        average.is_swapped = True
    _swap(model, average)
    try:
        yield
    finally:
        _swap(model, average)
        if average is not None:
            average.is_swapped = False


@torch.no_grad()
def _swap(model: nn.Module, average: Average | None) -> None:
    """In place, because sharded parameters are views of memory that FSDP refers to as well."""
    for name, parameter in model.named_parameters() if average is not None else ():
        assert average is not None
        own, other = local(parameter.data), local(average.tensors[name])
        kept = own.clone()
        own.copy_(other)
        other.copy_(kept)
