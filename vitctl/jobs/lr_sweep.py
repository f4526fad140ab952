"""Several trainings of one job, each in a folder: hyperparameters to choose the best of, or seeds."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitctl.engine.evaluation import Score
from vitctl.engine.journal import CHECKPOINTS
from vitctl.engine.runtime import Runtime
from vitctl.errors import CheckpointError
from vitctl.jobs.record.result import RunResult, read_result, write_result

SWEEP, SEEDS = "sweep", "seeds"
Scored = tuple[Score | None, dict[str, Any]]


@dataclass(frozen=True)
class Trial:
    """A hyperparameter value, or a seed, and its score."""

    value: float
    score: Score


def run_trials(
    values: Sequence[float],
    attempt: Callable[[float, Path], Score | None],
    run_dir: Path,
    runtime: Runtime,
    *,
    knob: str,
    must_match: Mapping[str, Any],
    where: str = SWEEP,
) -> list[Trial]:
    """Score every value, reading back those that an earlier process finished.

    Args:
        attempt: trains with a value in a folder, resuming from its checkpoint, and scores.
        run_dir: gets WHERE/KNOB_VALUE/ for each; a finished one keeps its result, not its checkpoints.
        knob: name of the hyperparameter, e.g. "lr".
        must_match: digests of data and weights that a finished score must have.

    Raises:
        CheckpointError: a folder holds the score of other data or weights.
        Stopped: a signal arrived; finished scores are kept.

    Paper: Appendix B.1.1
    """
    tried = []
    for value in values:
        folder = run_dir / where / (f"{knob}_{value}" if isinstance(value, int) else f"{knob}_{value:g}")

        def make(value: float = value, folder: Path = folder) -> Scored:
            return attempt(value, folder), {knob: value}

        tried.append(Trial(value, read_or_train(folder, runtime, must_match, make, job=where)))
    return tried


def read_or_train(
    folder: Path,
    runtime: Runtime,
    must_match: Mapping[str, Any],
    make: Callable[[], Scored],
    *,
    job: str,
    keep_checkpoints: bool = False,
) -> Score:
    """Return the score in folder/result.json if it is finished, else store and return that of `make`.

    All processes call this. The checkpoints of a finished training are deleted, unless `keep_checkpoints`.

    Args:
        must_match: what a finished score must share: digests of data and weights, settings.
        make: trains in the folder, resuming from its checkpoint; returns the score, which the main process
            knows, and more fields for the provenance.

    Raises CheckpointError if the folder holds a score of other data, weights or settings.
    """
    result = read_result(folder) if runtime.is_main else None
    done = result is not None and result.status == "done"
    if result is not None and done:
        _check_same(folder, result.provenance, must_match)
    score = broadcast_score(Score.of(result.metrics) if result is not None and done else None, runtime)
    if not score.total:
        folder.mkdir(parents=True, exist_ok=True)
        own, findings = make()
        score = broadcast_score(own, runtime)
        runtime.release()
        if runtime.is_main:
            write_result(folder, RunResult(job, "done", score.numbers, {**must_match, **findings}))
    if runtime.is_main and not keep_checkpoints:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return score


def best(tried: Sequence[Trial]) -> Trial:
    """Return the trial with the highest score by evaluation.metric; the first of equals."""
    return max(tried, key=lambda one: one.score.deciding)


def broadcast_score(score: Score | None, runtime: Runtime) -> Score:
    """Return the main process's score on every process: the others do not know it after a resume."""
    return Score(**json.loads(runtime.broadcast(json.dumps(asdict(score or Score(0, 0))))))


def _check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if changed := [key for key, value in now.items() if key not in before or before[key] != value]:
        raise CheckpointError(
            folder,
            f"holds a score of other {', '.join(changed)}",
            "remove it to train it again, or choose another folder with --out",
        )
