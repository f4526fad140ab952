"""Polyak averaging of the weights."""

import torch
from torch import Tensor, nn


class Average:
    """ema = decay * ema + (1 - decay) * weights, after each step, for every parameter.

    Args:
        model: its weights are the first average.
        decay: in [0, 1).

    Paper: Section 4.1 (0.9999 for the runs at 512 and 518).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step, after the optimizer's."""
        weights = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self.tensors.values()), weights, 1.0 - self.decay)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Continue from saved averages."""
        for name, value in tensors.items():
            self.tensors[name].copy_(value)
