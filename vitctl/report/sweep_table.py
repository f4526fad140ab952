"""The table of a sweep: what each run varied, and its result."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.engine.journal import LOG, Record, read_records, write_run_json
from vitctl.jobs.record.result import read_result
from vitctl.system.tables import write_csv

TABLE = "sweep"
SEED = "seed"


@dataclass(frozen=True)
class Outcome:
    """A run of a sweep.

    Args:
        name: of its folder.
        recipe: that it varies.
        varied: dotted key -> value.
        status: "done", "stopped", "failed" or "waiting".
        value: of the compared metric; None while there is none.
        numbers: of its result, by dotted name.
        loss: last that was logged.
        seconds: spent in training.
        error: one line, when it failed.
    """

    name: str
    recipe: str
    varied: Mapping[str, Any]
    status: str
    value: float | None
    numbers: Mapping[str, float]
    loss: float | None
    seconds: float | None
    error: str = ""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed: mean and standard deviation of the compared metric."""

    name: str
    recipe: str
    varied: Mapping[str, Any]
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Over the seeds, of the population; 0 for one."""
        return statistics.pstdev(self.values)


def outcome(folder: Path, recipe: str, varied: Mapping[str, Any], metric: str, error: str) -> Outcome:
    """The outcome of a run, read from its folder.

    Args:
        folder: of the run.
        recipe, varied: of its cell.
        metric: dotted name of the compared metric.
        error: of the run that just failed; else "".
    """
    result = read_result(folder)
    records = read_records(folder / LOG)
    steps = [record for record in records if record.get("kind") == "train"]
    numbers = (
        _logged(records) | _numbers(result.metrics) if result is not None and result.status == "done" else {}
    )
    status = "failed" if error else result.status if result is not None else "stopped" if steps else "waiting"
    return Outcome(
        folder.name,
        recipe,
        varied,
        status,
        numbers.get(metric),
        numbers,
        steps[-1]["loss"] if steps else None,
        _seconds(steps),
        error,
    )


def groups(outcomes: Sequence[Outcome]) -> list[Group]:
    """The finished runs without their seeds, in their order."""
    found: dict[tuple[str, str], Group] = {}
    for one in outcomes:
        if one.value is None:
            continue
        varied = {key: value for key, value in one.varied.items() if key != SEED}
        seed = f"seed_{one.varied[SEED]}" if SEED in one.varied else ""
        name = "__".join(part for part in one.name.split("__") if part != seed) or Path(one.recipe).stem
        before = found.get((one.recipe, name))
        values = (*before.values, one.value) if before else (one.value,)
        found[one.recipe, name] = Group(name, one.recipe, varied, values)
    return list(found.values())


def write_sweep_table(out: Path, outcomes: Sequence[Outcome]) -> None:
    """OUT/sweep.json and OUT/sweep.csv, each whole or not at all. Accuracies are shares 0..1."""
    rows = [
        {
            "run": one.name,
            "recipe": one.recipe,
            "varied": dict(one.varied),
            "status": one.status,
            "value": one.value,
            "numbers": dict(one.numbers),
            "loss": one.loss,
            "seconds": one.seconds,
            "error": one.error,
        }
        for one in outcomes
    ]
    write_run_json(out / f"{TABLE}.json", {"runs": rows})
    keys = list(dict.fromkeys(key for one in outcomes for key in one.varied))
    numbers = list(dict.fromkeys(name for one in outcomes for name in one.numbers))
    lines: list[list[object]] = [["run", "recipe", *keys, "status", *numbers, "loss", "seconds"]]
    for one in outcomes:
        varied = [one.varied.get(key, "") for key in keys]
        found = [one.numbers.get(name, "") for name in numbers]
        lines.append([one.name, one.recipe, *varied, one.status, *found, one.loss, one.seconds])
    write_csv(out / f"{TABLE}.csv", lines)


def _logged(records: Sequence[Record]) -> dict[str, float]:
    """Numbers from the log that the result may lack: the best of all evaluations, and the last few-shot
    accuracies.

    Few-shot accuracies in the result override them: they are those of the checkpoint that represents the run.
    """
    scores = [
        record["accuracy"] for record in records if record.get("kind") == "evaluate" and "accuracy" in record
    ]
    best = {"best_accuracy": max(scores)} if scores else {}
    probed = [r for r in records if r.get("kind") == "fewshot" and {"shots", "accuracy"} <= r.keys()]
    return best | {f"{r['shots']}-shot": r["accuracy"] for r in probed}


def _seconds(steps: Sequence[Record]) -> float | None:
    """Training time between the logged steps, without evaluations and saves."""
    if not steps:
        return None
    samples = [0, *(record["samples"] for record in steps)]
    spent: list[float] = [
        (now - before) / r["images_per_second"]
        for before, now, r in zip(samples, samples[1:], steps, strict=False)
    ]
    return round(sum(spent), 1)


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number of a result by dotted name."""
    flat: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{key}"] = value
    return flat


def shared_words(names: Sequence[str]) -> list[str]:
    """Short names of runs: parts that all of them share are left out."""
    split = [name.split("__") for name in names]
    shared = set(split[0]).intersection(*split[1:]) if len(split) > 1 else set()
    return [
        ", ".join(part for part in parts if part not in shared) or name
        for parts, name in zip(split, names, strict=True)
    ]
