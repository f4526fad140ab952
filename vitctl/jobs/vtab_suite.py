"""VTAB (Section 4.1, B.1.1): every task fine-tuned on its 1,000 images with one setting, scored on its whole
test split; and the table of the tasks, beside the paper's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.vtab import GROUPS, SUITES, VtabTask
from vitctl.data.datasets.vtab_images import TaskData
from vitctl.data.source.views import source_text
from vitctl.engine.computation import computed_training, dropout_draws
from vitctl.engine.evaluation import Score
from vitctl.engine.journal import Journal, Report, silent
from vitctl.engine.metrics import baselines
from vitctl.engine.preemption import StopFlag
from vitctl.engine.schedule import TASK_IMAGES, fitted_recipe
from vitctl.jobs.inputs.network import rates_in_words, unseen_pixels
from vitctl.jobs.inputs.opened import Inputs, chosen_tasks, open_inputs
from vitctl.jobs.inputs.weights import check_found, random_in_words, weights_of
from vitctl.jobs.provenance import shown, weights_used
from vitctl.jobs.record.data_verified import WHOLE, check_whole, verify
from vitctl.jobs.record.result import DATA_DIGEST, RunResult
from vitctl.jobs.training import Act, open_journal, start_runtime
from vitctl.jobs.vtab_runs import (
    Setting,
    SuiteContext,
    fine_tune,
    score_features,
    scored_as,
    settings,
    tune,
)
from vitctl.models.variants import downstream
from vitctl.recipe.paper import TABLE_9, VTAB_MODELS
from vitctl.recipe.schema import Vtab
from vitctl.system.files import write_csv

TABLE = "table.csv"
PROTOCOL = "fine-tuning, 1,000 images per task, one setting for all tasks"
LIGHT = "light: a linear classifier on frozen features, not the protocol of VTAB"


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
    for each seed, and scored on its whole test split. All processes work on one run at a time, so that a run
    is the same for any number of them.

    Args:
        recipe: checked.
        run_dir: gets sweep/, tasks/ and light/ with a folder for each run, and table.csv.
        report: called with every log record of the main process.
        stop: set by signals.
        act: done with each prepared training instead of it, see `RunContext`.
        inputs: the images, if they are open already.

    Returns:
        accuracy per task (mean and deviation over seeds), group means, the mean over tasks, and the paper's.

    Raises:
        DataError: data of a task is missing; all such tasks are named.
        Stopped: a signal came; finished runs are kept.

    Paper: Section 4.1, Appendix B.1.1, Table 9
    """
    stop = StopFlag() if stop is None else stop
    recipe = fitted_recipe(recipe, TASK_IMAGES)
    found = weights_of(recipe)
    tasks = chosen_tasks(recipe)
    data = list((inputs or open_inputs(recipe, run_dir)).tasks.values())
    runtime = start_runtime(recipe.machine, run_dir, recipe.log)
    journal = open_journal(runtime, run_dir, report)
    check_found(
        runtime, found, [source for one in data for source in (one.train800, one.val200, one.train, one.test)]
    )
    bytes_read = verify(runtime, run_dir, *(source for task in data for source in (task.test, task.train)))
    context = SuiteContext(recipe, runtime, run_dir, report, stop, found, bytes_read, act)
    text = f"{len(tasks)} tasks, {len(recipe.vtab.seeds)} seeds each"
    text += "" if recipe.vtab.light else f"; {rates_in_words(recipe, context.rates)}"
    found.log(journal, random_in_words(recipe.weights, recipe.seed), text)
    for text in unseen_pixels(found.weights.config, recipe.data.image_size):
        journal.write("warning", step=0, text=text)

    chosen, swept = (None, []) if recipe.vtab.light else _best_setting(context, data, journal)
    scores: dict[str, list[Score]] = {}
    for task in data:
        name = task.task.name
        scores[name] = (
            [fine_tune(context, task, chosen, seed) for seed in recipe.vtab.seeds]
            if chosen
            else [score_features(context, task)]
        )
        values = [score.accuracy for score in scores[name]]
        journal.write(
            "task", step=0, task=name, group=task.task.group, accuracy=float(np.mean(values)), seeds=values
        )
    check_whole(bytes_read, runtime)  # also the images that were trained on
    table = make_vtab_table(data, scores, num_tasks=len(SUITES[recipe.vtab.suite]), light=recipe.vtab.light)
    if runtime.is_main:
        write_vtab_table(run_dir / TABLE, table)
    return RunResult(
        "vtab",
        "done",
        metrics=table | ({"sweep": swept} if swept else {}),
        provenance=_provenance(context, data, chosen) | WHOLE,
        files={"table": str(run_dir / TABLE)},
    )


def _best_setting(
    context: SuiteContext, data: Sequence[TaskData], journal: Journal
) -> tuple[Setting, list[dict[str, Any]]]:
    """The setting of the best mean accuracy over the validation images of all tasks, the first of equals; and
    all of them.
    """
    tried = settings(context.recipe)
    if len(tried) == 1:
        return tried[0], []
    rows: list[dict[str, Any]] = []
    for setting in tried:
        accuracies = {task.task.name: tune(context, task, setting).accuracy for task in data}
        mean = float(np.mean(list(accuracies.values())))
        rows.append(
            {"lr": setting.lr, "total_steps": setting.total_steps, "val200": mean, "tasks": accuracies}
        )
        journal.write("setting", step=0, lr=setting.lr, total_steps=setting.total_steps, accuracy=mean)
    means = [row["val200"] for row in rows]
    best = means.index(max(means))
    rows[best]["chosen"] = True
    return tried[best], rows


def _provenance(context: SuiteContext, data: Sequence[TaskData], setting: Setting | None) -> dict[str, Any]:
    recipe = context.recipe
    chosen: dict[str, Any] = {}
    if setting:
        chosen = {"lr": setting.lr, "total_steps": setting.total_steps, "warmup_steps": setting.warmup_steps}
        body = downstream(
            context.found.weights.config, num_classes=0, image_size=context.image_size, **context.rates
        )
        chosen |= context.rates | dropout_draws(recipe, body, context.run_dir)
    return weights_used(context.found, recipe.weights) | {
        "suite": recipe.vtab.suite,
        "protocol": "light" if recipe.vtab.light else "fine-tuning",
        **computed_training(recipe, context.runtime),
        **shown(scored_as(context)),
        "augment": recipe.data.augment,
        "seeds": list(recipe.vtab.seeds),
        **chosen,
        **DATA_DIGEST,
        "tasks": {task.task.name: _images(context, task) for task in data},
    }


def _images(context: SuiteContext, data: TaskData) -> dict[str, Any]:
    augments = context.recipe.data.augment == "bit" and not context.recipe.vtab.light
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
    data: Sequence[TaskData], scores: Mapping[str, Sequence[Score]], *, num_tasks: int, light: bool
) -> dict[str, Any]:
    """All numbers of the table, as shares 0..1.

    Args:
        data: of the tasks, in the order of the suite.
        scores: per task, one for each seed.
        num_tasks: of the whole suite; with fewer the table is partial.
        light: whether the scores are those of the light protocol.

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
        "protocol": LIGHT if light else PROTOCOL,
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
    """Mean over the tasks of each group that has any."""
    groups = {group: [means[task.name] for task in tasks if task.group == group] for group in GROUPS}
    return {group: float(np.mean(values)) for group, values in groups.items() if values}


def write_vtab_table(path: Path, metrics: Mapping[str, Any]) -> None:
    """The table as CSV, a row per task, per group and for the means; whole or not at all.

    Accuracies are shares 0..1.
    """
    paper = metrics["paper"]
    columns = [
        "row",
        "group",
        "accuracy",
        "std",
        "num_seeds",
        "num_test",
        "note",
        *(f"paper {name}" for name in paper),
    ]
    lines: list[list[Any]] = [columns]
    for name, row in metrics["tasks"].items():
        cells = [name, row["group"], row["mean"], row["std"], len(row["by_seed"]), row["total"], row["copy"]]
        lines.append(cells + [column["tasks"][name] for column in paper.values()])
    for name, value in metrics["groups"].items():
        lines.append(
            [f"group {name}", name, value, *[""] * 4] + [column["groups"][name] for column in paper.values()]
        )
    lines.append([metrics["label"], "", metrics["mean"], metrics["std"], "", "", metrics["protocol"]])
    lines[-1] += [column["mean"] for column in paper.values()]
    write_csv(path, lines)


def _label(metrics: Mapping[str, Any]) -> str:
    """What the last row is the mean of; a table of some of the tasks, or of other images, says so."""
    said = ["partial"] if metrics["partial"] else []
    if metrics["copies"]:
        said.append(f"{len(metrics['copies'])} not as published")
    return f"mean of {len(metrics['tasks'])} tasks" + (f" ({', '.join(said)})" if said else "")


def _row(data: TaskData, scores: Sequence[Score]) -> dict[str, Any]:
    values = [score.accuracy for score in scores]
    return {
        "group": data.task.group,
        "mean": float(np.mean(values)),
        "std": float(np.std(values)),
        "by_seed": values,
        "total": scores[0].total,
        "mean_per_class": _mean([score.mean_per_class for score in scores]),
        **baselines(data.test.labels(), data.task.num_classes),
        "copy": data.copy,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _paper(tasks: Sequence[VtabTask]) -> dict[str, Any]:
    """Table 9 over the same tasks; nothing for suites that the paper does not have."""
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
