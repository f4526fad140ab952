"""The scripts about what surrounds the step: ratios and goals of planted numbers, and each of them run with
tiny settings.
"""

import importlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


def run(name: str, results: Path, *words: object) -> dict[str, Any]:
    """Run a script; returns what it wrote."""
    command = [sys.executable, SCRIPTS / f"{name}.py", "--results", results, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    assert found["machine"]["versions"]["vitctl"] and found["limits"]
    return found


def check_rows(found: dict[str, Any], num_rounds: int, goals: list[float | None]) -> None:
    """Both sides have numbers in every round, and the ratio is theirs to ours or the other way round."""
    assert [row["goal"] for row in found["rows"]] == pytest.approx(goals)
    for row in found["rows"]:
        own, other = (
            [numbers[row["number"]] for numbers in row[side]["rounds"]] for side in ("ours", "theirs")
        )
        assert len(own) == len(other) == num_rounds and min(own + other) > 0
        pairs = [(b / a if row["better"] == "less" else a / b) for a, b in zip(own, other, strict=True)]
        assert row["ratio"]["median"] == pytest.approx(float(np.median(pairs)))
        assert row["ours"]["settings"] and row["theirs"]["settings"]


def photographs(path: Path, names: list[str]) -> Path:
    """A tar of small JPEG files."""
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for name in names:
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)).save(file, "JPEG")
            info = tarfile.TarInfo(name)
            info.size = len(file.getvalue())
            tar.addfile(info, io.BytesIO(file.getvalue()))
    return path


@pytest.mark.slow
def test_ridge__beside_scikit_learn_with_equal_answers(tmp_path: Path) -> None:
    small = ("--images", 300, "--features", 32, "--classes", 5, "--sklearn", 3, "--rounds", 2)
    found = run("ridge", tmp_path, *small)
    check_rows(found, 2, [10.0])
    assert found["rows"][0]["notes"]["largest difference of a score"] < 1e-9
    assert found["rows"][0]["notes"]["share of equal answers"] == 1


@pytest.mark.slow
def test_saving__beside_torch_save_and_dcp(tmp_path: Path) -> None:
    found = run("saving", tmp_path, "--model", "Ti/16", "--rounds", 2, "--device", "cpu")
    check_rows(found, 2, [10.0, 10.0, None, None, None, None])
    assert found["limits"]["copy_seconds"] > 0
    for row in found["rows"]:
        for side in ("ours", "theirs"):
            assert all(numbers["finished"] >= numbers["stall"] for numbers in row[side]["rounds"])


@pytest.mark.slow
def test_loader__all_sides_hand_over_batches(tmp_path: Path) -> None:
    photos = photographs(tmp_path / "photos.tar", [f"{number}.jpg" for number in range(150)])
    sides = ("vitctl", "vitctl-antialias", "timm", "torchvision", "webdataset")
    small = ("--images", 100, "--rounds", 1, "--workers", 1)
    found = run("loader", tmp_path, "--photos", photos, *small, "--sides", *sides)
    check_rows(found, 1, [None, 2.0, None, 1.5, None, None])


@pytest.mark.slow
def test_end_to_end__both_sides_train(tmp_path: Path) -> None:
    names = [f"{split}/class{c}/{n}.jpg" for split in ("train", "test") for c in range(10) for n in range(4)]
    photos = photographs(tmp_path / "photos.tar", names)
    small = ("--train", 40, "--test", 20, "--steps", 4, "--every", 2, "--batch-size", 8, "--rounds", 1)
    found = run("end_to_end", tmp_path, "--photos", photos, "--accuracy", 0, *small)
    check_rows(found, 1, [1.5, 1.5])


@pytest.mark.slow
def test_start__commands_of_both_sides(tmp_path: Path) -> None:
    found = run("start", tmp_path, "--rounds", 1)
    check_rows(found, 1, [1 / 0.7, None, None, 1 / 0.7, None, 10.0, 1.0])


def test_end_to_end__seconds_to_an_accuracy_of_a_planted_log() -> None:
    end_to_end = importlib.import_module("end_to_end")
    records = [
        {"kind": "train", "time": 101.0, "images_per_second": 5.0},
        {"kind": "evaluate", "time": 102.0, "accuracy": 0.2},
        {"kind": "train", "time": 103.0, "images_per_second": 50.0},
        {"kind": "evaluate", "time": 104.0, "accuracy": 0.4},
        {"kind": "evaluate", "time": 106.0, "accuracy": 0.3},
    ]
    lines = ["a warning", *map(json.dumps, records)]
    assert end_to_end.numbers(lines, 100.0, 0.3)["seconds to accuracy"] == 4.0
    assert end_to_end.numbers(lines, 100.0, 0.5)["seconds to accuracy"] == float("inf")
    assert end_to_end.numbers(lines, 100.0, 0.3)["images/s"] == 50.0  # the first is a warm-up


def test_start__first_step_of_a_planted_log(tmp_path: Path) -> None:
    start, log = importlib.import_module("start"), tmp_path / "log.jsonl"
    assert start.first_step(log, 0) is None
    lines = [
        json.dumps({"kind": kind, "time": time}) + "\n"
        for kind, time in (("train", 1.0), ("data", 2.0), ("train", 3.0))
    ]
    log.write_text("".join(lines))
    assert start.first_step(log, 0) == 1.0
    assert start.first_step(log, len(lines[0])) == 3.0
    log.write_text(lines[0] + lines[2][:-4])  # still being written
    assert start.first_step(log, len(lines[0])) is None
