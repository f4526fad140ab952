"""SIGKILL and second signals: nothing is left behind, nothing is torn, and the resumed run equals one that
was never killed.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.conftest import checkpoint, harmed, paced
from tests.faults.conftest import (
    ROOT,
    assert_same,
    command,
    fill,
    make_room,
    prepared,
    records,
    resume,
)
from tests.matrix import slow
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.launch.worker import work

SHARED_MEMORY = Path("/dev/shm")
PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
EVERY_2 = {"checkpoint.every_steps": 2}


def soon(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not (value := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(value)


def test_second_signal__in_the_middle_of_a_save_tears_nothing(
    tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    """The save writes in the background and never ends: the first signal waits, the second does not."""
    folder = prepared(tmp_path / "a", tiny_data, **EVERY_2)
    with warm.Popen(harmed("stuck_save", folder), **PIPED, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("vitctl: SIGTERM: stopping as soon as")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=60)
    assert (process.returncode, text) == (3, "vitctl: stopped at once; what was saved is complete\n")
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (2, [])
    work(folder)
    assert [r["step"] for r in records(folder, "resume")] == [2]
    assert_same(folder, straight)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000010", "step_00000012"]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_compile__the_first_signal_waits_for_its_end_and_the_second_does_not(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """With torch's compiler and an empty cache: minutes for a large model, seconds for this one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder, family = prepared(tmp_path / "a", tiny_data, **{"machine.compile": True}), []
    with subprocess.Popen(harmed("compiling", folder), **PIPED, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "compiling\n"
        for _ in range(times):
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            text = process.stderr.readline()
        process.communicate(timeout=300)
    assert process.returncode == 3
    assert psutil.wait_procs(family, timeout=30)[1] == []
    saved, problems = newest_checkpoint(folder / "checkpoints")
    compiled = [r["step"] for r in records(folder, "compile")] if (folder / "log.jsonl").exists() else []
    if times == 2:
        assert text == "vitctl: stopped at once; what was saved is complete\n"
        assert (saved, problems, compiled) == (None, [], [])
    else:
        assert saved is not None
        assert (saved.step, problems, compiled) == (0, [], [0])
    straight = prepared(tmp_path / "straight", tiny_data, **{"machine.compile": True})
    for run_dir in (folder, straight):
        resume(run_dir)
    assert checkpoint(folder, 12) == checkpoint(straight, 12)


def zombies() -> set[int]:
    """Children of this process that ended and were not waited for.

    Tests before this one may have left some.
    """
    return {p.pid for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE}


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["loader worker", pytest.param("all", marks=pytest.mark.slow)])
def test_killed__no_process_and_no_memory_is_left(tiny_data: Path, tmp_path: Path, whom: str) -> None:
    """One loader process, which the run reports; or the run with its loader processes."""
    values = {"machine.workers": 2, "schedule.total_steps": 4000, "evaluation.every_steps": 0}
    folder, shared, earlier = tmp_path / "a", set(os.listdir(SHARED_MEMORY)), zombies()
    line = command(folder, tiny_data, **values)
    with warm.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert soon(lambda: (folder / "checkpoints" / "step_00000003").exists() or process.poll() is not None)
        family = psutil.Process(process.pid).children(recursive=True)  # one verified the shards and ended
        workers = [one for one in family if one.status() != psutil.STATUS_ZOMBIE]
        assert len(workers) == 2
        for one in workers[:1] if whom == "loader worker" else [*workers, psutil.Process(process.pid)]:
            one.kill()
        _, text = process.communicate(timeout=60)
    if whom == "loader worker":
        assert process.returncode == 2
        [line] = text.splitlines()
        assert line.startswith(
            "vitctl: a loader process was killed (SIGKILL), most often out of memory; use fewer"
        )
        assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    else:
        assert (process.returncode, text) == (-signal.SIGKILL, "")
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
    assert zombies() <= earlier
    assert soon(
        lambda: not [n for n in set(os.listdir(SHARED_MEMORY)) - shared if n.startswith(("torch_", "sem."))]
    )
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None and problems == []


@pytest.mark.parametrize("kind", ["in the middle of a save", *slow("after a save", "full disk")])
def test_killed__the_run_resumes_bit_for_bit(
    kind: str, tiny_data: Path, straight: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """benchmarks/soak.py kills one run again and again, in every way."""
    root = request.getfixturevalue("small_disk") if kind == "full disk" else tmp_path
    folder = root / "a"
    if kind == "in the middle of a save":
        line = harmed("stuck_save", prepared(folder, tiny_data, **EVERY_2))
    else:
        line = paced(command(folder, tiny_data))
    with warm.Popen(line, **PIPED, cwd=ROOT) as process:
        if kind == "in the middle of a save":
            assert process.stdout is not None
            assert process.stdout.readline() == "saving\n"
        else:
            assert soon(lambda: newest_checkpoint(folder / "checkpoints")[0])
        if kind == "full disk":
            fill(root, 4096)
            time.sleep(0.2)
        process.kill()
    if kind == "full disk":
        make_room(root)
    assert process.returncode == -signal.SIGKILL
    assert newest_checkpoint(folder / "checkpoints")[1] == []
    work(folder)
    assert_same(folder, straight)
    assert list((folder / "checkpoints").glob(".*")) == []
