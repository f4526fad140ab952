"""The records of a training against each other: chains, checkpoints, the result's numbers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitctl.engine.checkpoint.files import SavedCheckpoint, read_checkpoint
from vitctl.engine.distributed.agreement import checksum
from vitctl.engine.journal import LOG, json_digest
from vitctl.engine.run_files import (
    AVERAGE,
    CHECKPOINTS,
    MODEL,
    RECIPE,
    RESULT,
    STATE,
    STEP_RECORDS,
    step_folders,
    tensors_file,
)
from vitctl.engine.schedule import total_steps
from vitctl.engine.trace.steps import (
    MOST_STEPS,
    LoggedEnds,
    Steps,
    not_named,
    read_logged_ends,
    read_steps,
    record_problem,
)
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.record.result import DELETE_IT, RunResult, read_result
from vitctl.jobs.record.runs import TRAINING
from vitctl.jobs.sweep import SEEDS, SWEEP
from vitctl.models.build import build
from vitctl.models.weights.weights_file import read_weights, weights_digest
from vitctl.recipe.schema import Finetune, Pretrain, Recipe
from vitctl.system.files import inside
from vitctl.verify.counts import Claims, check_counts
from vitctl.verify.finding import Finding, differs, ok, unchecked, unproven
from vitctl.verify.log import Log, chain_problem, check_log, read_log, torn


def check_records(
    folder: Path, recipe: Recipe | None, *, select_best: bool, is_traced: bool
) -> Iterator[Finding]:
    """What the files of one training say of each other; nothing is computed again.

    Args:
        folder: of the training.
        recipe: of the run, where the folder is its own; None for a training inside it.
        select_best: the best checkpoint of a training represents it.
        is_traced: the recipe asks for a record of the steps.
    """
    result, found = _readable_result(folder)
    yield from found
    heads = result.record if result is not None else {}
    steps, log = None, None
    try:
        steps = read_steps(folder)
    except VitctlError as error:
        yield differs("steps", str(error))
    else:
        yield from _check_steps(folder, steps, heads, recipe, is_traced=is_traced)
    try:
        log = read_log(folder)
    except VitctlError as error:
        yield differs("log", str(error))
    else:
        yield _check_log(folder, log, steps, heads)
    whole: list[SavedCheckpoint] = []
    yield from _check_checkpoints(folder, steps, log, heads if result is not None else None, whole)
    if result is None or result.status != "done":
        if not found:
            yield _unfinished(result)
        return
    yield check_counts(Claims(result, log, steps, recipe, select_best))
    if weights := _check_weights(result, whole):
        yield weights


def _readable_result(folder: Path) -> tuple[RunResult | None, list[Finding]]:
    """The result of a folder, None where there is none, or where it is none, which is found."""
    try:
        result = read_result(folder)
    except CheckpointError as error:
        return None, [differs("result", str(error).removesuffix(DELETE_IT))]
    if result is not None and (problem := odd_field(result)):
        return None, [differs("result", f"{folder / RESULT}: {problem}; it was changed")]
    return result, []


def _unfinished(result: RunResult | None) -> Finding:
    if result is not None and result.metrics:
        return differs(
            "result", f"it has numbers, and its status is {result.status}; only a finished run has numbers"
        )
    return unchecked("result", f"there is none: the run is {result.status if result else 'not finished'}")


class _Used(BaseModel):
    """The fields of the provenance that are compared."""

    model_config = ConfigDict(strict=True)

    weights_step: int | None = Field(None, ge=0, le=MOST_STEPS)
    weights_averaged: bool = False
    weights_sha256: str = ""
    recipe_sha256: str = ""
    train_sha256: str = ""
    data_sha256: str = ""
    labels: str = ""


class _Record(BaseModel):
    """The digests in a result."""

    model_config = ConfigDict(strict=True)

    log: str = ""
    steps: str = ""
    checkpoints: dict[str, str] = {}


def odd_field(result: RunResult) -> str:
    """The field of a result that is not of its type; "" where all are."""
    try:
        _Used.model_validate(result.provenance)
        names = {LOG: "log", STEP_RECORDS: "steps"}
        _Record.model_validate({names.get(name, name): value for name, value in result.record.items()})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg'].lower()}"
    return ""


def _check_steps(
    folder: Path, steps: Steps | None, heads: Mapping[str, Any], recipe: Recipe | None, *, is_traced: bool
) -> Iterator[Finding]:
    path = folder / STEP_RECORDS
    if steps is None:
        if STEP_RECORDS in heads:
            yield differs("steps", f"{path} is gone; the result names its last line")
        elif (folder / RECIPE).is_file() and not (folder / CHECKPOINTS).is_dir():
            yield unchecked("steps", "this folder has none of its own")
        elif is_traced:
            yield differs("steps", f"{path} is gone; the recipe says log.trace = true")
        else:
            yield unchecked("steps", "there is no record of them: log.trace = false")
        return
    if (
        problem := chain_problem(path, steps.chain, heads)
        or steps.problem
        or _end_problem(path, steps, recipe)
    ):
        yield differs("steps", problem)
        return
    if any(start.before is None for start in steps.starts):
        text = "a start names neither the line before it nor the checkpoint that it loaded, as in an earlier state of vitctl"
        yield unproven("starts", text)
    last = steps.chain.links[-1] if steps.chain.links else ""
    starts = f", {len(steps.starts)} starts" if len(steps.starts) > 1 else ""
    text = f"{len(steps.by_step):,} records, each follows the one before{starts}{torn(steps.chain)}; head {last[:16]}"
    if steps.gaps:
        gap = steps.gaps[0]
        text += f"; steps {gap.first} to {gap.last} have none, as the start after them says: log.trace was false, or the disk full"
        yield unproven("steps", text) if is_traced else unchecked("steps", text)
    else:
        yield ok("steps", text)


def _end_problem(path: Path, steps: Steps, recipe: Recipe | None) -> str:
    """Steps that are recorded beyond the end, or not at all where no start says so."""
    end = _length(steps, recipe)
    if end and steps.last > end:
        return f"{path}: has a record of step {steps.last}, and the training ends after step {end}"
    gaps = [gap for gap in steps.gaps if not gap.is_told]
    if gaps:
        count = sum(gap.last - gap.first + 1 for gap in gaps)
        return (
            f"{count} have no record, the first is step {gaps[0].first}: a full disk, or lines were removed"
        )
    return ""


def _length(steps: Steps, recipe: Recipe | None) -> int:
    """Steps of a training, from the recipe of the run, or as its last start says; 0 where nothing tells."""
    start = steps.starts[-1] if steps.starts else None
    if start is None or "train" not in start.made_of.images:
        return 0
    values = start.made_of.recipe
    if isinstance(recipe, Pretrain | Finetune):
        given = recipe.schedule.total_steps, recipe.schedule.total_epochs
    else:
        try:
            given = (
                int(values.get("schedule.total_steps") or 0),
                float(values.get("schedule.total_epochs") or 0),
            )
        except ValueError:
            return 0
    images = start.made_of.images["train"].num_images
    return total_steps(images, start.batch_size, steps=given[0], epochs=given[1]) if any(given) else 0


def _check_log(folder: Path, log: Log | None, steps: Steps | None, heads: Mapping[str, Any]) -> Finding:
    if log is None:
        is_gone = LOG in heads or steps is not None
        return differs("log", f"{folder / LOG} is gone") if is_gone else unchecked("log", "there is none")
    return check_log(log, steps, heads)


def _check_checkpoints(
    folder: Path,
    steps: Steps | None,
    log: Log | None,
    heads: Mapping[str, Any] | None,
    whole: list[SavedCheckpoint],
) -> Iterator[Finding]:
    """Each checkpoint of a folder; `heads` of the result, None where it need not name them; those that are
    whole go to `whole`.
    """
    found = sorted(step_folders(folder / CHECKPOINTS))
    noted = (heads or {}).get(CHECKPOINTS, {})
    ends = read_logged_ends(folder) if log is not None and found else LoggedEnds((), {})
    loaded = (
        {start.step: start.checkpoint for start in steps.starts if start.checkpoint}
        if steps is not None
        else {}
    )
    for path in found:
        try:
            saved = read_checkpoint(path)
        except (CheckpointError, OSError) as error:
            yield differs("checkpoint", str(error))
            continue
        whole.append(saved)
        if path.name in noted and noted[path.name] != saved.digest:
            whole.pop()
            yield differs(
                "checkpoint",
                f"{path}: is not the one that the result names; it was changed and its digests too",
            )
        elif text := _files_problem(saved) or record_problem(saved, steps, ends, _checksum_of(saved, steps)):
            whole.pop()
            yield differs("checkpoint", f"{path}: {text}")
        elif loaded.get(saved.step, saved.digest) != saved.digest:
            whole.pop()
            yield differs("checkpoint", f"{path}: is not the one that a start loaded, as {STEP_RECORDS} says")
        elif heads and path.name not in noted:
            yield differs(
                "checkpoint", f"{path}: the result does not name it; it was added, or the result was changed"
            )
    if gone := sorted(set(noted) - {path.name for path in found}):
        yield unchecked("checkpoints", f"{', '.join(gone)} of the result: deleted since")
    if unnamed := next(
        (f"{saved.folder} does not say {text}" for saved in whole if (text := not_named(saved))), ""
    ):
        yield unproven(
            "checkpoints",
            f"{unnamed}, as in an earlier state of vitctl: its records cannot be compared with that",
        )
    elif whole:
        yield ok("checkpoints", f"{', '.join(saved.folder.name for saved in whole)}: every byte as written")


def _checksum_of(saved: SavedCheckpoint, steps: Steps | None) -> str:
    """The digest of a checkpoint's weights as steps.jsonl records it; "" where that has none of the step."""
    line = steps.by_step.get(saved.step) if steps is not None else None
    if line is None or not line.weights:
        return ""
    config = read_weights(str(saved.folder / tensors_file(MODEL))).config
    tensors = saved.tensors(MODEL)
    names = build(config, device="meta").state_dict()  # the digest depends on their order
    return checksum((name, tensors[name]) for name in names if name in tensors)


def _files_problem(saved: SavedCheckpoint) -> str:
    """A file of tensors that the state of a checkpoint does not name, so that no digest covers it."""
    there = {path.name for path in saved.folder.glob(tensors_file("*"))}
    odd = sorted(there - saved.state["files"].keys())
    return f"{odd[0]} is not named in {STATE}; it was added" if odd else ""


def published_digest(result: RunResult) -> str:
    """One digest of what a result says: job, status, numbers, provenance, and the digests of its records and
    checkpoints.
    """
    said = {name: getattr(result, name) for name in ("job", "status", "metrics", "provenance", "record")}
    return json_digest(said)


def check_parts(run_dir: Path, result: RunResult) -> Iterator[Finding]:
    """The numbers of a result that are those of trainings inside the run: learning rates, seeds, tasks of
    VTAB.
    """
    numbers: dict[str, Any] = (
        {f"{SWEEP}/lr_{lr}": accuracy for lr, accuracy in (result.metrics.get("sweep") or {}).items()}
        if result.job == "finetune"
        else {}
    )
    by_seed = result.metrics.get("by_seed")
    if isinstance(by_seed, dict):
        numbers |= {f"{SEEDS}/seed_{seed}": one["accuracy"] for seed, one in list(by_seed.items())[1:]}
    for task, row in (result.metrics.get("tasks") or {}).items():
        seeds = result.provenance.get("seeds", [])
        setting = f"lr_{result.provenance.get('lr', 0):g}_steps_{result.provenance.get('total_steps')}"
        if result.provenance.get("protocol") == "fine-tuning":
            numbers |= {
                f"tasks/{task}/{setting}/seed_{s}": a
                for s, a in zip(seeds, row.get("by_seed", []), strict=False)
            }
    for name, accuracy in numbers.items():
        place = inside(run_dir, *name.split("/"), error=CheckpointError)
        own = read_result(place)
        if own is None:
            yield differs("parts", f"{place}: the result has its accuracy, and it has no result")
            return
        if own.metrics.get("accuracy") != accuracy:
            found = own.metrics.get("accuracy")
            yield differs("parts", f"{place}: accuracy {found}, in the result of the run {accuracy}")
            return
    if numbers:
        yield ok("parts", f"the accuracies of {len(numbers)} trainings are those of their own results")


def _check_weights(result: RunResult, whole: Sequence[SavedCheckpoint]) -> Finding | None:
    """The weights that a result is of are those of the checkpoint, its average where there is one."""
    used = result.provenance
    saved = next((one for one in whole if one.step == used.get("weights_step")), None)
    if saved is None or "weights_sha256" not in used or result.job not in TRAINING:
        return None
    part = AVERAGE if tensors_file(AVERAGE) in saved.state["files"] else MODEL
    path = saved.folder / tensors_file(part)
    if bool(used.get("weights_averaged")) != (part == AVERAGE):
        return differs(
            "weights", f"{path}: these represent the run, and the result names others (weights_averaged)"
        )
    if weights_digest(saved.tensors(part)) != used["weights_sha256"]:
        return differs(
            "weights", f"{path}: not the weights of the result, whose digest is {used['weights_sha256'][:16]}"
        )
    return ok("weights", f"{saved.folder.name}/{path.name} are those of the result")
