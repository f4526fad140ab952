"""Computing a part of a run again: the run's own job is started in a scratch folder and stopped at the
training in question.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from vitctl.engine.averaging import averaged
from vitctl.engine.checkpoint.files import read_checkpoint
from vitctl.engine.checkpoint.saving import Saver
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import LOG
from vitctl.engine.loop import Trainer
from vitctl.engine.preemption import StopFlag
from vitctl.engine.run_files import CHECKPOINTS, RECIPE, RESULT, step_folders
from vitctl.engine.task import TrainingTask
from vitctl.engine.trace.replay import (
    TOLERANCE,
    WEIGHTS_TOLERANCE,
    Replay,
    Replayed,
    newest_before,
    set_threads,
)
from vitctl.engine.trace.steps import StartLine, Steps
from vitctl.engine.training import Run
from vitctl.errors import CheckpointError, RecipeError, VitctlError
from vitctl.jobs.evaluate import evaluate
from vitctl.jobs.finetune import finetune
from vitctl.jobs.pretrain import pretrain
from vitctl.jobs.record.identity import identity_differences
from vitctl.jobs.record.kernels import KERNELS, MICRO_BATCH
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.record.runs import choose_weights, logged_scores
from vitctl.jobs.vtab_suite import vtab
from vitctl.recipe.load import Loaded, Override, with_overrides
from vitctl.recipe.schema import Evaluate, Finetune, Pretrain, Vtab
from vitctl.recipe.write import to_toml
from vitctl.system.bounds import RUN_FILE
from vitctl.system.files import read_bytes
from vitctl.verify.counts import own_counts
from vitctl.verify.finding import Finding, Progress, differs, ok, unchecked, unproven

_JOBS: dict[str, Callable[..., Any]] = {"pretrain": pretrain, "finetune": finetune, "vtab": vtab}
# What a machine decides, which a replay takes from the record, and where files lie.
_NOT_COMPARED = ("machine.precision", "data.path", "weights.source")
# What a result of `evaluate` says of its images and weights, which follows from recipe, data and weights.
_OF_A_SCORE = (
    "split",
    "labels",
    "image_size",
    "eval_method",
    "eval_resize",
    "resample",
    "exif_orientation",
    "mean",
    "std",
    "data_sha256",
    "weights_sha256",
    "network_sha256",
)
_OF_THE_RECIPE = ("batch_size", "lanes", "draws")  # fields of a start that follow from the recipe


class _DoneError(Exception):
    """Ends the job once its training was looked at."""


@dataclass
class Again:
    """A training of a run, to be prepared once more on this machine.

    Args:
        run_dir: of the run; it is only read.
        folder: of the training in it, or the run itself.
        loaded: recipe.toml, with the places of data and weights on this machine.
        start: how it was computed, as recorded; None where nothing tells.
        scratch: an empty folder.
        built_from: weights whose network is that of the training, instead of the start weights; "" for these.
        reached: whether the training was prepared.
    """

    run_dir: Path
    folder: Path
    loaded: Loaded
    start: StartLine | None
    scratch: Path
    built_from: str = ""
    reached: bool = False

    def reach(self, act: Callable[[Path, TrainingTask, Trainer, Saver], None]) -> None:
        """Start the job up to the prepared training, and call `act` with what `fit` takes.

        Raises:
            RecipeError: the job of the run does not train.
        """
        place = self.folder.resolve().relative_to(self.run_dir.resolve())
        recipe = with_overrides(self.loaded, self._machine()).recipe
        if not isinstance(recipe, Pretrain | Finetune | Vtab):
            raise RecipeError(f"{self.run_dir}: a run of {recipe.job} has no steps")
        self._copy(place)

        def only_this(folder: Path, task: TrainingTask, trainer: Trainer, saver: Saver) -> Score | None:
            if folder.resolve() != (self.scratch / place).resolve():
                return self._finished(folder)
            self.reached = True
            try:
                act(folder, task, trainer, saver)
            finally:
                trainer.runtime.release()
            raise _DoneError

        set_threads(self.start.threads if self.start is not None else None)
        try:
            _JOBS[recipe.job](recipe, self.scratch, stop=StopFlag(), act=only_this)
        except _DoneError:
            return
        raise RecipeError(f"{self.run_dir}: its recipe does not train {place}")

    def _finished(self, folder: Path) -> Score:
        """The score of a training before the one in question, as the run has it."""
        there = self.run_dir / folder.resolve().relative_to(self.scratch.resolve())
        scores = logged_scores(there)
        if not scores:
            raise RecipeError(f"{there}: logs no score, and {self.folder} needs it")
        # What the job reads of a finished training; whoever deletes these folders deletes links.
        shutil.copyfile(there / LOG, folder / LOG)
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        for path in step_folders(there / CHECKPOINTS):
            (folder / CHECKPOINTS / path.name).symlink_to(path.resolve())
        return scores[max(scores)]

    def _machine(self) -> list[Override]:
        values: dict[str, Any] = {"machine.processes": 1, "log.trackers": ()}
        if isinstance(self.loaded.recipe, Pretrain | Finetune):
            values["machine.sharding"] = "none"
        if self.built_from:
            values |= {"weights.source": self.built_from, "weights.which": ""}
        if self.start is not None:
            values |= {"machine.micro_batch": self.start.micro_batch}
            if self.loaded.recipe.machine.precision == "auto":
                values |= {"machine.precision": self.start.precision}
            values |= {"machine.device": "cpu"} if self.start.device == "cpu" else {}
            for name in ("attention", "linear", "compile", "checkpoint_blocks"):
                known = getattr(self.start, name)
                values |= {f"machine.{name}": known} if known not in ("", None) else {}
        return [
            Override(key, value) for key, value in values.items() if value != "" or key == "weights.which"
        ]

    def _copy(self, place: Path) -> None:
        """The recipe, choices that were measured, and the results of the other trainings: they need not be
        trained again.
        """
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / RECIPE).write_text(to_toml(self.loaded), encoding="utf-8")
        for name in (RESULT, KERNELS, MICRO_BATCH):
            for file in self.run_dir.rglob(name):
                inside = file.parent.relative_to(self.run_dir)
                if name != RESULT or inside not in (Path(), place):
                    (self.scratch / inside).mkdir(parents=True, exist_ok=True)
                    content = read_bytes(file, RUN_FILE.limit, error=CheckpointError)
                    (self.scratch / inside / name).write_bytes(content)


def by_start(
    steps: Steps, ranges: Sequence[tuple[int, int]], folder: Path
) -> list[tuple[StartLine, list[tuple[int, int]], str]]:
    """Steps by the start that made them, where starts computed in another way: each with its steps, and why
    these cannot be repeated.

    Args:
        steps: the record.
        ranges: (first, last) of the steps.
        folder: of the training.
    """
    starts = [start for bounds in ranges for start in steps.starts_of(*bounds)]
    if all(_computes(one) == _computes(starts[0]) for one in starts):
        return [(starts[0], list(ranges), "")]
    found = []
    for first, last in ranges:
        cuts = [first, *sorted({one.step + 1 for one in steps.starts if first <= one.step < last}), last + 1]
        for begin, end in pairwise(cuts):
            start = steps.start_of(begin)
            found.append((start, [(begin, end - 1)], _not_repeatable(steps, start, begin, end - 1, folder)))
    return found


def _computes(start: StartLine) -> tuple[object, ...]:
    kernels = (
        start.attention,
        start.linear,
        start.compile,
        start.checkpoint_blocks,
        start.micro_batch,
        start.threads,
        start.precision,
    )
    return (*kernels, start.made_of.model_dump_json())


def _not_repeatable(steps: Steps, start: StartLine, first: int, last: int, folder: Path) -> str:
    saved = newest_before(folder, first)
    if start.step and (saved is None or saved.step < start.step):
        return f"steps {first} to {last}: no checkpoint is kept of step {start.step}, where they began in another way"
    final = steps.starts[-1].made_of
    changed = identity_differences(start.made_of.model_dump(), final.model_dump())
    words = "; ".join(text for _, text in changed)
    return f"steps {first} to {last}: made with another recipe: {words}" if changed else ""


def replay(
    again: Again, steps: Steps, ranges: Sequence[tuple[int, int]], progress: Progress
) -> list[Finding]:
    """Repeat steps of a training and compare them with their record.

    Args:
        again: the training.
        steps: its record.
        ranges: (first, last) of the steps.
        progress: called after each step.
    """
    found: list[Replayed] = []
    environment: list[str] = []
    made_of: list[str] = []
    trained_in: list[str] = []

    def act(folder: Path, task: TrainingTask, trainer: Trainer, saver: Saver) -> None:
        here = StartLine.model_validate({"step": 0, "batch_size": trainer.batch_size, **(task.facts or {})})
        used = [start for bounds in ranges for start in steps.starts_of(*bounds)]
        environment.extend(dict.fromkeys(text for start in used for text in differences(start, here)))
        many = next((start for start in used if start.processes > 1 and not here.lanes), None)
        for start, name in product(used, _OF_THE_RECIPE):
            if (was := getattr(start, name)) != (now := getattr(here, name)):
                made_of.append(f"{name} was {was}, now {now}")
        for key, text in identity_differences(used[-1].made_of.model_dump(), here.made_of.model_dump()):
            if key not in _NOT_COMPARED and not (key == "weights" and again.built_from):
                (environment if key == "computation" else made_of).append(text)
        trained_in.append(here.precision)
        reason = "; ".join(environment)
        if many is not None:
            environment.insert(
                0, f"made by {many.processes} processes, whose sum of gradients depends on their number"
            )
            reason = "; ".join(environment)
        draws = many is not None and here.draws
        found.append(
            Replay(again.folder, steps, ranges, reason, draws, progress).run(folder, task, trainer, saver)
        )
        if many is not None and draws:
            text = f"dropout was drawn by {many.processes} processes: loss, gradient and weights cannot be compared by one"
            found[0].unproven.append(text)

    again.reach(act)
    (result,) = found
    return [*_inputs(made_of), *_replayed(result, environment, trained_in[0])]


def _inputs(made_of: Sequence[str]) -> list[Finding]:
    return [differs("replay", f"it is of other inputs: {'; '.join(made_of)}")] if made_of else []


def _replayed(result: Replayed, environment: Sequence[str], precision: str) -> list[Finding]:
    what = "steps " + ", ".join(
        f"{first} to {last}" if first < last else f"{first}" for first, last in result.ranges
    )
    if len(result.ranges) == 1 and result.ranges[0][0] == result.ranges[0][1]:
        what = f"step {result.ranges[0][0]}"
    findings = []
    if environment:
        text = f"the last bits of numbers may be others here: {'; '.join(environment)}"
        findings.append(unchecked("environment", text))
    for one in result.differences:
        findings.append(differs("replay", f"step {one.step}: {one.text}" if one.step else one.text))
    findings += [unproven("replay", text) for text in result.unproven]
    if result.differences or result.unproven:
        return findings
    if not result.rounding:
        return [*findings, ok("replay", f"{what}: equal, bit for bit")]
    within = f"loss within {TOLERANCE[precision]:g} (at most {result.largest:.1g} off), gradient norm within ten times that"
    if result.checkpoints:
        bound, found = WEIGHTS_TOLERANCE[precision], f"at most {result.farthest:.1g}"
        within += f", {len(result.checkpoints)} checkpoints within {bound:g} of their updates ({found})"
    text = f"{what}: images, labels and order equal; not the same bits from {result.rounding}; {within}"
    return [*findings, ok("replay within a tolerance", text)]


def differences(before: StartLine, here: StartLine) -> list[str]:
    """What of the environment differs between a recorded start and this machine, in words."""
    words = []
    for name, label in (
        ("precision", "precision"),
        ("device", "device"),
        ("device_name", "device"),
        ("threads", "threads"),
    ):
        one, two = getattr(before, name), getattr(here, name)
        if one != two:
            words.append(f"{label} {one}, here {two}")
    was, now = before.hardware | before.versions, here.hardware | here.versions
    for name in sorted({*was, *now}):
        one, two = was.get(name, "not recorded"), now.get(name, "none")
        if one != two:
            words.append(f"{name} {one}, here {two}")
    return words


def rescore(again: Again, result: RunResult | None) -> Finding:
    """Score the weights that represent a training again, and compare the integers with those that it logged.

    Args:
        again: the training, or a run of `evaluate`.
        result: of the latter.
    """
    recipe = again.loaded.recipe
    if isinstance(recipe, Evaluate):
        if result is None or result.status != "done":
            return unproven("score", "there is no result")
        again.scratch.mkdir(parents=True)
        alone = with_overrides(again.loaded, [Override("machine.processes", 1)]).recipe
        assert isinstance(alone, Evaluate)
        here = evaluate(alone, again.scratch)
        odd = [key for key in _OF_A_SCORE if result.provenance.get(key) != here.provenance.get(key)]
        if odd:
            text = f"{odd[0]} is {here.provenance.get(odd[0])} here, {result.provenance.get(odd[0])} in the result"
            return differs("score", text)
        return _compared(Score.of(here.metrics), _claimed(result), "in the result")
    try:
        path, chosen = choose_weights(again.folder)
    except VitctlError as error:
        return unproven("score", f"{error}")
    logged = logged_scores(again.folder).get(chosen.step or 0)
    if logged is None:
        return unproven("score", f"none is logged of step {chosen.step}")
    scores: list[Score | None] = []

    def act(folder: Path, task: TrainingTask, trainer: Trainer, saver: Saver) -> None:
        run = Run(folder, task, trainer, saver)
        run.load(read_checkpoint(path.parent))
        with averaged(trainer.unwrapped, trainer.average if chosen.averaged else None):
            scores.append(task.score(trainer.unwrapped) if task.score is not None else None)

    again.reach(act)
    (score,) = scores
    if score is None:
        return unproven("score", "there are no images to score")
    if result is not None and result.status == "done" and _claimed(result) != logged:
        return _compared(score, _claimed(result), "in the result")
    return _compared(score, logged, f"logged at step {chosen.step}")


def _claimed(result: RunResult) -> Score | None:
    """The counts of a result; None where it has none."""
    try:
        return Score.of(own_counts(result))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _compared(score: Score, before: Score | None, where: str) -> Finding:
    if before is None:
        return differs("score", f"{score.correct} of {score.total} here, no counts {where}")
    if score != before:
        return differs(
            "score", f"{score.correct} of {score.total} here, {before.correct} of {before.total} {where}"
        )
    return ok("score", f"scored again: {score.correct:,} of {score.total:,} correct, the same integers")
