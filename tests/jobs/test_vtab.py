"""The table of tasks: every task once, the finished ones read back, the missing ones named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import CPU, do
from vitctl.errors import DataError, RecipeError

TASKS = {"vtab.tasks": ("digits", "shapes-count"), "schedule.total_steps": 2, "schedule.warmup_steps": 1}


def table(folder: Path, pretrained: Path, **values: Any) -> dict[str, Any]:
    given = {
        **CPU,
        **TASKS,
        "machine.precision": "float32",
        "schedule.batch_size": 8,
        "data.path": str(folder.parent / "none"),
    }
    return do("vtab_mini", folder, **{**given, "weights.source": str(pretrained), **values})


def test_vtab__a_partial_table_and_again(pretrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    metrics = table(folder, pretrained)["metrics"]
    assert set(metrics["tasks"]) == {"digits", "shapes-count"}
    assert metrics["partial"] is True
    means = {name: values["mean"] for name, values in metrics["tasks"].items()}
    assert metrics["mean"] == pytest.approx(sum(means.values()) / 2, rel=1e-15)
    assert metrics["groups"] == {"natural": means["digits"], "structured": means["shapes-count"]}
    own = json.loads((folder / "tasks" / "digits" / "seed_0" / "result.json").read_text())
    assert own["metrics"]["accuracy"] == means["digits"]

    log = folder / "tasks" / "digits" / "seed_0" / "log.jsonl"
    before = log.read_text()
    (folder / "tasks" / "shapes-count" / "seed_0" / "result.json").unlink()
    assert table(folder, pretrained)["metrics"] == metrics
    assert log.read_text() == before


def test_vtab__unknown_task(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"vtab.tasks: digit not in suite 'mini'; it has digits, shapes-shape"):
        table(tmp_path / "table", pretrained, **{"vtab.tasks": ("digit",)})


def test_vtab__names_every_task_without_data_at_once(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        do("vtab", tmp_path / "table", **CPU, **{"weights.source": str(pretrained), "data.path": str(tmp_path)})
    said = str(caught.value)
    assert said.startswith(f"19 of 19 tasks have no usable shards under {tmp_path}: caltech101, cifar100, dtd")
    assert "smallnorb-elev; each needs a folder" in said
    assert "\n" not in said
    assert not (tmp_path / "table").exists()
