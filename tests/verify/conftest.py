"""A finished run that is verified and harmed, and the findings about it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, batch_keys
from vitctl.engine.checkpoint import read_checkpoint, save_checkpoint
from vitctl.engine.journal import RECORDS, json_digest
from vitctl.jobs.record.result import published_digest, read_result
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.models.weights.weights_file import read_weights
from vitctl.recipe.load import Override, load_recipe
from vitctl.verify.finding import FAILS
from vitctl.verify.run_check import verify

SHORT = {"schedule.total_steps": 12, "checkpoint.every_steps": 4, "evaluation.every_steps": 6}
LAST = "checkpoints/step_00000012"
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


@pytest.fixture(scope="session")
def on_test(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights were trained on the images that are scored."""
    return trained(tmp_path_factory.mktemp("on_test") / "run", tiny_data, **{"data.train_split": "test"})


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The honest run, to be harmed."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture
def train(tiny_data: Path, tmp_path: Path) -> Train:
    """train(name, **values) makes a run of the tiny recipe."""

    def do(name: str, data: Path = tiny_data, **values: Any) -> Path:
        return trained(tmp_path / name, data, **values)

    return do


def longer(run: Path, allow: str = "schedule.total_steps", **values: Any) -> None:
    """Resume a finished run with changed values."""
    given = [Override(key, value) for key, value in (values or {"schedule.total_steps": 20}).items()]
    prepare_run(load_recipe(str(run / "recipe.toml"), given), run, allow=(allow,))
    work(run)


def found(folder: Path, **options: Any) -> list[tuple[str, str]]:
    """What differs or is not proven: what it is, and the text."""
    return [(one.what, one.text) for _, one in verify(folder, **options) if one.state in FAILS]


def said(folder: Path, what: str, **options: Any) -> list[tuple[str, str]]:
    """State and text of the lines about one thing."""
    return [(one.state, one.text) for _, one in verify(folder, **options) if one.what == what]


def first_use(folder: Path, key: str) -> tuple[int, int]:
    """Step and position at which a sample is first used."""
    return next((step, keys.index(key)) for step, keys in enumerate(batch_keys(folder), 1) if key in keys)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def as_earlier(run: Path) -> None:
    """Make a run what an earlier release would have written: with a link of lines as the end of a record."""
    link, states, log = "0" * 64, {}, run / "log.jsonl"
    log.write_text(re.sub(r'"digest": "\w+", ', "", log.read_text()))
    for file in sorted((run / "checkpoints").glob("*/state.json")):
        state = json.loads(file.read_text())
        state |= {"log_head": link, "steps_head": link, "unrecorded": 0}
        del state["sha256"]
        states[file.parent.name] = json_digest(state)
        file.write_text(json.dumps({**state, "sha256": states[file.parent.name]}))
    recorded(run, **dict.fromkeys(RECORDS, link), checkpoints=states)


def recorded(run: Path, **record: Any) -> None:
    """Give a result other digests of its records, and its own digest anew."""
    rewrite(run / "result.json", lambda result: result["record"].update(record))
    result = read_result(run, own=False)
    rewrite(run / "result.json", lambda r: r["record"].update({"result.json": published_digest(result)}))


def replaced(run: Path, other: Path, *names: str) -> None:
    """Put tensors of another run into the last checkpoint, with digests of them."""
    folder, theirs = run / LAST, read_checkpoint(other / LAST)
    saved, stored = read_checkpoint(folder), read_weights(str(folder / "model.safetensors"))
    tensors = {n: (theirs if n in names else saved).tensors(n) for n in ("model", "ema", "optimizer")}
    state = {key: value for key, value in saved.state.items() if key not in ("format", "step", "files")}
    shutil.rmtree(folder)
    save_checkpoint(folder.parent, 12, tensors=tensors, config=stored.config, meta=stored.meta, state=state)
