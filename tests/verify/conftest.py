"""A finished run that is verified and harmed, and what is found of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from vitctl.launch.prepare import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe
from vitctl.verify.finding import FAILS
from vitctl.verify.verify import verify

SHORT = {"schedule.total_steps": 12, "checkpoint.every_steps": 4, "evaluation.every_steps": 6}
Train = Callable[..., Path]


def trained(folder: Path, data: Path, **values: Any) -> Path:
    """The tiny recipe in 12 steps, in this process."""
    given = {"data.path": str(data), **SHORT, **values}
    prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in given.items()]), folder)
    work(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run; it stays as it is."""
    return trained(tmp_path_factory.mktemp("finished") / "run", tiny_data)


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The same, to be harmed."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture
def train(tiny_data: Path, tmp_path: Path) -> Train:
    """train(name, **values) makes a run of the tiny recipe."""

    def do(name: str, data: Path = tiny_data, **values: Any) -> Path:
        return trained(tmp_path / name, data, **values)

    return do


def found(folder: Path, **options: Any) -> list[tuple[str, str]]:
    """What differs or is not proven: what it is, and the text."""
    return [(one.what, one.text) for _, one in verify(folder, **options) if one.state in FAILS]


def said(folder: Path, what: str, **options: Any) -> list[tuple[str, str]]:
    """State and text of the lines about one thing."""
    return [(one.state, one.text) for _, one in verify(folder, **options) if one.what == what]


def batches(folder: Path) -> list[list[str]]:
    """The keys of each step's batch, in order, as a run of one process wrote them."""
    lines = (folder / "samples" / "rank_00.jsonl").read_text().splitlines()
    return [json.loads(line)["keys"] for line in lines]


def first_use(folder: Path, key: str) -> tuple[int, int]:
    """Step and position at which a sample is first used."""
    return next((step, keys.index(key)) for step, keys in enumerate(batches(folder), 1) if key in keys)


def edit(path: Path, old: str, new: str, count: int = 1) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def relinked(path: Path) -> None:
    """What a forger does: every link computed again."""
    from vitctl.engine.trace.chain import linked, split

    before, lines = "", []
    for line in path.read_bytes().splitlines():
        lines.append(linked(split(line).body, before))
        before = split(lines[-1]).sha256
    path.write_bytes(b"\n".join(lines) + b"\n")
