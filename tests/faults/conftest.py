"""Shared by the tests of faults: the run without a fault, and the comparison with it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import TINY, checkpoint, step_images
from vitctl.engine.journal import read_records
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"schedule.total_steps": 12, "checkpoint.every_steps": 3, "evaluation.every_steps": 4}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # the last bit of a sum depends on the number of threads


def prepared(folder: Path, data: Path, **values: Any) -> Path:
    """A run folder with the tiny recipe."""
    given = {"data.path": str(data), **SHORT, **values}
    prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in given.items()]), folder)
    return folder


def command(folder: Path, data: Path, **values: Any) -> list[str]:
    """The command of the same run."""
    sets = [part for key, value in {**SHORT, **values}.items() for part in ("--set", f"{key}={value}")]
    line = ("pretrain", "--recipe", str(TINY), "--data", str(data), "--out", str(folder))
    return [sys.executable, "-m", "vitctl", *line, *sets]


def resume(folder: Path) -> None:
    """Resume as a user does."""
    line = [sys.executable, "-m", "vitctl", "resume", str(folder)]
    warm.run(line, check=True, capture_output=True, env=ENVIRONMENT)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The complete records of log.jsonl."""
    return [record for record in read_records(folder / "log.jsonl") if record["kind"] == kind]


def warnings(folder: Path) -> list[str]:
    """The warnings in the log."""
    return [record["text"] for record in records(folder, "warning")]


def numbers_of(folder: Path) -> list[tuple[Any, ...]]:
    """The numbers of each step in the log, without times."""
    train = [
        ("train", r["step"], r["loss"], r["lr"], r["grad_norm"], r["num_bad"])
        for r in records(folder, "train")
    ]
    return train + [("evaluate", r["step"], r["correct"], r["total"]) for r in records(folder, "evaluate")]


def assert_same(folder: Path, straight: Path, step: int = 12) -> None:
    """Weights, average and optimizer byte by byte, log records and samples number by number."""
    assert set(checkpoint(folder, step)) == {"model.safetensors", "ema.safetensors", "optimizer.safetensors"}
    assert checkpoint(folder, step) == checkpoint(straight, step)
    assert numbers_of(folder) == numbers_of(straight)
    assert step_images(folder) == step_images(straight)


@pytest.fixture(scope="session")
def straight(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a fault."""
    folder = prepared(tmp_path_factory.mktemp("straight") / "run", tiny_data)
    work(folder)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB, if this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    if subprocess.run(line, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, leave: int) -> None:
    """Leave so many bytes free."""
    (disk / "filler").unlink(missing_ok=True)
    for _ in range(100):
        there = os.statvfs(disk)
        with suppress(OSError), (disk / "filler").open("ab") as file:  # the run may have written meanwhile
            os.posix_fallocate(file.fileno(), 0, max(1, there.f_bavail * there.f_frsize - leave))
            return
    raise AssertionError("the disk could not be filled")


def make_room(disk: Path) -> None:
    (disk / "filler").unlink()


def status(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["status"])
