"""The images of a job, opened and checked once: the checks before a run and the job use the same object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitctl.data.datasets.vtab import SUITES, VtabTask
from vitctl.data.datasets.vtab_images import TaskData, open_task
from vitctl.data.source.views import Source
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.inputs.data import open_scored, open_training_images
from vitctl.jobs.inputs.fewshot_sets import FewshotSet, open_sets
from vitctl.jobs.inputs.network import needs_labels
from vitctl.recipe.protocols import FewshotImages
from vitctl.recipe.schema import Evaluate, Fewshot, Finetune, Pretrain, Recipe, Vtab


@dataclass(frozen=True)
class Inputs:
    """What a job reads; which fields are set depends on the job.

    Args:
        train, scored: images to train on, and to score on (pretrain, finetune, evaluate).
        probed: of [fewshot_probe].
        tried: images that learning rates are trained on, and scored on.
        sets: of `fewshot`.
        tasks: of `vtab`, by name.
    """

    train: Source | None = None
    scored: Source | None = None
    probed: FewshotSet | None = None
    tried: tuple[Source, Source] | None = None
    sets: list[FewshotSet] = field(default_factory=list)
    tasks: Mapping[str, TaskData] = field(default_factory=dict)


def open_inputs(recipe: Recipe, run_dir: Path) -> Inputs:
    """Open the images of a recipe; data sets that come with vitctl are generated once, in RUN/data.

    Raises:
        DataError: data is missing, splits have different classes, labels are invalid, or there are too few.
    """
    if isinstance(recipe, Pretrain | Finetune):
        train, scored = open_training_images(recipe.data, run_dir, needs_labels=needs_labels(recipe))
        probed, tried = None, None
        if isinstance(recipe, Pretrain):
            probed = open_probe(recipe, run_dir)
        elif recipe.sweep.lrs:
            splits = {"train_split": recipe.sweep.train_split, "eval_split": recipe.sweep.eval_split}
            trained, chosen_by = open_training_images(recipe.data.model_copy(update=splits), run_dir)
            assert chosen_by is not None
            tried = trained, chosen_by
        return Inputs(train, scored, probed, tried)
    if isinstance(recipe, Fewshot):
        return Inputs(sets=open_sets(recipe.data, recipe.fewshot.shots, run_dir))
    if isinstance(recipe, Vtab):
        return Inputs(tasks=open_tasks(recipe, chosen_tasks(recipe), run_dir))
    if isinstance(recipe, Evaluate):
        return Inputs(scored=open_scored(recipe.data, recipe.data.eval_split, run_dir))
    return Inputs()


def open_probe(recipe: Pretrain, run_dir: Path) -> FewshotSet | None:
    """Open the data set of [fewshot_probe]; None when it is off.

    Raises:
        DataError: data is missing, or a class has fewer images than shots.
    """
    p = recipe.fewshot_probe
    if not p.every_steps:
        return None
    data = FewshotImages(
        dataset=p.dataset, path=p.path, root=p.root, train_split=p.train_split, eval_split=p.eval_split
    )
    return open_sets(data, p.shots, run_dir)[0]


def chosen_tasks(recipe: Vtab) -> list[VtabTask]:
    """The rows of vtab.suite that vtab.tasks names, or all.

    Raises RecipeError on a name that the suite lacks.
    """
    by_name = {task.name: task for task in SUITES[recipe.vtab.suite]}
    unknown = [name for name in recipe.vtab.tasks if name not in by_name]
    if unknown:
        raise RecipeError(
            f"vtab.tasks: {', '.join(unknown)} not in suite '{recipe.vtab.suite}'; it has "
            f"{', '.join(by_name)}"
        )
    return [task for name, task in by_name.items() if name in (recipe.vtab.tasks or by_name)]


def open_tasks(recipe: Vtab, tasks: Sequence[VtabTask], run_dir: Path) -> dict[str, TaskData]:
    """Images of every task. Raises one DataError that names all that are missing."""
    opened, problems = {}, []
    root = Path(recipe.data.path or recipe.data.root)
    for task in tasks:
        try:
            opened[task.name] = open_task(
                task, root, scratch=run_dir / "data", allow_partial=recipe.data.allow_partial
            )
        except DataError as error:
            problems.append((task.name, error))
    if problems:
        missing = ", ".join(name for name, _ in problems)
        mini = "" if recipe.vtab.suite == "mini" else ", --suite mini needs no data"
        reason = f" ({problems[0][1]})" if len(problems) == 1 else ""
        raise DataError(
            f"{len(problems)} of {len(tasks)} tasks have no usable shards under {root}: {missing}{reason}; "
            f"each needs a folder "
            f"{root}/NAME made by `vitctl data shards`; --task takes some of the tasks{mini}"
        )
    return opened
