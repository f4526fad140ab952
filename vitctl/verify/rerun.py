"""Compute a part of a run again: its job starts in a scratch folder and stops at one training.

The run is only read.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitctl.engine.checkpoint import read_checkpoint
from vitctl.engine.computation import MICRO_BATCH
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import CHECKPOINTS, LOG, MODEL, RECIPE, RESULT, step_folders, tensor_files
from vitctl.engine.optimizer import averaged
from vitctl.engine.preemption import StopFlag
from vitctl.engine.trace import StartLine
from vitctl.engine.trainer import Trainer
from vitctl.errors import CheckpointError, DataError, RecipeError, VitctlError
from vitctl.jobs.evaluate import evaluate
from vitctl.jobs.finetune import finetune
from vitctl.jobs.pretrain import pretrain
from vitctl.jobs.record.result import RunResult, choose_weights, logged_scores
from vitctl.jobs.vtab_suite import vtab
from vitctl.recipe.load import Loaded, Override, with_overrides
from vitctl.recipe.schema import Evaluate, Finetune, Pretrain, Vtab, lora_of
from vitctl.recipe.write import to_toml
from vitctl.system import limits
from vitctl.system.files import read_bytes
from vitctl.verify.finding import Finding, differs, ok, unproven

_JOBS: dict[str, Callable[..., Any]] = {"pretrain": pretrain, "finetune": finetune, "vtab": vtab}

Act = Callable[[Trainer], None]


class _DoneError(Exception):
    """Ends the job after its training was compared."""


@dataclass
class Rerun:
    """A training of a run, to be prepared again on this machine.

    Args:
        run_dir: of the run.
        folder: of the training inside it, or the run itself.
        loaded: recipe.toml, with the places of data and weights on this machine.
        start: the recorded start that tells how it computed; None if none is recorded.
        scratch: an empty folder.
        built_from: the checkpoint whose network stands in for missing start weights.
        reached: whether the training was prepared.
    """

    run_dir: Path
    folder: Path
    loaded: Loaded
    start: StartLine | None
    scratch: Path
    built_from: Path | None = None
    reached: bool = False

    def reach(self, act: Act, instead: Path | None = None) -> None:
        """Start the job up to the prepared training, and call `act` with its trainer.

        Args:
            act: called once.
            instead: a checkpoint whose network stands in for missing start weights; `act` loads its weights.

        Raises:
            CheckpointError: the start weights are missing.
            RecipeError: the job of the run does not train.
        """
        try:
            self._start(act)
        except CheckpointError:
            recipe = self.loaded.recipe
            if self.reached or instead is None or not isinstance(recipe, Finetune | Vtab):
                raise
            if lora_of(recipe).rank:
                raise  # a checkpoint has its adapters merged, not the frozen weights beside them
            self.built_from = instead
            self.scratch = self.scratch.with_name(f"{self.scratch.name}_built")
            self._start(act)

    def _start(self, act: Act) -> None:
        place = self.folder.resolve().relative_to(self.run_dir.resolve())
        recipe = with_overrides(self.loaded, self._machine()).recipe
        if not isinstance(recipe, Pretrain | Finetune | Vtab):
            raise RecipeError(self.run_dir, f"a run of {recipe.job} has no steps")
        self._copy(place)

        def only_this(trainer: Trainer) -> Score | None:
            folder = trainer.log.folder
            if folder.resolve() != (self.scratch / place).resolve():
                return self._finished(folder)
            self.reached = True
            try:
                act(trainer)
            finally:
                trainer.runtime.release()
            raise _DoneError

        if self.start is not None and self.start.threads is not None:
            torch.set_num_threads(self.start.threads)  # on a CPU their number changes bits
        try:
            _JOBS[recipe.job](recipe, self.scratch, stop=StopFlag(), act=only_this)
        except _DoneError:
            return
        raise RecipeError(self.run_dir, f"its recipe does not train {place}")

    def explained(self, error: VitctlError) -> str:
        """Return an error of `reach`, and the option that fixes it."""
        if isinstance(error, DataError):
            return f"{error}; --data SHARDS names another place"
        if isinstance(error, CheckpointError) and not self.reached and hasattr(self.loaded.recipe, "weights"):
            return f"{error}; --from START names another place"
        return str(error)

    def _finished(self, folder: Path) -> Score:
        """Return the logged score of a training that the job needs before this one."""
        original = self.run_dir / folder.resolve().relative_to(self.scratch.resolve())
        scores = logged_scores(original)
        if not scores:
            raise RecipeError(f"{original} has no logged score, which {self.folder} needs")
        # The job reads these of a finished training. Deleting the folders deletes links.
        shutil.copyfile(original / LOG, folder / LOG)
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        for path in step_folders(original / CHECKPOINTS):
            (folder / CHECKPOINTS / path.name).symlink_to(path.resolve())
        return scores[max(scores)]

    def _machine(self) -> list[Override]:
        values: dict[str, Any] = {"machine.processes": 1, "log.trackers": (), "log.trace": True}
        values["log.profile"] = ""
        if isinstance(self.loaded.recipe, Pretrain | Finetune):
            values["machine.sharding"] = "none"
        if self.built_from is not None:
            values |= {"weights.source": str(tensor_files(self.built_from)[MODEL]), "weights.which": ""}
        if self.start is not None:
            values["machine.micro_batch"] = self.start.micro_batch
            if self.loaded.recipe.machine.precision == "auto" and self.start.precision:
                values["machine.precision"] = self.start.precision
            if self.start.device == "cpu":
                values["machine.device"] = "cpu"
            of_gpu = self.start.device == "cuda" and not torch.cuda.is_available()
            for name in ("checkpoint_blocks", *(() if of_gpu else ("attention", "compile"))):
                if (used := getattr(self.start, name)) not in ("", None):
                    values[f"machine.{name}"] = used
        return [Override(key, value) for key, value in values.items()]

    def _copy(self, place: Path) -> None:
        """Copy the recipe, measured choices and other trainings' results, so that they are not repeated."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / RECIPE).write_text(to_toml(self.loaded), encoding="utf-8")
        for name in (RESULT, MICRO_BATCH):
            for file in self.run_dir.rglob(name):
                inside = file.parent.relative_to(self.run_dir)
                if name != RESULT or inside not in (Path(), place):
                    (self.scratch / inside).mkdir(parents=True, exist_ok=True)
                    content = read_bytes(file, limits.RUN_FILE, error=CheckpointError)
                    (self.scratch / inside / name).write_bytes(content)


def rescore(rerun: Rerun, result: RunResult | None) -> Finding:
    """Score the weights that represent a training, or those of a run of `evaluate`, again, and compare the
    counts with those of the result or the log.
    """
    try:
        if isinstance(rerun.loaded.recipe, Evaluate):
            return _evaluated(rerun, result)
        return _scored(rerun, result)
    except VitctlError as error:
        return unproven("score", rerun.explained(error))


def _evaluated(rerun: Rerun, result: RunResult | None) -> Finding:
    if result is None or result.status != "done":
        return unproven("score", "there is no result")
    rerun.scratch.mkdir(parents=True)
    quiet = {"machine.processes": 1, "evaluation.answers": "", "evaluation.fit_temperature": False}
    alone = with_overrides(rerun.loaded, [Override(key, value) for key, value in quiet.items()]).recipe
    assert isinstance(alone, Evaluate)
    here = evaluate(alone, rerun.scratch)
    for name in ("weights_sha256", "data_sha256"):
        before, now = result.provenance.get(name), here.provenance.get(name)
        if before != now:
            return differs("score", f"{name} is {now} here, {before} in the result")
    return _compared(Score.of(here.metrics), result_score(result), "in the result")


def _scored(rerun: Rerun, result: RunResult | None) -> Finding:
    path, chosen = choose_weights(rerun.folder)
    logged = logged_scores(rerun.folder).get(chosen.step or 0)
    if logged is None:
        return unproven("score", f"none is logged of step {chosen.step}")
    scores: list[Score] = []
    tests: list[Score] = []

    def act(trainer: Trainer) -> None:
        state = trainer.state
        state.load(read_checkpoint(path.parent))
        with averaged(state.network, state.average if chosen.averaged else None):
            scores.extend(one.run(state.network) for one in trainer.evaluators if one.name == "evaluate")
            tests.extend([trainer.test(state.network)] if trainer.test else [])

    rerun.reach(act, path.parent)
    if not scores:
        return unproven("score", "there are no images to score")
    if result is not None and result.status == "done":
        if result_score(result) != logged:
            return _compared(scores[0], result_score(result), "in the result")
        recorded = Score.of(result.metrics["test"]) if tests and "test" in result.metrics else None
        if tests and tests[0] != recorded:
            return _compared(tests[0], recorded, "of the test images in the result")
    return _compared(scores[0], logged, f"logged at step {chosen.step}")


def result_score(result: RunResult) -> Score | None:
    """Return the counts in a result, of the first seed if there are several; None if it has none."""
    counts, by_seed = result.metrics, result.metrics.get("by_seed")
    first = next(iter(by_seed.values()), None) if isinstance(by_seed, dict) else None
    if "correct" not in counts and isinstance(first, dict):
        counts = {"total": counts.get("total"), "correct": first.get("correct")}
    try:
        score = Score.of(counts)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return score if score.total else None


def _compared(score: Score, before: Score | None, where: str) -> Finding:
    here = f"{score.correct} of {score.total} here"
    if before is None:
        return differs("score", f"{here}, no counts {where}")
    if score != before:
        return differs("score", f"{here}, {before.correct} of {before.total} {where}")
    return ok("score", f"scored again: {score.correct:,} of {score.total:,} correct, the same integers")
