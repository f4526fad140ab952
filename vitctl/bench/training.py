"""A recipe's own training, prepared as `pretrain` and `finetune` prepare it, in a folder that is deleted, to
be measured.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from vitctl.bench.budget import Budget
from vitctl.bench.clock import Clock, TimedTrainer
from vitctl.bench.memory import peak_bytes, reset_peak
from vitctl.data.loader.batches import Batch
from vitctl.engine.checkpoint.saving import Saver
from vitctl.engine.loop import Trainer, run_steps, take
from vitctl.engine.preemption import StopFlag
from vitctl.engine.task import TrainingTask
from vitctl.engine.trace.recorder import Recorder
from vitctl.engine.training import Run
from vitctl.errors import DataError
from vitctl.jobs.finetune import finetune
from vitctl.jobs.inputs.data import open_training_images
from vitctl.jobs.inputs.network import needs_labels
from vitctl.jobs.pretrain import pretrain
from vitctl.recipe.machine import Log
from vitctl.recipe.protocols import FewshotProbe, LrSweep, Repeats
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.sections import Evaluation

SYNTHETIC_IMAGES = 1_281_167
_JOBS: dict[str, Callable[..., Any]] = {"pretrain": pretrain, "finetune": finetune}
_MADE_AHEAD = 8  # batches that a loader may have ready
_WARM_UP = 2  # steps before those that are measured: the first allocates memory, the optimizer's too


class _DoneError(Exception):
    """Ends the job once its training was measured."""


class _Enough(BaseException):
    """Ends the loop."""


@dataclass(frozen=True)
class Prepared:
    """A training as `fit` takes it.

    `synthetic`: its images are noise, of which a few are used again and again. `lanes`: its micro-batches are
    leaves of lanes.
    """

    folder: Path
    task: TrainingTask
    trainer: Trainer
    saver: Saver
    synthetic: bool
    lanes: bool

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self.trainer.runtime.device

    def batches(self) -> Iterator[Batch]:
        """Micro-batches as a run gets them, endless; noise costs nothing, because one step's is used again
        and again.
        """
        made = self.task.batches(0)
        return cycle(self.step_of(made)) if self.synthetic else made

    def step_of(self, batches: Iterator[Batch]) -> list[Batch]:
        """The micro-batches of one step of this process."""
        return take(batches, len(self.task.own))


@dataclass(frozen=True)
class Steps:
    """Measured steps: seconds by phase of each, the peak of the memory in bytes, and seconds of CPU of this
    process.
    """

    split: list[dict[str, float]]
    peak: int
    cpu_seconds: float


def with_images(recipe: Pretrain | Finetune, scratch: Path) -> tuple[Pretrain | Finetune, str]:
    """The recipe with noise images where a known data set is not here, and a note that says so.

    Raises:
        DataError: shards that were given are not there.
    """
    data = recipe.data
    if data.synthetic:
        return recipe, f"noise images of {data.image_size} pixels"
    try:
        open_training_images(
            data.model_copy(update={"eval_split": ""}), scratch, needs_labels=needs_labels(recipe)
        )
    except DataError:
        if data.path or data.mixture:
            raise
        changed = data.model_copy(update={"synthetic": SYNTHETIC_IMAGES})
        return recipe.model_copy(
            update={"data": changed}
        ), f"noise images: {data.dataset or 'the data set'} is not here"
    return recipe, ""


def without_extras(recipe: Pretrain | Finetune) -> Pretrain | Finetune:
    """The recipe without scores, probes, trackers, tried rates and seeds: what is measured is its training
    step.
    """
    log: Log = recipe.log.model_copy(update={"trackers": ()})
    changes: dict[str, Any] = {
        "log": log,
        "data": recipe.data.model_copy(update={"eval_split": ""}),
        "evaluation": Evaluation(),
        "checkpoint": recipe.checkpoint.model_copy(update={"keep_best": 0}),
    }
    if isinstance(recipe, Pretrain):
        return recipe.model_copy(update={**changes, "fewshot_probe": FewshotProbe()})
    return recipe.model_copy(update={**changes, "sweep": LrSweep(lrs=()), "finetune": Repeats()})


def reach(recipe: Pretrain | Finetune, scratch: Path, measure: Callable[[Prepared], None]) -> None:
    """Prepare the recipe's training as its job does, and call `measure` with it."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:

        def act(run_dir: Path, task: TrainingTask, trainer: Trainer, saver: Saver) -> None:
            try:
                measure(
                    Prepared(
                        run_dir,
                        task,
                        trainer,
                        saver,
                        bool(recipe.data.synthetic),
                        bool(recipe.schedule.lanes),
                    )
                )
            finally:
                trainer.runtime.release()
            raise _DoneError

        try:
            _JOBS[recipe.job](recipe, Path(folder), stop=StopFlag(), act=act)
        except _DoneError:
            return


def measure_steps(prepared: Prepared, budget: Budget, least: int = 1) -> Steps:
    """Run the loop of every training, its update and its records, until the budget is spent.

    Args:
        prepared: the training.
        budget: of the steps that are measured and those before.
        least: steps to measure, whatever they take.
    """
    clock = Clock(prepared.device)
    trainer = TimedTrainer.of(prepared.trainer, clock)
    trainer.lr = _from_the_start(trainer.lr, prepared.task.total_steps)
    task = replace(prepared.task, total_steps=2**40, evaluate_every=0, probe_every=0, save_every=0)
    run = Run(prepared.folder, task, trainer, prepared.saver)
    if task.facts is not None:
        run.recorder = Recorder(
            run.folder, run.journal, run.runtime, trainer.unwrapped, task.own, trainer.batch_size
        )
        run.recorder.start(0, task.facts)
    if task.warm_up:
        budget.say("compiling")
        trainer.warm_up(prepared.step_of(prepared.batches()))
        clock.restart()
    run.start_clock(0)
    batches = prepared.batches()
    with contextlib.suppress(_Enough):
        run_steps(trainer, task, _clocked(batches, prepared, clock, budget, least), 0, run)
    return Steps(clock.steps(), peak_bytes(prepared.device), clock.cpu_seconds())


def loader_rate(prepared: Prepared, budget: Budget) -> float:
    """Images/s that the loader of this process gives without a step beside it, after what it had made ahead."""
    budget.say("measuring the loader alone")
    batches = prepared.batches()
    for _ in range(_MADE_AHEAD):
        if budget.left > 0:
            next(batches)
    began, taken = time.perf_counter(), 0
    while not taken or budget.left > 0:
        taken += len(next(batches))
    return taken / (time.perf_counter() - began)


def _from_the_start(lr: Callable[[int], float], total_steps: int) -> Callable[[int], float]:
    """The rates of the run, again and again: more steps may be measured than it has."""
    return lambda step: lr(step % max(1, total_steps))


def _clocked(
    batches: Iterator[Batch], prepared: Prepared, clock: Clock, budget: Budget, least: int
) -> Iterator[Batch]:
    """The same batches, with a stamp before the first of each step; ends the loop when enough steps were
    measured.
    """
    share, step, began = len(prepared.task.own), -_WARM_UP, time.monotonic()
    while True:
        took, began = time.monotonic() - began, time.monotonic()
        if step == -_WARM_UP + 1 and budget.left < budget.seconds / 2:
            step = 0  # steps are so long that one is enough to warm up
        if step == 0:
            reset_peak(prepared.device)
            clock.restart()
        clock.begin_step()
        if step >= least and _agreed(prepared, budget.left <= 0):
            raise _Enough
        longer = f"; a step takes {took:.0f} s" if took > max(1, budget.left) else ""
        budget.say((f"training step {step + 1}" if step >= 0 else "warming up") + longer)
        given = 0
        while given < share:
            batch = next(batches)
            given += len(batch)
            yield batch
        step += 1


def _agreed(prepared: Prepared, over: bool) -> bool:
    """Whether time is over on any process: all of them end after the same step."""
    runtime = prepared.trainer.runtime
    return over if runtime.num_processes == 1 else runtime.sum([float(over)])[0] > 0
