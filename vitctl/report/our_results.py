"""Our results, to compare with the paper's: runs of the shipped recipes, unchanged and on all of their data."""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitctl.data.datasets.vtab import GROUPS
from vitctl.engine.run_files import RECIPE
from vitctl.errors import VitctlError
from vitctl.jobs.record.result import read_result
from vitctl.recipe.load import load_recipe, recipe_names
from vitctl.recipe.paper import RESULTS
from vitctl.recipe.schema import Evaluate, Fewshot, Pretrain, SeededRecipe
from vitctl.recipe.write import written_name
from vitctl.report.paper_cells import FIVE_SHOT, REAL, VTAB
from vitctl.report.paper_runs import FinishedRun, data_misfit, recipe_misfit, weights_misfit
from vitctl.report.sweep_table import TABLE as SWEEP

_IMAGENET = "imagenet"
_EXPERIMENTS = re.compile(
    r"(finetune|bit)_(imagenet|cifar10|cifar100|pets|flowers102)(_\d+)?|vtab|fewshot|evaluate"
)


class Pretraining(NamedTuple):
    """A pre-training: the recipe, and the number of images of its data set (0: all)."""

    recipe: str
    subset_images: int = 0


@dataclass(frozen=True)
class Ours:
    """Our result in a table cell.

    Args:
        values: accuracies in percent, one for each seed.
        remark: a note for the user; empty for most.
    """

    values: tuple[float, ...]
    remark: str = ""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Over the seeds, of the population as in `sweep`; None for one."""
        return statistics.pstdev(self.values) if len(self.values) > 1 else None


class ExcludedRun(NamedTuple):
    """A finished run of a recipe of the tables that is not used for a cell, and why."""

    run: str
    recipe: str
    reason: str


@dataclass(frozen=True)
class OurResults:
    """Accuracies in percent by pre-training and experiment (see `paper_cells.experiments_for`), the runs left
    out, their folder.
    """

    accuracies: dict[tuple[Pretraining, str], tuple[float, ...]]
    left_out: tuple[ExcludedRun, ...] = ()
    folder: Path = Path("runs")

    def best(self, pretraining: Pretraining, experiments: Sequence[str]) -> Ours | None:
        """The best of the experiments that a cell may show; None when none has been run."""
        found = {
            experiment: Ours(self.accuracies[pretraining, experiment])
            for experiment in experiments
            if (pretraining, experiment) in self.accuracies
        }
        if not found:
            return None
        name = max(found, key=lambda experiment: found[experiment].mean)
        missing = [experiment for experiment in experiments if experiment not in found]
        remark = (
            f"{missing[0]} has not been run"
            if missing
            else f"{name} is the better"
            if len(experiments) > 1
            else ""
        )
        return Ours(found[name].values, remark)


def our_results(runs: Path) -> OurResults:
    """All results under a folder of runs that belong in the paper's tables.

    The digest of the weights links a fine-tuning, VTAB or few-shot run to the pre-training run that it
    started from, and a score under the ReaL labels to the fine-tuning run that it scored.

    Args:
        runs: holds run folders, and folders of sweeps; those that cannot be read are skipped.
    """
    left: list[ExcludedRun] = []
    found: list[FinishedRun] = []
    for run in _finished(runs):
        reason = recipe_misfit(run) or data_misfit(run)
        if reason:
            left.append(ExcludedRun(run.where, run.name, reason))
        else:
            found.append(run)
    seen: dict[tuple[Any, ...], str] = {}
    accuracies: dict[tuple[Pretraining, str], tuple[float, ...]] = {}
    for run in found:
        if run.result.job == "pretrain":
            continue
        chain, reason = _chain(run, found)
        if chain is None:
            left.append(ExcludedRun(run.where, run.name, reason))
            continue
        pretraining, scored_recipe, seed = chain
        for experiment, values in _accuracies(run, scored_recipe).items():
            key = (pretraining.digest, experiment, seed)
            if key in seen:
                left.append(ExcludedRun(run.where, run.name, f"the same weights and seed as {seen[key]}"))
                break
            seen[key] = run.where
            row = Pretraining(pretraining.name, _subset(pretraining))
            accuracies[row, experiment] = (
                *accuracies.get((row, experiment), ()),
                *(100 * value for value in values),
            )
    return OurResults(accuracies, tuple(left), runs)


def _chain(
    run: FinishedRun, found: Sequence[FinishedRun]
) -> tuple[tuple[FinishedRun, str, int], str] | tuple[None, str]:
    """The pre-training behind a score, the recipe of the scored network, and its seed; or why there is none."""
    candidates = [
        other
        for other in found
        if other.result.job == ("finetune" if run.result.job == "evaluate" else "pretrain")
    ]
    source, reason = weights_misfit(run, candidates)
    if source is None:
        return None, reason
    if run.result.job == "evaluate":
        inner, reason = _chain(source, found)
        return (
            (None, f"{source.where}: {reason}") if inner is None else ((inner[0], source.name, inner[2]), "")
        )
    assert isinstance(run.recipe, SeededRecipe)
    return (source, run.name, run.recipe.seed), ""


def _subset(pretraining: FinishedRun) -> int:
    assert isinstance(pretraining.recipe, Pretrain)
    return pretraining.recipe.data.subset_images


def _accuracies(run: FinishedRun, by: str) -> dict[str, Sequence[float]]:
    """Experiment -> shares 0..1, one for each seed."""
    metrics = run.result.metrics
    if run.result.job == "finetune":
        return {by: metrics.get("by_seed") or [metrics["accuracy"]]}
    if run.result.job == "evaluate":
        return {REAL + by: [metrics["real"]["accuracy"]]}
    if run.result.job == "fewshot":
        return {FIVE_SHOT: metrics["by_seed"]["5"]}
    tasks = metrics["tasks"]
    by_task = {f"{VTAB} {name}": row["by_seed"] for name, row in tasks.items()}
    groups = {
        f"{VTAB} {group}": _mean_by_seed([row["by_seed"] for row in tasks.values() if row["group"] == group])
        for group in GROUPS
    }
    return {VTAB: _mean_by_seed([row["by_seed"] for row in tasks.values()]), **groups, **by_task}


def _mean_by_seed(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def _finished(runs: Path) -> Iterator[FinishedRun]:
    """Every finished run of a recipe that the tables are about, in the order of their folders."""
    shipped = set(recipe_names())
    rows = {name for table in RESULTS.values() for name in table.rows}
    files = [*runs.glob("*/result.json")]
    files += [file for sweep in runs.glob(f"*/{SWEEP}.json") for file in sweep.parent.glob("*/result.json")]
    for file in sorted(files):
        folder = file.parent
        try:
            result = read_result(folder)
            recipe = load_recipe(str(folder / RECIPE)).recipe
            name = written_name(folder / RECIPE)
        except (VitctlError, OSError):
            continue
        if result is None or result.status != "done" or name not in shipped:
            continue
        if (name in rows or _EXPERIMENTS.fullmatch(name)) and not _is_outside_tables(recipe):
            yield FinishedRun(folder, str(folder.relative_to(runs)), name, recipe, result)


def _is_outside_tables(recipe: Any) -> bool:
    """Few-shot and evaluation runs exist for every data set; the tables use ImageNet, and the ReaL labels."""
    if isinstance(recipe, Evaluate):
        return recipe.data.dataset != _IMAGENET or recipe.evaluation.labels != "real"
    return isinstance(recipe, Fewshot) and (recipe.data.dataset != _IMAGENET or bool(recipe.data.datasets))
