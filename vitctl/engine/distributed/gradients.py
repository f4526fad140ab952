"""The gradient of a global batch from the micro-batches of all processes: by all-reduce, or by a fixed tree
over its leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.lane_sum import LaneSum, Tensors
from vitctl.engine.distributed.runtime import Runtime, seed_step
from vitctl.engine.distributed.sharding import synced
from vitctl.engine.distributed.transfer import sent

Backward = Callable[[Batch, int, float], Tensor]  # (batch, step, scale of its loss) -> its summed loss


class Sums(NamedTuple):
    """Over the global batch, the same on every process: the loss, images that count, unusable images,
    processes that got a signal.

    Scalars in float64 on the device, where they may not be computed yet.
    """

    loss: Tensor
    num_images: Tensor
    num_bad: Tensor
    num_stopped: Tensor


class Gradients(Protocol):
    """Leaves the gradient of a global batch in the parameters, without waiting for the device."""

    @property
    def norm_dtype(self) -> torch.dtype | None:
        """That the squares of the global norm are added in; None: that of the gradient."""
        ...

    def __call__(self, backward: Backward, step: int, micro_batches: list[Batch], stopped: bool) -> Sums:
        """Compute it after `step` finished steps, from this process's share; `stopped`: this process received
        a signal.
        """
        ...


@dataclass(frozen=True)
class AllReduced:
    """DDP or FSDP2 add up the gradients, in an order that depends on the processes and their micro-batches.

    Args:
        runtime: of this process.
        model: wrapped.
        seed: of dropout, drawn by (seed, step, rank).
    """

    runtime: Runtime
    model: nn.Module
    seed: int
    norm_dtype: torch.dtype | None = None

    def __call__(self, backward: Backward, step: int, micro_batches: list[Batch], stopped: bool) -> Sums:
        """See `Gradients`."""
        seed_step(self.seed, step, self.runtime.rank)
        losses = []
        with self.runtime.transfer.ahead(micro_batches) as coming:
            for number, batch in enumerate(coming, start=1):
                with synced(self.model, self.runtime.accelerator, now=number == len(micro_batches)):
                    losses.append(backward(batch, step, self.runtime.num_processes))
        counts = sent(_counts(micro_batches, stopped).sum(dim=0), self.runtime.device)
        return Sums(*self.runtime.add(torch.cat([_added(losses)[None], counts])))


@dataclass(frozen=True)
class ByLanes:
    """Gradients and counts are added in the order of the leaves, so that they are the same on any number of
    processes.

    Args:
        runtime: of this process.
        model: not wrapped for DDP.
        seed: of dropout, drawn by (seed, step, leaf).
        lane_sum: the tree of additions.
    """

    runtime: Runtime
    model: nn.Module
    seed: int
    lane_sum: LaneSum
    norm_dtype: torch.dtype | None = torch.float64

    def __call__(self, backward: Backward, step: int, micro_batches: list[Batch], stopped: bool) -> Sums:
        """See `Gradients`; the micro-batches are the leaves of this process, in order."""
        losses: list[Tensor] = []
        parameters = list(self.model.parameters())

        def leaf(number: int) -> Tensors:
            seed_step(self.seed, step, number)
            losses.append(backward(next(coming), step, 1))
            taken = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(taken) == len(parameters), "every parameter has a gradient in every leaf"
            self.model.zero_grad(set_to_none=True)
            return taken

        with self.runtime.transfer.ahead(micro_batches) as coming:  # leaves are computed in order
            gradients = self.lane_sum.gradients(leaf)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        counts = torch.cat([_counts([batch], stopped) for batch in micro_batches])
        rows = torch.cat([torch.stack(losses).double()[:, None], sent(counts, self.runtime.device)], dim=1)
        return Sums(*_added([*self.lane_sum.table(rows)]))


def _counts(batches: list[Batch], stopped: bool) -> Tensor:
    """Images that count, unusable ones, and whether this process received a signal, float64 `[batches, 3]`,
    on the host.
    """
    rows = [[float(batch.weights.sum()), float(len(batch.bad)), float(stopped)] for batch in batches]
    return torch.tensor(rows, dtype=torch.float64)


def _added(terms: list[Tensor]) -> Tensor:
    """The sum in float64, from left to right: the order decides the last bits, and `sum` has another in other
    releases of Python.
    """
    total = torch.zeros_like(terms[0], dtype=torch.float64)
    for term in terms:
        total = total + term
    return total
