"""The table of tasks: every task once, the finished ones read back, the missing ones named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trained import TASKS, table
from vitctl.data.datasets.vtab import VTAB
from vitctl.errors import RecipeError
from vitctl.jobs.vtab_suite import Setting, settings
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import launch
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.paper import TABLE_9

SETTING = "lr_0.03_steps_2"


def test_vtab__a_partial_table_and_again(pretrained: Path, task_shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    metrics = table(folder, pretrained, task_shards)["metrics"]
    assert set(metrics["tasks"]) == {"digits", "shapes-count"}
    assert metrics["partial"] is True
    means = {name: values["mean"] for name, values in metrics["tasks"].items()}
    assert metrics["mean"] == pytest.approx(sum(means.values()) / 2, rel=1e-15)
    assert metrics["groups"] == {"natural": means["digits"], "structured": means["shapes-count"]}
    own = json.loads((folder / "tasks" / "digits" / SETTING / "seed_0" / "result.json").read_text())
    assert own["metrics"]["accuracy"] == means["digits"]

    log = folder / "tasks" / "shapes-count" / SETTING / "seed_0" / "log.jsonl"
    before = log.read_text()
    (folder / "tasks" / "digits" / SETTING / "seed_0" / "result.json").unlink()
    assert table(folder, pretrained, task_shards)["metrics"] == metrics
    assert log.read_text() == before


def test_vtab__unknown_task(pretrained: Path, task_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"vtab.tasks: digit not in suite 'mini'; did you mean digits\?"):
        table(tmp_path / "table", pretrained, task_shards, **{"vtab.tasks": ("digit",)})


def test_settings__every_rate_with_every_schedule_and_the_warmup_in_proportion() -> None:
    recipe = load_recipe("vtab").recipe
    assert settings(recipe) == [
        Setting(0.003, 500, 100),
        Setting(0.003, 2500, 500),
        Setting(0.01, 500, 100),
        Setting(0.01, 2500, 500),
    ]
    alone = load_recipe("vtab", [Override("vtab.sweep_lrs", ()), Override("vtab.sweep_steps", ())]).recipe
    assert settings(alone) == [Setting(0.01, 2500, 500)]  # what Table 4 prints


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"vtab.seeds": ()}, "seeds = [] leaves nothing to run"),
        ({"vtab.seeds": (0, 0)}, "seeds = [0, 0] names something twice"),
        ({"vtab.sweep_lrs": (0.0,)}, "sweep_lrs and sweep_steps should be above 0"),
        ({"schedule.total_steps": 0, "schedule.total_epochs": 5.0}, "set schedule.total_steps"),
    ],
)
def test_recipe__refuses(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("vtab", [Override(key, value) for key, value in values.items()])
    assert said in str(caught.value)


def test_table_9__every_task_and_the_papers_own_means() -> None:
    assert set(TABLE_9) == {task.name for task in VTAB}
    columns = list(zip(*TABLE_9.values(), strict=True))
    assert [round(float(np.mean(column)), 1) for column in columns] == [77.6, 76.3, 72.7]


@pytest.mark.slow
def test_vtab__two_processes_make_the_same_table(pretrained: Path, task_shards: Path, tmp_path: Path) -> None:
    """All processes share each run: in float64 the integers are those of one process."""
    one = table(tmp_path / "one", pretrained, task_shards, **{"machine.precision": "float64"})
    values = {**TASKS, "schedule.batch_size": 8, "weights.source": str(pretrained), "machine.device": "cpu"}
    values |= {"machine.workers": 0, "machine.precision": "float64", "machine.processes": 2}
    loaded = load_recipe("vtab_mini", [Override(key, value) for key, value in values.items()])
    prepare_run(loaded, tmp_path / "two")
    two = launch(tmp_path / "two", lambda _: None)
    assert two["metrics"] == one["metrics"]
