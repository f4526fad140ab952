"""Replay: repeat steps of a training from an earlier checkpoint, and compare them with the record.

On the run's machine type and versions every bit must agree. Elsewhere the images read must be equal, and
losses and gradient norms must agree within a tolerance. If they do not, nothing is proven: rounding grows
from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from torch import Tensor

from vitctl.data.loader.batches import Batch, take
from vitctl.engine.agreement import checksum, identity_differences
from vitctl.engine.checkpoint import SavedCheckpoint, parts, read_checkpoint
from vitctl.engine.journal import (
    CHECKPOINTS,
    TENSOR_FILES,
    TRACE,
    step_folder,
    step_folders,
    step_of,
)
from vitctl.engine.sharding import full
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
from vitctl.engine.update import Result
from vitctl.errors import CheckpointError, VitctlError
from vitctl.models.blocks import trainable
from vitctl.recipe.neutral_keys import PLACES
from vitctl.verify.finding import Finding, Progress, differs, ok, unchecked, unproven
from vitctl.verify.rerun import Rerun

# Relative, for the loss; ten times as large for the gradient norm. torch's fused optimizers round
# float64, too, on a CPU.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "tf32": 1e-2, "bf16": 3e-2}
_GROWS = (
    "rounding grows from step to step: replay steps after a later checkpoint, or on the machine of the run"
)
_PART_NAMES = {
    "samples": "the sample",
    "bytes": "the encoded image",
    "pixels": "the pixels",
    "labels": "the label",
}
# Fields of a start that decide the bits of the steps after it.
_COMPUTATION = ("attention", "linear", "compile", "checkpoint_blocks", "micro_batch", "threads", "precision")
# Values that a replay takes from the record, and paths.
_NOT_COMPARED = ("machine.precision", *PLACES)

Range = tuple[int, int]  # first and last step


class Era(NamedTuple):
    """Steps computed in the same way: the start that says how, the first and the last step."""

    start: StartLine
    first: int
    last: int


def eras(steps: Steps) -> list[Era]:
    """Divide recorded steps wherever a start computes in another way than the one before."""
    joined: list[Era] = []
    for era in _steps_of_starts(steps):
        if joined and _computation(joined[-1].start) == _computation(era.start):
            joined[-1] = joined[-1]._replace(last=era.last)
        else:
            joined.append(era)
    return joined


def _steps_of_starts(steps: Steps) -> list[Era]:
    ends = [*(start.step for start in steps.starts[1:]), steps.last]
    return [Era(start, start.step + 1, end) for start, end in zip(steps.starts, ends, strict=False)]


def _computation(start: StartLine) -> list[object]:
    return [start.made_of, *(getattr(start, name) for name in _COMPUTATION)]


def newest_before(folder: Path, first: int) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint before step `first`, or None."""
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
    """Repeat steps of a training and compare them with their record, as far as this machine can.

    The rest is not proven. `era` contains the steps, and `ranges` are ascending.
    """
    words = ", ".join(f"{first} to {last}" for first, last in ranges)
    saved, problem = newest_before(rerun.folder, ranges[0][0]), ""
    changed = identity_differences(era.start.made_of.model_dump(), steps.starts[-1].made_of.model_dump())
    if era.first > 1 and (saved is None or saved.step < era.first - 1):
        problem = f"no checkpoint is kept of step {era.first - 1}, where they began in another way"
    elif changed:
        problem = f"made with another recipe: {'; '.join(text for _, text in changed)}"
    if problem:
        return [unproven("replay", f"steps {words}: {problem}")]
    try:
        return _replay(rerun, steps, ranges, progress)
    except VitctlError as error:
        return [unproven("replay", f"steps {words}: {rerun.explained(error)}")]


def _replay(rerun: Rerun, steps: Steps, ranges: Sequence[Range], progress: Progress) -> list[Finding]:
    findings: list[Finding] = []
    used = [
        start
        for start, begin, end in _steps_of_starts(steps)
        if any(first <= end and last >= begin for first, last in ranges)
    ]

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
            findings.append(differs("replay", f"other inputs: {'; '.join(inputs)}"))
        if environment:
            text = f"the last bits of numbers may differ here: {'; '.join(environment)}"
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
    """Return how the environment of a recorded start differs from this machine, in words."""
    was, now = _environment(before), _environment(here)
    return [
        f"{name} {was.get(name, 'not recorded')}, here {now.get(name, 'none')}"
        for name in dict.fromkeys((*was, *now))
        if was.get(name) != now.get(name)
    ]


def _environment(start: StartLine) -> dict[str, object]:
    names = ("precision", "device", "device_name", "threads", "linear")
    return {name: getattr(start, name) for name in names} | start.hardware | start.versions


class _EndError(Exception):
    """Ends a range at its first difference, with the finding."""


@dataclass
class _Replay:
    """Repeats steps of the training in `folder` and compares each with its record. Nothing is written.

    Args:
        trainer: the prepared training in a scratch folder.
        may_round: bits of numbers may differ, because the environment does.
        draws_differ: other processes drew the dropout: numbers and weights cannot be compared.
        findings: the first difference of each range.
        rounding: the first number whose bits differ where they may; "" if all agree.
        largest: relative difference of a loss.
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
    range: Range = (0, 0)

    def compare(self, first: int, last: int) -> Range:
        """Repeat a range of steps from the newest checkpoint before it. Return the range compared."""
        saved, is_first = newest_before(self.folder, first), self.range == (0, 0)
        begin = saved.step if saved is not None else 0
        self.range = begin + 1, last
        try:
            if saved is not None:
                self.trainer.state.load(saved)
            elif not is_first:  # the start state is gone
                self._unproven(f"{self.folder}: there is no checkpoint before step {first}")
            self._check_weights(begin)
            batches = self.trainer.batches(first_step=begin)
            for step in range(begin, last):
                micro_batches = take(batches, len(self.trainer.own))
                result = self.trainer.train_step.update(step, micro_batches).result()
                self._compare_step(step + 1, result, micro_batches)
        except _EndError as end:
            self.findings.append(end.args[0])
        return self.range

    def verdict(self, ranges: Sequence[Range]) -> Finding:
        words = [f"{first} to {last}" if first < last else f"{first}" for first, last in ranges]
        is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        what = f"step{'' if is_one else 's'} {', '.join(words)}"
        if not self.rounding:
            return ok("replay", f"{what}: equal, bit for bit")
        precision = self.trainer.runtime.precision
        text = (
            f"{what}: images, labels and order equal; not the same bits from {self.rounding}; loss within "
            f"{TOLERANCE[precision]:g} (at most {self.largest:.1g} off), gradient norm within ten times that"
        )
        return ok("replay within a tolerance", text)

    def _compare_step(self, step: int, result: Result, micro_batches: list[Batch]) -> None:
        trainer = self.trainer
        if step not in self.steps.by_step:
            self._unproven(f"step {step} has no record; the steps after it were not computed again")
        recorded = self.steps.at(step)
        weights = trainer.state.network if recorded.weights else None
        size = trainer.train_step.batch_size
        here = describe_step(trainer.runtime, step, result, micro_batches, trainer.own, size, weights)
        self._compare_batch(recorded, here, micro_batches)
        if not self.draws_differ:
            self._compare_numbers(recorded, here, result)
            self._compare_checkpoint(step)
        self.progress(*self.range, step)

    def _check_weights(self, begin: int) -> None:
        recorded = self.steps.at(begin).weights if begin in self.steps.by_step else ""
        recorded = recorded or next((one.weights for one in self.steps.starts if one.step == begin), "")
        if recorded and weights_checksum(self.trainer.state.network) != recorded:
            text = f"the weights after step {begin}" if begin else "the start weights"
            self.rounding = self.rounding or text
            if not self.may_round:  # continue: the data does not depend on them, and may differ, too
                self.findings.append(differs("replay", text))

    def _differs(self, step: int, text: str) -> NoReturn:
        raise _EndError(differs("replay", f"step {step}: {text}"))

    def _unproven(self, text: str) -> NoReturn:
        raise _EndError(unproven("replay", text))

    def _bits_differ(self, step: int, text: str) -> None:
        """Record that bits differ, as a difference where they must agree."""
        if not self.may_round:
            self._differs(step, text)
        self.rounding = self.rounding or f"step {step}: {text}"

    def _compare_batch(self, recorded: StepLine, here: StepRecord, batches: list[Batch]) -> None:
        part = next((name for name in PARTS if recorded.batch.get(name) != here.fields["batch"][name]), None)
        if part is None:
            return
        text, count = _PART_NAMES[part], self.trainer.train_step.batch_size
        if len(differing := self._differing_marks(recorded, here, slice(count))):
            first = int(differing[0])
            sample = int(np.concatenate([batch.samples.numpy() for batch in batches])[first])
            more = f"; {len(differing)} of {count} differ" if len(differing) > 1 else ""
            prefix = "here " if part == "samples" else ""
            text += f" at position {first} of the batch, {prefix}key {self.trainer.log.key(sample)}{more}"
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
        """Compare a number whose bits differ. Return its relative difference, at most `bound`."""
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
        names = list(trainable(self.trainer.state.network))
        size = self.trainer.train_step.batch_size
        differing = self._differing_marks(recorded, here, slice(size, None))
        if not len(differing) or len(here.marks) - size != len(names):
            return "the norm of the gradient"
        last = names[int(differing[-1])]  # the first to differ in the backward pass
        return f"the gradient of {last} ({len(differing)} of {len(names)} parameters differ)"

    def _differing_marks(self, recorded: StepLine, here: StepRecord, where: slice) -> np.ndarray:
        """Return which marks differ; none if trace.bin does not hold those of this step."""
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
        state, here = self.trainer.state, dict[str, dict[str, Tensor]]()
        for part, name, tensor in parts(state.network, state.average, state.optimizer):
            here.setdefault(part, {})[name] = full(tensor).detach()
        for part in TENSOR_FILES:
            stored, now = saved.tensors(part), here.get(part, {})
            names = sorted(stored.keys() | now.keys())
            if differing := [name for name in names if not _same(stored.get(name), now.get(name))]:
                count = f"{len(differing)} of {len(names)} tensors"
                self._bits_differ(step, f"the checkpoint of step {step}: {part} {differing[0]} ({count})")


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
        return False
    return checksum([("", one)]) == checksum([("", two)])
