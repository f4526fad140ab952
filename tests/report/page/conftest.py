"""Runs to make pages of: a trained one that everything can be opened of, and made-up ones."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.trained import do
from vitctl.data.datasets.vtab import SUITES
from vitctl.engine.journal import append_record
from vitctl.jobs.record.result import RunResult, write_result
from vitctl.jobs.vtab_suite import group_means
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.paper_vtab import COLUMNS, TABLE_9
from vitctl.recipe.write import to_toml

SHORT = {
    "schedule.total_steps": 8,
    "schedule.warmup_steps": 1,
    "evaluation.every_steps": 4,
    "checkpoint.every_steps": 4,
}


@pytest.fixture(scope="session")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on six shapes, its data and weights still there."""
    folder = tmp_path_factory.mktemp("report") / "trained"
    do(TINY, folder, **{"data.path": str(tiny_data)}, **SHORT)
    return folder


def made_up(folder: Path, recipe: str, result: RunResult | None, num_steps: int = 0, **values: Any) -> Path:
    """A run folder with a recipe, a result, and a log of a training."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        to_toml(load_recipe(recipe, [Override(key, v) for key, v in values.items()]))
    )
    if result is not None:
        write_result(folder, result)
    for step in range(1, num_steps + 1):
        numbers = {
            "loss": 5 * math.exp(-step / 30),
            "lr": 1e-3,
            "images_per_second": 900.0 + step % 7,
            "data_wait": 0.02,
        }
        counts = {"mfu": 0.41, "num_bad": step // 50, "num_skipped": step // 60, "total_steps": num_steps}
        append_record(
            folder / "log.jsonl", {"kind": "train", "step": step, "time": step, **numbers, **counts}
        )
        if step % 10 == 0:
            record = {
                "kind": "evaluate",
                "step": step,
                "accuracy": step / 200,
                "correct": step,
                "total": 200,
                "time": step,
            }
            append_record(folder / "log.jsonl", record)
            append_record(
                folder / "log.jsonl",
                {"kind": "fewshot", "step": step, "shots": 5, "accuracy": step / 300, "time": step},
            )
    return folder


def vtab_result() -> RunResult:
    """All 19 tasks: this run's accuracies are the paper's of L/16 JFT, one percent lower."""
    tasks, means = SUITES["vtab"], {name: values[1] / 100 - 0.01 for name, values in TABLE_9.items()}
    rows = {
        task.name: {"group": task.group, "mean": means[task.name], "std": 0.004, "by_seed": [means[task.name]] * 3,
                    "total": 1000, "majority_class": 0.1, "chance": 0.05, "copy": ""}
        for task in tasks
    }  # fmt: skip
    paper = {}
    for number, column in enumerate(COLUMNS):
        own = {name: values[number] / 100 for name, values in TABLE_9.items()}
        paper[column] = {"tasks": own, "groups": group_means(tasks, own), "mean": sum(own.values()) / 19}
    groups = group_means(tasks, means)
    table = {
        "protocol": "fine-tuning",
        "mean": sum(means.values()) / 19,
        "std": 0.001,
        "label": "mean of 19 tasks",
        "mean_of_groups": sum(groups.values()) / 3,
        "tasks": rows,
        "groups": groups,
        "paper": paper,
    }
    return RunResult("vtab", "done", table, {"precision": "bf16"})
