"""Our results next to the paper's: finished runs of the shipped recipes, unchanged and on all images.

In reading order: which experiments a cell of the paper's tables may show; whether a run is its recipe's
experiment, by values, images and start weights; and the accuracies of all runs in a folder.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from vitctl.data.datasets.catalog import known_size
from vitctl.data.datasets.vtab import GROUPS
from vitctl.data.datasets.vtab import VTAB as TASKS
from vitctl.engine.journal import RECIPE
from vitctl.errors import VitctlError
from vitctl.jobs.inputs.data import SPLITS
from vitctl.jobs.record.result import RunResult, read_result, unverified_bytes
from vitctl.models.variants import ResNetConfig
from vitctl.recipe.load import load_recipe, recipe_names
from vitctl.recipe.neutral_keys import RESULT_NEUTRAL
from vitctl.recipe.paper import FIGURE_4_SIZES, RESULTS
from vitctl.recipe.schema import (
    Evaluate,
    Fewshot,
    Finetune,
    Pretrain,
    Recipe,
    SeededRecipe,
    Vtab,
)
from vitctl.recipe.write import differences, written_name
from vitctl.report.run_records import run_folders

VTAB, FIVE_SHOT, REAL = "vtab", "5-shot", "real of "
_IMAGENET = "imagenet"
_DATA_SETS = {
    "ImageNet": _IMAGENET, "CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Pets": "pets",
    "Flowers": "flowers102",
}  # fmt: skip
# Section 4.1: ImageNet in Table 2 at 512, for ViT-H/14 at 518.
_TABLE_2_IMAGENET = {
    "jft_h14": "finetune_imagenet_518",
    "jft_l16_14ep": "finetune_imagenet_512",
    "in21k_l16": "finetune_imagenet_512",
}
# BiT 3.3: R152x4 at 480; CIFAR's small images are enlarged to 128 for every network.
_R152X4_AT_480 = (_IMAGENET, "pets", "flowers102")

# Recipes that start from weights; the tables' other recipes are rows of RESULTS.
_EXPERIMENTS = re.compile(
    r"(finetune|bit)_(imagenet|cifar10|cifar100|pets|flowers102)(_\d+)?|vtab|fewshot|evaluate"
)
# Keys that may differ although a run counts as its recipe's, besides those that change no number.
# data.path may not differ: its images cannot be checked against the recipe's data set.
_FREE = (
    *(*RESULT_NEUTRAL, "machine.precision", "evaluation.every_steps", "fewshot_probe."),
    *("seed", "finetune.seeds", "weights.source"),
)
# Values set on the command line for recipes that fit any data set.
_NAMED: Mapping[str, Mapping[str, Any]] = {
    "fewshot": {"data.dataset": _IMAGENET},
    "evaluate": {"data.dataset": _IMAGENET, "data.eval_split": "validation", "evaluation.labels": "real"},
}
_ROUND = 1_000_000  # the paper prints the size of JFT-300M in millions


# The experiments of a cell


def experiments_for(number: str, recipe: str, column: str) -> tuple[str, ...]:
    """Return the experiments of a table cell; if there are two, the better one counts.

    Args:
        recipe: of the pre-training.

    Returns:
        recipes of the fine-tuning; "vtab"; "5-shot" for linear 5-shot on ImageNet; "real of RECIPE" for that
        network under the ReaL labels. Empty if no recipe has the experiment.

    Paper: Section 4.1, Appendix B.1.1: ResNets are also fine-tuned by BiT's rule, and the best result counts
    """
    if column == "ReaL":
        return tuple(REAL + experiment for experiment in experiments_for(number, recipe, "ImageNet"))
    network = pretraining_recipe(recipe).model
    is_bit = network.version == "v2"  # BiT's network, not the paper's
    if column == "VTAB":
        return () if is_bit else (VTAB,)  # BiT's were scored by BiT's rule for 1,000 images
    if column not in _DATA_SETS:
        return (FIVE_SHOT,)
    name = _DATA_SETS[column]
    if is_bit:
        return (f"bit_{name}_480" if network.name == "R152x4" and name in _R152X4_AT_480 else f"bit_{name}",)
    if number == "2" and column == "ImageNet":
        return (_TABLE_2_IMAGENET[recipe],)
    return (f"finetune_{name}", f"bit_{name}") if is_resnet(recipe) else (f"finetune_{name}",)


def pretraining_recipe(name: str) -> Pretrain:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, Pretrain)
    return recipe


def is_resnet(name: str) -> bool:
    """Return whether a pre-training recipe trains a ResNet, whose better protocol of two counts."""
    return isinstance(pretraining_recipe(name).network(1000), ResNetConfig)


# Checks that a run is its recipe's experiment


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of a shipped recipe.

    Args:
        where: the folder, as shown to the user.
        recipe: with the values of the run.
    """

    folder: Path
    where: str
    name: str
    recipe: Recipe
    result: RunResult

    @property
    def digest(self) -> str:
        """Return the digest of the weights behind its result."""
        return str(self.result.provenance.get("weights_sha256", ""))


def recipe_misfit(run: FinishedRun) -> str:
    """Return the first value in which a run differs from its shipped recipe; "" if none does."""
    named = _NAMED.get(run.name, {})
    for key, wanted, value in differences(load_recipe(run.name).recipe, run.recipe):
        is_subset = key == "data.subset_images" and run.name.startswith("fig4_")
        if key.startswith(_FREE) or (key in named and value == named[key]):
            continue
        if is_subset and value in FIGURE_4_SIZES.values():
            continue
        if key == "data.path":
            return "data.path is set: its images cannot be checked against the data set of the recipe"
        return f"{key} is {value}, in the recipe {wanted}"
    for key, wanted in named.items():
        value = reduce(getattr, key.split("."), run.recipe)
        if value != wanted:
            return f"{key} is {value}, should be {wanted}"
    return ""


def data_misfit(run: FinishedRun) -> str:
    """Return why a run's images are not its recipe's, by number and source; "" if they are."""
    used = run.result.provenance
    if unverified := unverified_bytes(run.result):
        return unverified
    if isinstance(run.recipe, Vtab):
        return _vtab_misfit(run.result.metrics)
    for key in ("data_source", "train_source"):
        if "partial" in (described := used.get(key, "")) or "copy" in described:
            return f"its images are {described}"
    for key, (dataset, split, limit) in _expected_images(run.recipe).items():
        known = known_size(dataset, split)
        if known is None:
            return f"how many images {split} of {dataset} has is not known"
        size, number = limit or known[0], used.get(key)
        if number is None:
            return f"its result does not say {key}"
        if number != size and (size % _ROUND or round(number / _ROUND) * _ROUND != size):
            return f"{number:,} images of {split} of {dataset}, should be {size:,}"
    return ""


def _expected_images(recipe: Recipe) -> dict[str, tuple[str, str, int]]:
    """Return for provenance keys: data set, split, and the size of a subset of it (0: all)."""
    if isinstance(recipe, Fewshot):
        dataset = recipe.data.dataset
        train_split, eval_split = SPLITS[dataset]
        return {"num_train": (dataset, train_split, 0), "num_images": (dataset, eval_split, 0)}
    assert isinstance(recipe, Pretrain | Finetune | Evaluate)
    dataset = recipe.data.dataset
    scored = {"num_images": (dataset, recipe.data.eval_split, 0)}
    if isinstance(recipe, Evaluate):
        return scored
    trained = {"num_train": (dataset, recipe.data.train_split, recipe.data.subset_images)}
    has_no_classes = isinstance(recipe, Pretrain) and recipe.loss.name == "masked_patch"
    return trained if has_no_classes or not recipe.data.eval_split else trained | scored


def _vtab_misfit(metrics: Mapping[str, Any]) -> str:
    if metrics.get("partial", True) or set(metrics["tasks"]) != {task.name for task in TASKS}:
        return f"{len(metrics.get('tasks', {}))} of {len(TASKS)} tasks"
    for task in TASKS:
        row, known = metrics["tasks"][task.name], known_size(task.data_set, task.test)
        if row["copy"]:
            return f"{task.name}: {row['copy']}"
        if known is not None and row["total"] != known[0]:
            return f"{task.name}: {row['total']:,} test images, should be {known[0]:,}"
    return ""


def _source_run(run: FinishedRun, candidates: Sequence[FinishedRun]) -> tuple[FinishedRun | None, str]:
    """Return the run whose result's weights another run started from or scored, or the reason for none."""
    used = run.result.provenance
    if used.get("initialise") == "random":
        return None, "it started from random weights"
    digest = used.get("weights_sha256" if run.result.job == "evaluate" else "from_sha256")
    source = next((one for one in candidates if digest and one.digest == digest), None)
    return source, "" if source else "its weights are of no run here that can be used"


# The accuracies of all runs


class Pretraining(NamedTuple):
    """A pre-training recipe, and the number of images of its data set (0: all)."""

    recipe: str
    subset_images: int = 0


@dataclass(frozen=True)
class Ours:
    """Our result in a table cell: accuracies in percent, one for each seed, and a remark or ""."""

    values: tuple[float, ...]
    remark: str = ""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Return the population standard deviation over the seeds, as in `sweep`; None for one seed."""
        return statistics.pstdev(self.values) if len(self.values) > 1 else None


class ExcludedRun(NamedTuple):
    """A finished run of a recipe in the tables that no cell uses, and why."""

    run: str
    recipe: str
    reason: str


@dataclass(frozen=True)
class OurResults:
    """Accuracies in percent by pre-training and experiment (see `experiments_for`), and excluded runs."""

    accuracies: dict[tuple[Pretraining, str], tuple[float, ...]]
    left_out: tuple[ExcludedRun, ...] = ()
    folder: Path = Path("runs")

    def best(self, pretraining: Pretraining, experiments: Sequence[str]) -> Ours | None:
        """Return the best of the experiments that a cell may show; None if none has been run."""
        known = {
            one: self.accuracies[pretraining, one]
            for one in experiments
            if (pretraining, one) in self.accuracies
        }
        if not known:
            return None
        name = max(known, key=lambda experiment: statistics.fmean(known[experiment]))
        missing = [experiment for experiment in experiments if experiment not in known]
        if missing:
            return Ours(known[name], f"{missing[0]} has not been run")
        return Ours(known[name], f"{name} is the better" if len(experiments) > 1 else "")


def our_results(runs: Path) -> OurResults:
    """Return all results under a folder of runs that belong in the paper's tables.

    The digest of the weights links a fine-tuning, VTAB or few-shot run to the pre-training run that it
    started from, and a score under the ReaL labels to the fine-tuning run that it scored.

    Args:
        runs: contains run folders, and folders of several such as sweeps; unreadable ones are skipped.
    """
    left: list[ExcludedRun] = []
    usable: list[FinishedRun] = []
    for run in _finished(runs):
        if reason := recipe_misfit(run) or data_misfit(run):
            left.append(ExcludedRun(run.where, run.name, reason))
        else:
            usable.append(run)
    seen: dict[tuple[Any, ...], str] = {}
    accuracies: dict[tuple[Pretraining, str], tuple[float, ...]] = {}
    for run in usable:
        if run.result.job == "pretrain":
            continue
        tuned, pretraining, reason = _chain(run, usable)
        if pretraining is None:
            left.append(ExcludedRun(run.where, run.name, reason))
            continue
        assert isinstance(tuned.recipe, SeededRecipe) and isinstance(pretraining.recipe, Pretrain)
        row = Pretraining(pretraining.name, pretraining.recipe.data.subset_images)
        for experiment, values in _accuracies(run, tuned.name).items():
            key = (pretraining.digest, experiment, tuned.recipe.seed)
            if key in seen:
                left.append(ExcludedRun(run.where, run.name, f"the same weights and seed as {seen[key]}"))
                break
            seen[key] = run.where
            percent = tuple(100 * value for value in values)
            accuracies[row, experiment] = accuracies.get((row, experiment), ()) + percent
    return OurResults(accuracies, tuple(left), runs)


def _chain(run: FinishedRun, usable: Sequence[FinishedRun]) -> tuple[FinishedRun, FinishedRun | None, str]:
    """Return the run that trained a scored network, its pre-training, or why there is none."""
    scored = [other for other in usable if other.result.job == "finetune"]
    tuned, prefix = run, ""
    if run.result.job == "evaluate":
        source, reason = _source_run(run, scored)
        if source is None:
            return run, None, reason
        tuned, prefix = source, f"{source.where}: "
    pretraining, reason = _source_run(tuned, [one for one in usable if one.result.job == "pretrain"])
    return tuned, pretraining, prefix + reason


def _accuracies(run: FinishedRun, tuned: str) -> dict[str, Sequence[float]]:
    """Return shares 0..1, one for each seed, by experiment; `tuned` is the recipe of a scored network."""
    metrics = run.result.metrics
    if run.result.job == "finetune":
        return {tuned: metrics.get("by_seed") or [metrics["accuracy"]]}
    if run.result.job == "evaluate":
        return {REAL + tuned: [metrics["real"]["accuracy"]]}
    if run.result.job == "fewshot":
        return {FIVE_SHOT: metrics["by_seed"]["5"]}
    by_task = {f"{VTAB} {name}": row["by_seed"] for name, row in metrics["tasks"].items()}
    means = {VTAB: _mean_by_seed(by_task.values())}
    rows = metrics["tasks"].values()
    means |= {
        f"{VTAB} {group}": _mean_by_seed([row["by_seed"] for row in rows if row["group"] == group])
        for group in GROUPS
    }
    return means | by_task


def _mean_by_seed(rows: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def _finished(runs: Path) -> Iterator[FinishedRun]:
    rows = {name for table in RESULTS.values() for name in table.rows}
    shipped = {name for name in recipe_names() if name in rows or _EXPERIMENTS.fullmatch(name)}
    for folder in sorted(run_folders(runs)):
        try:
            result = read_result(folder)
            recipe = load_recipe(str(folder / RECIPE)).recipe
            name = written_name(folder / RECIPE)
        except (VitctlError, OSError):
            continue
        if result is None or result.status != "done" or name not in shipped or _is_outside_tables(recipe):
            continue
        yield FinishedRun(folder, str(folder.relative_to(runs)), name, recipe, result)


def _is_outside_tables(recipe: Recipe) -> bool:
    """Return whether a few-shot or evaluation run is not on ImageNet, or not under the ReaL labels."""
    if isinstance(recipe, Evaluate):
        return recipe.data.dataset != _IMAGENET or recipe.evaluation.labels != "real"
    return isinstance(recipe, Fewshot) and (recipe.data.dataset != _IMAGENET or bool(recipe.data.datasets))
