"""One update of the weights from a global batch: the mathematics of a training."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from vitctl.data.loader.batches import Batch
from vitctl.engine.losses import Objective
from vitctl.engine.optimizer import Average, clip_gradients, take_step
from vitctl.engine.runtime import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    OPTIMIZER,
    Fetched,
    Runtime,
    Stamps,
    seed_step,
    sent,
)
from vitctl.engine.sharding import synced
from vitctl.models.blocks import train_mode
from vitctl.models.build import Model
from vitctl.system.process import HERE

Backward = Callable[[Batch, int, float], Tensor]  # (batch, step, scale of its loss) -> its summed loss


class Sums(NamedTuple):
    """Parts of sums over the global batch, float64 `[5]` on the device, maybe pending; on every process the
    same.

    They are the loss, usable images, unusable ones, micro-batches of processes that should stop, and those
    without images because of an outage.
    """

    loss: Tensor
    num_images: Tensor
    num_bad: Tensor
    num_stopped: Tensor
    num_lost: Tensor


# Leaves the gradient of a global batch in the parameters, without device synchronisation: (backward, finished
# steps, this process's share, whether it should stop) -> `Sums`, float64 [5].
Gradients = Callable[[Backward, int, list[Batch], bool], Tensor]


@dataclass
class TrainStep:
    """One update of the weights w from a global batch of B images, R of them usable.

        L    = sum of the losses of this process's images / B       forward, loss
        g    = sum of dL/dw over all processes                      backward; all-reduce or lanes
        g   <- g * B / R                                            the gradient of the mean
        g   <- g * min(1, clip_norm / |g|), or cut at clip_value    clip
        w   <- optimizer(w, g, lr(step))                            optimizer
        ema <- d * ema + (1 - d) * w                                average; d = averaging.decay

    An image is unusable if it cannot be decoded or has no label of these classes. If the sum of L or |g| is
    not finite, or a process has no images because of an outage, all processes leave w, the optimizer's
    moments and ema as they are; after an outage, in every later update too. Without any usable image, g = 0;
    momentum and weight decay still change w. DDP and FSDP divide by the number of processes: their losses are
    scaled by it.

    Args:
        model: wrapped by the runtime.
        network: the same model, not wrapped.
        objective: (model, batch, finished steps) -> loss summed over the batch.
        gradients: sums the gradients of all micro-batches and processes.
        lr: finished steps -> learning rate of the next update.
        clip_norm: bound of the global gradient norm; 0: off.
        clip_value: bound of each number of the gradient; 0: off.
        norm_dtype: that the squares of the global norm are added in; None: that of the gradient.
        changing: gives the block in which weights, optimizer and average change.
        holding: gives the block in which they stay, for copies of the weights.
    """

    runtime: Runtime
    model: nn.Module
    network: Model
    objective: Objective
    gradients: Gradients
    optimizer: Optimizer
    average: Average | None
    lr: Callable[[int], float]
    batch_size: int
    clip_norm: float
    clip_value: float = 0.0
    norm_dtype: torch.dtype | None = None
    lost: Tensor | None = field(default=None, init=False)  # batches of an outage so far, on the device
    changing: Callable[[], AbstractContextManager[None]] = nullcontext
    holding: Callable[[], AbstractContextManager[None]] = nullcontext

    def update(self, step: int, micro_batches: list[Batch], stopped: bool = False) -> "Update":
        """Take one step after `step` finished ones, from this process's share of the global batch.

        No device synchronisation: a GPU keeps computing while the next batch is prepared. From the sums all
        processes learn at the same step that one of them was `stopped`.
        """
        HERE.arrive("the sum of gradients")
        clock = self.runtime.clock
        clock.switch(FORWARD)
        train_mode(self.model)
        with self.holding():
            together = self.gradients(self._backward, step, micro_batches, stopped)
        clock.switch(OPTIMIZER)
        sums = Sums(*together)
        # More updates may be queued before the host knows that one was lost: they are lost too.
        self.lost = sums.num_lost if self.lost is None else sums.num_lost.add_(self.lost)
        to_mean = self.batch_size / sums.num_images.clamp(min=1)  # without images all gradients are 0
        parameters = list(self.network.parameters())
        norms = clip_gradients(
            parameters, self.clip_norm, max_value=self.clip_value, scale=to_mean, dtype=self.norm_dtype
        )
        is_finite = torch.addcmul(sums.num_lost, sums.loss, norms[0], value=0) == 0  # 0 * inf is NaN
        lr = self.lr(step)
        with self.changing():
            self._apply(lr, is_finite)
        names = tuple(name for name, p in self.network.named_parameters() if p.grad is not None)
        self.network.zero_grad(set_to_none=True)
        numbers = torch.cat([together, norms.double()])
        stamps = clock.taken()  # before the numbers are sent: whoever has them may read the times, too
        return Update(Fetched(numbers.detach()), lr, names, stamps)

    def warm_up(self, micro_batches: list[Batch]) -> None:
        """Compute the gradients of one update and discard them, so that torch.compile compiles now."""
        train_mode(self.model)
        self.gradients(self._backward, 0, micro_batches, False)
        self.network.zero_grad(set_to_none=True)
        self.runtime.clock.taken()

    def _backward(self, batch: Batch, step: int, scale: float) -> Tensor:
        clock = self.runtime.clock
        clock.switch(FORWARD)
        loss = self.objective(self.model, batch, step)
        clock.switch(BACKWARD)
        if scale > 1:  # DDP and FSDP wait for the others at the end of the pass, after this callback
            ends = partial(clock.switch, EXCHANGE)
            queue = Variable._execution_engine.queue_callback
            loss.register_hook(lambda _: queue(ends))  # type: ignore[no-untyped-call]
        torch.autograd.backward(loss, torch.full_like(loss, scale / self.batch_size))
        return loss.detach()

    def _apply(self, lr: float, is_finite: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        take_step(self.optimizer, is_finite)
        if self.average is not None:
            self.average.update(self.network, is_finite)


@dataclass(frozen=True)
class AllReduced:
    """Gradients summed by DDP or FSDP2, in an order that depends on the processes and micro-batches."""

    runtime: Runtime
    model: nn.Module
    seed: int

    def __call__(self, backward: Backward, step: int, micro_batches: list[Batch], stopped: bool) -> Tensor:
        seed_step(self.seed, step, self.runtime.rank)
        own = zip(*batch_sums(micro_batches, stopped), strict=True)
        sums = sent(torch.tensor([*map(sum, own)], dtype=torch.float64), self.runtime.device)
        with self.runtime.transfer.ahead(micro_batches) as coming:
            for number, batch in enumerate(coming, start=1):
                with synced(self.model, self.runtime.accelerator, now=number == len(micro_batches)):
                    # DDP and FSDP divide the sum by the number of processes.
                    sums[0].add_(backward(batch, step, self.runtime.num_processes))
        self.runtime.clock.switch(EXCHANGE)
        return self.runtime.add(sums)


def batch_sums(batches: list[Batch], stopped: bool) -> list[list[float]]:
    """Return the `Sums` of each batch, with a loss of 0."""
    return [[0, float(one.weights.sum()), len(one.bad), stopped, bool(one.outage)] for one in batches]


@dataclass(frozen=True)
class Result:
    """The outcome of one update, the same on every process.

    Args:
        loss: sum of the weighted losses over the number of usable images of the global batch.
        grad_norm: global norm before clipping.
        num_bad: unusable images.
        stop: a process received a signal, or has no images.
        lost: a process had no images because of an outage; nothing changed and the update does not count.
        skipped: loss or gradient was not finite; nothing changed.
        gradient: norms `[P]` before clipping of the parameters that have a gradient, never of mere shards.
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

    def __str__(self) -> str:
        return f"loss {self.loss:g}, gradient norm {self.grad_norm:g}, learning rate {self.lr:g}"


@dataclass(frozen=True)
class Update:
    """An update that is queued on the device; `result` waits for it.

    `numbers` are float64: `Sums`, the gradient's norm, then that of each of `parameters`. `stamps` are those
    of its parts.
    """

    numbers: Fetched
    lr: float
    parameters: tuple[str, ...]
    stamps: Stamps

    def result(self) -> Result:
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
