"""Data and finished pre-training runs, made once in a test run, for all tests that need them."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.conftest import SHORT, TINY, started
from vitctl.data.datasets import catalog
from vitctl.data.datasets.readers import shapes
from vitctl.data.datasets.vtab import MINI
from vitctl.data.datasets.vtab_images import open_task
from vitctl.data.writer.shard_writer import write_split
from vitctl.engine.log import RunLog
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe

SMALL = {"schedule.batch_size": 8, "schedule.total_steps": 6, "schedule.warmup_steps": 1, "data.crop": "none"}
CPU = {"machine.device": "cpu", "machine.workers": 0, "machine.precision": "float64"}

Job = Callable[..., dict[str, Any]]


def do(recipe: str | Path, folder: Path, **values: Any) -> dict[str, Any]:
    """Run a recipe in this process and return its result.json."""
    prepare_run(load_recipe(str(recipe), [Override(key, value) for key, value in values.items()]), folder)
    work(folder)
    return result_of(folder)


def result_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def finetuned(num_processes: int, folder: Path, start: Path, data: Path, **values: Any) -> None:
    """Run `vitctl finetune` in several processes."""
    given = {"machine.processes": num_processes, "weights.source": start, "data.path": data, **values}
    sets = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    line = [sys.executable, "-m", "vitctl", "finetune", "--out", str(folder), *sets]
    shown = folder.with_name(f"{folder.name}.txt")
    codes = [process.wait(timeout=240) for process in started(line, shown, num_processes)]
    assert set(codes) == {0}, shown.read_text()


@contextmanager
def crash_after(step: int) -> Iterator[None]:
    """Raise an error after a step of the trainings in the block; their rescue saves a checkpoint."""
    log_step = RunLog._log_step

    def fails(log: RunLog, at: int, *rest: Any) -> None:
        log_step(log, at, *rest)
        if at == step:
            raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunLog, "_log_step", fails)
        with pytest.raises(ZeroDivisionError):
            yield


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that one pytest process makes and all workers of xdist share. Tests copy it."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)
    folder, done = shared / name, shared / f"{name}.done"
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 70 training images in 4 shards and 23 test images of 6 shapes, 16 pixels wide."""

    def write(root: Path) -> None:
        for split, size in (("train", 70), ("test", 23)):
            items = shapes.items("shape", split, size, seed=0, image_size=16)
            write_split(items, root / split, shapes.SHAPES, seed=0, source_text="test", max_samples=18)

    return made_once(tmp_path_factory, "tiny", write)


@pytest.fixture(scope="session")
def pretrained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe in one process, uninterrupted: 20 steps on six shapes, with averaged weights."""
    values = {"data.path": str(tiny_data)}
    return made_once(tmp_path_factory, "pretrained", lambda folder: do(TINY, folder, **values))


@pytest.fixture(scope="session")
def one_process(pretrained: Path) -> Path:
    """The same run, for tests that compare others with it."""
    return pretrained


@pytest.fixture(scope="session")
def short(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe in eight steps, saved after every second."""
    values = {"data.path": str(tiny_data), **SHORT}
    return made_once(tmp_path_factory, "short", lambda folder: do(TINY, folder, **values))


@pytest.fixture
def short_copy(short: Path, tmp_path: Path) -> Path:
    """A copy of it, tmp_path/a, to be changed."""
    return Path(shutil.copytree(short, tmp_path / "a"))


@pytest.fixture(scope="session")
def regularised(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-training with dropout and stochastic depth."""
    values = {"data.path": str(tiny_data), "model.dropout": 0.1, "model.drop_path": 0.2}
    return made_once(tmp_path_factory, "regularised", lambda folder: do(TINY, folder, **values))


@pytest.fixture(scope="session")
def speck(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT of one layer and one patch of 8 pixels, after one step."""
    sizes = {"model.depth": 1, "model.hidden_size": 12, "model.mlp_size": 12, "model.patch_size": 8}
    steps = {"schedule.total_steps": 1, "schedule.warmup_steps": 0, "data.image_size": 8}
    values = {**CPU, **sizes, **steps, "data.path": str(tiny_data)}
    return made_once(tmp_path_factory, "speck", lambda folder: do(TINY, folder, **values))


@pytest.fixture
def job(pretrained: Path, tiny_data: Path, tmp_path: Path) -> Job:
    """job("finetune", **{"a.b": value}) runs a shipped recipe on the tiny data from the tiny weights."""

    def run(recipe: str, name: str = "run", **values: Any) -> dict[str, Any]:
        common = {} if recipe == "export" else {**CPU, "data.path": str(tiny_data)}
        small = SMALL if recipe == "finetune" else {}
        return do(recipe, tmp_path / name, **{**common, **small, "weights.source": str(pretrained), **values})

    return run


TASKS: dict[str, Any] = {
    "vtab.tasks": ("digits", "shapes-count"),
    "schedule.total_steps": 2,
    "schedule.warmup_steps": 1,
}


@pytest.fixture(scope="session")
def task_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of TASKS, which a suite would write into its run folder."""

    def write(root: Path) -> None:
        for task in MINI:
            if task.name in TASKS["vtab.tasks"]:
                open_task(task, root, scratch=root)

    return made_once(tmp_path_factory, "tasks", write)


def table(folder: Path, pretrained: Path, shards: Path, **values: Any) -> dict[str, Any]:
    """Run the suite, which finds its own images written already."""

    def copy(_: object, place: Path) -> None:
        shutil.copytree(shards / place.name, place, dirs_exist_ok=True)

    given = {
        **CPU,
        **TASKS,
        "machine.precision": "float32",
        "schedule.batch_size": 8,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "write_data_set", copy)
        return do("vtab_mini", folder, **{**given, "weights.source": str(pretrained), **values})
