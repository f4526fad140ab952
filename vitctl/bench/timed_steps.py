"""Run a recipe's training steps as `pretrain` and `finetune` do, and time each part.

Every moment of a step belongs to exactly one part, see `vitctl.engine.runtime.Clock`, or to its record.
"""

import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch

from vitctl.bench.largest_batch import peak_bytes, reset_peak
from vitctl.bench.measuring import Budget
from vitctl.data.loader.batches import Batch, take
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Runtime, Stamps, part_seconds, seconds_between
from vitctl.engine.trainer import Trainer
from vitctl.engine.update import TrainStep, Update
from vitctl.errors import DataError
from vitctl.jobs.finetune import finetune
from vitctl.jobs.inputs.data import open_training_images
from vitctl.jobs.pretrain import pretrain
from vitctl.recipe.schema import FewshotProbe, Finetune, LrSweep, Pretrain, Repeats
from vitctl.recipe.sections import Evaluation

LOG = "log"
SYNTHETIC_IMAGES = 1_281_167
WARM_UP = 2  # steps before the measured ones: the first allocates memory, including the optimizer's
_JOBS: dict[str, Callable[..., Any]] = {"pretrain": pretrain, "finetune": finetune}


def without_extras(recipe: Pretrain | Finetune) -> Pretrain | Finetune:
    """Return the recipe without scores, probes, trackers, learning-rate sweep and repeats."""
    changes: dict[str, Any] = {
        "log": recipe.log.model_copy(update={"trackers": ()}),
        "data": recipe.data.model_copy(update={"eval_split": ""}),
        "evaluation": Evaluation(),
        "checkpoint": recipe.checkpoint.model_copy(update={"keep_best": 0}),
    }
    if isinstance(recipe, Pretrain):
        return recipe.model_copy(update={**changes, "fewshot_probe": FewshotProbe()})
    return recipe.model_copy(update={**changes, "sweep": LrSweep(lrs=()), "finetune": Repeats()})


def with_images(recipe: Pretrain | Finetune, scratch: Path) -> tuple[Pretrain | Finetune, list[str]]:
    """Return the recipe, with noise if a known data set is missing, and a note on it. Raises DataError."""
    data = recipe.data
    if data.synthetic:
        return recipe, [f"noise images of {data.image_size} pixels"]
    train_only = data.model_copy(update={"eval_split": ""})
    try:
        open_training_images(train_only, scratch, needs_labels=recipe.needs_labels)
    except DataError:
        if data.path or data.mixture:
            raise
        noise = data.model_copy(update={"synthetic": SYNTHETIC_IMAGES})
        note = f"noise images: {data.dataset or 'the data set'} is not on this machine"
        return recipe.model_copy(update={"data": noise}), [note]
    return recipe, []


def micro_batches(trainer: Trainer) -> Iterator[Batch]:
    """Yield a run's micro-batches without end; noise repeats the images of one step."""
    made = trainer.batches(first_step=0)
    return cycle(take(made, len(trainer.own))) if getattr(trainer.recipe.data, "synthetic", 0) else made


class _DoneError(Exception):
    """Ends the job after its training was measured."""


def with_training(recipe: Pretrain | Finetune, scratch: Path, measure: Callable[[Trainer], None]) -> None:
    """Prepare the recipe's training as its job does, and call `measure` with it."""

    def act(trainer: Trainer) -> None:
        try:
            measure(trainer)
        finally:
            trainer.runtime.release()
        raise _DoneError

    with tempfile.TemporaryDirectory(dir=scratch) as folder, contextlib.suppress(_DoneError):
        _JOBS[recipe.job](recipe, Path(folder), stop=StopFlag(), act=act)


def timed(trainer: Trainer, taken: list[Stamps]) -> Trainer:
    """Return a copy of a trainer without end, scores and checkpoints, whose updates add their stamps to
    `taken`. The trainer must be before its first step.
    """
    step, recipe, never = trainer.train_step, trainer.recipe, {"every_steps": 0}

    def lr(number: int) -> float:
        return step.lr(number % max(1, trainer.total_steps))  # more steps may be measured than the run has

    class Timed(TrainStep):
        def update(self, *given: Any) -> Update:
            update = super().update(*given)
            taken.append(update.stamps)
            return update

    state, machine = trainer.state.at_the_start(), recipe.machine
    sections = {name: getattr(recipe, name).model_copy(update=never) for name in ("evaluation", "checkpoint")}
    sections["machine"] = machine.model_copy(update={"compile": False})  # already compiled
    changed = {"lr": lr, "changing": state.changing}
    return replace(
        trainer,
        recipe=recipe.model_copy(update=sections),
        state=state,
        train_step=Timed(**{one.name: getattr(step, one.name) for one in fields(step) if one.init} | changed),
        evaluators=(),
        total_steps=2**40,
        pending=deque(),
    )


def step_parts(taken: Sequence[Stamps]) -> list[dict[str, float]]:
    """Return the seconds of each part of all steps but the last, with LOG, the time until the next one."""
    return [
        part_seconds(one) | {LOG: seconds_between(one[-1][1], following[0][1])}
        for one, following in pairwise(taken)
    ]


class _Enough(BaseException):
    """Ends the loop."""


def measure_steps(trainer: Trainer, budget: Budget, least: int = 1) -> tuple[list[dict[str, float]], int]:
    """Run the training loop until the budget is spent, for at least `least` measured steps.

    The trainer stays before its first step. Returns the seconds of each step's parts, and the peak memory in
    bytes.
    """
    device = trainer.runtime.device
    taken: list[Stamps] = []
    looping = timed(trainer, taken)
    looping.log.start(0, looping.facts, trains=False)
    with contextlib.suppress(_Enough):
        looping.run_steps(_clocked(trainer, taken, budget, least))
    taken.append(trainer.runtime.clock.taken())  # the last step ends where the next one began
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return step_parts(taken), peak_bytes(device)


def _clocked(trainer: Trainer, taken: list[Stamps], budget: Budget, least: int) -> Iterator[Batch]:
    """Yield the training's micro-batches until the time is over."""
    batches, step, began = micro_batches(trainer), -WARM_UP, time.monotonic()
    while True:
        took, began = time.monotonic() - began, time.monotonic()
        if step == 1 - WARM_UP and budget.left < budget.seconds / 2:
            step = 0  # steps are so long that one warm-up step is enough
        if step == 0:
            reset_peak(trainer.runtime.device)
            taken.clear()
        if step >= least and _is_over(trainer.runtime, budget):
            raise _Enough
        longer = f"; a step takes {took:.0f} s" if took > max(1, budget.left) else ""
        budget.say((f"training step {step + 1}" if step >= 0 else "warming up") + longer)
        yield from take(batches, len(trainer.own))
        step += 1


def _is_over(runtime: Runtime, budget: Budget) -> bool:
    """Return whether the time is over on any process, so that all end after the same step."""
    over = budget.left <= 0
    return over if runtime.num_processes == 1 else runtime.sum([float(over)])[0] > 0
