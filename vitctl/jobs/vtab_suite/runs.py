"""One run of one task of VTAB in a folder of its own: made, gone on with, or read back when it is finished."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitctl.data.datasets.vtab_images import TaskData
from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.source.read import Source
from vitctl.engine.checkpoint.files import newest_checkpoint
from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import Record, Report
from vitctl.engine.preemption import StopFlag
from vitctl.engine.run_files import AVERAGE, CHECKPOINTS
from vitctl.jobs.inputs.network import rates_of
from vitctl.jobs.inputs.weights import Found, transferred_model
from vitctl.jobs.record.result import recipe_digest
from vitctl.jobs.sweep import Scored, finished_or
from vitctl.jobs.training import Images, Work, dropout_draws, on_device, open_journal, train
from vitctl.models.weights.load import weights_digest
from vitctl.recipe.neutral import result_neutral
from vitctl.recipe.schema import Vtab

JOB = "vtab-task"
# Of a run in a table; digests tell images and weights wherever they lie, and `precision` is told as it was resolved.
_FREE = (*result_neutral(), "vtab.", "machine.precision", "data.path", "data.allow_partial", "weights.source")


@dataclass(frozen=True)
class Setting:
    """What the paper chose on the validation images: a learning rate, and a length with its warm-up in steps."""

    lr: float
    total_steps: int
    warmup_steps: int

    @property
    def name(self) -> str:
        """As the folders of its runs are called."""
        return f"lr_{self.lr:g}_steps_{self.total_steps}"


@dataclass(frozen=True)
class Bench:
    """What all runs of a table share."""

    recipe: Vtab
    runtime: Runtime
    run_dir: Path
    report: Report
    stop: StopFlag
    found: Found

    @property
    def image_size(self) -> int:
        """Side of the images of all tasks, in pixels."""
        return self.recipe.data.image_size or self.found.weights.config.image_size

    @property
    def rates(self) -> dict[str, float]:
        """dropout and drop_path of all runs."""
        return rates_of(self.recipe, self.found.weights.config)


def scored_as(bench: Bench) -> EvalTransform:
    """How the images of all tasks are shown when they are scored: squashed to the square that the model sees.

    The benchmark's images are taken as they were published, the damaged JPEGs of Pets among them.
    """
    resample = bench.recipe.data.resample
    return EvalTransform(bench.image_size, method="square", resize=0, resample=resample, truncated="pad")


def settings(recipe: Vtab) -> list[Setting]:
    """The settings that are tried: every learning rate with every schedule; the recipe's own where there is no sweep.

    The warm-up keeps its share of the schedule.

    Paper: Appendix B.1.1
    """
    s = recipe.schedule
    return [
        Setting(lr, steps, round(s.warmup_steps * steps / s.total_steps))
        for lr in recipe.vtab.sweep_lrs or (recipe.optimizer.lr,)
        for steps in recipe.vtab.sweep_steps or (s.total_steps,)
    ]


def tune(bench: Bench, data: TaskData, setting: Setting) -> Score:
    """Train on the 800 images, score on the 200: the only images that a setting may be chosen by."""
    folder = bench.run_dir / "sweep" / data.task.name / setting.name
    seed = bench.recipe.vtab.seeds[0]
    return _fine_tuned(bench, data, setting, seed, folder, ("train800", data.train800), ("val200", data.val200))


def fine_tune(bench: Bench, data: TaskData, setting: Setting, seed: int) -> Score:
    """Train on all 1,000 images, score on the whole test split."""
    folder = bench.run_dir / "tasks" / data.task.name / setting.name / f"seed_{seed}"
    return _fine_tuned(bench, data, setting, seed, folder, ("train", data.train), ("test", data.test))


def belongs_to(bench: Bench, recipe: Vtab, data: TaskData, train_on: str, score_on: str) -> dict[str, Any]:
    """What a score of a task belongs to; two scores can be compared where these agree."""
    sources: dict[str, Source] = {"train800": data.train800, "val200": data.val200, "train": data.train}
    return {
        "task": data.task.name,
        "train_split": data.names[train_on],
        "train_sha256": sources[train_on].digest,
        "split": data.names[score_on],
        "data_sha256": {**sources, "test": data.test}[score_on].digest,
        "data_source": data.source,
        "train800_proven": data.proven,
        "copy": data.copy,
        "num_classes": data.task.num_classes,
        "image_size": bench.image_size,
        "resample": recipe.data.resample,
        "precision": bench.runtime.precision,
        "from_sha256": bench.found.weights.digest,
        "initialise": recipe.weights.initialise,
        "protocol": "light" if recipe.vtab.light else "fine-tuning",
        "recipe_sha256": recipe_digest(recipe, _FREE, bench.rates),
    }


def _fine_tuned(
    bench: Bench,
    data: TaskData,
    setting: Setting,
    seed: int,
    folder: Path,
    train_on: tuple[str, Source],
    score_on: tuple[str, Source],
) -> Score:
    recipe = _at(bench.recipe, setting, seed)
    transform = _augmentation(bench, data)
    belongs = belongs_to(bench, recipe, data, train_on[0], score_on[0]) | {
        "seed": seed,
        "lr": setting.lr,
        "total_steps": setting.total_steps,
        "warmup_steps": setting.warmup_steps,
        **bench.rates,
        "crop": f"random out of {transform.resize}" if transform.crop == "random" else "none",
        "flip": transform.flip,
    }

    def make() -> Scored:
        return _train(bench, recipe, data, folder, (train_on[1], transform), score_on[1])

    kept = bench.recipe.vtab.keep_checkpoints
    return finished_or(folder, bench.runtime, belongs, make, job=JOB, keep_checkpoints=kept)


def _train(
    bench: Bench,
    recipe: Vtab,
    data: TaskData,
    folder: Path,
    train_on: tuple[Source, TrainTransform],
    score_on: Source,
) -> Scored:
    """The score after the last step, and what is known only now; on the main process the digest of the scored weights too."""
    runtime, weights = bench.runtime, bench.found.weights
    model, _ = transferred_model(
        weights,
        recipe.weights,
        num_classes=data.task.num_classes,
        image_size=bench.image_size,
        **bench.rates,
        seed=recipe.seed,
        dtype=runtime.dtype,
    )
    placed = on_device(model, runtime)
    images = Images(*train_on, score_on, scored_as(bench))
    meta = images.meta(weights.meta["mean"], weights.meta["std"])

    def report(record: Record) -> None:
        bench.report({**record, "task": str(folder.relative_to(bench.run_dir))})

    score = train(
        recipe,
        Work(runtime, folder, open_journal(runtime, folder, report), bench.stop),
        placed,
        images,
        meta,
        started_from=bench.found.weights.digest,
    )
    found_out = dropout_draws(recipe, model.config, folder)
    if runtime.is_main:
        found_out |= {"weights_sha256": weights_digest(_scored(recipe, folder, placed))}
    return score, found_out


def _scored(recipe: Vtab, folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights that were scored: the last, or their average where there is one."""
    saved, _ = newest_checkpoint(folder / CHECKPOINTS) if recipe.averaging.decay else (None, [])
    return saved.tensors(AVERAGE) if saved else model.state_dict()


def _at(recipe: Vtab, setting: Setting, seed: int) -> Vtab:
    """The recipe of one run."""
    return recipe.model_copy(
        update={
            "seed": seed,
            "optimizer": recipe.optimizer.model_copy(update={"lr": setting.lr}),
            "schedule": recipe.schedule.model_copy(
                update={"total_steps": setting.total_steps, "warmup_steps": setting.warmup_steps}
            ),
        }
    )


def _augmentation(bench: Bench, data: TaskData) -> TrainTransform:
    """Random crop and flip where BiT has them for the task (Appendix F)."""
    chosen = bench.recipe.data.augment == "bit"
    return TrainTransform(
        bench.image_size,
        crop="random" if chosen and data.task.crop else "none",
        flip=chosen and data.task.flip,
        resample=bench.recipe.data.resample,
        resize=round(bench.image_size * 7 / 6),
        truncated="pad",
    )
