"""VTAB (Section 4.1, B.1.1): fine-tune every task on its 1,000 images with one setting, score its test split.

It also writes the table of the tasks, with the paper's numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.vtab import GROUPS, SUITES, VtabTask
from vitctl.data.datasets.vtab_images import TaskData
from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.source.views import source_text
from vitctl.engine.assemble import Images, RunContext
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.engine.computation import computed_training, dropout_draws, settled
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import AVERAGE, CHECKPOINTS, Report, silent
from vitctl.engine.metrics import baselines
from vitctl.engine.preemption import StopFlag
from vitctl.engine.schedule import TASK_IMAGES, fitted_recipe, warmup_of
from vitctl.jobs.inputs.data import Inputs, chosen_tasks, open_inputs
from vitctl.jobs.inputs.weights import (
    FoundWeights,
    check_found,
    random_in_words,
    transferred_model,
    weights_of,
)
from vitctl.jobs.lr_sweep import SWEEP, Scored, read_or_train
from vitctl.jobs.record.result import DATA_DIGEST, RunResult, recipe_digest
from vitctl.jobs.training import (
    WHOLE,
    Act,
    check_whole,
    on_device,
    shown,
    start_run,
    train,
    weights_used,
    within,
)
from vitctl.models.variants import downstream, unseen_pixels
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.neutral_keys import RESULT_NEUTRAL
from vitctl.recipe.paper import TABLE_9, VTAB_MODELS
from vitctl.recipe.schema import Vtab, rates_in_words, rates_of
from vitctl.system.files import write_csv
from vitctl.system.text import count_text

JOB, TASKS = "vtab-task", "tasks"
# Keys left out of a run's recipe digest: images and weights have their own digests, and the resolved
# `precision` is recorded.
_FREE = (*RESULT_NEUTRAL, "vtab.", "machine.precision", "data.path", "data.allow_partial", "weights.source")


@dataclass(frozen=True)
class Setting:
    """The hyperparameters that the paper chose on validation images; length and warm-up are in steps."""

    lr: float
    total_steps: int
    warmup_steps: int

    @property
    def name(self) -> str:
        return f"lr_{self.lr:g}_steps_{self.total_steps}"


@dataclass(frozen=True)
class SuiteContext:
    """State shared by all runs of a table."""

    recipe: Vtab
    run: RunContext
    found: FoundWeights

    @property
    def image_size(self) -> int:
        """Return the side of all tasks' images, in pixels."""
        return self.recipe.data.image_size or self.found.weights.config.image_size

    @property
    def rates(self) -> dict[str, float]:
        return rates_of(self.recipe, self.found.weights.config)


def scored_as(context: SuiteContext) -> EvalTransform:
    """Return the evaluation pre-processing of all tasks: images are squashed to the model's square.

    They are used as published, including the damaged JPEGs of Pets.
    """
    resample = context.recipe.data.resample
    return EvalTransform(context.image_size, method="square", resize=0, resample=resample, truncated="pad")


def settings(recipe: Vtab) -> list[Setting]:
    """Return the settings to try: every learning rate with every schedule; without a sweep, the recipe's own.

    The warm-up keeps its share of the schedule.

    Paper: Appendix B.1.1
    """
    s = recipe.schedule
    return [
        Setting(lr, steps, round(warmup_of(s, TASK_IMAGES) * steps / s.total_steps))
        for lr in recipe.vtab.sweep_lrs or (recipe.optimizer.lr,)
        for steps in recipe.vtab.sweep_steps or (s.total_steps,)
    ]


def score_identity(
    context: SuiteContext, recipe: Vtab, data: TaskData, train_on: str, score_on: str
) -> dict[str, Any]:
    """Return what a task's score depends on; scores are comparable if these agree."""
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
        "precision": context.run.runtime.precision,
        "from_sha256": context.found.weights.digest,
        "initialise": recipe.weights.initialise,
        "protocol": "fine-tuning",
        "recipe_sha256": recipe_digest(recipe, _FREE, context.rates),
    }


def fine_tune(
    context: SuiteContext, data: TaskData, setting: Setting, seed: int, part: str, splits: tuple[str, str]
) -> Score:
    """Train on the first of the splits and score on the second, in a folder of PART/TASK/SETTING."""
    folder = context.run.folder / part / data.task.name / setting.name
    folder = folder / f"seed_{seed}" if part == TASKS else folder
    length = {"total_steps": setting.total_steps, "warmup_steps": setting.warmup_steps}
    schedule = length | {"warmup_epochs": 0.0}
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
        images = Images(train_on, transform, score_on, scored_as(context), context.found.weights.meta)
        return _train(context, recipe, data, folder, images)

    kept = context.recipe.vtab.keep_checkpoints
    return read_or_train(folder, context.run.runtime, must_match, make, job=JOB, keep_checkpoints=kept)


def _train(context: SuiteContext, recipe: Vtab, data: TaskData, folder: Path, images: Images) -> Scored:
    """Return the score after the last step, and on the main process the digest of the scored weights."""
    runtime, weights = context.run.runtime, context.found.weights
    rates: Mapping[str, Any] = context.rates
    model, _, _ = transferred_model(
        weights,
        recipe.weights,
        num_classes=data.task.num_classes,
        image_size=context.image_size,
        **rates,
        seed=recipe.seed,
        dtype=runtime.dtype,
        keeps_head=False,
    )
    placed = on_device(model, runtime)
    recipe = settled(recipe, runtime, model.config, folder, TASK_IMAGES)
    score = train(
        recipe,
        within(context.run, folder, str(folder.relative_to(context.run.folder))),
        placed,
        images,
        start_weights_sha256=weights.digest,
    )
    findings = dropout_draws(recipe, model.config, folder)
    if runtime.is_main:
        # The scored weights: the last ones, or their average if there is one.
        saved, _ = newest_checkpoint(folder / CHECKPOINTS) if recipe.averaging.decay else (None, [])
        state = saved.tensors(AVERAGE) if saved else placed.state_dict()
        findings |= {"weights_sha256": weights_digest(state)}
    return score, findings


def _augmentation(context: SuiteContext, data: TaskData) -> TrainTransform:
    """Return the augmentation: random crop and flip where BiT uses them for the task (Appendix F)."""
    chosen = context.recipe.data.augment == "bit"
    return TrainTransform(
        context.image_size,
        crop="random" if chosen and data.task.crop else "none",
        flip=chosen and data.task.flip,
        resample=context.recipe.data.resample,
        resize=round(context.image_size * 7 / 6),
        truncated="pad",
    )


TABLE = "table.csv"
PROTOCOL = "fine-tuning, 1,000 images per task, one setting for all tasks"


def vtab(
    recipe: Vtab,
    run_dir: Path,
    report: Report = silent,
    stop: StopFlag | None = None,
    act: Act | None = None,
    inputs: Inputs | None = None,
) -> RunResult:
    """Fine-tune weights.source on every task of vtab.suite, resuming where an earlier process ended.

    First a small sweep: every setting is trained on the 800 images of every task and scored on its 200, and
    the setting with the best mean is used for all tasks. Then every task is trained on its 1,000 images, once
    for each seed, and scored on its entire test split. All processes work on one run at a time, so that a run
    is the same for any number of them.

    Args:
        run_dir: gets table.csv, and sweep/ and tasks/ with a folder for each run.
        act: called with each prepared training instead of `fit`, see `RunContext`.

    Returns:
        accuracy per task (mean and deviation over seeds), group means, the mean over tasks, and the paper's.

    Raises:
        DataError: data of a task is missing; all such tasks are named.
        Stopped: a signal arrived; finished runs are kept.

    Paper: Section 4.1, Appendix B.1.1, Table 9
    """
    recipe = fitted_recipe(recipe, TASK_IMAGES)
    found = weights_of(recipe)
    tasks = chosen_tasks(recipe)
    data = list((inputs or open_inputs(recipe, run_dir)).tasks.values())
    scored_first = [source for task in data for source in (task.test, task.train)]
    run = start_run(recipe, run_dir, report, stop, *scored_first, act=act)
    runtime, journal = run.runtime, run.journal
    read = [source for one in data for source in (one.train800, one.val200, one.train, one.test)]
    check_found(runtime, found, read)
    context = SuiteContext(recipe, run, found)
    text = f"{count_text(len(tasks), 'task')}, {count_text(len(recipe.vtab.seeds), 'seed')} each"
    rates = rates_in_words(recipe, context.rates)
    found.log(journal, random_in_words(recipe.weights, recipe.seed), f"{text}; {rates}")
    journal.say("warning", *unseen_pixels(found.weights.config, recipe.data.image_size))

    chosen, swept = _best_setting(context, data)
    scores: dict[str, list[Score]] = {}
    for task in data:
        name = task.task.name
        scores[name] = [
            fine_tune(context, task, chosen, seed, TASKS, ("train", "test")) for seed in recipe.vtab.seeds
        ]
        values = [score.accuracy for score in scores[name]]
        journal.write(
            "task", step=0, task=name, group=task.task.group, accuracy=float(np.mean(values)), seeds=values
        )
    check_whole(run.shards, runtime)  # training images, too
    table = make_vtab_table(data, scores, num_tasks=len(SUITES[recipe.vtab.suite]))
    if runtime.is_main:
        write_vtab_table(run_dir / TABLE, table)
    return RunResult(
        "vtab",
        "done",
        metrics=table | ({"sweep": swept} if swept else {}),
        provenance=_provenance(context, data, chosen) | WHOLE,
        files={"table": str(run_dir / TABLE)},
    )


def _best_setting(context: SuiteContext, data: Sequence[TaskData]) -> tuple[Setting, list[dict[str, Any]]]:
    """Return the setting with the best mean validation accuracy, the first of equals, and all rows."""
    tried = settings(context.recipe)
    if len(tried) == 1:
        return tried[0], []
    rows: list[dict[str, Any]] = []
    for setting in tried:
        # 200 of the 1,000 images, which the others do not train on: a setting may be chosen by no others.
        first, splits = context.recipe.vtab.seeds[0], ("train800", "val200")
        accuracies = {
            task.task.name: fine_tune(context, task, setting, first, SWEEP, splits).accuracy for task in data
        }
        mean = float(np.mean(list(accuracies.values())))
        rows.append(
            {"lr": setting.lr, "total_steps": setting.total_steps, "val200": mean, "tasks": accuracies}
        )
        context.run.journal.write(
            "setting", step=0, lr=setting.lr, total_steps=setting.total_steps, accuracy=mean
        )
    means = [row["val200"] for row in rows]
    best = means.index(max(means))
    rows[best]["chosen"] = True
    return tried[best], rows


def _provenance(context: SuiteContext, data: Sequence[TaskData], setting: Setting) -> dict[str, Any]:
    recipe = context.recipe
    body = downstream(
        context.found.weights.config, num_classes=0, image_size=context.image_size, **context.rates
    )
    length = {"schedule": recipe.schedule.model_copy(update={"total_steps": setting.total_steps})}
    recipe = settled(
        recipe.model_copy(update=length), context.run.runtime, body, context.run.folder, TASK_IMAGES
    )
    return weights_used(context.found, recipe.weights) | {
        "suite": recipe.vtab.suite,
        "protocol": "fine-tuning",
        **computed_training(recipe, context.run.runtime, body),
        **shown(scored_as(context)),
        "augment": recipe.data.augment,
        "seeds": list(recipe.vtab.seeds),
        **asdict(setting),
        **context.rates,
        **dropout_draws(recipe, body, context.run.folder),
        **DATA_DIGEST,
        "tasks": {task.task.name: _images(context, task) for task in data},
    }


def _images(context: SuiteContext, data: TaskData) -> dict[str, Any]:
    augments = context.recipe.data.augment == "bit"
    return {
        "train_split": data.names["train"],
        "train_sha256": data.train.digest,
        "split": data.names["test"],
        "data_sha256": data.test.digest,
        "data_source": data.source,
        "train_source": source_text(data.train),
        "train800_proven": data.proven,
        "copy": data.copy,
        "crop": augments and data.task.crop,
        "flip": augments and data.task.flip,
    }


def make_vtab_table(
    data: Sequence[TaskData], scores: Mapping[str, Sequence[Score]], *, num_tasks: int
) -> dict[str, Any]:
    """Return all numbers of the table, as shares 0..1.

    Args:
        scores: per task, one for each seed.
        num_tasks: in the full suite; with fewer, the table is partial.

    Returns:
        `mean`, the plain mean over the tasks, which is the VTAB score, and its deviation over the seeds; the
        mean of the groups' means, which others report; per task and per group; and the paper's, over the same
        tasks.

    Paper: Appendix D.10, Table 9
    """
    tasks = [entry.task for entry in data]
    rows = {entry.task.name: _row(entry, scores[entry.task.name]) for entry in data}
    means = {name: row["mean"] for name, row in rows.items()}
    by_seed = np.array([[score.accuracy for score in scores[task.name]] for task in tasks]).mean(axis=0)
    groups = group_means(tasks, means)
    table = {
        "protocol": PROTOCOL,
        "mean": float(np.mean(list(means.values()))),
        "std": float(by_seed.std()),
        "mean_of_groups": float(np.mean(list(groups.values()))),
        "partial": len(tasks) < num_tasks,
        "num_tasks": num_tasks,
        "copies": [name for name, row in rows.items() if row["copy"]],
        "tasks": rows,
        "groups": groups,
        "paper": _paper(tasks),
    }
    return table | {"label": _label(table)}


def group_means(tasks: Sequence[VtabTask], means: Mapping[str, float]) -> dict[str, float]:
    groups = {group: [means[task.name] for task in tasks if task.group == group] for group in GROUPS}
    return {group: float(np.mean(values)) for group, values in groups.items() if values}


def write_vtab_table(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write the table as CSV, atomically: rows for tasks, groups and means. Accuracies are shares 0..1."""
    paper = metrics["paper"]
    columns = ("row", "group", "accuracy", "std", "num_seeds", "num_test", "note")
    lines: list[Sequence[Any]] = [
        (*columns, *(f"paper {name}" for name in paper)),
        *(
            (
                *(
                    name,
                    row["group"],
                    row["mean"],
                    row["std"],
                    len(row["by_seed"]),
                    row["total"],
                    row["copy"],
                ),
                *(column["tasks"][name] for column in paper.values()),
            )
            for name, row in metrics["tasks"].items()
        ),
        *(
            (f"group {name}", name, value, *[""] * 4, *(column["groups"][name] for column in paper.values()))
            for name, value in metrics["groups"].items()
        ),
        (
            *(metrics["label"], "", metrics["mean"], metrics["std"], "", "", metrics["protocol"]),
            *(column["mean"] for column in paper.values()),
        ),
    ]
    write_csv(path, lines)


def _label(metrics: Mapping[str, Any]) -> str:
    """Return the label of the last row; it says if tasks are missing or images are not as published."""
    said = ["partial"] if metrics["partial"] else []
    if metrics["copies"]:
        said.append(f"{len(metrics['copies'])} not as published")
    return f"mean of {count_text(len(metrics['tasks']), 'task')}" + (f" ({', '.join(said)})" if said else "")


def _row(data: TaskData, scores: Sequence[Score]) -> dict[str, Any]:
    values = [score.accuracy for score in scores]
    return {
        "group": data.task.group,
        "mean": float(np.mean(values)),
        "std": float(np.std(values)),
        "by_seed": values,
        "total": scores[0].total,
        "mean_per_class": _mean([score.means.get("mean_per_class") for score in scores]),
        **baselines(data.test.labels(), data.task.num_classes),
        "copy": data.copy,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _paper(tasks: Sequence[VtabTask]) -> dict[str, Any]:
    """Return Table 9 over the same tasks; empty for suites that the paper does not have."""
    if not all(task.name in TABLE_9 for task in tasks):
        return {}
    columns = {}
    for number, column in enumerate(VTAB_MODELS):
        means = {task.name: round(TABLE_9[task.name][number] / 100, 4) for task in tasks}
        columns[column] = {
            "tasks": means,
            "groups": group_means(tasks, means),
            "mean": float(np.mean(list(means.values()))),
        }
    return columns
