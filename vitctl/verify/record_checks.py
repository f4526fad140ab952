"""Check the files of a run against its records, without recomputing anything.

The digests in result.json cover result.json itself, log.jsonl, steps.jsonl and the checkpoints; those in a
checkpoint cover the records next to it. Recipe and data are compared with their recorded digests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source, split_sources
from vitctl.engine.checkpoint import SavedCheckpoint, foreign, read_checkpoint
from vitctl.engine.journal import (
    AVERAGE,
    CHECKPOINTS,
    LOG,
    MODEL,
    RECIPE,
    RESULT,
    STEP_RECORDS,
    begins,
    json_digest,
    read_records,
    step_folders,
    tensors_file,
)
from vitctl.engine.trace import (
    StartLine,
    Steps,
    read_steps,
    record_problem,
)
from vitctl.errors import VitctlError
from vitctl.jobs.inputs.data import chosen_tasks, open_recipe_split, open_tasks, open_training_images
from vitctl.jobs.record.result import (
    DELETE_IT,
    TRAINING,
    RunResult,
    published_digest,
    read_result,
    with_recipe,
)
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.load import Loaded, load_recipe
from vitctl.recipe.neutral_keys import deciding_values
from vitctl.recipe.schema import Evaluate, Finetune, Pretrain, Recipe, Vtab
from vitctl.system.text import count_text
from vitctl.verify.finding import Finding, differs, ok, unchecked, unproven

T = TypeVar("T")

_OTHER = "has not the digest that the result names: it was changed, cut, or is of another run"


@dataclass
class Training:
    """The records of a run, or of one training inside it; `problems` are files that cannot be read."""

    folder: Path
    result: RunResult | None = None
    steps: Steps | None = None
    problems: list[Finding] = field(default_factory=list)

    @property
    def finished(self) -> RunResult | None:
        return self.result if self.result is not None and self.result.status == "done" else None

    @property
    def last_start(self) -> StartLine | None:
        return self.steps.starts[-1] if self.steps is not None and self.steps.starts else None

    def used(self, name: str) -> Any:
        """Return a field of the result's provenance; None if there is none."""
        return self.result.provenance.get(name) if self.result is not None else None

    def end(self, name: str) -> str:
        """Return how a record ends by the result; what earlier releases noted instead is not compared."""
        end: str = self.result.record.get(name, "") if self.result is not None else ""
        return end if ":" in end else ""


def read_training(folder: Path) -> Training:
    training = Training(folder)
    training.result = _read("result", partial(read_result, own=False), training)
    training.steps = _read("steps", read_steps, training)
    return training


def _read(what: str, read: Callable[[Path], T], training: Training) -> T | None:
    try:
        return read(training.folder)
    except VitctlError as error:
        training.problems.append(differs(what, str(error).removesuffix(DELETE_IT)))
        return None


def check_records(training: Training, *, is_traced: bool) -> Iterator[Finding]:
    """Check the records of one training; `is_traced`: its recipe asks for a record of the steps."""
    yield from training.problems
    unreadable = {finding.what for finding in training.problems}
    intact: list[SavedCheckpoint] = []
    checkpoints = [*_check_checkpoints(training, intact)]
    if "steps" not in unreadable:
        yield _check_steps(training, is_traced)
    yield _check_log(training)
    yield from checkpoints
    if "result" not in unreadable:
        yield _check_result(training)
        yield from _check_weights(training, intact)


def _check_steps(training: Training, is_traced: bool) -> Finding:
    folder, steps, end = training.folder, training.steps, training.end(STEP_RECORDS)
    path = folder / STEP_RECORDS
    if steps is None:
        if end:
            return differs("steps", f"{path} is gone; the result names its digest")
        if (folder / RECIPE).is_file() and not (folder / CHECKPOINTS).is_dir():
            return unchecked("steps", "this folder has no steps")
        if is_traced:
            return differs("steps", f"{path} is gone; the recipe says log.trace = true")
        return unchecked("steps", "not recorded: log.trace = false")
    if end and not begins(path, end):
        return differs("steps", f"{path}: {_OTHER}")
    gaps, last_step = list(steps.gaps), training.used("weights_step") or 0
    if training.finished and last_step > steps.last:
        gaps.append((steps.last + 1, last_step))
    starts = f", {len(steps.starts)} starts" if len(steps.starts) > 1 else ""
    text = f"{count_text(len(steps.by_step), 'record')}{starts}{_compared(end)}"
    if not gaps:
        return ok("steps", text) if end else unchecked("steps", text)
    first, last = gaps[0]
    text += (
        f"; steps {first} to {last} have no record: log.trace was false, the disk was full, "
        "or lines were removed"
    )
    return (unproven if is_traced else unchecked)("steps", text)


def _check_log(training: Training) -> Finding:
    path, end = training.folder / LOG, training.end(LOG)
    try:
        records = read_records(path)
        if end and records and not begins(path, end):
            return differs("log", f"{path}: {_OTHER}")
    except VitctlError as error:
        return differs("log", str(error))
    if not records:
        is_needed = end or training.steps is not None or path.exists()
        return differs("log", f"{path} is gone or empty") if is_needed else unchecked("log", "missing")
    text = f"{count_text(len(records), 'record')}{_compared(end)}"
    return ok("log", text) if end else unchecked("log", text)


def _compared(end: str) -> str:
    return ", as the result names them" if end else "; no result names their digest: see the checkpoints"


def _check_checkpoints(training: Training, intact: list[SavedCheckpoint]) -> Iterator[Finding]:
    """Check each checkpoint of a folder; add the unchanged ones to `intact`."""
    paths = sorted(step_folders(training.folder / CHECKPOINTS))
    named = training.result.record.get(CHECKPOINTS, {}) if training.result is not None else {}
    for path in paths:
        try:
            saved = read_checkpoint(path)
            problem = foreign(saved, named) or record_problem(saved)
        except (VitctlError, OSError) as error:
            yield differs("checkpoint", str(error))
            continue
        if problem:
            yield differs("checkpoint", f"{path}: {problem}")
        else:
            intact.append(saved)
    if gone := sorted(set(named) - {path.name for path in paths}):
        yield unchecked("checkpoints", f"{', '.join(gone)} of the result: deleted since")
    if intact:
        yield ok("checkpoints", f"{', '.join(saved.folder.name for saved in intact)}: every byte as written")


def _check_result(training: Training) -> Finding:
    path, result = training.folder / RESULT, training.result
    if result is None:
        steps = [one for one in read_records(training.folder / LOG) if one.get("kind") == "train"]
        if steps and steps[-1].get("step") == steps[-1].get("total_steps"):
            return unproven("result", f"{path}: missing, though the last step is done")
        return unchecked("result", "missing: the run is not finished")
    digest = result.record.get(RESULT, "")
    if digest not in ("", published_digest(result)):
        return differs("result", f"{path}: its digest is not that of its contents; it was changed")
    if result.status != "done":
        return unchecked("result", f"the run is {result.status}")
    if not result.record:
        return unproven("result", f"{path}: names no digests of the records")
    if not digest:
        return unchecked(
            "result", "has no digest of its fields, as of an earlier vitctl; --result scores again"
        )
    return ok("result", "job, status, metrics and provenance as written")


def _check_weights(training: Training, intact: Sequence[SavedCheckpoint]) -> Iterator[Finding]:
    """Check that the result's weights are those of the checkpoint, its average if it has one."""
    result, step = training.finished, training.used("weights_step")
    saved = next((saved for saved in intact if saved.step == step), None)
    if result is None or result.job not in TRAINING:
        return
    if saved is None:
        yield unchecked("weights", f"the checkpoint of step {step}, of the result, is not here")
        return
    part = AVERAGE if saved.files(AVERAGE) else MODEL
    path = next(iter(saved.files(part)), saved.folder / tensors_file(part))
    digest = result.provenance.get("weights_sha256", "")
    is_same_part = result.provenance.get("weights_averaged", False) == (part == AVERAGE)
    if is_same_part and weights_digest(saved.tensors(part)) == digest:
        yield ok("weights", f"{saved.folder.name}/{path.name} are those of the result")
    else:
        text = f"{path}: not the weights of the result, whose digest is {digest[:16]}"
        yield differs("weights", text)


def check_recipe(loaded: Loaded, trainings: Sequence[Training]) -> Finding:
    """Check recipe.toml, without paths replaced on this machine, against the result's and starts' digests."""
    recipe = load_recipe(loaded.name).recipe
    digest = json_digest(deciding_values(recipe))
    starts = [start for training in trainings if training.steps for start in training.steps.starts]
    last = [training.last_start for training in trainings if training.last_start is not None]
    result, in_result = trainings[0].finished, trainings[0].used("recipe_sha256")
    known = [start.recipe_file for start in last if start.recipe_file]
    if result is None or not in_result:
        if not known:
            return unchecked("recipe", "no digest of it was recorded")
    elif with_recipe(result, recipe).provenance["recipe_sha256"] != in_result:
        return differs("recipe", "recipe.toml: its values are not those of the result")
    if known and digest not in known:
        return differs("recipe", "recipe.toml: its values are not those of the last start")
    others = [start for start in starts if start.recipe_file not in ("", digest)]
    text = "recipe.toml: the values that decide the result are as recorded"
    return ok("recipe", text + f"; {len(others)} of {len(starts)} starts had others" * bool(others))


def check_data(recipe: Recipe, run: Training, scratch: Path, *, reads_bytes: bool) -> Iterator[Finding]:
    """Check the indexes of the data against the recorded digests.

    Args:
        recipe: with data.path as it is on this machine.
        run: its folder `data` may hold generated images; else they are generated in `scratch`.
        reads_bytes: also check every shard against its index.
    """
    try:
        sources = _sources(recipe, run.folder if (run.folder / "data").is_dir() else scratch)
    except VitctlError as error:
        yield (unproven if reads_bytes else unchecked)("data", f"{error}; --data SHARDS names another place")
        return
    recorded = _recorded_digests(run)
    for name, source in sources.items():
        if name in recorded and source.digest != recorded[name]:
            text = (
                f"{name}: digest {source.digest[:16]}, recorded {recorded[name][:16]}: other images or "
                f"labels, or shards written again"
            )
            yield differs("data", text)
            if reads_bytes:
                yield unchecked("shards", "not read, since they are not those of the run")
            return
    if not recorded.keys() & sources.keys():
        yield unchecked("data", "no digest of it was recorded")
        return
    counts = ", ".join(f"{name} {count_text(len(source), 'image')}" for name, source in sources.items())
    yield ok("data", f"{counts}: index and labels have the recorded digests")
    if not any(split_sources(source) for source in sources.values()):
        return
    if not reads_bytes:
        yield unchecked("shards", "not read: --bytes checks every shard against its index")
        return
    verification = Verification(list(sources.values()), scratch)
    verification.finish(None)
    found = verification.found()
    if found.damaged:
        yield differs("shards", "; ".join(found.damaged[:4]))
    elif found.share < 1:
        text = f"only {found.share:.1%} of their bytes could be read; these are as their index says"
        yield unproven("shards", text)
    else:
        yield ok("shards", "every byte as its index says")


def _sources(recipe: Recipe, place: Path) -> dict[str, Source]:
    if isinstance(recipe, Pretrain | Finetune):
        train, scored = open_training_images(recipe.data, place, needs_labels=False)
        once = (
            {"test": open_recipe_split(recipe.data, split, place / "data")}
            if (split := recipe.data.test_split)
            else {}
        )
        return {"train": train} | ({"score": scored} if scored is not None else {}) | once
    if isinstance(recipe, Vtab):
        tasks = open_tasks(recipe, chosen_tasks(recipe), place)
        pairs = {f"{name} train": task.train for name, task in tasks.items()}
        return pairs | {f"{name} test": task.test for name, task in tasks.items()}
    if isinstance(recipe, Evaluate):
        return {"score": open_recipe_split(recipe.data, recipe.data.eval_split, place / "data")}
    return {}


def _recorded_digests(run: Training) -> dict[str, str]:
    """Return the digest of each split, by name: the result's, otherwise the last start's."""
    start, tested = run.last_start, run.used("test")
    digests = {name: images.sha256 for name, images in start.made_of.images.items()} if start else {}
    for name, field_name in (("train", "train_sha256"), ("score", "data_sha256")):
        digests |= {name: run.used(field_name)} if run.used(field_name) else {}
    digests |= {"test": str(tested.get("data_sha256"))} if isinstance(tested, dict) else {}
    for task, used in (run.used("tasks") or {}).items():
        digests[f"{task} train"] = str(used.get("train_sha256"))
        digests[f"{task} test"] = str(used.get("data_sha256"))
    return digests
