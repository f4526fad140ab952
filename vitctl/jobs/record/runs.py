"""Finished runs: which weights represent a run, and which run is used where none is named."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitctl.engine.checkpoint import newest_checkpoint, read_checkpoint
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import (
    AVERAGE,
    CHECKPOINTS,
    LOG,
    MODEL,
    RECIPE,
    RESULT,
    STATE,
    read_records,
    step_folder,
    step_of,
    tensors_file,
)
from vitctl.errors import CheckpointError, RecipeError
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.recipe.sections import weights_choice
from vitctl.recipe.write import written_name
from vitctl.system.files import read_toml

RUNS = Path("runs")
PRETRAINING, TRAINING = ("pretrain",), ("pretrain", "finetune")
_TAKES_ANY = ("evaluate", "export")  # what also makes sense for a fine-tuned network
_GIVEN = "as given"
_INSTEAD = {
    AVERAGE: "only a run with averaging.decay keeps a Polyak average; use the weights themselves with "
    "--weights model",
    MODEL: "the checkpoint was copied in part; copy it again, or use another one with --weights STEP",
}
_QUICKSTARTED = "; `vitctl quickstart` left some here: --from quickstart/pretrain"


@dataclass(frozen=True)
class ChosenWeights:
    """Which weights were chosen.

    Args:
        how: "last" or "best" of a run, "step", or "as given": a checkpoint or a file was named.
        step: finished steps; None where nothing tells.
        averaged: it is the Polyak average.
        accuracy: logged by the run at this step; None where there is none.
        better: step and accuracy of another kept checkpoint of the run with a higher accuracy.
        damaged: newer checkpoints that were skipped, a line each.
        unfinished: the run has no result, was stopped or failed.
    """

    how: str = _GIVEN
    step: int | None = None
    averaged: bool = False
    accuracy: float | None = None
    better: tuple[int, float] | None = None
    damaged: tuple[str, ...] = ()
    unfinished: bool = False

    def used(self, prefix: str = "weights") -> dict[str, Any]:
        """For the provenance of a result."""
        fields = {
            f"{prefix}_chosen": self.how,
            f"{prefix}_step": self.step,
            f"{prefix}_averaged": self.averaged,
        }
        return fields | ({f"{prefix}_passed_over": list(self.damaged)} if self.damaged else {})

    @property
    def text(self) -> str:
        """One line for the screen."""
        said = ["the Polyak average"] if self.averaged else []
        if self.how != _GIVEN:
            scored = f", accuracy {self.accuracy:.2%}" if self.accuracy is not None else ""
            of = {"last": "the last checkpoint", "best": "the best checkpoint kept"}.get(
                self.how, "the checkpoint"
            )
            said.append(f"{of}, step {self.step}{scored}")
        if self.unfinished:
            said.append("of a run that is not finished")
        if self.better:
            step, accuracy = self.better
            said.append(
                f"a better checkpoint is kept: step {step}, accuracy {accuracy:.2%}: --weights best uses it"
            )
        return "; ".join([*said, *(f"skipped: {problem}" for problem in self.damaged)])


def choose_weights(place: Path, which: str = "", *, by_size: bool = False) -> tuple[Path, ChosenWeights]:
    """The weights file of a run folder, a checkpoint folder, a folder of another program, or a file.

    Args:
        place: one of those.
        which: "last", "best" (by the accuracies that the run logged, among the checkpoints that are kept), or
            the number of a step; "ema" or "model": the Polyak average, or the weights themselves, of the
            checkpoint that represents the run. "": that checkpoint: the best of a run with
            evaluation.select_best, else the last. The Polyak average is used where the run kept one, unless
            "model" is given.
        by_size: as `read_checkpoint` takes it.

    Raises:
        CheckpointError: there are no such weights.

    Paper: Section 4.1 (averaging), Section 4.3 (early stopping)
    """
    try:
        weights_choice(which)
    except ValueError as error:
        raise CheckpointError(f"{place}: --weights {error}") from None
    if (place / RECIPE).is_file() and not (place / CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"{place}: a run without checkpoints; give one that has been trained with --from"
        )
    if (place / CHECKPOINTS).is_dir():
        folder, chosen = _checkpoint(place, "" if which in (AVERAGE, MODEL) else which, by_size)
    else:
        folder, chosen = place, ChosenWeights()
        if which not in ("", AVERAGE, MODEL):
            raise CheckpointError(
                f"{place}: --weights {which} chooses among the checkpoints of a run; give a run folder"
            )
    is_ours = folder.is_dir() and ((folder / STATE).exists() or (folder / tensors_file(AVERAGE)).exists())
    if not is_ours:
        if which:
            raise CheckpointError(
                f"{place}: --weights {which}: this is one set of weights; leave --weights out"
            )
        if not folder.exists():
            raise CheckpointError(
                f"{folder}: no such weights; give a run folder, a checkpoint folder or a weights file "
                f"with --from"
            )
        return folder, ChosenWeights(
            step=step_of(folder.parent), averaged=folder.name == tensors_file(AVERAGE)
        )
    has_average = (folder / tensors_file(AVERAGE)).exists()
    name = which if which in (AVERAGE, MODEL) else AVERAGE if has_average else MODEL
    path = folder / tensors_file(name)
    if chosen.how != _GIVEN:
        result = read_result(place)
        chosen = replace(chosen, unfinished=result is None or result.status != "done")
    if not path.exists():
        raise CheckpointError(f"{path}: no such weights; {_INSTEAD[name]}")
    return path, replace(chosen, step=step_of(folder), averaged=name == AVERAGE)


def _checkpoint(run: Path, which: str, by_size: bool) -> tuple[Path, ChosenWeights]:
    """The folder of the requested checkpoint of a run, verified."""
    root, scores = run / CHECKPOINTS, {step: score.accuracy for step, score in logged_scores(run).items()}
    kept = sorted(step for path in root.iterdir() if (step := step_of(path)) is not None)
    scored = [step for step in kept if step in scores]
    best = max(scored, key=lambda step: (scores[step], step), default=None)
    how = which or ("best" if selects_best(run) else "last")
    if how == "last":
        saved, problems = newest_checkpoint(root, by_size=by_size)
        if saved is None:
            raise CheckpointError(
                f"{run}: holds no complete checkpoint{': ' + problems[0] if problems else ''}"
            )
        _check_recorded(run, how, saved.step, problems)
        own = scores.get(saved.step)
        better = (best, scores[best]) if best is not None and own is not None and scores[best] > own else None
        if better and not _is_whole(step_folder(root, better[0]), by_size):
            better = None
        return saved.folder, ChosenWeights("last", accuracy=own, better=better, damaged=tuple(problems))
    if how == "best" and best is None:
        raise CheckpointError(
            f"{run}: none of its checkpoints was scored, so there is no best one; use the last: "
            f"--weights last"
        )
    step = best if how == "best" else int(how)
    if step not in kept or step is None:
        raise CheckpointError(
            f"{run}: has no checkpoint of step {how}; it has {', '.join(map(str, kept)) or 'none'}"
        )
    if how == "best":
        _check_recorded(run, how, step, [])
    folder = read_checkpoint(step_folder(root, step), by_size=by_size).folder
    return folder, ChosenWeights("best" if how == "best" else "step", accuracy=scores.get(step))


def _check_recorded(run: Path, how: str, step: int, problems: Sequence[str]) -> None:
    """Check that the checkpoint that represents a finished run is the one that its result describes.

    Raises:
        CheckpointError: that one is missing or damaged; another one is used only when it is named by its
            step.
    """
    result = read_result(run)
    recorded = result.provenance if result is not None and result.status == "done" else {}
    if recorded.get("weights_chosen") != how or recorded.get("weights_step") in (None, step):
        return
    why = problems[0] if problems else "its folder is gone"
    raise CheckpointError(
        f"{run}: its result is of step {recorded['weights_step']}, whose checkpoint cannot be used ({why}); "
        f"copy it back, or use "
        f"another one by its step: --weights {step}"
    )


def _is_whole(folder: Path, by_size: bool) -> bool:
    try:
        read_checkpoint(folder, by_size=by_size)
    except (CheckpointError, OSError):
        return False
    return True


def selects_best(run: Path) -> bool:
    """Whether the best checkpoint of a run represents it, and not the last."""
    try:
        evaluation = read_toml(run / RECIPE, error=RecipeError)[0].get("evaluation")
    except RecipeError:
        return False
    names = ("select_best", "early_stopping")  # the second in recipes of earlier releases
    return isinstance(evaluation, dict) and any(bool(evaluation.get(name, False)) for name in names)


def logged_scores(run: Path) -> dict[int, Score]:
    """Step -> score, of all evaluations of a training run."""
    return {step: score for step, score in Score.by_step(read_records(run / LOG)).items() if step}


def logged_probes(run: Path, step: int) -> dict[str, float]:
    """Few-shot accuracies of a training run at a step, by their names: "5-shot"."""
    records = [record for record in read_records(run / LOG) if record.get("kind") == "fewshot"]
    probes = [
        record for record in records if record.get("step") == step and {"shots", "accuracy"} <= record.keys()
    ]
    return {f"{record['shots']}-shot": record["accuracy"] for record in probes}


def start_weights(job: str) -> str:
    """The address of published weights that a job can start from; those that are scored need a trained head."""
    return f"gs://vit_models/imagenet21k{'+imagenet2012' * (job in _TAKES_ANY)}/ViT-B_16.npz"


class NewestRun(NamedTuple):
    """The finished run that is used because none was named; `text` says so in one line."""

    folder: Path
    text: str


def newest_run(job: str, runs: Path = RUNS) -> NewestRun:
    """The newest finished run whose weights a job can use: any training to score or export, else a
    pre-training.

    Args:
        job: that uses them.
        runs: folder of run folders; deeper folders, and runs that were stopped or failed, are not used.

    Raises:
        CheckpointError: there is none.
    """
    jobs = TRAINING if job in _TAKES_ANY else PRETRAINING
    found = [
        (file.stat().st_mtime, file.parent, read_result(file.parent)) for file in runs.glob(f"*/{RESULT}")
    ]
    done = [
        (when, folder, result)
        for when, folder, result in found
        if result is not None and result.job in jobs and result.status == "done"
    ]
    wanted = "training" if jobs == TRAINING else "pre-training"
    if not done:
        raise CheckpointError(
            f"no finished {wanted} run under "
            f"{runs.resolve()}{_QUICKSTARTED * Path('quickstart/pretrain').is_dir()}; "
            f"give weights with --from, for example the published --from {start_weights(job)}"
        )
    when, folder, result = max(done, key=lambda one: one[:2])
    passed = _passed_over(runs, jobs, when)
    text = f"no --from: using the newest finished {wanted} run, {folder} ({_described(folder, result, when)})"
    return NewestRun(folder, f"{text}; newer, but not used: {', '.join(passed)}" if passed else text)


def _described(folder: Path, result: RunResult, when: float) -> str:
    accuracy = result.metrics.get("accuracy")
    return (
        f"{result.job}, recipe {written_name(folder / RECIPE) or 'unknown'}, "
        f"finished {time.strftime('%Y-%m-%d %H:%M', time.localtime(when))}, "
        + (f"accuracy {accuracy:.2%}" if accuracy is not None else "not scored")
    )


def _passed_over(runs: Path, jobs: tuple[str, ...], since: float) -> list[str]:
    """Newer runs of the same jobs that are not used, each with the reason."""
    passed = []
    for file in sorted(runs.glob(f"*/{RECIPE}")):
        folder = file.parent
        if _job_of(file) in jobs and _touched(folder) > since:
            result = read_result(folder)
            if result is None or result.status != "done":
                passed.append(f"{folder} ({result.status if result else 'not finished'})")
    for file in sorted(runs.glob(f"*/*/{RESULT}")):
        if _job_of(file.parent / RECIPE) in jobs and file.stat().st_mtime > since:
            passed.append(f"{file.parent} (deeper than {runs}/NAME)")
    return passed


def _touched(folder: Path) -> float:
    return max(
        path.stat().st_mtime for path in (folder / RESULT, folder / LOG, folder / RECIPE) if path.exists()
    )


def _job_of(recipe: Path) -> str:
    try:
        return str(read_toml(recipe, error=RecipeError)[0].get("job", ""))
    except RecipeError:
        return ""
