"""The gradient of a global batch from the micro-batches of all processes: by all-reduce, or by a fixed tree over its leaves."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.data.source.order import Lanes, Tree, subtrees
from vitctl.engine.distributed.runtime import Runtime, seed_step
from vitctl.engine.distributed.sharding import synced
from vitctl.engine.distributed.transfer import sent

Tensors = list[Tensor]
BUCKET_BYTES = 64 * 2**20  # of the gradient that are exchanged at a time


def added(tree: Tree, known: Callable[[Tree], Tensors | None]) -> Tensors:
    """Add up a tree, left before right; `known` gives the tensors of a node, which are changed, or None: add
    its subtrees.
    """
    tensors = known(tree)
    if tensors is not None:
        return tensors
    assert not isinstance(tree, int)
    left, right = added(tree[0], known), added(tree[1], known)
    torch._foreach_add_(left, right)
    return left


@dataclass(frozen=True)
class LaneSum:
    """Sums gradients and counts over the leaves of the global batch.

    Args:
        lanes: how the batch is cut.
        rank: of this process.
        num_processes: among which the lanes are divided.
    """

    lanes: Lanes
    rank: int
    num_processes: int

    @property
    def own(self) -> range:
        """The leaves of this process."""
        return self.lanes.owned(self.rank, self.num_processes)

    def gradients(self, leaf: Callable[[int], Tensors]) -> Tensors:
        """The sum of the gradients of all leaves, the same on every process.

        Args:
            leaf: computes the gradient of one of this process's leaves, a list of tensors that may be
                changed.
        """
        nodes = subtrees(self.lanes.tree, self.own)
        sums = {
            node: added(node, lambda part: leaf(part) if isinstance(part, int) else None) for node in nodes
        }
        return sums[self.lanes.tree] if self.num_processes == 1 else self._exchanged(sums)

    def table(self, rows: Tensor) -> Tensor:
        """The rows of all leaves, float64 `[num_leaves, N]`, from those of this process's; no number is
        rounded.
        """
        table = rows.new_zeros(self.lanes.num_leaves, rows.shape[1])
        table[self.own.start : self.own.stop] = rows
        if self.num_processes > 1:
            bits = table.view(
                torch.int64
            )  # one process has each row, the others zeros: a sum of integers copies them
            dist.all_reduce(bits)
        return table

    def _exchanged(self, sums: Mapping[Tree, Tensors]) -> Tensors:
        """Complete the tree: each process does it for one block of every bucket, and all gather the blocks."""
        mine = list(sums.values())
        for numbers in _buckets(mine[0]):
            flat = [_flat([tensors[i] for i in numbers], self.num_processes) for tensors in mine]
            whole = self._completed(torch.stack(flat))
            first = 0
            for tensor in (mine[0][i] for i in numbers):
                tensor.copy_(whole[first : first + tensor.numel()].view_as(tensor))
                first += tensor.numel()
        return mine[0]

    def _completed(self, sums: Tensor) -> Tensor:
        """The sum `[S]` of a part of the gradient from this process's subtrees of it, `[K, S]`; S is a
        multiple of the processes.
        """
        nodes = [
            subtrees(self.lanes.tree, self.lanes.owned(rank, self.num_processes))
            for rank in range(self.num_processes)
        ]
        size = sums.shape[1] // self.num_processes
        sent = sums.view(len(sums), self.num_processes, size).transpose(0, 1).reshape(-1, size)
        received = sums.new_empty(sum(map(len, nodes)), size)
        dist.all_to_all_single(
            received, sent, [len(theirs) for theirs in nodes], [len(sums)] * self.num_processes
        )
        known = dict(zip((node for theirs in nodes for node in theirs), received, strict=True))
        block = added(self.lanes.tree, lambda node: [known[node]] if node in known else None)[0]
        whole = sums.new_empty(sums.shape[1])
        _gather(whole, block)
        return whole


def _gather(whole: Tensor, block: Tensor) -> None:
    """All-gather by the newer of torch's two names for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, block)


def _buckets(tensors: Tensors) -> Iterator[list[int]]:
    """Numbers of the tensors in runs of about BUCKET_BYTES."""
    run: list[int] = []
    size = 0
    for number, tensor in enumerate(tensors):
        run.append(number)
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES:
            yield run
            run, size = [], 0
    if run:
        yield run


def _flat(tensors: Tensors, multiple: int) -> Tensor:
    """One vector of all their numbers, with zeros up to a multiple of a length."""
    size = sum(tensor.numel() for tensor in tensors)
    return torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(-size % multiple)])


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
