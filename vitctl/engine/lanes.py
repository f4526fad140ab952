"""Lanes: sums in a fixed order of the global batch's leaves, the same bytes on any number of processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.data.source.order import Lanes, Tree, subtrees
from vitctl.engine.runtime import BACKWARD, EXCHANGE, Runtime, seed_step, sent
from vitctl.engine.update import Backward, batch_sums
from vitctl.models.blocks import trainable

Tensors = list[Tensor]
_cuda: Any = torch.cuda  # only partly typed
BUCKET_BYTES = 64 * 2**20  # of the gradient per exchange


def added(tree: Tree, known: Callable[[Tree], Tensors | None]) -> Tensors:
    """Add up a tree in place, left before right; `known` returns a node's tensors, or None to recurse."""
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

    `nodes`: see `Runtime.nodes`. `stream` exchanges sums while a GPU computes; None on a CPU. `switch`: see
    `Clock`.
    """

    lanes: Lanes
    rank: int
    num_processes: int
    nodes: tuple[int, Any, Any] | None = None
    stream: Any = None
    switch: Callable[[str], None] = lambda _: None

    @property
    def own(self) -> range:
        return self.lanes.owned(self.rank, self.num_processes)

    @cached_property
    def stages(self) -> list[tuple[Any, list[range]]]:
        """The groups that complete the tree in turn, the node's first, each with its members' leaves."""
        size, *groups = self.nodes or (self.num_processes, None)
        own = [self.lanes.owned(rank, self.num_processes) for rank in range(self.num_processes)]
        nodes = [own[first : first + size] for first in range(0, len(own), size)]
        between = [range(node[0].start, node[-1].stop) for node in nodes]
        return list(zip(groups, (nodes[self.rank // size], between), strict=False))

    def gradients(self, leaf: Callable[[int], Tensors], parameters: Sequence[Tensor]) -> Tensors:
        """Return the sum of the gradients of all leaves, the same on every process.

        The last backward pass completes the sum from the last parameter to the first, bucket by bucket.
        `leaf` computes the gradients of one of this process's leaves, as tensors that may be overwritten.
        """
        *before, node = subtrees(self.lanes.tree, self.own)
        sums, lefts = list[Tensors](), list[Tensors]()
        waiting, there = list(_buckets(parameters)), set[int]()

        def known(part: Tree) -> Tensors | None:
            return leaf(part) if isinstance(part, int) else None

        def ready(place: int, _: Tensor) -> None:
            there.add(place)
            while waiting and there.issuperset(waiting[-1]):  # in the same order on all processes
                bucket = waiting.pop()
                mine = [cast("Tensor", parameters[i].grad) for i in bucket]
                for left in reversed(lefts):
                    torch._foreach_add_(mine, [left[i] for i in bucket])
                if self.num_processes > 1:
                    self._exchange([*([one[i] for i in bucket] for one in sums), mine])

        sums.extend(added(part, known) for part in before)
        while not isinstance(node, int):
            lefts.append(added(node[0], known))
            node = node[1]
        with ExitStack() as hooks:
            for place, parameter in enumerate(cast("Any", parameters)):
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(partial(ready, place)))
            gradients = leaf(node)
        if self.stream is not None:
            self.switch(EXCHANGE)
            _cuda.current_stream().wait_stream(self.stream)
            self.switch(BACKWARD)
        return gradients

    def table(self, rows: Tensor) -> Tensor:
        """Return the rows of all leaves, float64 `[num_leaves, N]`, from this process's, without rounding."""
        table = rows.new_zeros(self.lanes.num_leaves, rows.shape[1])
        table[self.own.start : self.own.stop] = rows
        if self.num_processes > 1:
            bits = table.view(torch.int64)  # all but one process have zeros: an integer sum copies
            dist.all_reduce(bits)
        return table

    def _exchange(self, mine: list[Tensors]) -> None:
        """Put a bucket's sum into this process's last subtree of it."""
        if self.stream is not None:
            self.stream.wait_stream(_cuda.current_stream())
        self.switch(EXCHANGE)  # no time at all beside the stream
        with _cuda.stream(self.stream):
            sizes = [tensor.numel() for tensor in mine[-1]]
            rest = mine[-1][0].new_zeros(-sum(sizes) % self.num_processes)
            flat = [torch.cat([*(tensor.reshape(-1) for tensor in tensors), rest]) for tensors in mine]
            parts = torch.split(self._completed(torch.stack(flat), *self.stages)[: sum(sizes)], sizes)
            shaped = [part.view_as(tensor) for part, tensor in zip(parts, mine[-1], strict=True)]
            torch._foreach_copy_(mine[-1], shaped)
        self.switch(BACKWARD)

    def _completed(self, sums: Tensor, *stages: tuple[Any, list[range]]) -> Tensor:
        """Return a part's sum `[S]` from this process's subtrees `[K, S]`; each member completes a block."""
        if not stages:
            return sums[0]
        (group, own), *later = stages
        nodes = [subtrees(self.lanes.tree, leaves) for leaves in own]
        size = sums.shape[1] // len(nodes)
        sent = sums.view(len(sums), len(nodes), size).transpose(0, 1).reshape(-1, size)
        received = sums.new_empty(sum(map(len, nodes)), size)
        dist.all_to_all_single(
            received, sent, [len(theirs) for theirs in nodes], [len(sums)] * len(nodes), group=group
        )
        known = dict(zip((node for theirs in nodes for node in theirs), received, strict=True))
        together = subtrees(self.lanes.tree, range(own[0].start, own[-1].stop))
        blocks = [added(node, lambda part: [known[part]] if part in known else None)[0] for node in together]
        whole = sums.new_empty(sums.shape[1])
        _gather(whole, self._completed(torch.stack(blocks), *later), group)
        return whole


def _gather(whole: Tensor, block: Tensor, group: Any) -> None:
    """All-gather under either of the names that torch has given it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, block, group=group)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the tensors' numbers in groups of about BUCKET_BYTES."""
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


@dataclass(frozen=True)
class ByLanes:
    """The gradients of a global batch, by lanes, see `Gradients`; the model is not wrapped for DDP."""

    runtime: Runtime
    model: nn.Module
    seed: int
    lane_sum: LaneSum

    def __call__(self, backward: Backward, step: int, micro_batches: list[Batch], stopped: bool) -> Tensor:
        losses: list[Tensor] = []
        parameters = list(trainable(self.model).values())

        def leaf(number: int) -> Tensors:
            seed_step(self.seed, step, number)
            losses.append(backward(next(coming), step, 1))
            taken = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(taken) == len(parameters), "every trained parameter has a gradient in every leaf"
            self.model.zero_grad(set_to_none=True)
            return taken

        with self.runtime.transfer.ahead(micro_batches) as coming:  # leaves are computed in order
            gradients = self.lane_sum.gradients(leaf, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        rows = sent(
            torch.tensor(batch_sums(micro_batches, stopped), dtype=torch.float64), self.runtime.device
        )
        rows[:, 0] = torch.stack(losses)
        self.runtime.clock.switch(EXCHANGE)
        total: Tensor
        total, *others = self.lane_sum.table(rows)
        for row in others:  # in the order of the leaves
            total.add_(row)
        return total
