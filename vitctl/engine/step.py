"""One optimizer update of the global batch."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.gradients import Gradients
from vitctl.engine.distributed.runtime import Fetched, Runtime
from vitctl.engine.losses import Objective
from vitctl.engine.optimizer import Average, clip_gradients, take_step
from vitctl.engine.preemption import StopFlag
from vitctl.models.build import Model
from vitctl.system.process import HERE


@dataclass(frozen=True)
class Result:
    """The outcome of one update, the same on every process.

    Args:
        loss: mean over the readable images of the global batch.
        grad_norm: global norm before clipping.
        lr: learning rate.
        num_bad: unreadable images.
        stop: a process received a signal.
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
    gradient: Tensor | None = None
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """An update that the device was told to compute; `result` waits until it has.

    Args:
        numbers: float64, loss summed over the images, readable images, unreadable ones, processes with a
            signal, the norm of the gradient, and then of each parameter's.
        lr: learning rate.
        parameters: names of those that have a gradient.
    """

    numbers: Fetched
    lr: float
    parameters: tuple[str, ...]

    def result(self) -> Result:
        """Wait for the numbers and return them."""
        numbers = self.numbers.wait()
        loss_sum, num_images, num_bad, stopped, norm = numbers[:5].tolist()
        skipped = not (math.isfinite(loss_sum) and math.isfinite(norm))
        loss = loss_sum / max(1.0, num_images)
        return Result(loss, norm, self.lr, int(num_bad), bool(stopped), skipped, numbers[5:], self.parameters)


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
        is_updating: an update is being applied. After an error then, weights, optimizer and average belong to
            no step, and cannot be saved.
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
    is_updating: bool = False

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
        self.model.train()
        sums = self.gradients(self._backward, step, micro_batches, self.stop.raised)
        readable = torch.where(sums.num_images > 0, self.batch_size / sums.num_images, 1.0)
        parameters, lr = list(self.unwrapped.parameters()), self.lr(step)
        norm, each = clip_gradients(
            parameters, self.clip_norm, scale=readable, dtype=self.gradients.norm_dtype
        )
        self.before_update()
        self.is_updating = True  # until the step is counted
        self._step(lr, sums.loss.isfinite() & norm.isfinite())
        names = tuple(name for name, p in self.unwrapped.named_parameters() if p.grad is not None)
        self.optimizer.zero_grad(set_to_none=True)
        numbers = torch.cat([torch.stack([*sums, norm.double()]), each.double()])
        return Update(Fetched(numbers.detach()), lr, names)

    def warm_up(self, micro_batches: list[Batch]) -> None:
        """Compute the gradients of one update and discard them, so that torch.compile compiles now."""
        self.model.train()
        self.gradients(self._backward, 0, micro_batches, False)
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, batch: Batch, step: int, scale: float) -> Tensor:
        loss = self.objective(self.model, batch, step)
        self.runtime.accelerator.backward(loss * (scale / self.batch_size))
        return loss.detach()

    def _step(self, lr: float, is_finite: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        take_step(self.optimizer, is_finite)
        if self.average is not None:
            self.average.update(self.unwrapped, is_finite)


def take(batches: Iterator[Batch], share: int) -> list[Batch]:
    """Take the micro-batches of this process's share of one global batch, `share` images."""
    micro_batches: list[Batch] = []
    while sum(len(batch.labels) for batch in micro_batches) < share:
        micro_batches.append(next(batches))
    return micro_batches
