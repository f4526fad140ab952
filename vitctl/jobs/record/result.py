"""The result of a job: RUN/result.json, with everything that two numbers must have in common to be compared."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from vitctl.data.source.verification import DataVerified
from vitctl.data.source.views import Source, source_text
from vitctl.engine.journal import (
    CHAINED,
    CHECKPOINTS,
    RESULT,
    STATE,
    head,
    json_digest,
    json_text,
    parse_json_text,
    step_folders,
    with_infinities,
    write_run_json,
)
from vitctl.errors import CheckpointError
from vitctl.recipe.schema import Recipe
from vitctl.recipe.write import deciding_values, result_neutral
from vitctl.system.files import RUN_FILE, read_bytes, read_json
from vitctl.system.text import one_line

_MOST_BYTES = 256 * 2**20
DELETE_IT = "; delete it to run again"
_SEVERAL_SCORES = ("fewshot", "vtab")  # whose accuracy is one for each number of shots, or task
# What the digests of data cover; those of earlier releases were of index.json alone.
DATA_DIGEST = {"data_digest": "index, tables, views"}
# Values that a recipe may take from the weights ("as_stored") or the device ("auto"): a result records the
# resolved value.
_RESOLVED = {"dropout": "dropout", "drop_path": "drop_path", "machine.precision": "precision"}


class _Numbers(BaseModel):
    """The fields of metrics that other code reads: an accuracy, or one for each number of shots or task;
    counts.
    """

    accuracy: float | dict[str, float] = 0.0
    correct: int = 0
    total: int = 0
    mean_per_class: float = 0.0
    majority_class: float = 0.0
    chance: float = 0.0
    tasks: dict[str, dict[str, Any]] | None = None
    groups: dict[str, float | None] | None = None
    by_seed: dict[str, Any] | list[Any] | None = None


class _Origin(BaseModel):
    """The fields of the provenance that other code reads."""

    versions: dict[str, str] = {}
    image_size: int | None = None
    eval_resize: int | None = None
    data_verified: DataVerified = "none"
    data_damaged: list[str] = []
    tasks: dict[str, dict[str, Any]] | None = None


def _sound(values: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    kind.model_validate(values, strict=True)
    return values


def _sound_origin(values: dict[str, Any]) -> dict[str, Any]:
    """The provenance, with `data_verified` in a word; earlier releases wrote true, false or the share of the
    bytes.
    """
    old = values.get("data_verified")
    if isinstance(old, bool):
        values = values | {"data_verified": "whole" if old else "damaged"}
    elif isinstance(old, int | float):
        values = values | {"data_verified": "part" if old > 0 else "none"}
    return _sound(values, _Origin)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a job.

    `status` is "done", "stopped" (by a signal, saved, can be resumed) or "failed"; `metrics` are the numbers,
    `provenance` is what they depend on: digests of data and weights, split, resolution, recipe; `record` holds
    the last digests of log.jsonl and steps.jsonl, those of the checkpoints, and that of the result itself.
    """

    job: str
    status: Literal["done", "stopped", "failed"]
    metrics: Annotated[dict[str, Any], AfterValidator(partial(_sound, kind=_Numbers))] = field(
        default_factory=dict
    )
    provenance: Annotated[dict[str, Any], AfterValidator(_sound_origin)] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    error: str = ""
    record: dict[str, Any] = field(default_factory=dict)


_RESULT: TypeAdapter[RunResult] = TypeAdapter(RunResult)


def data_used(source: Source, split: str) -> dict[str, Any]:
    """Which images a number is about: their digest, the split expression, and their source."""
    return {
        "split": split,
        "data_sha256": source.digest,
        **DATA_DIGEST,
        "data_source": source_text(source),
        "num_images": len(source),
    }


def unverified_bytes(result: RunResult) -> str:
    """Why the bytes behind a result are not known to be those of its digests; "" where all of them were
    verified.
    """
    used = result.provenance
    return {
        "whole": "",
        "damaged": f"its shards do not match their index ({'; '.join(used.get('data_damaged', ()))})",
        "part": "only a part of its bytes were verified against their digests",
        "none": "it does not record that any of its bytes were verified against their digests",
    }[used.get("data_verified", "none")]


def with_recipe(result: RunResult, recipe: Recipe) -> RunResult:
    """The result with a digest of the recipe values that its numbers depend on, "auto" and "as_stored"
    resolved.
    """
    used = result.provenance
    resolved = {key: used[name] for key, name in _RESOLVED.items() if name in used}
    return replace(
        result, provenance=used | {"recipe_sha256": recipe_digest(recipe, result_neutral(), resolved)}
    )


def recipe_digest(recipe: Recipe, free: tuple[str, ...], resolved: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe's values, without keys that start with one of `free`; `resolved` replaces some
    values.
    """
    return json_digest(deciding_values(recipe, free) | dict(resolved))


def write_result(folder: Path, result: RunResult) -> RunResult:
    """Write RUN/result.json, completely or not at all, and return the result, with the digests of the
    folder's records and its own.
    """
    result = replace(result, record=record_digests(folder))
    stored = RunResult(**parse_json_text(json_text(asdict(result))))  # as a reader sees it
    result = replace(result, record=result.record | {RESULT: published_digest(stored)})
    write_run_json(folder / RESULT, asdict(result))
    return result


def published_digest(result: RunResult) -> str:
    """One digest of a result: job, status, numbers, provenance, and the digests of its records and checkpoints."""
    fields = {name: getattr(result, name) for name in ("job", "status", "metrics", "provenance", "record")}
    fields["record"] = {name: value for name, value in result.record.items() if name != RESULT}
    return json_digest(fields)


def record_digests(folder: Path) -> dict[str, Any]:
    """The digests of the last lines of log.jsonl and steps.jsonl, and of the state of each checkpoint."""
    heads = {path: digest for path in CHAINED if (digest := head(folder / path))}
    states = {
        path.name: digest
        for path in sorted(step_folders(folder / CHECKPOINTS))
        if (digest := _state_digest(path))
    }
    return heads | ({CHECKPOINTS: states} if states else {})


def _state_digest(folder: Path) -> str:
    try:
        state = read_json(folder / STATE, RUN_FILE.limit, error=CheckpointError)
    except (CheckpointError, OSError):
        return ""
    return str(state.get("sha256", "")) if isinstance(state, dict) else ""


def read_result(folder: Path) -> RunResult | None:
    """The result of a run folder; None while there is none.

    Raises:
        CheckpointError: the file is not a result.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        found = _RESULT.validate_json(read_bytes(path, _MOST_BYTES, error=CheckpointError), strict=True)
        if found.job not in _SEVERAL_SCORES and isinstance(found.metrics.get("accuracy"), dict):
            raise CheckpointError(f"accuracy of {found.job}: should be one number")
        return replace(
            found, metrics=with_infinities(found.metrics), provenance=with_infinities(found.provenance)
        )
    except (CheckpointError, ValidationError) as error:
        said = str(error) if isinstance(error, CheckpointError) else _first_problem(error)
        raise CheckpointError(f"{path}: not a valid result of vitctl ({said}){DELETE_IT}") from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{one_line('.'.join(map(str, first['loc']))) or 'its value'}: {first['msg'].lower()}"
