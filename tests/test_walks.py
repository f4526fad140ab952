"""Few files take part in a training and in a prediction. Each number may only fall."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import warm
from tests.walked import LR

MOST_FILES_TO_FIRST_STEP = 65  # goal: 45
MOST_FUNCTIONS = 651  # goal: 350; lambdas and comprehensions are functions too
MOST_CALLS = 4_620  # goal: 4,000
MOST_INDEX_READS = 1  # of each split
MOST_FILES_OF_LR = 7  # goal: 6
MOST_FILES_OF_IMAGE = 18  # goal: 14
MOST_FILES_TO_PREDICT = 45  # goal: 30


def walked(folder: Path, *line: str) -> dict[str, Any]:
    """Run a command in a process of its own, which has read nothing yet, and return what it entered."""
    out = folder / "walk.json"
    command = [sys.executable, "-m", "tests.walked", str(out), *line, "--set", "machine.device=cpu"]
    done = warm.run(command, capture_output=True, text=True, timeout=240)
    assert out.exists(), done.stderr
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def first_step(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `pretrain --recipe smoke` enters before its first step, with shards at hand."""
    folder = tmp_path_factory.mktemp("walk")
    sets = {"machine.workers": 0, "optimizer.lr": LR, "schedule.warmup_steps": 0}
    values = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    out = str(folder / "run")
    return walked(folder, "pretrain", "--recipe", "smoke", "--data", str(tiny_data), "--out", out, *values)


@pytest.mark.parametrize(
    ("way", "most"),
    [("files", MOST_FILES_TO_FIRST_STEP), ("lr", MOST_FILES_OF_LR), ("image", MOST_FILES_OF_IMAGE)],
)
def test_pretrain__enters_few_files(first_step: dict[str, Any], way: str, most: int) -> None:
    files = first_step[way]
    assert len(files) <= most, f"{way}: {len(files)} files, at most {most}:\n" + "\n".join(files)


def test_pretrain__calls_few_functions(first_step: dict[str, Any]) -> None:
    calls = first_step["calls"]
    most = sorted(calls.items(), key=lambda one: one[1], reverse=True)[:20]
    assert (len(calls) <= MOST_FUNCTIONS, sum(calls.values()) <= MOST_CALLS) == (True, True), (
        len(calls),
        most,
    )


def test_pretrain__reads_each_index_once(first_step: dict[str, Any]) -> None:
    assert first_step["index_reads"] == 2 * MOST_INDEX_READS


def test_predict__enters_few_files(speck: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(image)
    files = walked(tmp_path, "predict", str(image), "--from", str(speck))["files"]
    assert len(files) <= MOST_FILES_TO_PREDICT, f"{len(files)} files:\n" + "\n".join(files)
