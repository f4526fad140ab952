"""One optimizer update, and the training loop."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitctl.data.loader.batches import Batch
from vitctl.engine.averaging import Average
from vitctl.engine.distributed.gradients import Gradients
from vitctl.engine.distributed.runtime import Fetched, Runtime
from vitctl.engine.evaluation import stop_together
from vitctl.engine.losses import Objective
from vitctl.engine.optimizer import clip_gradients, take_step
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.task import TrainingTask, is_due
from vitctl.models.build import Model
from vitctl.system.waiting import HERE


@dataclass(frozen=True)
class Result:
    """The outcome of one update, the same on every process.

    `skipped`: loss or gradient was not finite, and nothing was changed. `gradient`: norms `[P]` before
    clipping, of each parameter that has a gradient, named by `parameters`, in the order of the model; of
    whole parameters also where they are sharded.
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
    """An update that the device was told to compute; `result` waits until it is.

    Args:
        numbers: float64, loss summed over the images, images that count, unusable ones, processes with a
            signal, the norm of the gradient, and then of each parameter's.
        lr: learning rate.
        parameters: names of those that have a gradient.
    """

    numbers: Fetched
    lr: float
    parameters: tuple[str, ...]

    def result(self) -> Result:
        """Its outcome."""
        numbers = self.numbers.wait()
        loss_sum, num_images, num_bad, stopped, norm = numbers[:5].tolist()
        skipped = not (math.isfinite(loss_sum) and math.isfinite(norm))
        loss = loss_sum / max(1.0, num_images)
        return Result(loss, norm, self.lr, int(num_bad), bool(stopped), skipped, numbers[5:], self.parameters)


@dataclass
class Trainer:
    """A model, its optimizer and its loss.

    `model` is wrapped by the runtime, `unwrapped` is the same model unwrapped. `objective(model, batch,
    step)` sums over its batch, `gradients` adds up those of all micro-batches, `lr(step)` is the rate after
    `step` finished updates, `batch_size` is global. `before_step` is called before weights, optimizer and
    average change: a checkpoint may still be copying them. `after_step` is called once the step is counted in
    `finished_step`, which is -1 before the loop. `is_updating` is true while an update is applied: after an
    error then, weights, optimizer and average belong to no step, and cannot be saved.
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
    before_step: Callable[[], None] = lambda: None
    after_step: Callable[[], None] = lambda: None
    finished_step: int = -1

    def update(self, step: int, micro_batches: list[Batch]) -> Update:
        """One optimizer step after `step` finished ones, from this process's share of the global batch.

        The gradient is that of the mean loss over the readable images of the global batch, whatever the
        micro-batches and processes: each share adds loss / batch_size, and a few unreadable images are
        corrected for at the end. An update whose loss or gradient is not finite is skipped by all processes
        together.

        Nothing here waits for a GPU, which computes on while the next batch is prepared.
        """
        HERE.arrive()
        self.model.train()
        sums = self.gradients(self._backward, step, micro_batches, self.stop.raised)
        readable = torch.where(sums.num_images > 0, self.batch_size / sums.num_images, 1.0)
        parameters, lr = list(self.unwrapped.parameters()), self.lr(step)
        norm, each = clip_gradients(
            parameters, self.clip_norm, scale=readable, dtype=self.gradients.norm_dtype
        )
        self.before_step()
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


class Hooks(Protocol):
    """Called by the loop around the updates, with the number of finished steps."""

    def log(self, step: int, result: Result, waited: float, micro_batches: list[Batch], /) -> None:
        """Called after each update, with the seconds that the loop waited for its images."""

    def evaluate(self, step: int, /) -> None:
        """Score the model."""

    def probe(self, step: int, /) -> None:
        """Score its features few-shot."""

    def save(self, step: int, last: bool, /) -> None:
        """Save a checkpoint, in the background unless it is the last of this process."""

    def rescue(self, step: int, error: Exception, /) -> None:
        """After an error: save the state if it is consistent, without the other processes, and do not raise."""


def run_steps(
    trainer: Trainer, task: TrainingTask, batches: Iterator[Batch], first_step: int, hooks: Hooks
) -> None:
    """Train from `first_step` finished steps to `task.total_steps`.

    Args:
        trainer: the model and its update.
        task: how often it is scored and saved.
        batches: endless micro-batches of this process, from first_step on.
        first_step: steps finished before.
        hooks: logging, evaluation, saving.

    Raises:
        Stopped: a signal came to any process; the state is saved.
        Exception: the error that ended the training; the last consistent state is saved before.
    """
    step, unread = first_step, Unread(hooks)
    trainer.finished_step = HERE.step = step
    try:
        stop_together(trainer.runtime, trainer.stop)
        while step < task.total_steps:
            began = time.perf_counter()
            micro_batches = take(batches, len(task.own))
            waited = time.perf_counter() - began
            unread.add(step + 1, trainer.update(step, micro_batches), waited, micro_batches)
            step += 1
            trainer.finished_step = HERE.step = step
            trainer.is_updating = False
            trainer.after_step()
            if unread.read(task.steps_behind if not task.is_read_at_once(step) else 0):
                unread.read(0)
                raise Stopped
            is_last = step == task.total_steps
            if is_last or is_due(step, task.evaluate_every):
                hooks.evaluate(step)
            if is_due(step, task.probe_every) or (is_last and task.probe_every):
                hooks.probe(step)
            if is_last or is_due(step, task.save_every):
                hooks.save(step, is_last)
    except Stopped:
        unread.read(0)
        hooks.save(step, True)
        raise
    except Exception as error:
        with suppress(Exception):  # the first error is the one to report
            unread.read(0)
        hooks.rescue(step, error)
        raise


class Unread:
    """Updates whose numbers were not read yet, oldest first: a GPU computes them while the next one is
    prepared.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._updates: deque[tuple[int, Update, float, list[Batch]]] = deque()

    def add(self, step: int, update: Update, waited: float, micro_batches: list[Batch]) -> None:
        """An update that makes `step` finished ones, and what `Hooks.log` wants to know of it."""
        self._updates.append((step, update, waited, micro_batches))

    def read(self, behind: int) -> bool:
        """Read and log all but the newest `behind`; returns whether one of them says that a process got a
        signal.
        """
        stop = False
        while len(self._updates) > behind:
            step, update, waited, micro_batches = self._updates.popleft()
            result = update.result()
            stop = stop or result.stop
            self._hooks.log(step, result, waited, micro_batches)
        return stop


def take(batches: Iterator[Batch], share: int) -> list[Batch]:
    """Micro-batches that make up this process's share of one global batch."""
    micro_batches: list[Batch] = []
    while sum(len(batch.labels) for batch in micro_batches) < share:
        micro_batches.append(next(batches))
    return micro_batches
