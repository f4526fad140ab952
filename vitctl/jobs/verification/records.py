"""The records of a training against each other: chains, checkpoints, the result's numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitctl.engine.checkpoint.files import SavedCheckpoint, read_checkpoint
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import LOG, read_records
from vitctl.engine.run_files import (
    AVERAGE,
    CHECKPOINTS,
    MODEL,
    RECIPE,
    RESULT,
    STEP_RECORDS,
    STEPS_HEAD,
    step_folders,
    tensors_file,
)
from vitctl.engine.trace.chain import Chain, read_chain
from vitctl.engine.trace.steps import MOST_STEPS, Steps, is_json, read_steps, same_number
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.jobs.record.runs import TRAINING
from vitctl.jobs.sweep import SEEDS, SWEEP
from vitctl.jobs.verification.finding import Finding, differs, ok, unchecked
from vitctl.models.weights.load import weights_digest

_EARLIER = "an earlier vitctl wrote it"


def check_records(folder: Path, result: RunResult | None) -> Iterator[Finding]:
    """What the files of one training say of each other; nothing is computed again.

    Args:
        folder: of the training.
        result: in it; None while there is none.
    """
    if result is not None and (problem := odd_field(result)):
        yield differs("result", f"{folder / RESULT}: {problem}; it was changed")
        result = None
    heads = result.record if result is not None else {}
    steps = None
    try:
        steps = read_steps(folder)
    except VitctlError as error:
        yield differs("steps", str(error))
    else:
        yield _check_steps(folder, steps, heads)
    yield _check_log(folder, steps, heads)
    yield from _check_checkpoints(folder, steps, heads.get(CHECKPOINTS, {}))
    yield from _check_result(folder, result)


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


def _check_steps(folder: Path, steps: Steps | None, heads: Mapping[str, Any]) -> Finding:
    if steps is None:
        if STEP_RECORDS in heads:
            return differs("steps", f"{folder / STEP_RECORDS} is gone; the result names its last line")
        if (folder / RECIPE).is_file() and not (folder / CHECKPOINTS).is_dir():
            return unchecked("steps", "this folder has none of its own")
        return unchecked("steps", f"there is no record of them: {_EARLIER}, or log.trace = false")
    if problem := _chain_problem(folder / STEP_RECORDS, steps.chain, heads):
        return differs("steps", problem)
    if steps.missing:
        return differs(
            "steps",
            f"{len(steps.missing)} have no record, the first is step {steps.missing[0]}: a full disk, or lines were removed",
        )
    last = steps.chain.links[-1] if steps.chain.links else ""
    starts = f", {len(steps.starts)} starts" if len(steps.starts) > 1 else ""
    return ok(
        "steps",
        f"{len(steps.by_step):,} records, each follows the one before{starts}{_torn(steps.chain)}; head {last[:16]}",
    )


def _check_log(folder: Path, steps: Steps | None, heads: Mapping[str, Any]) -> Finding:
    path = folder / LOG
    if not path.exists():
        return differs("log", f"{path} is gone") if LOG in heads else unchecked("log", "there is none")
    chain = read_chain(path, is_json)
    if problem := _chain_problem(path, chain, heads):
        return differs("log", problem)
    if not chain.links:
        return unchecked("log", f"its lines are not chained: {_EARLIER}")
    compared = 0
    by_step = steps.by_step if steps is not None else {}
    for record in read_records(path):
        if record.get("kind") == "train" and (line := by_step.get(record.get("step", 0))):
            for name in ("loss", "grad_norm", "lr"):
                if not same_number(line.number(name), float(record.get(name) or 0.0)):
                    text = f"step {line.step}: {name} is {record.get(name)!r} in {LOG}, {line.number(name)!r} in {STEP_RECORDS}"
                    return differs("log", text)
            compared += 1
    before = f", {chain.num_before} before them of an earlier vitctl" if chain.num_before else ""
    same = f"; numbers of {compared:,} step{'s' * (compared != 1)} as in {STEP_RECORDS}" if compared else ""
    return ok("log", f"{len(chain.links):,} lines, each follows the one before{before}{_torn(chain)}{same}")


def _chain_problem(path: Path, chain: Chain, heads: Mapping[str, Any]) -> str:
    if chain.broken_at:
        return f"{path}, line {chain.broken_at}: does not follow the line before; one of the two was changed, added or removed"
    if path.name in heads and heads[path.name] not in chain.links:
        return f"{path}: has no line with the digest {str(heads[path.name])[:16]} that the result names; its end was removed or changed"
    return ""


def _torn(chain: Chain) -> str:
    return f"; {chain.num_torn} incomplete, as a crash leaves them" if chain.num_torn else ""


def _check_checkpoints(folder: Path, steps: Steps | None, noted: Mapping[str, Any]) -> Iterator[Finding]:
    found = sorted(step_folders(folder / CHECKPOINTS))
    whole = []
    for path in found:
        try:
            saved = read_checkpoint(path)
        except (CheckpointError, OSError) as error:
            yield differs("checkpoint", str(error))
            continue
        if path.name in noted and noted[path.name] != saved.digest:
            yield differs(
                "checkpoint", f"{path}: is not the one that the result names; it was changed and its digests too"
            )
        elif text := _head_problem(saved, steps):
            yield differs("checkpoint", f"{path}: {text}")
        else:
            whole.append(path.name)
    if gone := sorted(set(noted) - {path.name for path in found}):
        yield unchecked("checkpoints", f"{', '.join(gone)} of the result: deleted since")
    if whole:
        yield ok("checkpoints", f"{', '.join(whole)}: every byte as written")


def _head_problem(saved: SavedCheckpoint, steps: Steps | None) -> str:
    """Why the record of steps is not the one that a checkpoint was saved with; "" where it is, or the checkpoint names none."""
    head = saved.state.get(STEPS_HEAD)
    if steps is None or not head:
        return ""
    if steps.after.get(str(head)) != saved.step:
        return (
            f"{STEP_RECORDS} has no line of step {saved.step} with the digest that it was saved with ({str(head)[:16]})"
        )
    return ""


def _check_result(folder: Path, result: RunResult | None) -> Iterator[Finding]:
    if result is None or result.status != "done":
        yield unchecked("result", f"there is none: the run is {result.status if result else 'not finished'}")
        return
    yield _check_counts(folder, result)
    if weights := _check_weights(folder, result):
        yield weights


def _check_counts(folder: Path, result: RunResult) -> Finding:
    """The counts of a result are those of the log, at the step of its weights or the last."""
    own, accuracy = _own_score(result)
    if own is None:
        return unchecked("result", "it has no counts of its own")
    used = result.provenance
    records = [r for r in read_records(folder / LOG) if r.get("labels") in (None, used.get("labels"))]
    scores = Score.by_step(records)
    if not scores:
        return unchecked("result", f"no evaluation is in {folder / LOG}")
    step = used.get("weights_step", max(scores)) if result.job in TRAINING else max(scores)
    logged = scores.get(step)
    if logged is None:
        return differs("result", f"no evaluation of step {step} is logged, and the result is of it")
    where = f"in the log at step {step}" if step else "in the log"
    if own != logged:
        counts = f"{own.correct} of {own.total} are correct in it, {logged.correct} of {logged.total} {where}"
        return differs("result", counts)
    if accuracy != logged.accuracy:
        return differs("result", f"its accuracy {accuracy} is not {logged.correct} / {logged.total}")
    return ok("result", f"{own.correct:,} of {own.total:,} correct, as {where}")


def _own_score(result: RunResult) -> tuple[Score | None, Any]:
    """The counts and the accuracy of a result's own training; with several seeds, those of the first. None where it has none."""
    counts, by_seed = result.metrics, result.metrics.get("by_seed")
    if "correct" not in counts and isinstance(by_seed, dict) and by_seed:
        first = next(iter(by_seed.values()))
        counts = {**first, "total": counts.get("total")} if isinstance(first, dict) else {}
    try:
        return Score.of(counts), counts.get("accuracy")
    except (KeyError, TypeError, ValueError):
        return None, None


def check_parts(run_dir: Path, result: RunResult) -> Iterator[Finding]:
    """The numbers of a result that are those of trainings inside the run: learning rates, seeds, tasks of VTAB."""
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
                f"tasks/{task}/{setting}/seed_{s}": a for s, a in zip(seeds, row.get("by_seed", []), strict=False)
            }
    for name, accuracy in numbers.items():
        inside = read_result(run_dir / name)
        if inside is None:
            yield differs("parts", f"{run_dir / name}: the result has its accuracy, and it has no result")
            return
        if inside.metrics.get("accuracy") != accuracy:
            yield differs(
                "parts",
                f"{run_dir / name}: accuracy {inside.metrics.get('accuracy')}, in the result of the run {accuracy}",
            )
            return
    if numbers:
        yield ok("parts", f"the accuracies of {len(numbers)} trainings are those of their own results")


def _check_weights(folder: Path, result: RunResult) -> Finding | None:
    """The weights that a result is of are those of the checkpoint."""
    used = result.provenance
    name = tensors_file(AVERAGE if used.get("weights_averaged") else MODEL)
    path = folder / CHECKPOINTS / f"step_{used.get('weights_step') or 0:08d}"
    if "weights_sha256" not in used or not (path / name).exists():
        return None
    if weights_digest(SavedCheckpoint(path, {}).tensors(Path(name).stem)) != used["weights_sha256"]:
        return differs(
            "weights", f"{path / name}: not the weights of the result, whose digest is {used['weights_sha256'][:16]}"
        )
    return ok("weights", f"{path.name}/{name} are those of the result")
