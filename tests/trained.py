"""Finished pre-training runs, made once, for all tests that need weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe

SMALL = {"schedule.batch_size": 8, "schedule.total_steps": 6, "schedule.warmup_steps": 1, "data.crop": "none"}
CPU = {"machine.device": "cpu", "machine.workers": 0, "machine.precision": "float64"}

Job = Callable[..., dict[str, Any]]


def do(recipe: str | Path, folder: Path, **values: Any) -> dict[str, Any]:
    """Run a recipe in this process and give its result.json."""
    prepare_run(load_recipe(str(recipe), [Override(key, value) for key, value in values.items()]), folder)
    work(folder)
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.fixture(scope="session")
def pretrained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT of 16 pixels, trained for 20 steps on six shapes, with averaged weights beside it."""
    folder = tmp_path_factory.mktemp("pretrained") / "tiny"
    do(TINY, folder, **{"data.path": str(tiny_data)})
    return folder


@pytest.fixture(scope="session")
def regularised(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-training with dropout and stochastic depth."""
    folder = tmp_path_factory.mktemp("regularised") / "run"
    do(TINY, folder, **{"data.path": str(tiny_data), "model.dropout": 0.1, "model.drop_path": 0.2})
    return folder


@pytest.fixture(scope="session")
def speck(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT of one layer and one patch of 8 pixels, after one step."""
    folder = tmp_path_factory.mktemp("speck") / "speck"
    sizes = {"model.depth": 1, "model.hidden_size": 12, "model.mlp_size": 12, "model.patch_size": 8}
    steps = {"schedule.total_steps": 1, "schedule.warmup_steps": 0, "data.image_size": 8}
    do(TINY, folder, **CPU, **sizes, **steps, **{"data.path": str(tiny_data)})
    return folder


@pytest.fixture
def job(pretrained: Path, tiny_data: Path, tmp_path: Path) -> Job:
    """job("finetune", **{"a.b": value}) runs a shipped recipe on the tiny data from the tiny weights."""

    def run(recipe: str, name: str = "run", **values: Any) -> dict[str, Any]:
        data = {} if recipe == "export" else {"data.path": str(tiny_data)}
        small = SMALL if recipe == "finetune" else {}
        return do(
            recipe, tmp_path / name, **{**CPU, **data, **small, "weights.source": str(pretrained), **values}
        )

    return run


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
