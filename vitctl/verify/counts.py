"""The numbers of a result against the log: every number that a result claims is found there, or follows from
such numbers.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.vtab import GROUPS
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import Record
from vitctl.engine.run_files import CHECKPOINTS, step_of
from vitctl.engine.trace.steps import Steps
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.record.runs import TRAINING
from vitctl.jobs.sweep import SEEDS, SWEEP
from vitctl.jobs.vtab_runs import JOB
from vitctl.recipe.schema import Recipe
from vitctl.verify.finding import Finding, differs, ok, unchecked, unproven
from vitctl.verify.log import Log

INSIDE = (SWEEP, SEEDS, JOB)  # jobs of the results of trainings inside a run
_NOT_NUMBERS = ("kind", "step", "time", "seconds", "labels")
_BASELINES = ("majority_class", "chance")
_OF_TRAINING = frozenset((*_BASELINES, "last", "sweep", "std", "by_seed"))
# What every finished job writes into the provenance of its result.
_ALWAYS = {
    **dict.fromkeys(
        TRAINING,
        (
            "recipe_sha256",
            "train_sha256",
            "weights_sha256",
            "weights_step",
            "weights_chosen",
            "weights_averaged",
        ),
    ),
    "evaluate": ("recipe_sha256", "weights_sha256", "data_sha256", "labels"),
    "vtab": ("recipe_sha256", "from_sha256", "tasks", "seeds"),
    "fewshot": ("recipe_sha256",),
}
_OF_SCORES = ("data_sha256", "labels")


@dataclass(frozen=True)
class Claims:
    """A result, and what it is held against.

    Args:
        result: of a training, or of another job.
        log: beside it; None where there is none.
        steps: the record of its steps; None where there is none.
        recipe: of the run; None for a training inside it.
        select_best: the best of its checkpoints represents it, else the last.
    """

    result: RunResult
    log: Log | None
    steps: Steps | None
    recipe: Recipe | None
    select_best: bool


def check_counts(claims: Claims) -> Finding:
    """Whether a finished result has all that its job writes, and the numbers of the log."""
    try:
        return _check_counts(claims)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return differs("result", f"numbers are missing in it, or are none ({type(error).__name__}: {error})")


def _check_counts(claims: Claims) -> Finding:
    if problem := _missing(claims):
        return differs("result", problem)
    result, log = claims.result, claims.log
    if log is None:
        return unproven("result", "there is no log to compare it with")
    if result.job in _OF_ITS_OWN:
        problem = next(_OF_ITS_OWN[result.job](result, log), "")
        return differs("result", problem) if problem else ok("result", "its numbers are those of the log")
    return _check_scores(claims, log)


def _missing(claims: Claims) -> str:
    """What of a finished result is not as its job writes it."""
    result = claims.result
    jobs = (claims.recipe.job,) if claims.recipe is not None else INSIDE
    if result.job not in jobs:
        return f"it is of the job {result.job!r}, should be of {' or '.join(jobs)}"
    if not result.record:
        return "it has no record of the last lines and checkpoints, as every result of this vitctl has; it was changed"
    gone = [name for name in _ALWAYS.get(result.job, ()) if result.provenance.get(name) is None]
    return f"it has no {gone[0]}, as every finished {result.job} has; it was changed" if gone else ""


def _check_scores(claims: Claims, log: Log) -> Finding:
    """The result of a training, or of `evaluate`."""
    result = claims.result
    found = log.evaluations(result.provenance.get("labels"))
    if not found:
        claimed = [
            name for name in ("accuracy", "correct", "total", "mean_per_class") if name in result.metrics
        ]
        if claimed:
            return differs("result", f"it has the number {claimed[0]}, and no evaluation is logged")
        return unchecked("result", f"no evaluation is in {log.path}")
    step = _step(claims, log, found)
    if isinstance(step, str):
        return differs("result", step)
    if step not in found:
        return differs("result", f"no evaluation of step {step} is logged, and the result is of it")
    where = f"in the log at step {step}" if step else "in the log"
    problems = (
        _of_evaluate(result, log)
        if result.job == "evaluate"
        else _of_training(claims, log, found, step, where)
    )
    if problem := next(problems, ""):
        return differs("result", problem)
    score = Score.of(found[step])
    return ok("result", f"{score.correct:,} of {score.total:,} correct, as {where}")


def _step(claims: Claims, log: Log, found: Mapping[int, Record]) -> int | str:
    """The step whose weights represent the training; a text where the result names another one."""
    result = claims.result
    used = result.provenance.get("weights_step") if result.job in TRAINING else None
    if result.job == "evaluate":
        return max(found) if used is None else int(used)
    last = max([int(one.get("step", 0)) for one in log.of_kind("train")], default=0)
    last = max(last, claims.steps.last if claims.steps is not None else 0) or max(found)
    step, how = last, "last"
    if claims.select_best:
        kept = {step_of(Path(name)) for name in result.record.get(CHECKPOINTS, {})}
        scores = {at: Score.of(record).accuracy for at, record in found.items() if at in kept}
        step, how = max(scores, key=lambda at: (scores[at], at), default=last), "best"
    if used is not None and (used, result.provenance.get("weights_chosen")) != (step, how):
        return f"it is of step {used} ({result.provenance.get('weights_chosen')}), should be of the {how}, step {step}"
    return step


def own_counts(result: RunResult) -> dict[str, Any]:
    """The counts of a result's own training; with several seeds, those of the first."""
    by_seed = result.metrics.get("by_seed")
    if "correct" not in result.metrics and isinstance(by_seed, dict) and by_seed:
        first = next(iter(by_seed.values()))
        return {**first, "total": result.metrics.get("total")} if isinstance(first, dict) else {}
    return result.metrics


def _of_training(
    claims: Claims, log: Log, found: Mapping[int, Record], step: int, where: str
) -> Iterator[str]:
    result = claims.result
    metrics, own, logged = result.metrics, own_counts(result), numbers(found[step])
    seeds = "by_seed" in metrics
    yield from unlike(own, {k: v for k, v in logged.items() if not (seeds and k == "mean_per_class")}, where)
    if result.job in INSIDE:
        yield from _not_of(metrics, {*logged})
        return
    gone = [name for name in _BASELINES if name not in metrics]
    gone += [name for name in _OF_SCORES if result.provenance.get(name) is None]
    gone += ["last"] if claims.select_best and not seeds and "last" not in metrics else []
    yield from (
        f"it has no {name}, as every finished {result.job} that is scored has; it was changed"
        for name in gone
    )
    shots = {
        f"{one.get('shots')}-shot": one.get("accuracy")
        for one in log.of_kind("fewshot")
        if one.get("step") == step
    }
    yield from unlike(metrics, shots if not seeds else {}, where)
    if isinstance(last := metrics.get("last"), dict):
        final = max(found)
        yield from unlike(last, {"step": final, **numbers(found[final])}, f"in the log at step {final}")
    if isinstance(metrics.get("by_seed"), dict):
        yield from _of_seeds(metrics, result.provenance.get("seeds"))
    elif len(result.provenance.get("seeds") or ()) > 1:
        yield "it has no by_seed, and it is of several seeds; it was changed"
    yield from _not_of(metrics, {*logged, *shots, *_OF_TRAINING})


def _of_seeds(metrics: Mapping[str, Any], seeds: Any) -> Iterator[str]:
    """Mean and deviation follow from the seeds' counts."""
    by_seed, total = metrics["by_seed"], metrics.get("total")
    if [*by_seed] != [str(seed) for seed in seeds or ()]:
        yield f"its seeds are {', '.join(by_seed)}, should be {seeds}"
    for seed, one in by_seed.items():
        yield from unlike(
            one, {"accuracy": one.get("correct", 0) / total}, f"from its counts, of seed {seed}"
        )
    values = [one["accuracy"] for one in by_seed.values()]
    yield from unlike(
        metrics, {"accuracy": statistics.fmean(values), "std": statistics.pstdev(values)}, "from its seeds"
    )


def _of_evaluate(result: RunResult, log: Log) -> Iterator[str]:
    main, metrics = str(result.provenance.get("labels")), result.metrics
    logged = {str(record.get("labels", main)): numbers(record) for record in log.of_kind("evaluate")}
    own = {name: value for name, value in metrics.items() if not isinstance(value, dict)}
    others = {name: value for name, value in metrics.items() if isinstance(value, dict)}
    for name, record in logged.items():
        found, where = own if name == main else others.get(name, {}), f"in the log under the labels {name}"
        yield from unlike(found, record, where)
        yield from _not_of(found, {*record, "mean_per_class"})
    yield from _not_of(others, {*logged})


def _of_vtab(result: RunResult, log: Log) -> Iterator[str]:
    """Each task as it was logged last; the means follow from the tasks."""
    rows = result.metrics.get("tasks") or {}
    logged = {str(record.get("task")): record for record in log.of_kind("task")}
    yield from _not_of(rows, {*logged})
    yield from (
        f"it has no task {name}; it was changed" for name in result.provenance["tasks"] if name not in rows
    )
    for name, row in rows.items():
        seeds = logged[name]["seeds"]
        own = {"mean": float(np.mean(seeds)), "std": float(np.std(seeds)), "by_seed": seeds}
        yield from unlike(row, {**own, "group": logged[name].get("group")}, f"in the log, of {name}")
    by_seed = np.array([row["by_seed"] for row in rows.values()]).mean(axis=0)
    of_group = {group: [row["mean"] for row in rows.values() if row["group"] == group] for group in GROUPS}
    groups = {group: float(np.mean(values)) for group, values in of_group.items() if values}
    means = {"mean": float(np.mean([row["mean"] for row in rows.values()])), "std": float(by_seed.std())}
    means["mean_of_groups"] = float(np.mean(list(groups.values())))
    yield from unlike(result.metrics, {**means, "groups": groups}, "from its tasks")


def _of_fewshot(result: RunResult, log: Log) -> Iterator[str]:
    """Each number of shots as it was logged last."""
    accuracy, by_seed = result.metrics.get("accuracy") or {}, result.metrics.get("by_seed") or {}
    logged = {str(record.get("shots")): record for record in log.of_kind("fewshot")}
    where = "in the log, by shots"
    yield from unlike(accuracy, {shots: record.get("accuracy") for shots, record in logged.items()}, where)
    yield from unlike(by_seed, {shots: record.get("seeds") for shots, record in logged.items()}, where)
    yield from _not_of(accuracy, {*logged})


_OF_ITS_OWN = {"vtab": _of_vtab, "fewshot": _of_fewshot}


def numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record of an evaluation."""
    return {name: value for name, value in record.items() if name not in _NOT_NUMBERS}


def unlike(own: Mapping[str, Any], others: Mapping[str, Any], where: str) -> Iterator[str]:
    """What of `others` a result lacks or has otherwise, in words."""
    pairs = {"correct", "total"} & others.keys()
    if len(pairs) == 2 and pairs <= own.keys() and any(own[name] != others[name] for name in pairs):
        yield f"{own['correct']} of {own['total']} are correct in it, {others['correct']} of {others['total']} {where}"
    for name, value in others.items():
        if name not in own:
            yield f"it has no {name}, {value!r} is {where}; it was changed"
        elif own[name] != value:
            yield f"its {name} is {own[name]!r}, {value!r} {where}"
    if len(pairs) == 2 and others.get("accuracy", own.get("accuracy")) != others["correct"] / others["total"]:
        yield f"its accuracy {own.get('accuracy')} is not {others['correct']} / {others['total']}"


def _not_of(own: Iterable[str], known: set[str]) -> Iterator[str]:
    return (f"it has the number {name}, which nothing records" for name in own if name not in known)
