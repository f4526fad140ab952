"""Replay: repeat some steps of a training from a checkpoint before them, and compare them with their record
and the checkpoints.

On the machine type and versions of the run every bit must agree. Elsewhere numbers and tensors must agree
within a tolerance; where they do not, nothing is proven: rounding grows from step to step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
from vitctl.engine.run_files import (
    AVERAGE,
    CHECKPOINTS,
    MODEL,
    OPTIMIZER,
    TRACE,
    step_folder,
    step_folders,
    step_of,
    tensors_file,
)
from vitctl.engine.task import TrainingTask
from vitctl.engine.trace.digests import PARTS
from vitctl.engine.trace.recorder import StepRecord, describe_step, read_marks, weights_checksum
from vitctl.engine.trace.steps import StepLine, Steps
from vitctl.engine.training import Run
from vitctl.errors import CheckpointError, VitctlError
from vitctl.models.weights.weights_file import read_weights

# Relative, of the loss; ten times as much for the norm of the gradient. torch's fused optimizers round
# float64 too on a CPU.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "tf32": 1e-2, "bf16": 3e-2}
# Of a checkpoint's model, average and optimizer: the distance from the recorded tensors, over that from the
# state that the replay began with. Ten times as much for a single tensor: Adam turns the rounding of
# gradients that should be zero, such as those of attention's key biases, into updates. Measured over 20 to 60
# steps with ATEN_CPU_CAPABILITY=default: at most 0.005 and 0.11 in float32; 0.01 (SGD) to 0.6 (Adam) in bf16.
# Weights trained on other images from the same state: 1 and more.
WEIGHTS_TOLERANCE = {"float64": 0.05, "float32": 0.05, "tf32": 0.1, "bf16": 0.2}
_GROWS = (
    "rounding grows from step to step: replay steps after a later checkpoint, or on the machine of the run"
)
_PART_NAMES = {
    "samples": "the sample",
    "bytes": "the encoded image",
    "pixels": "the pixels",
    "labels": "the label",
}


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
        unproven: what could not be compared, or is outside the tolerance of another environment.
        rounding: the first number whose bits differ where they may, because the environment is another; ""
            where all agree.
        largest: relative difference of a loss.
        farthest: deviation of a part of a checkpoint, see `WEIGHTS_TOLERANCE`.
        checkpoints: steps whose checkpoint was compared.
    """

    ranges: list[tuple[int, int]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    rounding: str = ""
    largest: float = 0.0
    farthest: float = 0.0
    checkpoints: list[int] = field(default_factory=list)


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
        draws_differ: dropout was drawn by other processes: numbers and weights cannot be compared.
        progress: called after each step, with the first and the last of its range and the step.
    """

    folder: Path
    steps: Steps
    ranges: Sequence[tuple[int, int]]
    may_round: str = ""
    draws_differ: bool = False
    progress: Callable[[int, int, int], None] = lambda first, last, step: None  # noqa: ARG005
    found: Replayed = field(default_factory=Replayed)
    began: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # the state before a range

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
                run_steps(
                    trainer, replace(run.task, total_steps=last), task.batches(begin), begin, comparison
                )
            except _DiffersError:
                continue
            self.found.ranges[-1] = (begin + 1, last)
        return self.found

    def differs(self, step: int, text: str) -> None:
        """Note a difference, and end this range."""
        self.found.differences.append(Difference(step, text))
        raise _DiffersError

    def unproven(self, text: str) -> None:
        """Note that steps are not proven, and end this range."""
        self.found.unproven.append(text)
        raise _DiffersError

    def _load(self, run: Run, first: int) -> int:
        """The state after the newest step before `first` that has one; returns that step."""
        step = self._loaded(run, first)
        if self.may_round and not self.draws_differ:
            self.began = _copied(run.trainer)
        return step

    def _loaded(self, run: Run, first: int) -> int:
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
                text = (
                    f"checkpoint of step {step}: its weights are not those that were recorded after that step"
                )
                self.differs(step, text)
            # What is read does not depend on the weights: go on, and name the first difference of the data
            # too.
            if self.may_round:
                self.found.rounding = "the start weights"
            else:
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
            self.replay.unproven(f"step {step} has no record; those behind it were not computed again")
        assert recorded is not None
        weights = trainer.unwrapped if recorded.weights else None
        found = describe_step(
            self.run.runtime, step, result, micro_batches, self.positions, trainer.batch_size, weights
        )
        self._compare_batch(recorded, found, micro_batches)
        if not self.replay.draws_differ:
            self._compare_numbers(recorded, found, result)
            self._compare_checkpoint(recorded)
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
        far = abs(before - here) / max(abs(before), abs(here), 1e-300)
        bound = TOLERANCE[self.run.runtime.precision] * (10 if name == "grad_norm" else 1)
        if name == "lr" and not far <= 1e-12:
            replay.differs(recorded.step, text)
        if not far <= bound:
            replay.unproven(f"step {recorded.step}: {text}, more than {bound:g} apart; {_GROWS}")
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

    def _compare_checkpoint(self, recorded: StepLine) -> None:
        """Where the run has a checkpoint of this step: every tensor of it, its configuration and what is
        stored about images.
        """
        step, replay = recorded.step, self.replay
        folder = step_folder(replay.folder / CHECKPOINTS, step)
        if not folder.is_dir():
            return
        try:
            saved = read_checkpoint(folder)
            described = {
                name: read_weights(str(folder / tensors_file(name)))
                for name in (MODEL, AVERAGE)
                if (folder / tensors_file(name)).is_file()
            }
        except (VitctlError, OSError) as error:
            replay.unproven(str(error))
        saver = self.run.saver
        for name, weights in described.items():
            odd = [key for key, value in saver.meta.items() if weights.meta.get(key) != value]
            if odd or weights.config != saver.config:
                replay.differs(
                    step, f"the checkpoint of step {step}: {name} says another {odd[0] if odd else 'network'}"
                )
        here = _copied(self.run.trainer)
        stored = {part: saved.tensors(part) for part in (MODEL, OPTIMIZER, AVERAGE)}
        if (
            recorded.weights
            and checksum((n, stored[MODEL].get(n, t)) for n, t in here[MODEL].items()) != recorded.weights
        ):
            replay.differs(
                step, f"the checkpoint of step {step}: its weights are not those recorded after that step"
            )
        for part, tensors in stored.items():
            own = here.get(part, {})
            odd = sorted(
                name for name in tensors.keys() | own.keys() if not _same(tensors.get(name), own.get(name))
            )
            if odd:
                text = f"the checkpoint of step {step}: {part} {odd[0]} ({len(odd)} of {len(own)} tensors)"
                self._bits(step, text)
                self._compare_tensors(text, tensors, own, replay.began.get(part, {}))
        replay.found.checkpoints.append(step)

    def _compare_tensors(
        self, text: str, stored: Mapping[str, Tensor], here: Mapping[str, Tensor], began: Mapping[str, Tensor]
    ) -> None:
        """Compare tensors of another environment within WEIGHTS_TOLERANCE."""
        bound, replay = WEIGHTS_TOLERANCE[self.run.runtime.precision], self.replay
        if {name: one.shape for name, one in stored.items()} != {
            name: one.shape for name, one in here.items()
        }:
            replay.differs(self.begin, f"{text}: other names or shapes")
        far = moved = 0.0
        for name, tensor in here.items():
            own, zero = tensor.double(), torch.zeros_like(tensor, dtype=torch.float64)
            away = float((stored[name].double() - own).square().sum())
            path = float((own - began.get(name, zero).double()).square().sum())
            if not away <= (10 * bound) ** 2 * path or (name.startswith("step/") and away):
                replay.unproven(
                    f"{text}: {name} is {_ratio(away, path):.2g} of its updates apart, more than "
                    f"{10 * bound:g}; {_GROWS}"
                )
            far, moved = far + away, moved + path
        if not far <= bound**2 * moved:
            replay.unproven(
                f"{text}: {_ratio(far, moved):.2g} of its updates apart, more than {bound:g}; {_GROWS}"
            )
        replay.found.farthest = max(replay.found.farthest, _ratio(far, moved))


def _ratio(away: float, path: float) -> float:
    """The root of a ratio of two sums of squares."""
    return 0.0 if not away else math.sqrt(away / path) if path else math.inf


def _copied(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """The state of a training on the CPU, by part and name."""
    copies: dict[str, dict[str, Tensor]] = {}
    for part, name, tensor in parts(trainer.unwrapped, trainer.average, trainer.optimizer):
        copies.setdefault(part, {})[name] = tensor.detach().to("cpu", copy=True)
    return copies


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
        return False
    return checksum([("", one)]) == checksum([("", two)])


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
