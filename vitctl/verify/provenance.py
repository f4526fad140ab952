"""The provenance of a result against what the last start recorded, what follows from the recipe, and the
counts of its checkpoint.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitctl.engine.checkpoint.files import read_state
from vitctl.engine.journal import LOG
from vitctl.engine.run_files import AVERAGE, CHECKPOINTS, MODEL, RECIPE, RESULT, step_folder, tensors_file
from vitctl.engine.trace.steps import StartLine
from vitctl.engine.trainer import BAD_SAMPLES
from vitctl.errors import CheckpointError
from vitctl.jobs.inputs.data import eval_transform
from vitctl.jobs.provenance import shown
from vitctl.jobs.record.result import DATA_DIGEST, RunResult
from vitctl.jobs.record.runs import TRAINING
from vitctl.recipe.schema import Finetune, Pretrain, Recipe
from vitctl.verify.finding import REST, Finding, differs, ok, unchecked
from vitctl.verify.log import readable_records

_OF_THE_START = (
    "precision",
    "device",
    "device_name",
    "hardware",
    "processes",
    "threads",
    "versions",
    "attention",
    "linear",
)
# What records.py and inputs.py compare.
_COMPARED_ELSEWHERE = (
    *(
        "weights_step",
        "weights_averaged",
        "weights_sha256",
        "recipe_sha256",
        "train_sha256",
        "data_sha256",
        "labels",
    ),
    *("changed_on_purpose", "tasks", "seeds", "lr", "total_steps", "protocol", *DATA_DIGEST),
)


def check_provenance(
    folder: Path, result: RunResult, start: StartLine | None, recipe: Recipe, others: Sequence[str]
) -> Iterator[Finding]:
    """Check that a result names the machine and counts that were recorded, and what follows from the recipe;
    list the rest.

    Args:
        folder: of the training.
        result: in it, finished.
        start: the last one that was recorded; None where there is none.
        recipe: of the run.
        others: files beside it that nothing is compared with.
    """
    used = result.provenance
    compared = [key for key in _OF_THE_START if key in used] if start is not None else []
    texts = []
    if start is not None:
        texts = [
            f"{name} is {now}, {before} at the last start"
            for key in compared
            for name, now, before in _values(key, used[key], getattr(start, key))
            if now != before
        ]
        more, keys = _numbers(used, start)
        texts, compared = [*texts, *more], [*compared, *keys]
    differing, keys = _counts(folder, used)
    compared += keys
    given = _of_the_recipe(recipe) if result.job in TRAINING else {}
    compared += [key for key in given if key in used]
    differing += [
        f"{key} is {used[key]}, {value} by {RECIPE}"
        for key, value in given.items()
        if key in used and used[key] != value
    ]
    always = ("train_split", "compiled", "micro_batch")  # the others where images are scored
    gone = [key for key in given if key not in used and (key in always or "data_sha256" in used)]
    differing += [f"it has no {key}, as every finished {result.job} has" for key in gone]
    if texts and (step := _resumed_after(folder)):
        # No start is recorded where no step is made.
        text = f"the run was resumed at its last step, {step}, and scored again: {'; '.join(texts)}"
        yield unchecked("provenance", text)
    elif texts:
        differing = [*texts, *differing]
    if differing:
        yield differs("provenance", f"{folder / RESULT}: {'; '.join(differing)}")
    elif compared and not texts:
        yield ok("provenance", f"{', '.join(compared)} as recorded")
    if rest := [*sorted(set(used) - {*compared, *_COMPARED_ELSEWHERE}), *others]:
        yield unchecked(REST, f"nothing else records {', '.join(rest)}")


def _of_the_recipe(recipe: Recipe) -> dict[str, Any]:
    """What the result of a training says of its images and how it was computed that follows from the recipe
    alone.
    """
    if not isinstance(recipe, Pretrain | Finetune):
        return {}
    data = recipe.data
    own: dict[str, Any] = {"labels": "original", "train_split": data.train_split, "split": data.eval_split}
    own |= {"compiled": recipe.machine.compile, "micro_batch": recipe.machine.micro_batch}
    seen = shown(eval_transform(data))
    if not data.image_size:  # that of the start weights
        seen = {name: value for name, value in seen.items() if name not in ("image_size", "eval_resize")}
    if isinstance(recipe, Pretrain):
        seen |= {"mean": list(recipe.data.mean), "std": list(recipe.data.std)}
    return own | seen


def unused_files(folder: Path) -> list[str]:
    """The files of a run that no digest covers."""
    return [name for name in ("env.json", BAD_SAMPLES) if (folder / name).is_file()]


def missing_weights(folder: Path, result: RunResult) -> Finding | None:
    """A line for the weights of a result whose file is gone; None where it is there, or none is named."""
    used = result.provenance
    name = tensors_file(AVERAGE if used.get("weights_averaged") else MODEL)
    path = step_folder(folder / CHECKPOINTS, used.get("weights_step") or 0) / name
    if (
        used.get("weights_step") is None or "skipped_updates" not in used or path.exists()
    ):  # the latter: of a training
        return None
    return unchecked("weights", f"{path} is gone: the weights of the result cannot be compared")


def _values(key: str, now: Any, before: Any) -> list[tuple[str, Any, Any]]:
    """Name and the two values of what a key holds: of each package, or the key's own."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return [(key, now, before)]
    return [
        (f"{key}.{one}", now.get(one, "none"), before.get(one, "none")) for one in sorted({*now, *before})
    ]


def _numbers(used: dict[str, Any], start: StartLine) -> tuple[list[str], list[str]]:
    """Differences, and the keys that were compared, of numbers that a start records in another form."""
    texts, keys = [], []
    if "num_train" in used and "train" in start.made_of.images:
        keys.append("num_train")
        if used["num_train"] != (count := start.made_of.images["train"].num_images):
            texts.append(f"num_train is {used['num_train']}, {count} at the last start")
    wanted = used.get("micro_batch")
    if isinstance(wanted, int) and wanted > 0 and start.micro_batch:  # others are chosen by the run
        keys.append("micro_batch")
        shares = start.batch_size // start.processes, -(-start.batch_size // start.processes)
        if start.micro_batch not in {min(wanted, share) for share in shares} and not start.lanes:
            texts.append(f"micro_batch is {wanted}, {start.micro_batch} at the last start")
    return texts, keys


def _counts(folder: Path, used: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Skipped updates and bad samples, of the result and of the log, against those of the checkpoint of the
    result.
    """
    step = used.get("weights_step")
    if step is None:
        return [], []
    path = step_folder(folder / CHECKPOINTS, step)
    try:
        state = read_state(path)
    except (CheckpointError, OSError):
        return [], []
    texts = []
    if "skipped_updates" in used and used["skipped_updates"] != state.get("num_skipped", 0):
        texts.append(
            f"skipped_updates is {used['skipped_updates']}, {state.get('num_skipped', 0)} in {path.name}"
        )
    logged = [r for r in readable_records(folder) if r.get("kind") == "train" and r.get("step") == step]
    for name in ("num_bad", "num_skipped"):
        if logged and name in logged[-1] and name in state and logged[-1][name] != state[name]:
            texts.append(
                f"{name} is {logged[-1][name]} in {LOG} at step {step}, {state[name]} in {path.name}"
            )
    return texts, ["skipped_updates"] if "skipped_updates" in used else []


def _resumed_after(folder: Path) -> int:
    """The last step of a training that was started again when nothing was left to do; 0 for any other."""
    last: Any = None
    for record in readable_records(folder):
        last = record if record.get("kind") in ("resume", "train") else last
    if last is None or last["kind"] != "resume" or last.get("step") != last.get("total_steps"):
        return 0
    return int(last["step"])
