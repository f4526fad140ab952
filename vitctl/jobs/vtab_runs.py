"""One run of one task of VTAB in its folder: fine-tuned, or scored by a linear classifier on frozen features;
started, resumed, or read back when it is finished.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitctl.data.datasets.vtab_images import TaskData
from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.engine.computation import dropout_draws
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import AVERAGE, CHECKPOINTS, Record, Report
from vitctl.engine.metrics import count_by_class, mean_per_class
from vitctl.engine.preemption import StopFlag
from vitctl.engine.ridge import fit_and_score
from vitctl.engine.runtime import Runtime, num_workers
from vitctl.engine.trainer import Images, RunContext
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.network import rates_of
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model, transferred_model
from vitctl.jobs.record.result import recipe_digest
from vitctl.jobs.sweep import Scored, read_or_train
from vitctl.jobs.training import Act, digest_of, on_device, open_journal, train
from vitctl.models.build import Model, build
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.schema import Vtab
from vitctl.recipe.write import result_neutral

JOB = "vtab-task"
L2S = tuple(2.0**power for power in range(-2, 17, 3))  # of the linear classifier
# Keys left out of a run's recipe digest: digests identify images and weights, and `precision` is recorded as
# resolved.
_FREE = (*result_neutral(), "vtab.", "machine.precision", "data.path", "data.allow_partial", "weights.source")


@dataclass(frozen=True)
class Setting:
    """The hyperparameters that the paper chose on the validation images: a learning rate, and length and
    warm-up in steps.
    """

    lr: float
    total_steps: int
    warmup_steps: int

    @property
    def name(self) -> str:
        """Name of the folders of its runs."""
        return f"lr_{self.lr:g}_steps_{self.total_steps}"


@dataclass(frozen=True)
class SuiteContext:
    """State shared by all runs of a table."""

    recipe: Vtab
    runtime: Runtime
    run_dir: Path
    report: Report
    stop: StopFlag
    found: FoundWeights
    shards: Verification
    act: Act | None = None

    @property
    def image_size(self) -> int:
        """Side of the images of all tasks, in pixels."""
        return self.recipe.data.image_size or self.found.weights.config.image_size

    @property
    def rates(self) -> dict[str, float]:
        """dropout and drop_path of all runs."""
        return rates_of(self.recipe, self.found.weights.config)


def scored_as(context: SuiteContext) -> EvalTransform:
    """Return the evaluation pre-processing of all tasks: images are squashed to the square that the model
    sees.

    The benchmark's images are used as they were published, including the damaged JPEGs of Pets.
    """
    resample = context.recipe.data.resample
    return EvalTransform(context.image_size, method="square", resize=0, resample=resample, truncated="pad")


def settings(recipe: Vtab) -> list[Setting]:
    """Return the settings to try: every learning rate with every schedule; the recipe's own where there is no
    sweep.

    The warm-up keeps its share of the schedule.

    Paper: Appendix B.1.1
    """
    s = recipe.schedule
    return [
        Setting(lr, steps, round(s.warmup_steps * steps / s.total_steps))
        for lr in recipe.vtab.sweep_lrs or (recipe.optimizer.lr,)
        for steps in recipe.vtab.sweep_steps or (s.total_steps,)
    ]


def tune(context: SuiteContext, data: TaskData, setting: Setting) -> Score:
    """Train on the 800 images, score on the 200: the only images that a setting may be chosen by."""
    folder = context.run_dir / "sweep" / data.task.name / setting.name
    seed = context.recipe.vtab.seeds[0]
    return _fine_tuned(context, data, setting, seed, folder, ("train800", "val200"))


def fine_tune(context: SuiteContext, data: TaskData, setting: Setting, seed: int) -> Score:
    """Train on all 1,000 images, score on the whole test split."""
    folder = context.run_dir / "tasks" / data.task.name / setting.name / f"seed_{seed}"
    return _fine_tuned(context, data, setting, seed, folder, ("train", "test"))


def score_identity(
    context: SuiteContext, recipe: Vtab, data: TaskData, train_on: str, score_on: str
) -> dict[str, Any]:
    """Return what a score of a task depends on; two scores can be compared where these agree."""
    return {
        "task": data.task.name,
        "train_split": data.names[train_on],
        "train_sha256": getattr(data, train_on).digest,
        "split": data.names[score_on],
        "data_sha256": getattr(data, score_on).digest,
        "data_source": data.source,
        "train800_proven": data.proven,
        "copy": data.copy,
        "num_classes": data.task.num_classes,
        "image_size": context.image_size,
        "resample": recipe.data.resample,
        "precision": context.runtime.precision,
        "from_sha256": context.found.weights.digest,
        "initialise": recipe.weights.initialise,
        "protocol": "light" if recipe.vtab.light else "fine-tuning",
        "recipe_sha256": recipe_digest(recipe, _FREE, context.rates),
    }


def _fine_tuned(
    context: SuiteContext, data: TaskData, setting: Setting, seed: int, folder: Path, splits: tuple[str, str]
) -> Score:
    """Train on the first of two splits, score on the second."""
    schedule = {"total_steps": setting.total_steps, "warmup_steps": setting.warmup_steps}
    recipe = context.recipe.model_copy(
        update={
            "seed": seed,
            "optimizer": context.recipe.optimizer.model_copy(update={"lr": setting.lr}),
            "schedule": context.recipe.schedule.model_copy(update=schedule),
        }
    )
    transform = _augmentation(context, data)
    must_match = score_identity(context, recipe, data, *splits) | {
        "seed": seed,
        "lr": setting.lr,
        **schedule,
        **context.rates,
        "crop": f"random out of {transform.resize}" if transform.crop == "random" else "none",
        "flip": transform.flip,
    }

    def make() -> Scored:
        train_on, score_on = (getattr(data, split) for split in splits)
        return _train(
            context, recipe, data, folder, Images(train_on, transform, score_on, scored_as(context))
        )

    kept = context.recipe.vtab.keep_checkpoints
    return read_or_train(folder, context.runtime, must_match, make, job=JOB, keep_checkpoints=kept)


def _train(context: SuiteContext, recipe: Vtab, data: TaskData, folder: Path, images: Images) -> Scored:
    """Return the score after the last step, and more fields for the provenance: on the main process the
    digest of the scored weights.
    """
    runtime, weights = context.runtime, context.found.weights
    model, _ = transferred_model(
        weights,
        recipe.weights,
        num_classes=data.task.num_classes,
        image_size=context.image_size,
        **context.rates,
        seed=recipe.seed,
        dtype=runtime.dtype,
    )
    placed = on_device(model, runtime)

    def report(record: Record) -> None:
        context.report({**record, "task": str(folder.relative_to(context.run_dir))})

    score = train(
        recipe,
        RunContext(
            runtime,
            folder,
            open_journal(runtime, folder, report),
            context.stop,
            context.shards,
            context.act,
            digest_of(context.recipe),
        ),
        placed,
        images,
        images.meta(weights.meta["mean"], weights.meta["std"], recipe.loss.name),
        start_weights_sha256=weights.digest,
    )
    findings = dropout_draws(recipe, model.config, folder)
    if runtime.is_main:
        # What was scored: the last weights, or their average where there is one.
        saved, _ = newest_checkpoint(folder / CHECKPOINTS) if recipe.averaging.decay else (None, [])
        state = saved.tensors(AVERAGE) if saved else placed.state_dict()
        findings |= {"weights_sha256": weights_digest(state)}
    return score, findings


def _augmentation(context: SuiteContext, data: TaskData) -> TrainTransform:
    """Random crop and flip where BiT uses them for the task (Appendix F)."""
    chosen = context.recipe.data.augment == "bit"
    return TrainTransform(
        context.image_size,
        crop="random" if chosen and data.task.crop else "none",
        flip=chosen and data.task.flip,
        resample=context.recipe.data.resample,
        resize=round(context.image_size * 7 / 6),
        truncated="pad",
    )


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
