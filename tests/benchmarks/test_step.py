"""benchmarks/step.py and inference.py with a tiny network: they run, and both sides are measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.conftest import script
from tests.conftest import ROOT

TINY = ("--models", "Ti/16", "--image-size", "32", "--rounds", "1", "--no-compile")


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


def results(name: str, folder: Path, *arguments: str) -> Any:
    done = run(name, *TINY, *arguments, "--results", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / f"{name}.json").read_text())


def sides_of(row: Any) -> tuple[str, str]:
    for side in ("ours", "theirs"):
        assert all(numbers[row["number"]] > 0 for numbers in row[side]["rounds"])
    return row["ours"]["settings"].partition(",")[0], row["theirs"]["settings"].partition(",")[0]


def test_step__ours_is_the_update_of_a_prepared_training() -> None:
    step = script("step")
    work = step.Work("Ti/16", 32, 2, "float32", "cpu")
    take = step.our_step(work, {"model.depth": 1})
    first, second, third = (float(take()) for _ in range(3))
    assert first > second > third > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_step__says_that_there_is_none(tmp_path: Path) -> None:
    done = run("step", "--device", "cuda", "--results", str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "no CUDA device here: nothing was measured\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_step__both_sides_and_their_memory(tmp_path: Path) -> None:
    found = results("step", tmp_path, "--batch", "2", "--precisions", "bf16")
    assert [sides_of(row) for row in found["rows"]] == [("ours", "timm")] * 4
    assert [row["number"] for row in found["rows"]] == ["cpu", "cpu", "peak_mib", "peak_mib"]
    assert {"ours", "timm"} == set(found["rows"][0]["notes"]["tried"])


@pytest.mark.slow
def test_inference__sides_agree_and_are_measured(tmp_path: Path) -> None:
    found = results("inference", tmp_path, "--batch", "2", "--precisions", "float32")
    assert [sides_of(row) for row in found["rows"]] == [
        ("ours in torch", "timm in torch"),
        ("our ONNX", "timm's ONNX"),
        ("our ONNX", "ours in torch"),
        ("our ONNX", "timm in torch"),
    ]
    assert all(difference < 1e-3 for difference in found["rows"][0]["notes"]["largest_differences"].values())


def test_inference__logits_that_differ_end_it(tmp_path: Path) -> None:
    inference = script("inference")
    import numpy as np

    own = np.random.default_rng(0).normal(size=(2, 10))
    np.save(tmp_path / "float32 ours in torch, 0.npy", own)
    np.save(tmp_path / "float32 timm in torch, 1.npy", own + 1e-6)
    assert set(inference.compare_logits(tmp_path, "float32")) == {
        "float32 ours in torch",
        "float32 timm in torch",
    }
    np.save(tmp_path / "float32 timm in torch, 1.npy", own + 0.1)
    with pytest.raises(SystemExit, match=r"timm in torch differs from ours in torch by 0\.1"):
        inference.compare_logits(tmp_path, "float32")
