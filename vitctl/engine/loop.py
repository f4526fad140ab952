"""One optimizer update, and the training loop."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from vitctl.data.loader.batches import Batch
from vitctl.engine.averaging import Average
from vitctl.engine.distributed.gradients import Gradients
from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.evaluation import stop_together
from vitctl.engine.losses import Objective
from vitctl.engine.optimizer import clip_gradients, gradient_norms
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.task import TrainingTask, is_due
from vitctl.models.build import Model


@dataclass(frozen=True)
class Result:
    """The outcome of one update, the same on every process.

    `skipped`: loss or gradient was not finite, and nothing was changed; then `norms` has the norm of each parameter's gradient.
    `gradient`: norms `[P]` before clipping, of each parameter that has a gradient, in the order of the model; of whole parameters also
    where they are sharded.
    """

    loss: float
    grad_norm: float
    lr: float
    num_bad: int
    stop: bool
    skipped: bool = False
    norms: dict[str, float] = field(default_factory=dict)
    gradient: Tensor | None = None


@dataclass
class Trainer:
    """A model, its optimizer and its loss.

    `model` is wrapped by the runtime, `unwrapped` is the same model unwrapped. `objective(model, batch, step)` sums over its batch,
    `gradients` adds up those of all micro-batches, `lr(step)` is the rate after `step` finished updates, `batch_size` is global.
    `is_updating` is true while an update is applied: after an error then, weights, optimizer and average belong to no step, and
    cannot be saved.
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

    def update(self, step: int, micro_batches: list[Batch]) -> Result:
        """One optimizer step after `step` finished ones, from this process's share of the global batch.

        The gradient is that of the mean loss over the readable images of the global batch, whatever the micro-batches
        and processes: each share adds loss / batch_size, and a few unreadable images are corrected for at the end.
        An update whose loss or gradient is not finite is skipped by all processes together.
        """
        self.model.train()
        loss_sum, num_images, num_bad, stop = self.gradients(self._backward, step, micro_batches, self.stop.raised)
        if 0 < num_images < self.batch_size:
            for p in self.unwrapped.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.batch_size / num_images)
        total, gradient = clip_gradients(self.unwrapped.parameters(), self.clip_norm, dtype=self.gradients.norm_dtype)
        norm, lr = float(total), self.lr(step)
        skipped = not (math.isfinite(loss_sum) and math.isfinite(norm))
        norms = gradient_norms(self.unwrapped) if skipped else {}
        self.is_updating = True  # until the step is counted
        if not skipped:
            self._step(lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_sum / max(1.0, num_images)
        return Result(loss, norm, lr, int(num_bad), bool(stop), skipped, norms, gradient)

    def warm_up(self, micro_batches: list[Batch]) -> None:
        """Compute the gradients of one update and discard them, so that torch.compile compiles now."""
        self.model.train()
        self.gradients(self._backward, 0, micro_batches, False)
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, batch: Batch, step: int, scale: float) -> Tensor:
        loss = self.objective(self.model, batch, step)
        self.runtime.accelerator.backward(loss * (scale / self.batch_size))
        return loss.detach()

    def _step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.unwrapped)


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


def run_steps(trainer: Trainer, task: TrainingTask, batches: Iterator[Batch], first_step: int, hooks: Hooks) -> None:
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
    step = first_step
    try:
        stop_together(trainer.runtime, trainer.stop)
        while step < task.total_steps:
            began = time.perf_counter()
            micro_batches = take(batches, len(task.own))
            waited = time.perf_counter() - began
            result = trainer.update(step, micro_batches)
            step += 1
            trainer.is_updating = False
            hooks.log(step, result, waited, micro_batches)
            if result.stop:
                raise Stopped
            is_last = step == task.total_steps
            if is_last or is_due(step, task.evaluate_every):
                hooks.evaluate(step)
            if is_due(step, task.probe_every) or (is_last and task.probe_every):
                hooks.probe(step)
            if is_last or is_due(step, task.save_every):
                hooks.save(step, is_last)
    except Stopped:
        hooks.save(step, True)
        raise
    except Exception as error:
        hooks.rescue(step, error)
        raise


def take(batches: Iterator[Batch], share: int) -> list[Batch]:
    """Micro-batches that make up this process's share of one global batch."""
    micro_batches: list[Batch] = []
    while sum(len(batch.labels) for batch in micro_batches) < share:
        micro_batches.append(next(batches))
    return micro_batches
