"""The gradient of a global batch by one fixed binary tree of additions, the same bits on any number of
processes.

Rounding makes a sum depend on the order of its additions. Here the order is fixed by the numbers of the
leaves: the leaves of a lane are added in a binary tree, and then the lanes. A process adds the largest
subtrees that lie within its own leaves, and the additions above them are done in one place for each block of
the gradient, by the process that the block is sent to.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vitctl.data.loader.lanes import Lanes, Tree, subtrees

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
