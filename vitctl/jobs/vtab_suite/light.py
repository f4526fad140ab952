"""A quick estimate of VTAB: a linear classifier on frozen features, in closed form.

Not the protocol of the paper.
"""

from functools import partial

import torch
from torch import Tensor

from vitctl.data.datasets.vtab_images import TaskData
from vitctl.data.source.views import Source
from vitctl.engine.distributed.runtime import num_workers
from vitctl.engine.evaluation import Score
from vitctl.engine.metrics import count_by_class, mean_per_class
from vitctl.engine.ridge import fit_and_score
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.weights import loaded_model
from vitctl.jobs.sweep import Scored, read_or_train
from vitctl.jobs.training import on_device, open_journal
from vitctl.jobs.vtab_suite.runs import JOB, SuiteContext, score_identity, scored_as
from vitctl.models.build import Model, build

L2S = tuple(2.0**power for power in range(-2, 17, 3))


def score_features(context: SuiteContext, data: TaskData) -> Score:
    """Fit on the 800 images with each regulariser, choose by the 200, fit on all 1,000, score on the whole
    test split.

    Every task has its own regulariser, the smallest of the best. Images are squashed to the square that the
    model sees.

    Args:
        context: of the table.
        data: of the task.

    Returns:
        the score, kept in RUN/light/NAME/result.json.
    """
    folder = context.run_dir / "light" / data.task.name

    def make() -> Scored:
        model = _frozen(context)
        x800, x200, x_test = (_features(context, model, s) for s in (data.train800, data.val200, data.test))
        y800, y200 = (torch.from_numpy(source.labels()) for source in (data.train800, data.val200))
        fit = partial(fit_and_score, num_classes=data.task.num_classes)
        tried = [_correct(fit(x800, y800, x200, l2=l2), data.val200) for l2 in L2S]
        l2 = L2S[tried.index(max(tried))]
        scores = fit(torch.cat([x800, x200]), torch.cat([y800, y200]), x_test, l2=l2)
        return _score(scores, data.test), {"l2": l2}

    must_match = score_identity(context, context.recipe, data, "train", "test")
    return read_or_train(folder, context.runtime, must_match, make, job=JOB)


def _correct(scores: Tensor, source: Source) -> int:
    return int((scores.argmax(dim=1).numpy() == source.labels()).sum())


def _score(scores: Tensor, source: Source) -> Score:
    labels = source.labels()
    right = (scores.argmax(dim=1).numpy() == labels)[:, None]
    by_class = count_by_class(right, labels, len(source.class_names))
    return Score(int(right.sum()), len(labels), mean_per_class(by_class))


def _frozen(context: SuiteContext) -> Model:
    model, _ = loaded_model(context.found, context.image_size, context.runtime.dtype)
    if context.recipe.weights.initialise == "random":
        model = build(model.config, seed=context.recipe.seed, dtype=context.runtime.dtype)
    return on_device(model, context.runtime)


def _features(context: SuiteContext, model: Model, source: Source) -> Tensor:
    """Representations [N, R] of a split."""
    recipe, runtime, meta = context.recipe, context.runtime, context.found.weights.meta
    extract = ImagePass(
        runtime,
        open_journal(runtime, context.run_dir, context.report),
        scored_as(context),
        tuple(meta["mean"]),
        tuple(meta["std"]),
        recipe.evaluation.batch_size,
        num_workers(recipe.machine, runtime),
        context.stop,
        context.shards,
    )
    return extract(model, source)
