"""Run folders for these tests: finished ones without a training, and one that was trained."""

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
from vitctl.recipe.paper import TABLE_9, VTAB_MODELS
from vitctl.recipe.write import to_toml

SIZES = {
    "imagenet": (1_281_167, 50_000),
    "pets": (3_680, 3_669),
    "cifar10": (50_000, 10_000),
    "jft300m": (303_000_000, 49_511),
}


@pytest.fixture(scope="session")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on six shapes, its data and weights still there."""
    folder = tmp_path_factory.mktemp("report") / "trained"
    steps = {"schedule.total_steps": 8, "schedule.warmup_steps": 1}
    every = {"evaluation.every_steps": 4, "checkpoint.every_steps": 4}
    do(TINY, folder, **{"data.path": str(tiny_data)}, **steps, **every)
    return folder


def made_up(folder: Path, recipe: str, result: RunResult | None, num_steps: int = 0, **values: Any) -> Path:
    """A run folder with a recipe, a result, and a log of a training."""
    folder.mkdir(parents=True)
    loaded = load_recipe(recipe, [Override(key, value) for key, value in values.items()])
    (folder / "recipe.toml").write_text(to_toml(loaded))
    if result is not None:
        write_result(folder, result)
    for step in range(1, num_steps + 1):
        common = {"step": step, "time": step}
        numbers = {"loss": 5 * math.exp(-step / 30), "lr": 1e-3, "images_per_second": 900.0 + step % 7}
        counts = {"num_bad": step // 50, "num_skipped": step // 60, "total_steps": num_steps}
        records = [{"kind": "train", **common, **numbers, **counts, "data_wait": 0.02, "mfu": 0.41}]
        if step % 10 == 0:
            scored = {"accuracy": step / 200, "correct": step, "total": 200}
            records.append({"kind": "evaluate", **common, **scored})
            records.append({"kind": "fewshot", **common, "shots": 5, "accuracy": step / 300})
        for record in records:
            append_record(folder / "log.jsonl", record)
    return folder


def finished(
    runs: Path,
    name: str,
    recipe: str,
    metrics: dict[str, Any],
    values: dict[str, Any] | None = None,
    **used: Any,
) -> Path:
    """A finished run of a shipped recipe, on all images of its data set unless `used` says otherwise."""
    folder = made_up(runs / name, recipe, None, **(values or {}))
    job_recipe = load_recipe(str(folder / "recipe.toml")).recipe
    num_train, num_images = SIZES.get(getattr(getattr(job_recipe, "data", None), "dataset", ""), (0, 0))
    whole = {"num_train": num_train, "num_images": num_images}
    whole |= {"data_source": "the original files", "data_verified": "whole"}
    files = {"model": f"{folder}/checkpoints/step_00000500/model.safetensors"}
    write_result(folder, RunResult(job_recipe.job, "done", metrics, whole | used, files))
    return folder


def vtab_result() -> RunResult:
    """All 19 tasks: the accuracies are the paper's of L/16 JFT, one percent lower."""
    tasks, means = SUITES["vtab"], {name: values[1] / 100 - 0.01 for name, values in TABLE_9.items()}
    rows = {
        task.name: {"group": task.group, "mean": means[task.name], "std": 0.004, "total": 1000, "copy": "",
                    "by_seed": [means[task.name]] * 3, "majority_class": 0.1, "chance": 0.05}
        for task in tasks
    }  # fmt: skip
    paper = {}
    for number, model in enumerate(VTAB_MODELS):
        shares = {name: values[number] / 100 for name, values in TABLE_9.items()}
        mean = sum(shares.values()) / 19
        paper[model] = {"tasks": shares, "groups": group_means(tasks, shares), "mean": mean}
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
