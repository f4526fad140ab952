"""One optimizer update of the global batch: its gradient over all processes, the step, skipped updates."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from vitctl.data.loader.batches import Batch
from vitctl.data.source.order import Lanes, Tree, subtrees
from vitctl.engine.losses import Objective
from vitctl.engine.optimizer import Average, clip_gradients, take_step
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Fetched, Runtime, moment, seed_step, sent
from vitctl.engine.sharding import local, synced
from vitctl.errors import VitctlError
from vitctl.models.blocks import train_mode, trainable
from vitctl.models.build import Model
from vitctl.system.process import HERE
from vitctl.system.remote import GaveUpError

Tensors = list[Tensor]
_cuda: Any = torch.cuda  # not all of it has types
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
        nodes: see `Runtime.nodes`.
        stream: of a GPU, on which sums are exchanged while it computes; None on a CPU.
    """

    lanes: Lanes
    rank: int
    num_processes: int
    nodes: tuple[int, Any, Any] | None = None
    stream: Any = None

    @property
    def own(self) -> range:
        """The leaves of this process."""
        return self.lanes.owned(self.rank, self.num_processes)

    @cached_property
    def stages(self) -> list[tuple[Any, list[range]]]:
        """Groups in which the tree is completed in turn, the node's first, each with its members' leaves."""
        size, *groups = self.nodes or (self.num_processes, None)
        own = [self.lanes.owned(rank, self.num_processes) for rank in range(self.num_processes)]
        nodes = [own[first : first + size] for first in range(0, len(own), size)]
        between = [range(node[0].start, node[-1].stop) for node in nodes]
        return list(zip(groups, (nodes[self.rank // size], between), strict=False))

    def gradients(self, leaf: Callable[[int], Tensors], parameters: Sequence[Tensor]) -> Tensors:
        """Return the sum of the gradients of all leaves, the same on every process.

        The last backward pass completes it from the last parameter to the first, a bucket as soon as its
        gradients are there.

        Args:
            leaf: computes the gradients of one of this process's leaves, tensors that may be changed.
            parameters: that have these gradients.
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
            _cuda.current_stream().wait_stream(self.stream)
        return gradients

    def table(self, rows: Tensor) -> Tensor:
        """Return the rows of all leaves, float64 `[num_leaves, N]`, from those of this process's; no number
        is rounded.
        """
        table = rows.new_zeros(self.lanes.num_leaves, rows.shape[1])
        table[self.own.start : self.own.stop] = rows
        if self.num_processes > 1:
            bits = table.view(
                torch.int64
            )  # one process has each row, the others zeros: a sum of integers copies them
            dist.all_reduce(bits)
        return table

    def _exchange(self, mine: list[Tensors]) -> None:
        """Put the sum of a bucket into the last of this process's subtrees of it."""
        if self.stream is not None:
            self.stream.wait_stream(_cuda.current_stream())
        with _cuda.stream(self.stream):
            sizes = [tensor.numel() for tensor in mine[-1]]
            rest = mine[-1][0].new_zeros(-sum(sizes) % self.num_processes)
            flat = [torch.cat([*(tensor.reshape(-1) for tensor in tensors), rest]) for tensors in mine]
            parts = torch.split(self._completed(torch.stack(flat), *self.stages)[: sum(sizes)], sizes)
            shaped = [part.view_as(tensor) for part, tensor in zip(parts, mine[-1], strict=True)]
            torch._foreach_copy_(mine[-1], shaped)

    def _completed(self, sums: Tensor, *stages: tuple[Any, list[range]]) -> Tensor:
        """Return the sum `[S]` of a part of the gradient from this process's subtrees of it, `[K, S]`; S is a
        multiple of the processes. Each member of a group completes one block, and all gather the blocks.
        """
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
    """All-gather by the newer of torch's two names for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, block, group=group)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
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


Backward = Callable[[Batch, int, float], Tensor]  # (batch, step, scale of its loss) -> its summed loss


class Sums(NamedTuple):
    """Over the global batch, the same on every process: the loss, images that count, unusable images,
    processes that should stop, micro-batches without images because of an outage.

    Scalars in float64 on the device, where they may not be computed yet.
    """

    loss: Tensor
    num_images: Tensor
    num_bad: Tensor
    num_stopped: Tensor
    num_lost: Tensor


# Leaves the gradient of a global batch in the parameters, without waiting for the device: (backward, finished
# steps, this process's share, whether it received a signal) -> sums.
Gradients = Callable[[Backward, int, list[Batch], bool], Sums]


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

    def __call__(self, backward: Backward, step: int, micro_batches: list[Batch], stopped: bool) -> Sums:
        """See `Gradients`; the micro-batches are the leaves of this process, in order."""
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
        counts = torch.cat([_counts([batch], stopped) for batch in micro_batches])
        rows = torch.cat([torch.stack(losses).double()[:, None], sent(counts, self.runtime.device)], dim=1)
        return Sums(*_added([*self.lane_sum.table(rows)]))


def _counts(batches: list[Batch], stopped: bool) -> Tensor:
    """Count images, unusable ones, whether this process should stop, and batches of an outage, float64
    `[batches, 4]`, on the host.
    """
    rows = [
        [float(batch.weights.sum()), float(len(batch.bad)), float(stopped), float(bool(batch.outage))]
        for batch in batches
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _added(terms: list[Tensor]) -> Tensor:
    """Return the sum in float64, from left to right: the order decides the last bits, and `sum` has another
    in other releases of Python.
    """
    total = torch.zeros_like(terms[0], dtype=torch.float64)
    for term in terms:
        total = total + term
    return total


@dataclass(frozen=True)
class Result:
    """The outcome of one update, the same on every process.

    Args:
        loss: mean over the readable images of the global batch.
        grad_norm: global norm before clipping.
        lr: learning rate.
        num_bad: unreadable images.
        stop: a process received a signal, or has no images.
        lost: a process has no images because of an outage, and nothing was changed: the update does not
            count.
        skipped: loss or gradient was not finite, and nothing was changed.
        gradient: norms `[P]` before clipping, of each parameter that has a gradient; of whole parameters also
            where they are sharded.
        parameters: names of those parameters, in the order of the model.
    """

    loss: float
    grad_norm: float
    lr: float
    num_bad: int
    stop: bool
    skipped: bool = False
    lost: bool = False
    gradient: Tensor | None = None
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """An update that the device was told to compute; `result` waits until it has.

    Args:
        numbers: float64, `Sums`, the norm of the gradient, and then of each parameter's.
        lr: learning rate.
        parameters: names of those that have a gradient.
    """

    numbers: Fetched
    lr: float
    parameters: tuple[str, ...]

    def result(self) -> Result:
        """Wait for the numbers and return them."""
        numbers = self.numbers.wait()
        loss_sum, num_images, num_bad, stopped, lost, norm = numbers[:6].tolist()
        return Result(
            loss_sum / max(1.0, num_images),
            norm,
            self.lr,
            int(num_bad),
            bool(stopped),
            not (math.isfinite(loss_sum) and math.isfinite(norm)),
            bool(lost),
            numbers[6:],
            self.parameters,
        )


@dataclass
class TrainStep:
    """A model, its loss and its optimizer.

    Args:
        runtime: this process among its peers.
        model: wrapped by the runtime.
        unwrapped: the same model.
        optimizer: of its parameters.
        average: of its weights, or None.
        objective: (model, batch, finished steps) -> loss summed over the batch.
        gradients: adds up the gradients of all micro-batches and processes.
        lr: finished steps -> learning rate of the next update.
        batch_size: images of the global batch.
        clip_norm: bound of the global gradient norm; 0: off.
        stop: set by signals.
        norm_dtype: that the squares of the global norm are added in; None: that of the gradient.
        is_updating: an update is being applied. After an error then, weights, optimizer and average belong to
            no step, and cannot be saved.
        forward: moments around each forward pass; whoever reads them empties the list.
    """

    runtime: Runtime
    model: nn.Module
    unwrapped: Model
    optimizer: Optimizer
    average: Average | None
    objective: Objective
    gradients: Gradients
    lr: Callable[[int], float]
    batch_size: int
    clip_norm: float
    stop: StopFlag
    norm_dtype: torch.dtype | None = None
    is_updating: bool = False
    forward: list[tuple[Any, Any]] = field(default_factory=list)

    def before_update(self) -> None:
        """Called before weights, optimizer and average change."""

    def update(self, step: int, micro_batches: list[Batch]) -> Update:
        """Take one optimizer step after `step` finished ones, from this process's share of the global batch.

        The gradient is that of the mean loss over the readable images of the global batch, whatever the
        micro-batches and processes: each share adds loss / batch_size, and a few unreadable images are
        corrected for at the end. An update whose loss or gradient is not finite is skipped by all processes
        together.

        No device synchronisation: a GPU computes on while the next batch is prepared.
        """
        HERE.arrive()
        train_mode(self.model)
        sums = self.gradients(self._backward, step, micro_batches, self.stop.raised)
        readable = torch.where(sums.num_images > 0, self.batch_size / sums.num_images, 1.0)
        parameters, lr = list(self.unwrapped.parameters()), self.lr(step)
        norm, each = clip_gradients(parameters, self.clip_norm, scale=readable, dtype=self.norm_dtype)
        self.before_update()
        self.is_updating = True  # until the step is counted
        self._step(lr, sums.loss.isfinite() & norm.isfinite() & (sums.num_lost == 0))
        names = tuple(name for name, p in self.unwrapped.named_parameters() if p.grad is not None)
        self.unwrapped.zero_grad(set_to_none=True)
        numbers = torch.cat([torch.stack([*sums, norm.double()]), each.double()])
        return Update(Fetched(numbers.detach()), lr, names)

    def warm_up(self, micro_batches: list[Batch]) -> None:
        """Compute the gradients of one update and discard them, so that torch.compile compiles now."""
        train_mode(self.model)
        self.gradients(self._backward, 0, micro_batches, False)
        self.unwrapped.zero_grad(set_to_none=True)

    def _backward(self, batch: Batch, step: int, scale: float) -> Tensor:
        began = moment(self.runtime.device)
        loss = self.objective(self.model, batch, step)
        self.forward.append((began, moment(self.runtime.device)))
        self.runtime.accelerator.backward(loss * (scale / self.batch_size))
        return loss.detach()

    def _step(self, lr: float, is_finite: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        take_step(self.optimizer, is_finite)
        if self.average is not None:
            self.average.update(self.unwrapped, is_finite)


def take(batches: Iterator[Batch], share: int, stop: StopFlag | None = None) -> list[Batch]:
    """Take the micro-batches of this process's share of one global batch, `share` images.

    Raises GaveUpError for an outage; with `stop` it is noted there instead.
    """
    micro_batches: list[Batch] = []
    while sum(len(batch.labels) for batch in micro_batches) < share:
        micro_batches.append(next(batches))
        if outage := micro_batches[-1].outage:
            if stop is None:
                raise GaveUpError(outage)
            stop.outage = outage
    return micro_batches


SKIPPED = "skipped.jsonl"
MAX_IN_A_ROW = 10


@dataclass
class Counts:
    """Counters of a run, stored in its checkpoints."""

    num_bad: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0

    def add(self, result: Result) -> None:
        """Count an update."""
        self.num_bad += result.num_bad
        self.num_skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0


def in_words(result: Result) -> str:
    """Return the numbers of an update as text."""
    return f"loss {result.loss:g}, gradient norm {result.grad_norm:g}, learning rate {result.lr:g}"


def skipped_record(step: int, rank: int, result: Result, model: nn.Module, keys: list[str]) -> dict[str, Any]:
    """Return a line of skipped.jsonl. Numbers are strings, since JSON has no infinity; norms of weights are
    of this process's shards.

    On a GPU they may be those after one more update: the numbers of a step are read while the next one is
    computed.

    Args:
        step: finished steps, this one included.
        rank: of this process.
        result: of the update.
        model: unwrapped.
        keys: of the samples of this process's share of the batch.
    """
    norms = [] if result.gradient is None else result.gradient.tolist()
    return {
        "step": step,
        "rank": rank,
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "lr": str(result.lr),
        "keys": keys,
        "gradient_norms": {name: str(norm) for name, norm in zip(result.parameters, norms, strict=True)},
        "weight_norms": {name: str(float(local(p.detach()).norm())) for name, p in model.named_parameters()},
    }


def check_progress(step: int, counts: Counts, result: Result, where: Path) -> None:
    """Stop a run that makes no progress.

    Raises:
        VitctlError: too many updates in a row were skipped.
    """
    if counts.skipped_in_a_row >= MAX_IN_A_ROW:
        raise VitctlError(
            f"step {step}: the last {MAX_IN_A_ROW} updates were not finite ({in_words(result)}) and were "
            f"skipped, training "
            f"stopped; {where} has norms and sample keys; lower optimizer.lr, set optimizer.clip_norm, or "
            f"lengthen "
            "schedule.warmup_steps"
        )


def check_share(steps: int, counts: Counts, where: Path) -> None:
    """Fail a finished run that skipped more than half of its updates: its weights are not the result of its
    recipe.

    Raises:
        VitctlError: more than half of the updates were skipped.
    """
    if 2 * counts.num_skipped > steps:
        raise VitctlError(
            f"{counts.num_skipped} of {steps} updates were not finite and were skipped: this is not the "
            f"training that the recipe describes, so no result was written; {where} has norms and sample "
            f"keys; lower optimizer.lr, set "
            f"optimizer.clip_norm, "
            "or lengthen schedule.warmup_steps"
        )
