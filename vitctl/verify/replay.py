"""Replay: repeat some steps of a training from a checkpoint before them, and compare them with their record
and with the checkpoints.

On the machine type and versions of the run every bit must agree. Elsewhere numbers and tensors must agree
within a tolerance; if they do not, nothing is proven: rounding grows from step to step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitctl.data.loader.batches import Batch
from vitctl.engine.agreement import checksum, identity_differences
from vitctl.engine.checkpoint import SavedCheckpoint, parts, read_checkpoint
from vitctl.engine.journal import (
    AVERAGE,
    CHECKPOINTS,
    MODEL,
    OPTIMIZER,
    TRACE,
    step_folder,
    step_folders,
    step_of,
)
from vitctl.engine.step import Result, take
from vitctl.engine.trace import (
    PARTS,
    StartLine,
    StepLine,
    StepRecord,
    Steps,
    describe_step,
    read_marks,
    weights_checksum,
)
from vitctl.engine.trainer import Trainer
from vitctl.errors import CheckpointError, VitctlError
from vitctl.verify.finding import Finding, Progress, differs, ok, unchecked, unproven
from vitctl.verify.rerun import Rerun

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
# What a start decides about the bits of the steps after it.
_COMPUTATION = ("attention", "linear", "compile", "checkpoint_blocks", "micro_batch", "threads", "precision")
# What a replay takes from the record, and where files are.
_NOT_COMPARED = ("machine.precision", "data.path", "weights.source")

Range = tuple[int, int]  # first and last step


class Era(NamedTuple):
    """Steps that were computed in the same way: the start that tells how, the first and the last step."""

    start: StartLine
    first: int
    last: int

    def overlaps(self, ranges: Sequence[Range]) -> bool:
        """Whether it has a step of some ranges."""
        return any(first <= self.last and last >= self.first for first, last in ranges)


def eras(steps: Steps) -> list[Era]:
    """Divide the steps of a record where a start computed in another way than the one before."""
    found: list[Era] = []
    for one in _steps_of_starts(steps):
        if found and _computation(found[-1].start) == _computation(one.start):
            found[-1] = found[-1]._replace(last=one.last)
        else:
            found.append(one)
    return found


def _steps_of_starts(steps: Steps) -> list[Era]:
    ends = [*(start.step for start in steps.starts[1:]), steps.last]
    return [Era(start, start.step + 1, end) for start, end in zip(steps.starts, ends, strict=False)]


def _computation(start: StartLine) -> list[object]:
    return [start.made_of, *(getattr(start, name) for name in _COMPUTATION)]


def newest_before(folder: Path, first: int) -> SavedCheckpoint | None:
    """The newest complete checkpoint of fewer than `first` steps; None if there is none."""
    for path in sorted(step_folders(folder / CHECKPOINTS), reverse=True):
        if (step_of(path) or first) < first:
            try:
                return read_checkpoint(path)
            except (CheckpointError, OSError):
                continue
    return None


def replay(
    rerun: Rerun, steps: Steps, era: Era, ranges: Sequence[Range], progress: Progress
) -> list[Finding]:
    """Repeat steps of a training and compare them with their record, as far as this machine has what they
    need; the rest is not proven.

    Args:
        rerun: the training.
        steps: its record.
        era: that the steps are in.
        ranges: of the steps, in ascending order.
        progress: called after each step.
    """
    words = ", ".join(f"{first} to {last}" for first, last in ranges)
    if problem := _not_repeatable(rerun.folder, steps, era, ranges[0][0]):
        return [unproven("replay", f"steps {words}: {problem}")]
    try:
        return _replay(rerun, steps, ranges, progress)
    except VitctlError as error:
        return [unproven("replay", f"steps {words}: {rerun.explained(error)}")]


def _not_repeatable(folder: Path, steps: Steps, era: Era, first: int) -> str:
    """Why steps cannot be repeated with recipe.toml and the checkpoints that are kept; "" if they can."""
    saved = newest_before(folder, first)
    if era.first > 1 and (saved is None or saved.step < era.first - 1):
        return f"no checkpoint is kept of step {era.first - 1}, where they began in another way"
    changed = identity_differences(era.start.made_of.model_dump(), steps.starts[-1].made_of.model_dump())
    return f"made with another recipe: {'; '.join(text for _, text in changed)}" if changed else ""


def _replay(rerun: Rerun, steps: Steps, ranges: Sequence[Range], progress: Progress) -> list[Finding]:
    findings: list[Finding] = []
    used = [one.start for one in _steps_of_starts(steps) if one.overlaps(ranges)]

    def act(trainer: Trainer) -> None:
        here = StartLine.model_validate({"step": 0, **trainer.facts})
        environment = list(dict.fromkeys(text for start in used for text in differences(start, here)))
        inputs: list[str] = []
        for key, text in identity_differences(used[-1].made_of.model_dump(), here.made_of.model_dump()):
            if key not in _NOT_COMPARED and not (key == "weights" and rerun.built_from):
                (environment if key == "computation" else inputs).append(text)
        many = next((start for start in used if start.processes > 1 and not here.lanes), None)
        if many is not None:
            text = f"made by {many.processes} processes, whose sum of gradients depends on their number"
            environment.insert(0, text)
        if inputs:
            findings.append(differs("replay", f"it is of other inputs: {'; '.join(inputs)}"))
        if environment:
            text = f"the last bits of numbers may be others here: {'; '.join(environment)}"
            findings.append(unchecked("environment", text))
        draws = many is not None and here.draws
        repeated = _Replay(rerun.folder, steps, trainer, bool(environment), draws, progress)
        done = [repeated.compare(first, last) for first, last in ranges]
        if many is not None and draws:
            text = (
                f"dropout was drawn by {many.processes} processes: loss, gradient and weights cannot be "
                f"compared by one"
            )
            repeated.findings.append(unproven("replay", text))
        findings.extend(repeated.findings or [repeated.verdict(done)])

    saved = newest_before(rerun.folder, ranges[0][0])
    rerun.reach(act, saved.folder if saved is not None else None)
    return findings


def differences(before: StartLine, here: StartLine) -> list[str]:
    """The differences between the environment of a recorded start and this machine, in words."""
    was, now = _environment(before), _environment(here)
    return [
        f"{name} {was.get(name, 'not recorded')}, here {now.get(name, 'none')}"
        for name in dict.fromkeys((*was, *now))
        if was.get(name) != now.get(name)
    ]


def _environment(start: StartLine) -> dict[str, object]:
    names = ("precision", "device", "device_name", "threads")
    return {name: getattr(start, name) for name in names} | start.hardware | start.versions


class _EndError(Exception):
    """Ends a range at its first difference."""


@dataclass
class _Replay:
    """Repeats steps of the training in `folder`. It is the hooks of the training loop: each step is compared
    with its record, and nothing is written.

    Args:
        folder: of the training, which is only read.
        steps: its record.
        run: the prepared training in a scratch folder.
        may_round: the bits of numbers may differ, because the environment is another.
        draws_differ: dropout was drawn by other processes: numbers and weights cannot be compared.
        progress: called after each step.
        findings: the first difference of each range.
        rounding: the first number whose bits differ where they may; "" if all agree.
        largest: relative difference of a loss.
        farthest: deviation of a part of a checkpoint, see `WEIGHTS_TOLERANCE`.
        num_checkpoints: that were compared.
        began: the state before a range, by part and name.
        range: of the steps that are being compared.
    """

    folder: Path
    steps: Steps
    trainer: Trainer
    may_round: bool
    draws_differ: bool
    progress: Progress
    findings: list[Finding] = field(default_factory=list)
    rounding: str = ""
    largest: float = 0.0
    farthest: float = 0.0
    num_checkpoints: int = 0
    began: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    range: Range = (0, 0)

    def compare(self, first: int, last: int) -> Range:
        """Repeat a range of steps, from the newest checkpoint before it; returns the range that was compared."""
        saved, is_first = newest_before(self.folder, first), self.range == (0, 0)
        begin = saved.step if saved is not None else 0
        self.range = begin + 1, last
        try:
            if saved is not None:
                self.trainer.load(saved)
            elif not is_first:  # the state of the start is gone
                self._unproven(f"{self.folder}: there is no checkpoint before step {first}")
            self._check_weights(begin)
            batches = self.trainer.batches(begin)
            for step in range(begin, last):
                micro_batches = take(batches, len(self.trainer.own))
                result = self.trainer.update(step, micro_batches).result()
                self.trainer.is_updating = False
                self.trainer.changing.release()
                self._compare_step(step + 1, result, micro_batches)
        except _EndError:
            pass
        return self.range

    def verdict(self, ranges: Sequence[Range]) -> Finding:
        """The finding of a replay in which nothing differs."""
        words = [f"{first} to {last}" if first < last else f"{first}" for first, last in ranges]
        is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        what = f"step{'' if is_one else 's'} {', '.join(words)}"
        if not self.rounding:
            return ok("replay", f"{what}: equal, bit for bit")
        precision = self.trainer.runtime.precision
        within = (
            f"loss within {TOLERANCE[precision]:g} (at most {self.largest:.1g} off), gradient norm within "
            f"ten times that"
        )
        if self.num_checkpoints:
            within += (
                f", {self.num_checkpoints} checkpoints within {WEIGHTS_TOLERANCE[precision]:g} of their "
                f"updates (at most {self.farthest:.1g})"
            )
        text = f"{what}: images, labels and order equal; not the same bits from {self.rounding}; {within}"
        return ok("replay within a tolerance", text)

    def _compare_step(self, step: int, result: Result, micro_batches: list[Batch]) -> None:
        """Compare a step."""
        trainer, recorded = self.trainer, self.steps.by_step.get(step)
        if recorded is None:
            self._unproven(f"step {step} has no record; those behind it were not computed again")
        assert recorded is not None
        weights = trainer.unwrapped if recorded.weights else None
        positions = trainer.own
        here = describe_step(
            self.trainer.runtime, step, result, micro_batches, positions, trainer.batch_size, weights
        )
        self._compare_batch(recorded, here, micro_batches)
        if not self.draws_differ:
            self._compare_numbers(recorded, here, result)
            self._compare_checkpoint(step)
        self.progress(*self.range, step)

    def _check_weights(self, begin: int) -> None:
        """Compare the weights that a range begins with with those recorded, and keep them for `_compare_tensors`."""
        recorded = self.steps.by_step[begin].weights if begin in self.steps.by_step else ""
        recorded = recorded or next((one.weights for one in self.steps.starts if one.step == begin), "")
        if recorded and weights_checksum(self.trainer.unwrapped) != recorded:
            text = f"the weights after step {begin}" if begin else "the start weights"
            self.rounding = self.rounding or text
            if not self.may_round:  # continue: the data does not depend on them, and may differ too
                self.findings.append(differs("replay", text))
        if self.may_round and not self.draws_differ:
            self.began = _copied(self.trainer)

    def _differs(self, step: int, text: str) -> None:
        """Note a difference, and end this range."""
        self.findings.append(differs("replay", f"step {step}: {text}"))
        raise _EndError

    def _unproven(self, text: str) -> None:
        """Note that steps are not proven, and end this range."""
        self.findings.append(unproven("replay", text))
        raise _EndError

    def _bits_differ(self, step: int, text: str) -> None:
        """Note that bits differ: a difference where they must agree."""
        if not self.may_round:
            self._differs(step, text)
        self.rounding = self.rounding or f"step {step}: {text}"

    def _compare_batch(self, recorded: StepLine, here: StepRecord, batches: list[Batch]) -> None:
        part = next((name for name in PARTS if recorded.batch.get(name) != here.fields["batch"][name]), None)
        if part is None:
            return
        text, count = _PART_NAMES[part], self.trainer.batch_size
        if len(differing := self._differing_marks(recorded, here, slice(count))):
            first = int(differing[0])
            sample = int(np.concatenate([batch.samples.numpy() for batch in batches])[first])
            more = f"; {len(differing)} of {count} differ" if len(differing) > 1 else ""
            prefix = "here " if part == "samples" else ""
            text += f" at position {first} of the batch, {prefix}key {self.trainer.key(sample)}{more}"
        self._differs(recorded.step, text)

    def _compare_numbers(self, recorded: StepLine, here: StepRecord, result: Result) -> None:
        step, bits, now = recorded.step, recorded.bits, here.fields
        tolerance = TOLERANCE[self.trainer.runtime.precision]
        if bits.get("lr") != now["bits"]["lr"]:
            self._compare_number(recorded, "lr", result.lr, "the learning rate", 1e-12)
        if bits.get("loss") != now["bits"]["loss"]:
            far = self._compare_number(recorded, "loss", result.loss, "the loss", tolerance)
            self.largest = max(self.largest, far)
        if recorded.skipped != result.skipped:
            self._differs(step, "the update: it was skipped in one of the two, not finite")
        if (recorded.gradient, bits.get("grad_norm")) != (now["gradient"], now["bits"]["grad_norm"]):
            words = self._gradient_in_words(recorded, here)
            self._compare_number(recorded, "grad_norm", result.grad_norm, words, 10 * tolerance)
        if recorded.weights and recorded.weights != now["weights"]:
            self._bits_differ(step, "the weights after the update")

    def _compare_number(self, recorded: StepLine, name: str, here: float, words: str, bound: float) -> float:
        """Compare a number whose bits differ; returns its relative difference, at most `bound`."""
        before, step = recorded.number(name), recorded.step
        text = f"{words}: recorded {before!r}, here {here!r}"
        far = abs(before - here) / max(abs(before), abs(here), 1e-300)
        if not self.may_round or (name == "lr" and not far <= bound):
            self._differs(step, text)
        if not far <= bound:
            self._unproven(f"step {step}: {text}, more than {bound:g} apart; {_GROWS}")
        self._bits_differ(step, words)
        return far

    def _gradient_in_words(self, recorded: StepLine, here: StepRecord) -> str:
        names = [name for name, _ in self.trainer.unwrapped.named_parameters()]
        size = self.trainer.batch_size
        differing = self._differing_marks(recorded, here, slice(size, None))
        if not len(differing) or len(here.marks) - size != len(names):
            return "the norm of the gradient"
        last = names[int(differing[-1])]  # a backward pass begins at the last one
        return (
            f"the gradient of {last} ({len(differing)} of {len(names)} parameters differ, the first in the "
            f"backward pass is named)"
        )

    def _differing_marks(self, recorded: StepLine, here: StepRecord, where: slice) -> np.ndarray:
        """Which marks differ; none if trace.bin does not hold those of this step."""
        marks = read_marks(self.folder / TRACE, recorded.step, recorded.trace, len(here.marks))
        return np.flatnonzero((here.marks if marks is None else marks)[where] != here.marks[where])

    def _compare_checkpoint(self, step: int) -> None:
        """Compare every tensor of the run's checkpoint of this step, if it has one."""
        folder = step_folder(self.folder / CHECKPOINTS, step)
        if not folder.is_dir():
            return
        try:
            saved = read_checkpoint(folder)
        except (VitctlError, OSError) as error:
            self._unproven(str(error))
        here = _copied(self.trainer)
        for part in (MODEL, OPTIMIZER, AVERAGE):
            stored, now = saved.tensors(part), here.get(part, {})
            odd = sorted(
                name for name in stored.keys() | now.keys() if not _same(stored.get(name), now.get(name))
            )
            if odd:
                text = f"the checkpoint of step {step}: {part} {odd[0]} ({len(odd)} of {len(now)} tensors)"
                self._bits_differ(step, text)
                self._compare_tensors(step, text, stored, now, self.began.get(part, {}))
        self.num_checkpoints += 1

    def _compare_tensors(
        self,
        step: int,
        text: str,
        stored: Mapping[str, Tensor],
        here: Mapping[str, Tensor],
        began: Mapping[str, Tensor],
    ) -> None:
        """Compare tensors of another environment within WEIGHTS_TOLERANCE."""
        bound = WEIGHTS_TOLERANCE[self.trainer.runtime.precision]
        if {name: one.shape for name, one in stored.items()} != {n: one.shape for n, one in here.items()}:
            self._differs(step, f"{text}: other names or shapes")
        far = moved = 0.0
        for name, tensor in here.items():
            now, zero = tensor.double(), torch.zeros_like(tensor, dtype=torch.float64)
            away = float((stored[name].double() - now).square().sum())
            path = float((now - began.get(name, zero).double()).square().sum())
            if not away <= (10 * bound) ** 2 * path or (name.startswith("step/") and away):
                self._too_far(f"{text}: {name}", away, path, 10 * bound)
            far, moved = far + away, moved + path
        if not far <= bound**2 * moved:
            self._too_far(text, far, moved, bound)
        self.farthest = max(self.farthest, _ratio(far, moved))

    def _too_far(self, text: str, away: float, path: float, bound: float) -> None:
        apart = f"{_ratio(away, path):.2g} of its updates apart, more than {bound:g}"
        self._unproven(f"{text} is {apart}; {_GROWS}")


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
