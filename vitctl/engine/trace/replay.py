"""Replay: some steps of a training are repeated from a checkpoint before them and compared with their record, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitctl.data.loader.batches import Batch
from vitctl.engine.checkpoint.files import SavedCheckpoint, read_checkpoint
from vitctl.engine.checkpoint.saving import Saver, parts
from vitctl.engine.distributed.agreement import checksum
from vitctl.engine.loop import Result, Trainer, run_steps
from vitctl.engine.run_files import AVERAGE, CHECKPOINTS, MODEL, OPTIMIZER, TRACE, step_folder, step_folders, step_of
from vitctl.engine.task import TrainingTask
from vitctl.engine.trace.digests import PARTS
from vitctl.engine.trace.recorder import StepRecord, describe_step, read_marks, weights_checksum
from vitctl.engine.trace.steps import StepLine, Steps
from vitctl.engine.training import Run
from vitctl.errors import CheckpointError

# Relative, of the loss; ten times as much for the norm of the gradient. Where bits cannot agree, rounding grows from step to step.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "tf32": 1e-2, "bf16": 3e-2}
_PART_NAMES = {"samples": "the sample", "bytes": "the encoded image", "pixels": "the pixels", "labels": "the label"}


@dataclass(frozen=True)
class Difference:
    """The first thing that differs: finished steps with that step, and what, in words."""

    step: int
    text: str


@dataclass
class Replayed:
    """What a replay found.

    Args:
        ranges: (first, last) of the steps that were compared.
        differences: the first of each range.
        rounding: the first number whose bits differ where they may, because the environment is another; "" where all agree.
        largest: relative difference of a loss.
        notes: what could not be compared.
    """

    ranges: list[tuple[int, int]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    rounding: str = ""
    largest: float = 0.0
    notes: list[str] = field(default_factory=list)


class _DiffersError(Exception):
    """Ends a replay at its first difference."""


@dataclass
class Replay:
    """Repeats steps of the training in `folder`, which is only read.

    Args:
        folder: of the training.
        steps: its record.
        ranges: (first, last) of the steps to compare, in ascending order.
        may_round: why the bits of numbers may differ; "" where they must agree.
        draws_differ: dropout was drawn by other processes: the loss says nothing.
        progress: called after each step, with the first and the last of its range and the step.
    """

    folder: Path
    steps: Steps
    ranges: Sequence[tuple[int, int]]
    may_round: str = ""
    draws_differ: bool = False
    progress: Callable[[int, int, int], None] = lambda first, last, step: None  # noqa: ARG005
    found: Replayed = field(default_factory=Replayed)

    def run(self, folder: Path, task: TrainingTask, trainer: Trainer, saver: Saver) -> Replayed:
        """Do it.

        Args:
            folder: a scratch folder.
            task, trainer, saver: the prepared training, as `fit` takes them.

        Returns:
            what was found; each range ends at its first difference.
        """
        run = Run(folder, replace(task, evaluate_every=0, probe_every=0, save_every=0), trainer, saver)
        for first, last in self.ranges:
            self.found.ranges.append((first, last))
            try:
                begin = self._load(run, first)
                comparison = _Comparison(self, run, task.own, begin)
                run_steps(trainer, replace(run.task, total_steps=last), task.batches(begin), begin, comparison)
            except _DiffersError:
                continue
            self.found.ranges[-1] = (begin + 1, last)
        return self.found

    def differs(self, step: int, text: str) -> None:
        """Note a difference, and end this range."""
        self.found.differences.append(Difference(step, text))
        raise _DiffersError

    def _load(self, run: Run, first: int) -> int:
        """The state after the newest step before `first` that has one; returns that step."""
        saved = newest_before(self.folder, first)
        if saved is not None:
            run.load(saved)
        elif len(self.found.ranges) > 1:
            raise CheckpointError(f"{self.folder}: there is no checkpoint before step {first}")
        step = saved.step if saved else 0
        recorded = self.steps.by_step[step].weights if step in self.steps.by_step else ""
        recorded = recorded or next((one.weights for one in self.steps.starts if one.step == step), "")
        if recorded and weights_checksum(run.trainer.unwrapped) != recorded:
            if step:
                text = f"checkpoint of step {step}: its weights are not those that were recorded after that step"
                self.differs(step, text)
            # What is read does not depend on the weights: go on, and name the first difference of the data too.
            self.found.differences.append(Difference(0, "the start weights"))
        return step


@dataclass
class _Comparison:
    """The hooks of the training loop: each step is compared with its record, nothing is written."""

    replay: Replay
    run: Run
    positions: range
    begin: int

    def log(self, step: int, result: Result, waited: float, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        """Compare a step."""
        trainer, recorded = self.run.trainer, self.replay.steps.by_step.get(step)
        if recorded is None:
            self.replay.found.notes.append(f"step {step} has no record; those behind it were not computed again")
            raise _DiffersError
        weights = trainer.unwrapped if recorded.weights else None
        found = describe_step(
            self.run.runtime, step, result, micro_batches, self.positions, trainer.batch_size, weights
        )
        self._compare_batch(recorded, found, micro_batches)
        self._compare_numbers(recorded, found, result)
        self._compare_checkpoint(step)
        self.replay.progress(self.begin + 1, self.replay.found.ranges[-1][1], step)

    def evaluate(self, step: int) -> None:
        """Nothing is scored."""

    def probe(self, step: int) -> None:
        """Nothing is scored."""

    def save(self, step: int, last: bool) -> None:
        """Nothing is saved."""

    def rescue(self, step: int, error: Exception) -> None:
        """Nothing is saved."""

    def _compare_batch(self, recorded: StepLine, found: StepRecord, batches: list[Batch]) -> None:
        part = next((name for name in PARTS if recorded.batch.get(name) != found.fields["batch"][name]), None)
        if part is None:
            return
        text = _PART_NAMES[part]
        count = self.run.trainer.batch_size
        differing = self._differing_marks(recorded, found, slice(count))
        if differing is not None and len(differing):
            first = int(differing[0])
            sample = int(np.concatenate([batch.samples.numpy() for batch in batches])[first])
            more = f"; {len(differing)} of {count} differ" if len(differing) > 1 else ""
            here = "here " if part == "samples" else ""
            text += f" at position {first} of the batch, {here}key {self.run.task.key(sample)}{more}"
        self.replay.differs(recorded.step, text)

    def _compare_numbers(self, recorded: StepLine, found: StepRecord, result: Result) -> None:
        for name, words in (("lr", "the learning rate"), ("loss", "the loss")):
            if recorded.bits.get(name) != found.fields["bits"][name]:
                self._number(recorded, name, getattr(result, name), words)
        if recorded.skipped != result.skipped:
            self.replay.differs(recorded.step, "the update: it was skipped in one of the two, not finite")
        if (recorded.gradient, recorded.bits.get("grad_norm")) != (
            found.fields["gradient"],
            found.fields["bits"]["grad_norm"],
        ):
            self._number(recorded, "grad_norm", result.grad_norm, self._gradient_in_words(recorded, found))
        if recorded.weights and recorded.weights != found.fields["weights"]:
            self._bits(recorded.step, "the weights after the update")

    def _number(self, recorded: StepLine, name: str, here: float, words: str) -> None:
        before = recorded.number(name)
        text = f"{words}: recorded {before!r}, here {here!r}"
        replay = self.replay
        if not replay.may_round:
            replay.differs(recorded.step, text)
        if replay.draws_differ and name != "lr":
            return
        far = abs(before - here) / max(abs(before), abs(here), 1e-300)
        bound = TOLERANCE[self.run.runtime.precision] * (10 if name == "grad_norm" else 1)
        if not far <= (1e-12 if name == "lr" else bound):
            replay.differs(recorded.step, text)
        if name == "loss":
            replay.found.largest = max(replay.found.largest, far)
        self._bits(recorded.step, words)

    def _bits(self, step: int, words: str) -> None:
        """Bits differ: a difference where they must agree, else noted."""
        if not self.replay.may_round:
            self.replay.differs(step, words)
        self.replay.found.rounding = self.replay.found.rounding or f"step {step}: {words}"

    def _gradient_in_words(self, recorded: StepLine, found: StepRecord) -> str:
        names = [name for name, _ in self.run.trainer.unwrapped.named_parameters()]
        size = self.run.trainer.batch_size
        differing = self._differing_marks(recorded, found, slice(size, None))
        if differing is None or not len(differing) or len(found.marks) - size != len(names):
            return "the norm of the gradient"
        last = names[int(differing[-1])]  # a backward pass begins at the last one
        return f"the gradient of {last} ({len(differing)} of {len(names)} parameters differ, the first in the backward pass is named)"

    def _differing_marks(self, recorded: StepLine, found: StepRecord, where: slice) -> np.ndarray | None:
        """Which marks differ; None where trace.bin does not hold those of this step."""
        marks = read_marks(self.replay.folder / TRACE, recorded.model_dump(), len(found.marks))
        return None if marks is None else np.flatnonzero(marks[where] != found.marks[where])

    def _compare_checkpoint(self, step: int) -> None:
        """Where the run has a checkpoint of this step: every tensor of it."""
        folder = step_folder(self.replay.folder / CHECKPOINTS, step)
        if not folder.is_dir():
            return
        try:
            saved = read_checkpoint(folder)
        except (CheckpointError, OSError) as error:
            self.replay.found.notes.append(str(error))
            return
        trainer = self.run.trainer
        here: dict[str, dict[str, Tensor]] = {}
        for part, name, tensor in parts(trainer.unwrapped, trainer.average, trainer.optimizer):
            here.setdefault(part, {})[name] = tensor
        for part in (MODEL, OPTIMIZER, AVERAGE):
            stored, own = saved.tensors(part), here.get(part, {})
            odd = sorted(name for name in stored.keys() | own.keys() if not _same(stored.get(name), own.get(name)))
            if odd:
                self._bits(step, f"the checkpoint of step {step}: {part} {odd[0]} ({len(odd)} of {len(own)} tensors)")


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None or one.shape != two.shape:
        return False
    return checksum([("", one)]) == checksum([("", two.detach().to("cpu", one.dtype))]) and one.dtype == two.dtype


def newest_before(folder: Path, first: int) -> SavedCheckpoint | None:
    """The newest whole checkpoint of fewer than `first` steps; None where there is none."""
    for path in sorted(step_folders(folder / CHECKPOINTS), reverse=True):
        if (step_of(path) or first) < first:
            try:
                return read_checkpoint(path)
            except (CheckpointError, OSError):
                continue
    return None


def set_threads(count: int | None) -> None:
    """Compute with as many threads as a run did: on a CPU their number changes bits."""
    if count is not None:
        torch.set_num_threads(count)
