"""The table of VTAB: per task, per group and in all, beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.vtab import GROUPS, VtabTask
from vitctl.data.datasets.vtab_images import TaskData
from vitctl.engine.evaluation import Score
from vitctl.engine.metrics import baselines
from vitctl.recipe.paper import TABLE_9, VTAB_MODELS
from vitctl.system.tables import write_csv

PROTOCOL = "fine-tuning, 1,000 images per task, one setting for all tasks"
LIGHT = "light: a linear classifier on frozen features, not the protocol of VTAB"


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
