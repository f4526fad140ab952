"""Whether a finished run is the experiment of its recipe: its values, its images, and its start weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.data.datasets.catalog import known_size
from vitctl.data.datasets.vtab import VTAB
from vitctl.engine.journal import LOG, read_records
from vitctl.engine.run_files import AVERAGE, CHECKPOINTS, MODEL, step_of
from vitctl.errors import VitctlError
from vitctl.jobs.inputs.fewshot_sets import SPLITS
from vitctl.jobs.record.result import RunResult, unverified_bytes
from vitctl.models.weights.weights_file import read_weights, weights_digest
from vitctl.recipe.load import load_recipe
from vitctl.recipe.neutral import result_neutral
from vitctl.recipe.paper import FIGURE_4_SIZES
from vitctl.recipe.schema import Evaluate, Fewshot, Finetune, Pretrain, Recipe, TrainRecipe, Vtab
from vitctl.recipe.write import differences

# What may differ in a run that still counts as one of its recipe, beside keys that change no number.
# data.path may not: its images cannot be checked against the data set that the recipe names.
_FREE = (
    *(*result_neutral(), "machine.precision", "evaluation.every_steps", "fewshot_probe."),
    *("seed", "finetune.seeds", "weights.source"),
)
# Values set on the command line for recipes that are for any data set.
_NAMED = {
    "fewshot": {"data.dataset": "imagenet"},
    "evaluate": {"data.dataset": "imagenet", "data.eval_split": "validation", "evaluation.labels": "real"},
}
_ROUND = 1_000_000  # the paper prints the size of JFT-300M in millions


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of a shipped recipe.

    Args:
        folder: of the run.
        where: the folder, as shown to the user.
        name: of the recipe.
        recipe: with the values that it was run with.
        result: its result.
    """

    folder: Path
    where: str
    name: str
    recipe: Recipe
    result: RunResult

    @property
    def digest(self) -> str:
        """Digest of its last weights."""
        return str(self.result.provenance.get("weights_sha256", ""))


def recipe_misfit(run: FinishedRun) -> str:
    """The first value in which a run differs from its shipped recipe, as text; "" when there is none."""
    named = _NAMED.get(run.name, {})
    shipped = load_recipe(run.name).recipe
    for key, wanted, found in differences(shipped, run.recipe):
        if key.startswith(_FREE) or (key in named and found == named[key]):
            continue
        if key == "data.subset_images" and run.name.startswith("fig4_") and found in FIGURE_4_SIZES.values():
            continue
        if key == "data.path":
            return "data.path is set: its images cannot be checked against the data set of the recipe"
        return f"{key} is {found}, in the recipe {wanted}"
    missing = [key for key in named if key not in {k for k, _, _ in differences(shipped, run.recipe)}]
    wrong = [key for key in missing if _value(run.recipe, key) != named[key]]
    return f"{wrong[0]} is {_value(run.recipe, wrong[0])}, should be {named[wrong[0]]}" if wrong else ""


def _value(recipe: Any, key: str) -> Any:
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return recipe


def data_misfit(run: FinishedRun) -> str:
    """Why the images of a run are not those of its recipe, by number and source; "" when they are."""
    if unverified := unverified_bytes(run.result):
        return unverified
    used = run.result.provenance
    if isinstance(run.recipe, Vtab):
        return _vtab_misfit(run)
    for key in ("data_source", "train_source"):
        if "partial" in (described := used.get(key, "")) or "copy" in described:
            return f"its images are {described}"
    wanted = _wanted(run.recipe)
    for key, (dataset, split, limit) in wanted.items():
        known = known_size(dataset, split)
        if known is None:
            return f"how many images {split} of {dataset} has is not known"
        size, found = limit or known[0], used.get(key)
        if found is None:
            return f"its result does not say {key}"
        if found != size and (size % _ROUND or round(found / _ROUND) * _ROUND != size):
            return f"{found:,} images of {split} of {dataset}, should be {size:,}"
    return ""


def _wanted(recipe: Recipe) -> dict[str, tuple[str, str, int]]:
    """Key of the provenance -> data set, split, and the size of a subset of it (0: all)."""
    if isinstance(recipe, Pretrain | Finetune):
        d = recipe.data
        train = {"num_train": (d.dataset, d.train_split, d.subset_images)}
        masked = (
            isinstance(recipe, Pretrain) and recipe.loss.name == "masked_patch"
        )  # has no classes to score
        return train if masked or not d.eval_split else train | {"num_images": (d.dataset, d.eval_split, 0)}
    if isinstance(recipe, Evaluate):
        return {"num_images": (recipe.data.dataset, recipe.data.eval_split, 0)}
    assert isinstance(recipe, Fewshot)
    train_split, eval_split = SPLITS[recipe.data.dataset]
    return {
        "num_train": (recipe.data.dataset, train_split, 0),
        "num_images": (recipe.data.dataset, eval_split, 0),
    }


def _vtab_misfit(run: FinishedRun) -> str:
    metrics = run.result.metrics
    if metrics.get("partial", True) or set(metrics["tasks"]) != {task.name for task in VTAB}:
        return f"{len(metrics.get('tasks', {}))} of {len(VTAB)} tasks"
    for task in VTAB:
        row, known = metrics["tasks"][task.name], known_size(task.data_set, task.test)
        if row["copy"]:
            return f"{task.name}: {row['copy']}"
        if known is not None and row["total"] != known[0]:
            return f"{task.name}: {row['total']:,} test images, should be {known[0]:,}"
    return ""


def weights_misfit(run: FinishedRun, candidates: Sequence[FinishedRun]) -> tuple[FinishedRun | None, str]:
    """The run whose weights another run started from or scored, or why there is none.

    They must be the weights that represent the run: the best checkpoint with select_best, else the last; the
    average where the recipe averages.

    Args:
        run: that started from, or scored, stored weights.
        candidates: runs that may have saved them.
    """
    if run.result.provenance.get("initialise") == "random":
        return None, "it started from random weights"
    digest, path = _origin(run)
    for source in candidates:
        stored = _stored(path, source)
        if not digest or (source.digest != digest and (stored is None or _digest(stored) != digest)):
            continue
        last, wanted = _last(source), _stands_for(source)
        taken = ((step_of(stored.parent) or 0), stored.stem) if stored is not None else (last, MODEL)
        if taken != wanted:
            return (
                None,
                f"of {source.where} it takes {_checkpoint_name(*taken)}, should be "
                f"{_checkpoint_name(*wanted)}",
            )
        return source, ""
    return None, "its weights are of no run here that can be used"


def _checkpoint_name(step: int, name: str) -> str:
    return f"{'the average of ' if name == AVERAGE else ''}step {step:,}"


def _origin(run: FinishedRun) -> tuple[str, Path]:
    """Digest and path of the weights that a run started from, or scored."""
    used = run.result.provenance
    keys = ("weights_sha256", "weights") if run.result.job == "evaluate" else ("from_sha256", "from")
    return str(used.get(keys[0], "")), Path(str(used.get(keys[1], "")))


def _stored(path: Path, source: FinishedRun) -> Path | None:
    """The same file in the folder of a run that may have been moved since; None when it belongs to another
    run.
    """
    parts = path.parts
    if CHECKPOINTS not in parts:
        return None
    at = parts.index(CHECKPOINTS)
    same = at > 0 and parts[at - 1] == source.folder.name and ".." not in parts[at:]
    return source.folder.joinpath(*parts[at:]) if same else None


def _digest(path: Path) -> str:
    try:
        return weights_digest(read_weights(path).state)
    except VitctlError:
        return ""


def _stands_for(source: FinishedRun) -> tuple[int, str]:
    """Step and file name of the weights that represent a training run."""
    assert isinstance(source.recipe, TrainRecipe)
    name = AVERAGE if source.recipe.averaging.decay else MODEL
    scores = [
        (record["accuracy"], record["step"])
        for record in read_records(source.folder / LOG)
        if record.get("kind") == "evaluate" and {"accuracy", "step"} <= record.keys()
    ]
    return (max(scores)[1] if source.recipe.evaluation.select_best and scores else _last(source)), name


def _last(source: FinishedRun) -> int:
    """The step of its last checkpoint."""
    return step_of(Path(source.result.files.get(MODEL, "")).parent) or 0
