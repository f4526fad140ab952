"""One 20-step loss curve in float64, and everything that must not change it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import (
    GOLDEN,
    Run,
    assert_golden,
    checkpoint,
    command,
    curve,
    paced,
    records,
    run_as,
    run_as_two,
    step_images,
)
from tests.matrix import slow


def test_golden__straight(one_process: Path, request: pytest.FixtureRequest) -> None:
    folder = one_process
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(json.dumps(curve(folder), indent=1) + "\n")
    assert_golden(folder)
    losses = curve(folder)["loss"]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert curve(folder)["lr"][0] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batch", "workers"), [*slow((16, 2)), (5, 0)])
def test_golden__micro_batches_and_workers(run: Run, micro_batch: int, workers: int) -> None:
    assert_golden(run("other", **{"machine.micro_batch": micro_batch, "machine.workers": workers}))


MIXED = {"data.mixup_alpha": 0.5, "data.cutmix_alpha": 1.0, "data.randaugment_layers": 2}


def test_mixed__micro_batches_workers_and_processes(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    one = run("one", **MIXED)
    golden = json.loads(GOLDEN.read_text())
    assert curve(one)["loss"] != pytest.approx(golden["loss"], rel=1e-3)
    folder = tmp_path / "two"
    run_as_two(folder, tiny_data, **{**MIXED, "machine.micro_batch": 3, "machine.workers": 1})
    for name, values in curve(folder).items():
        assert values == pytest.approx(curve(one)[name], rel=1e-9, abs=0), name
    assert step_images(folder) == step_images(one)


@pytest.mark.slow
def test_golden__two_processes(one_process: Path, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    run_as_two(folder, tiny_data, **{"machine.micro_batch": 5})
    assert_golden(folder)
    assert step_images(folder) == step_images(one_process)
    results = [json.loads((path / "result.json").read_text())["metrics"] for path in (folder, one_process)]
    assert results[0] == results[1]
    assert results[0]["total"] == 23


@pytest.mark.slow
@pytest.mark.parametrize("processes", [3, 4])
def test_resumed__in_several_processes_bit_for_bit(tiny_data: Path, tmp_path: Path, processes: int) -> None:
    """Three numbers have a sum that depends on their order, and DDP changes it after its first pass."""
    values = {"schedule.batch_size": 24, "schedule.total_steps": 12}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run_as(processes, straight, tiny_data, **values)
    run_as(processes, resumed, tiny_data, **values)
    (resumed / "result.json").unlink()
    for late in [one for one in (resumed / "checkpoints").iterdir() if one.name != "step_00000006"]:
        shutil.rmtree(late)
    run_as(processes, resumed, tiny_data, **values)
    assert [r["step"] for r in records(resumed, "resume")] == [6]
    assert checkpoint(resumed, 12) == checkpoint(straight, 12)
    assert (resumed / "steps.jsonl").read_text().count('"kind": "start"') == 2


def test_killed_and_resumed__bit_for_bit(one_process: Path, tiny_data: Path, tmp_path: Path) -> None:
    """SIGKILL at a random moment of the run, then the same command again."""
    straight, folder = one_process, tmp_path / "killed"
    slow = {"machine.workers": 1}
    step = random.randrange(7, 18)
    line = paced(command(folder, tiny_data, **slow))
    process = warm.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (folder / "log.jsonl").exists() or f'"step": {step},' not in (folder / "log.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.002)
    while not (folder / "checkpoints" / "step_00000006").exists():  # it is written while the training goes on
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
    assert not (folder / "result.json").exists()
    done = warm.run(command(folder, tiny_data, **slow), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stdout
    assert curve(folder) == curve(straight)
    assert step_images(folder) == step_images(straight)
    assert checkpoint(folder, 20) == checkpoint(straight, 20)
    assert set(checkpoint(folder, 20)) == {"model.safetensors", "ema.safetensors", "optimizer.safetensors"}


@pytest.mark.slow
def test_stopped_by_a_signal__bit_for_bit(one_process: Path, tiny_data: Path, tmp_path: Path) -> None:
    straight, folder = one_process, tmp_path / "stopped"
    line = paced(command(folder, tiny_data))
    with warm.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "log.jsonl").exists() or '"step": 3,' not in (folder / "log.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 3
    assert f"resume with: vitctl resume {folder}" in said
    done = warm.run([sys.executable, "-m", "vitctl", "resume", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert curve(folder) == curve(straight)
    assert checkpoint(folder, 20) == checkpoint(straight, 20)
