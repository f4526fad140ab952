"""Whether two results are about the same thing, and their numbers side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.errors import CheckpointError
from vitctl.jobs.result import RunResult, read_result

# What two numbers must share: provenance key -> what it means when it differs.
MUST_AGREE = {
    "suite": "another table of tasks",
    "protocol": "another protocol",
    "split": "another split",
    "num_images": "another number of images",
    "data_sha256": "other images, or the same written anew",
    "labels": "other labels",
}
# Of a table of tasks, each task's data.
_TASK_KEYS = ("split", "data_sha256", "train_split", "train_sha256")
_QUIET = {"data_source", "from", "weights", "tasks", "recipe"}
_INTEGERS = {"correct", "total", "top5_correct"}
_SHOWN = 12


@dataclass(frozen=True)
class Comparison:
    """Numbers side by side.

    Args:
        numbers: of every metric that one has: its name and its value in each, None where it is missing.
        reasons: why the numbers must not be compared; empty when they may be.
        differences: what else differs, provenance key and its value in each.
    """

    numbers: list[tuple[str, list[Any]]]
    reasons: list[str]
    differences: list[tuple[str, list[Any]]]


def compare(folders: Sequence[Path]) -> Comparison:
    """Put the results of runs side by side, the first being what the others are held against.

    Raises:
        CheckpointError: a folder has no result.
    """
    results = []
    for folder in folders:
        result = read_result(folder)
        if result is None:
            raise CheckpointError(f"{folder}: has no result.json; should be the folder of a finished run")
        results.append(result)
    flat = [_flat(result.metrics) for result in results]
    names = dict.fromkeys(name for numbers in flat for name in numbers)
    reasons = [
        f"{folder}: {reason}"
        for folder, result in zip(folders[1:], results[1:], strict=True)
        for reason in _reasons(results[0], result)
    ]
    reasons += [
        f"{folder}: is {r.status}, not done" for folder, r in zip(folders, results, strict=True) if r.status != "done"
    ]
    return Comparison(
        [(name, [numbers.get(name) for numbers in flat]) for name in names], reasons, _differences(results)
    )


def _reasons(first: RunResult, other: RunResult) -> list[str]:
    one, two = first.provenance, other.provenance
    kinds = [_kind(result) for result in (first, other)]
    reasons = [] if kinds[0] == kinds[1] else [f"{kinds[1]}, the first {kinds[0]}"]
    for key, meaning in MUST_AGREE.items():
        if one.get(key) != two.get(key):
            reasons.append(f"{key} differs ({_short(two.get(key))}, the first {_short(one.get(key))}): {meaning}")
    if (told := two.get("data_source")) != (wanted := one.get("data_source")):
        reasons.append(f"its images are from: {told or 'not told'}; those of the first: {wanted or 'not told'}")
    if one.get("tasks") != two.get("tasks"):
        odd = _odd_tasks(one.get("tasks") or {}, two.get("tasks") or {})
        reasons += [f"other data or splits in the tasks {', '.join(odd)}"] if odd else []
    return reasons


def _odd_tasks(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in sorted({*one, *two})
        if any((one.get(name) or {}).get(key) != (two.get(name) or {}).get(key) for key in _TASK_KEYS)
    ]


def _kind(result: RunResult) -> str:
    """Accuracies of a whole classifier are of one kind, however it was trained."""
    of_classifier = result.job in ("evaluate", "finetune", "pretrain")
    return "scores a classifier" if of_classifier else f"is of the job {result.job}"


def _differences(results: Sequence[RunResult]) -> list[tuple[str, list[Any]]]:
    told = [result.provenance.keys() for result in results]
    keys = [key for key in told[0] if all(key in keys for keys in told) and key not in _QUIET | set(MUST_AGREE)]
    rows = [(key, [result.provenance.get(key) for result in results]) for key in keys]
    return [(key, list(map(_short, values))) for key, values in rows if any(value != values[0] for value in values)]


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if name == "paper":
            continue
        if isinstance(value, Mapping):
            numbers |= _flat(value, f"{prefix}{name} ")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in _INTEGERS:
            numbers[prefix + name] = value
    return numbers


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    is_digest = len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
    return text[:_SHOWN] if is_digest else text
