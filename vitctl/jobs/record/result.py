"""Results and finished runs: RUN/result.json, which weights represent a run, which run is the default."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from vitctl.data.source.verification import DataVerified
from vitctl.data.source.views import Source, source_text
from vitctl.engine.journal import (
    AVERAGE,
    CHECKPOINTS,
    LOG,
    LOG_HEAD,
    MODEL,
    MOST_STEPS,
    RECIPE,
    RECORDS,
    RESULT,
    STATE,
    Record,
    begins,
    end_of,
    json_digest,
    json_text,
    logged_checkpoints,
    name_of,
    parse_json_text,
    read_records,
    step_folder,
    step_folders,
    step_of,
    tensor_files,
    tensors_file,
    with_infinities,
    write_run_json,
)
from vitctl.engine.metrics import METRICS
from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.weights.header import own_header
from vitctl.models.weights.names import full_address, meant
from vitctl.recipe.neutral_keys import RESULT_NEUTRAL, deciding_values
from vitctl.recipe.schema import Recipe
from vitctl.recipe.sections import weights_choice
from vitctl.recipe.write import written_name
from vitctl.system import limits
from vitctl.system.address import without_queries
from vitctl.system.files import flush, read_bytes, read_json, read_toml
from vitctl.system.text import did_you_mean, nearest, one_line

if TYPE_CHECKING:
    from vitctl.engine.checkpoint import SavedCheckpoint
    from vitctl.engine.evaluation import Score

_MOST_BYTES = 256 * 2**20
DELETE_IT = "; delete it to run again"
_COPY_BACK = f"copy the files of this run back, or delete {RESULT} and resume"
_GIVE_WEIGHTS = "give a run folder, a checkpoint folder or a weights file with --from"
_SEVERAL_SCORES = ("fewshot", "probe", "vtab")  # have one accuracy per number of shots, k, or task
# What a data digest covers; earlier releases covered index.json alone.
DATA_DIGEST = {"data_digest": "index, tables, views"}
# Values that a recipe may take from the weights ("as_stored") or the device ("auto"): a result records the
# resolved value.
_RESOLVED = {"dropout": "dropout", "drop_path": "drop_path", "machine.precision": "precision"}


class _Numbers(BaseModel):
    """The metrics that other code reads; some jobs have an accuracy per number of shots, k or task."""

    accuracy: float | dict[str, float] = 0.0
    accuracy_interval: list[float] = []
    correct: int = 0
    total: int = 0
    mean_per_class: float = 0.0
    f1: float = 0.0
    metric: str = "accuracy"
    majority_class: float = 0.0
    chance: float = 0.0
    tasks: dict[str, dict[str, Any]] | None = None
    groups: dict[str, float | None] | None = None
    by_seed: dict[str, Any] | list[Any] | None = None


class _Origin(BaseModel):
    """The provenance fields that other code reads."""

    versions: dict[str, str] = {}
    image_size: int | None = None
    eval_resize: int | None = None
    data_verified: DataVerified = "none"
    data_damaged: list[str] = []
    tasks: dict[str, dict[str, Any]] | None = None
    weights_step: int | None = Field(None, ge=0, le=MOST_STEPS)
    weights_averaged: bool = False
    weights_sha256: str = ""
    recipe_sha256: str = ""
    train_sha256: str = ""
    data_sha256: str = ""


class _Record(BaseModel):
    """The digests that are compared with the run's other files."""

    log: str = Field("", alias="log.jsonl")
    steps: str = Field("", alias="steps.jsonl")
    result: str = Field("", alias="result.json")
    checkpoints: dict[str, str] = {}


def _sound(values: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    kind.model_validate(values, strict=True)
    return values


@dataclass(frozen=True)
class RunResult:
    """The outcome of a job.

    Args:
        status: "done", "stopped" (by a signal; saved, can be resumed) or "failed".
        metrics: the numbers.
        provenance: what they depend on: digests of data and weights, split, resolution, recipe.
        record: how log.jsonl and steps.jsonl end, and digests of the checkpoints and of the result itself.
    """

    job: str
    status: Literal["done", "stopped", "failed"]
    metrics: Annotated[dict[str, Any], AfterValidator(partial(_sound, kind=_Numbers))] = field(
        default_factory=dict
    )
    provenance: Annotated[dict[str, Any], AfterValidator(partial(_sound, kind=_Origin))] = field(
        default_factory=dict
    )
    files: dict[str, str] = field(default_factory=dict)
    error: str = ""
    record: Annotated[dict[str, Any], AfterValidator(partial(_sound, kind=_Record))] = field(
        default_factory=dict
    )


_RESULT: TypeAdapter[RunResult] = TypeAdapter(RunResult)


def data_used(source: Source, split: str) -> dict[str, Any]:
    """Return the provenance of a number's images: their digest, split and source."""
    return {
        "split": split,
        "data_sha256": source.digest,
        **DATA_DIGEST,
        "data_source": source_text(source),
        "num_images": len(source),
    }


def unverified_bytes(result: RunResult) -> str:
    """Return why the bytes behind a result are not verified against its digests; "" if all were."""
    used = result.provenance
    return {
        "whole": "",
        "damaged": f"its shards do not match their index ({'; '.join(used.get('data_damaged', ()))})",
        "part": "only a part of its bytes were verified against their digests",
        "none": "it does not record that any of its bytes were verified against their digests",
    }[used.get("data_verified", "none")]


def with_recipe(result: RunResult, recipe: Recipe) -> RunResult:
    """Return the result with a digest of the recipe values behind it, "auto" and "as_stored" resolved."""
    used = result.provenance
    resolved = {key: used[name] for key, name in _RESOLVED.items() if name in used}
    return replace(
        result, provenance=used | {"recipe_sha256": recipe_digest(recipe, RESULT_NEUTRAL, resolved)}
    )


def recipe_digest(recipe: Recipe, free: tuple[str, ...], resolved: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a recipe's values, some `resolved`, without the keys that start with `free`."""
    return json_digest(deciding_values(recipe, free) | dict(resolved))


def write_result(folder: Path, result: RunResult) -> RunResult:
    """Write RUN/result.json atomically. Return the result with the digests of its records and its own.

    These are how log.jsonl and steps.jsonl end, and the digest of each checkpoint's state.
    """
    for name in RECORDS:  # after a power failure, truncated records would not match the result
        if (folder / name).is_file():
            flush(folder / name)
    record: dict[str, Any] = {path: end for path in RECORDS if (end := end_of(folder / path))}
    states = {path.name: _of_state(path, "sha256") for path in sorted(step_folders(folder / CHECKPOINTS))}
    if states := {name: digest for name, digest in states.items() if digest}:
        record[CHECKPOINTS] = states
    result = replace(result, record=record)
    stored = RunResult(**parse_json_text(json_text(asdict(result))))  # as a reader will parse it
    result = replace(result, record=result.record | {RESULT: published_digest(stored)})
    write_run_json(folder / RESULT, asdict(result))
    return result


def published_digest(result: RunResult) -> str:
    """Return one digest of a result and its records' digests, without `error` and `files`."""
    fields = {name: getattr(result, name) for name in ("job", "status", "metrics", "provenance", "record")}
    fields["record"] = {name: value for name, value in result.record.items() if name != RESULT}
    return json_digest(fields)


def _of_state(folder: Path, name: str) -> str:
    try:
        state = read_json(folder / STATE, limits.RUN_FILE, error=CheckpointError)
    except (CheckpointError, OSError):
        return ""
    return str(state.get(name, "")) if isinstance(state, dict) else ""


def read_result(folder: Path, *, own: bool = True, weights: bool = True) -> RunResult | None:
    """Return a run folder's result; None if there is none yet.

    Args:
        own: refuse a result that was changed or belongs to another run, judged by the records next to it.
            Records that were not copied along are not checked.
        weights: with `own`, also refuse a replaced or renamed checkpoint; False if the caller checks the
            checkpoint that it uses.

    Raises CheckpointError if the file is not a result, was changed, or belongs to another run.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        found = _RESULT.validate_json(read_bytes(path, _MOST_BYTES, error=CheckpointError), strict=True)
        if found.job not in _SEVERAL_SCORES and isinstance(found.metrics.get("accuracy"), dict):
            raise CheckpointError(f"accuracy of {found.job}", "should be one number")
    except (CheckpointError, ValidationError) as error:
        said = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_input=False, include_url=False)[0]
            place = one_line(".".join(map(str, first["loc"]))) or "its value"
            said = f"{place}: {first['msg'].lower()}"
        raise CheckpointError(path, f"not a valid result of vitctl ({said}){DELETE_IT}") from None
    ends = {name: found.record.get(name) for name in RECORDS if own and (folder / name).is_file()}
    if other := next((name for name, end in ends.items() if end and not begins(folder / name, end)), ""):
        raise CheckpointError(
            path,
            f"{other} has not the digest that it names: one of the two was changed, or is of another run",
            _COPY_BACK,
        )
    result = replace(
        found, metrics=with_infinities(found.metrics), provenance=with_infinities(found.provenance)
    )
    if own and result.record.get(RESULT, "") not in ("", published_digest(result)):
        raise CheckpointError(path, "its digest is not that of its contents; it was changed", _COPY_BACK)
    if own and _is_miscounted(result.metrics):
        raise CheckpointError(path, "its accuracy is not correct / total; it was changed", _COPY_BACK)
    if own and weights and (problem := _checkpoint_problem(folder, result)):
        raise CheckpointError(folder / CHECKPOINTS, problem, _COPY_BACK)
    return result


def _is_miscounted(metrics: Mapping[str, Any]) -> bool:
    """Return whether an accuracy differs from its counts, or a number is too large to be a count."""
    if any(isinstance(value, int) and abs(value) >= 2**63 for value in metrics.values()):
        return True
    accuracy, correct, total = (metrics.get(name) for name in ("accuracy", "correct", "total"))
    if isinstance(accuracy, int | float) and isinstance(correct, int) and isinstance(total, int):
        is_count = 0 <= correct <= total < 2**53 and total > 0
        return not (is_count and abs(accuracy - correct / total) <= 1e-6)  # NaN fails this, too
    return any(_is_miscounted(inner) for inner in metrics.values() if isinstance(inner, Mapping))


def _checkpoint_problem(folder: Path, result: RunResult) -> str:
    """Return how the result's checkpoint was replaced or renamed; "" if it was not, or is not here."""
    own = step_folder(folder, int(result.provenance.get("weights_step") or 0)).name
    digest = result.record.get(CHECKPOINTS, {}).get(own)
    there = (
        {path.name: _of_state(path, "sha256") for path in step_folders(folder / CHECKPOINTS)}
        if digest
        else {}
    )
    if own in there and there[own] not in ("", digest):  # no digest: it is damaged; its reader says so
        return f"{own} is not the checkpoint that the result names; it was replaced"
    renamed = [name for name in there if own not in there and there[name] == digest]
    return f"{renamed[0]} says step {int(own[5:])}, so its name should be {own}" if renamed else ""


def read_own_records(folder: Path) -> list[Record]:
    """Return the log records of a run, or of a training inside it. Raises CheckpointError if another's."""
    path, ends = folder / LOG, {_of_state(one, LOG_HEAD) for one in step_folders(folder / CHECKPOINTS)}
    with suppress(CheckpointError):
        result = read_result(folder, own=False)
        ends.add("" if result is None else result.record.get(LOG, ""))
    if path.is_file() and not all(begins(path, end) for end in ends if end):
        raise CheckpointError(
            path,
            f"is not the log that {RESULT} or a checkpoint names, and its numbers are not shown",
            "copy the files of this run back",
        )
    return read_records(path)


RUNS = Path("runs")
PRETRAINING, TRAINING = ("pretrain",), ("pretrain", "finetune")
_TAKES_ANY = ("evaluate", "export")  # jobs that also make sense for a fine-tuned network
_GIVEN = "as given"
_INSTEAD = {
    AVERAGE: "only a run with averaging.decay keeps a Polyak average; use the weights themselves with "
    "--weights model",
    MODEL: "the checkpoint was copied in part; copy it again, or use another one with --weights STEP",
}


@dataclass(frozen=True)
class ChosenWeights:
    """Which weights were chosen.

    Args:
        how: "last" or "best" of a run, "step", or "as given": a checkpoint or a file was named.
        step: finished steps; None if unknown.
        averaged: whether it is the Polyak average.
        accuracy: logged by the run at this step, or its evaluation.metric, which `metric` names; None if not
            logged.
        damaged: newer checkpoints that were skipped, one line each.
        unfinished: whether the run has no result, was stopped or failed.
        digest: of the checkpoint's state; "" if no run's checkpoint was chosen.
        was_pinned: whether it was chosen when the run started, and reused.
        is_known: whether a record in the run's folder confirms that it belongs to the run.
    """

    how: str = _GIVEN
    step: int | None = None
    averaged: bool = False
    accuracy: float | None = None
    metric: str = "accuracy"
    damaged: tuple[str, ...] = ()
    unfinished: bool = False
    digest: str = ""
    was_pinned: bool = False
    is_known: bool = True

    @property
    def pin(self) -> str:
        """Return the value of weights.pinned; "" if no run's checkpoint was chosen."""
        return f"{self.how}:{self.step}:{self.digest}" if self.digest else ""

    def used(self, prefix: str = "weights") -> dict[str, Any]:
        """Return the provenance."""
        fields = {
            f"{prefix}_chosen": self.how,
            f"{prefix}_step": self.step,
            f"{prefix}_averaged": self.averaged,
        }
        return fields | ({f"{prefix}_passed_over": list(self.damaged)} if self.damaged else {})

    @property
    def text(self) -> str:
        form = ".4f" if self.metric == "loss" else ".2%"
        scored = f", {self.metric} {self.accuracy:{form}}" if self.accuracy is not None else ""
        of = {"last": "the last checkpoint", "best": "the best checkpoint kept"}
        chosen = "chosen when this run started" if self.was_pinned else of.get(self.how, "the checkpoint")
        parts = (
            (self.averaged, "the Polyak average"),
            (self.how != _GIVEN, f"{chosen}, step {self.step}{scored}"),
            (self.unfinished, "of a run that is not finished"),
            (not self.is_known, "no record beside it tells whether it is of this run"),
            *((True, f"skipped: {problem}") for problem in self.damaged),
        )
        return "; ".join(text for is_so, text in parts if is_so)


def choose_weights(
    place: Path, which: str = "", *, by_size: bool = False, pinned: str = ""
) -> tuple[Path, ChosenWeights]:
    """Return the weights file of a run folder, a checkpoint folder, another program's folder, or a file.

    Args:
        which: "last", "best" (by logged scores, among the kept checkpoints) or a step number. "ema" or
            "model" selects the Polyak average or the raw weights of the checkpoint that represents the run.
            "" is that checkpoint: the best with evaluation.select_best, else the last. The average is used if
            the run kept one, unless "model" is given.
        by_size: see `read_checkpoint`.
        pinned: the checkpoint of a run that was chosen before, see `ChosenWeights.pin`.

    Raises CheckpointError if there are no such weights.

    Paper: Section 4.1 (averaging), Section 4.3 (early stopping)
    """
    try:
        weights_choice(which)
    except ValueError as error:
        raise CheckpointError(place, f"--weights {error}") from None
    if (place / RECIPE).is_file() and not (place / CHECKPOINTS).is_dir():
        if not (place / tensors_file(MODEL)).is_file():  # the classifier of `probe`
            graph = next(place.glob("*.onnx"), None)
            instead = f"or its graph, --from {graph}" if graph else "with --from"
            raise CheckpointError(place, "has no checkpoints", f"give a trained run {instead}")
        place /= tensors_file(MODEL)
    if (place / CHECKPOINTS).is_dir():
        folder, chosen = _checkpoint(place, "" if which in (AVERAGE, MODEL) else which, by_size, pinned)
    else:
        folder, chosen = place, ChosenWeights()
        if which not in ("", AVERAGE, MODEL):
            raise CheckpointError(
                place, f"--weights {which} chooses among the checkpoints of a run", "give a run folder"
            )
    files = _tensor_files(folder)
    if not ((folder / STATE).exists() or AVERAGE in files):
        if which and own_header(folder) is not None:  # another program's file may hold both
            raise CheckpointError(
                place, f"--weights {which}: there is only one set of weights", "omit --weights"
            )
        if not folder.exists():
            started = "this run started from them: restore them, or start a new run with other weights"
            near = nearest(folder.name, [one.name for one in folder.parent.glob("*")], 1)
            named = meant(str(folder)) or did_you_mean(str(folder.parent / name) for name in near)
            fix = started if pinned else named or _GIVE_WEIGHTS
            raise CheckpointError(folder, "no such weights", fix)
        name = name_of(folder.name)
        if folder.is_file() and name in _tensor_files(folder.parent):
            _check_given(folder.parent, name, by_size)
        return folder, ChosenWeights(step=step_of(folder.parent), averaged=name == AVERAGE)
    name = which if which in (AVERAGE, MODEL) else AVERAGE if AVERAGE in files else MODEL
    path = files.get(name, folder / tensors_file(name))
    if not path.exists():
        raise CheckpointError(path, f"no such weights; {_INSTEAD[MODEL if name in files else name]}")
    if chosen.how == _GIVEN:
        _check_given(folder, name, by_size)
    return path, replace(chosen, step=step_of(folder), averaged=name == AVERAGE)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return a folder's tensor files by name; for a checkpoint, the files that its state lists."""
    from vitctl.engine.checkpoint import read_state

    if not (folder / STATE).exists():
        return tensor_files(folder)
    recorded = sorted(read_state(folder)["files"], reverse=True)  # the first part wins
    return {name_of(file): folder / file for file in recorded}


def _check_given(folder: Path, name: str, by_size: bool) -> None:
    """Check a checkpoint given by path as one chosen in a run is checked. Raises CheckpointError."""
    from vitctl.engine.checkpoint import read_checkpoint

    if (folder / STATE).exists():
        saved = read_checkpoint(folder, by_size=by_size, only=name)
        if folder.parent.name == CHECKPOINTS:
            check_own(saved, read_result(folder.parent.parent, weights=False))


def check_own(saved: "SavedCheckpoint", result: RunResult | None) -> bool:
    """Check that a checkpoint is its folder's run's and step's; return whether a record confirms it.

    `result` is the run's.
    """
    from vitctl.engine.checkpoint import MOVE_IT, foreign

    run, name = saved.folder.parent.parent, saved.folder.name
    named: dict[str, str] = result.record.get(CHECKPOINTS, {}) if result is not None else {}
    if problem := foreign(saved, named):
        raise CheckpointError(saved.folder, problem, MOVE_IT)
    is_logged = saved.digest == logged_checkpoints(run).get(saved.step) or bool(saved.state.get(LOG_HEAD))
    return name in named or (is_logged and (run / LOG).is_file())


def _checkpoint(run: Path, which: str, by_size: bool, pinned: str) -> tuple[Path, ChosenWeights]:
    """Return the folder of a run's requested checkpoint, verified."""
    from vitctl.engine.checkpoint import newest_checkpoint, read_checkpoint

    root, logged = run / CHECKPOINTS, logged_scores(run)
    scores = {step: score.deciding for step, score in logged.items()}
    kept = sorted(step for path in root.iterdir() if (step := step_of(path)) is not None)
    scored = [step for step in kept if step in scores]
    best = max(scored, key=lambda step: (scores[step], step), default=None)
    how = which or ("best" if selects_best(run) else "last")
    saved: SavedCheckpoint | None
    problems: list[str] = []
    if pinned:
        saved, problems = _pinned_checkpoint(run, pinned, by_size)
        how = pinned.partition(":")[0]
    elif how == "last":
        saved, problems = newest_checkpoint(root, by_size=by_size)
        if saved is None:
            raise CheckpointError(
                run, f"holds no complete checkpoint{': ' + problems[0] if problems else ''}"
            )
    elif how == "best" and best is None:
        raise CheckpointError(
            run, "none of its checkpoints was scored, so there is no best one", "use the last: --weights last"
        )
    else:
        step = best if how == "best" else int(how)
        if step not in kept or step is None:
            raise CheckpointError(
                run, f"has no checkpoint of step {how}; it has {', '.join(map(str, kept)) or 'none'}"
            )
        saved = read_checkpoint(step_folder(root, step), by_size=by_size)
    result = read_result(run, weights=False)
    is_known, is_done = check_own(saved, result), result is not None and result.status == "done"
    # The checkpoint chosen for a finished run is the one that its result describes.
    recorded = result.provenance if result is not None and is_done and not pinned else {}
    if recorded.get("weights_chosen") == how and recorded.get("weights_step") not in (None, saved.step):
        why = problems[0] if problems else "its folder is gone"
        raise CheckpointError(
            run,
            f"its result is of step {recorded['weights_step']}, whose checkpoint cannot be used ({why})",
            f"restore it, or choose another checkpoint: --weights {saved.step}",
        )
    own = logged[saved.step].number if saved.step in logged else None
    how = how if how in ("last", "best") else "step"
    return saved.folder, ChosenWeights(
        how,
        accuracy=own,
        metric=METRICS[logged[saved.step].metric] if own is not None else "accuracy",
        damaged=tuple(problems),
        unfinished=not is_done,
        digest=saved.digest,
        was_pinned=bool(pinned),
        is_known=is_known,
    )


def _pinned_checkpoint(run: Path, pinned: str, by_size: bool) -> "tuple[SavedCheckpoint, list[str]]":
    """Return a run's pinned checkpoint, and a line per newer damaged one if it was the last."""
    from vitctl.engine.checkpoint import newest_checkpoint, read_checkpoint

    how, step, digest = pinned.split(":")
    folder = step_folder(run / CHECKPOINTS, int(step))
    problems: list[str] = []
    try:
        saved = read_checkpoint(folder, by_size=by_size)
        if saved.digest != digest:
            raise CheckpointError(folder, "the checkpoint was overwritten by another training")
    except CheckpointError as error:
        why = str(error) if folder.exists() else f"{folder}: it was deleted"
        other, _ = newest_checkpoint(folder.parent, by_size=by_size)
        named = " with --from" if other is None else f": --weights {other.step}"
        raise CheckpointError(
            f"{why}; this run started from that checkpoint: restore it, or start a new run{named}"
        ) from None
    newer = [path for path in step_folders(folder.parent) if path.name > folder.name and how == "last"]
    for path in sorted(newer, reverse=True):
        try:
            read_checkpoint(path, by_size=by_size)
        except CheckpointError as error:
            problems.append(str(error))
    return saved, problems


def selects_best(run: Path) -> bool:
    """Return whether the best checkpoint represents a run, instead of the last."""
    evaluation: Any = None
    with suppress(RecipeError):
        evaluation = read_toml(run / RECIPE, error=RecipeError)[0].get("evaluation")
    names = ("select_best", "early_stopping")  # the second in recipes of earlier releases
    return isinstance(evaluation, dict) and any(bool(evaluation.get(name, False)) for name in names)


def logged_scores(run: Path) -> "dict[int, Score]":
    """Return step -> score of a training run's evaluations."""
    from vitctl.engine.evaluation import Score

    return {step: score for step, score in Score.by_step(read_records(run / LOG)).items() if step}


def logged_test(run: Path, step: int | None, data_sha256: str) -> "Score | None":
    """Return the score of a step's weights on the images of data.test_split; None if it is not logged."""
    from vitctl.engine.evaluation import Score

    for record in read_records(run / LOG):
        same = record.get("step") == step and record.get("data_sha256") == data_sha256
        if record.get("kind") == "test" and same:
            return Score.of(record)
    return None


def start_weights(job: str) -> str:
    """Return the address of published weights to start from; for evaluate and export, with a trained head."""
    return f"gs://vit_models/imagenet21k{'+imagenet2012' * (job in _TAKES_ANY)}/ViT-B_16.npz"


def newest_run(job: str, runs: Path = RUNS) -> tuple[Path, str]:
    """Return the newest finished run whose weights a job can use, and a line that names it.

    `evaluate` and `export` take any training, other jobs a pre-training. Runs in deeper folders, and runs
    that were stopped or failed, are not considered. Raises CheckpointError if there is none.
    """
    jobs = TRAINING if job in _TAKES_ANY else PRETRAINING
    done = [
        (file.stat().st_mtime, file.parent, result)
        for file in runs.glob(f"*/{RESULT}")
        if (result := read_result(file.parent)) and result.job in jobs and result.status == "done"
    ]
    wanted = "training" if jobs == TRAINING else "pre-training"
    if not done:
        raise CheckpointError(
            f"no finished {wanted} run under {runs.resolve()}",
            fix=f"give weights with --from, for example the published --from {start_weights(job)}",
        )
    when, folder, result = max(done, key=lambda one: one[:2])
    accuracy = result.metrics.get("accuracy")
    scored = f"accuracy {accuracy:.2%}" if accuracy is not None else "not scored"
    text = (
        f"no --from: using the newest finished {wanted} run, {folder} ({result.job}, "
        f"recipe {written_name(folder / RECIPE) or 'unknown'}, "
        f"finished {time.strftime('%Y-%m-%d %H:%M', time.localtime(when))}, {scored})"
    )
    return folder, text


def weights_place(source: str, which: str, job: str, runs: Path = RUNS) -> tuple[Path | str, str]:
    """Return the path or address that weights.source means, and a line that names the "newest" run."""
    (source,) = without_queries(full_address(source), error=CheckpointError)
    if source == "newest":
        return newest_run(job, runs)
    if "://" not in source:
        return Path(source), ""
    if which != set_of(which):
        raise CheckpointError(
            source, f"--weights {which} chooses among the checkpoints of a run", "give a run folder"
        )
    return source, ""


def set_of(which: str) -> str:
    """Return "ema" or "model" if weights.which chooses averaged or raw weights, else ""."""
    return which if which in (AVERAGE, MODEL) else ""
