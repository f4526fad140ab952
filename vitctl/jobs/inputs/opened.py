"""The images of a job, opened and checked once: the checks before a run and the job use the same object."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitctl.data.datasets.vtab_images import TaskData
from vitctl.data.source.views import Source
from vitctl.jobs.inputs.data import open_scored, open_training_images
from vitctl.jobs.inputs.fewshot_sets import FewshotSet, open_sets
from vitctl.jobs.inputs.network import needs_labels
from vitctl.jobs.vtab_suite.tasks import chosen_tasks, open_tasks
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
