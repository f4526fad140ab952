"""Runs in one process and in several on this machine.

That two processes read every sample once, and step the learning rate once per update, is held by
tests/test_golden.py: the loss, rate and sample keys of two processes equal those of one.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.conftest import TINY, WITH_WORKER, Run, assert_golden, checkpoint, command, paced, sample_keys
from tests.launch.conftest import HOLD, Load
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.errors import LaunchError
from vitctl.launch import launcher
from vitctl.launch.launcher import launch
from vitctl.launch.prepare import prepare_run
from vitctl.recipe.load import Override, load_recipe
from vitctl.system.process import SIGNALS


def test_launch__one_run_per_folder(load: Load, tmp_path: Path) -> None:
    prepare_run(load(), tmp_path)
    other = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            LaunchError, match="another vitctl is running in this folder; wait for it, or choose another"
        ):
            launch(tmp_path, lambda _: None)
        holder.communicate("\n")
    assert launch(tmp_path, lambda _: None)["status"] == "done"


def test_one_process__whatever_the_environment_says_of_accelerate(
    run: Run, one_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `accelerate launch` with a configuration file that somebody made for something else."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    folder = run("run")
    assert_golden(folder)
    monkeypatch.undo()
    assert checkpoint(folder, 20) == checkpoint(one_process, 20)


def test_two_processes__the_error_of_one_is_the_last_line(tiny_data: Path, tmp_path: Path) -> None:
    """A data set whose scored split has an unreadable image: one process meets it, the other must not hang."""
    from tests.engine.test_trainer import damaged

    data = damaged(tiny_data, tmp_path / "data", "test", [20])
    folder = tmp_path / "run"
    done = warm.run(
        command(
            folder, data, **{"machine.processes": 2, "schedule.total_steps": 6, "evaluation.every_steps": 0}
        ),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vitctl: ")
    assert "cannot be evaluated" in last
    assert last.endswith(f"(process 1; {folder / 'logs' / 'rank_01.txt'})")
    assert "Traceback" not in done.stderr
    assert "cannot be evaluated" in (folder / "logs" / "rank_01.txt").read_text()
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert last == f"vitctl: {result['error']}"


def test_processes__are_not_started_inside_a_cluster_job(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under srun or torchrun the processes are there already: each is the body, none starts others."""
    prepare_run(load(**{"machine.processes": 2}), tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    called: list[Path] = []

    def work(run_dir: Path, *_: Any) -> dict[str, str]:
        called.append(run_dir)
        return {"status": "done"}

    monkeypatch.setattr(launcher, "work_as_member", work)
    assert launch(tmp_path, lambda _: None) == {"status": "done"}
    assert called == [tmp_path]


def test_two_processes__a_killed_one_is_named_and_the_run_goes_on(
    run: Run, one_process: Path, tiny_data: Path, tmp_path: Path
) -> None:
    straight, folder = one_process, tmp_path / "run"
    two = paced(
        command(folder, tiny_data, **{"machine.processes": 2, "checkpoint.every_steps": 2}), launched=True
    )
    with warm.Popen(two, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "log.jsonl").exists() or '"step": 5,' not in (folder / "log.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        max(ranks, key=lambda p: int(p.environ()["RANK"])).kill()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert said.splitlines()[-1] == (
        "vitctl: process 1 of 2 was killed (SIGKILL), most often because it ran out of memory; "
        f"{folder / 'logs' / 'rank_01.txt'} has its output; resume with: vitctl resume {folder}"
    )
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert not any(p.is_running() and p.status() != "zombie" for p in ranks)
    run("run", **{"checkpoint.every_steps": 2})
    assert_golden(folder)
    assert sample_keys(folder) == sample_keys(straight)


def test_two_processes__none_outlives_the_launcher(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two = command(
        folder, tiny_data, **{"machine.processes": 2, "machine.workers": 1, "schedule.total_steps": 5000}
    )
    with warm.Popen(two, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not (folder / "log.jsonl").exists() or '"step": 2,' not in (folder / "log.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [p for p in alive if p.status() != "zombie"] == []


def test_launch__progress_is_told_from_step_0(tiny_data: Path, tmp_path: Path) -> None:
    """The log has every tenth of 20 steps; the screen is told before the first, by one process and by two."""
    for processes in (1, 2):
        values = {"data.path": str(tiny_data), "machine.processes": processes, "log.every_steps": 10}
        folder = tmp_path / str(processes)
        prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in values.items()]), folder)
        seen: list[dict[str, Any]] = []
        launch(folder, seen.append)
        told = [record for record in seen if record["kind"] == "now"]
        assert {"starting", "reading weights and data"} & {record.get("text") for record in told}
        first = next(n for n, record in enumerate(seen) if record["kind"] == "train")
        if processes == 1:
            assert any(record.get("step") == 0 for record in seen[:first])
        assert '"now"' not in (folder / "log.jsonl").read_text()


HOSTILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: fp8
num_processes: 7
num_machines: 3
machine_rank: 2
use_cpu: true
debug: true
gpu_ids: '5'
main_process_ip: 10.9.9.9
main_process_port: 1
dynamo_config:
  dynamo_backend: INDUCTOR
"""


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, str]:
    """An environment in which accelerate finds a configuration that somebody made for something else."""
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text(HOSTILE)
    variables = {
        "PET_NNODES": "5",
        "PET_MAX_RESTARTS": "9",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    return {**os.environ, **variables, "HF_HOME": str(tmp_path / "hf")}


@pytest.mark.slow
def test_two_launches_at_once__beside_a_configuration_of_somebody_else(
    hostile: dict[str, str], load: Load, run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    """One by vitctl, one by its line, pasted: neither takes the other's port, a rank or a setting."""
    folder, pasted = tmp_path / "run", tmp_path / "pasted"
    two = {"machine.processes": 2, "optimizer.clip_norm": 0.0, "machine.micro_batch": 8}
    prepare_run(load(**two), pasted)
    hostile_line = {name: value for name, value in hostile.items() if not name.startswith("PET_")}
    words: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        warm.Popen(command(folder, tiny_data, **two), env=hostile, **words),
        subprocess.Popen((pasted / "launch.txt").read_text(), shell=True, env=hostile_line, **words),
    ]
    (shown, *said), (_, *pasted_said) = (process.communicate(timeout=240) for process in both)
    assert [process.returncode for process in both] == [0, 0], (said, pasted_said)
    assert said == [""]
    assert [text.splitlines()[-1] for text in pasted_said] == [f"done: {pasted / 'result.json'}"]
    straight = run("straight", **{**two, "machine.processes": 1})
    for one in (folder, pasted):
        assert json.loads((one / "result.json").read_text())["status"] == "done"
        assert checkpoint(one, 20) == checkpoint(straight, 20)
        assert sample_keys(one) == sample_keys(straight)
        assert json.loads((one / "result.json").read_text())["provenance"]["data_verified"] == "whole"
        for part in ("samples/rank_00.jsonl", "samples/rank_01.jsonl"):
            assert (one / part).exists()
        assert sorted(p.name for p in (one / "verified").iterdir()) == [
            "part_0_of_2.jsonl",
            "part_1_of_2.jsonl",
        ]
    assert "going on" not in shown
    assert "step 20/20" in shown
    assert re.search(r"^node \S+: processes 0 to 1, CPU", shown, re.M)
    assert next((folder / "logs").glob("launcher_*.txt")).read_text() == ""


def test_signal__is_passed_on_once_and_a_slow_save_completes(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = {"machine.processes": 2, "checkpoint.every_steps": 0, "schedule.total_steps": 5000}
    code = WITH_WORKER.format(worker="tests.launch.slow_worker")
    line = [sys.executable, "-c", code, *command(folder, tiny_data, **values)[3:]]
    with warm.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while not (folder / "log.jsonl").exists() or '"step": 2,' not in (folder / "log.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        _, said = process.communicate(timeout=120)
    assert process.returncode == 3, said
    assert said.splitlines() == [
        "vitctl: SIGINT: stopping as soon as the work so far is safe; a second signal stops at once",
        f"stopped and saved in {folder}; resume with: vitctl resume {folder}",
    ]
    steps = [
        json.loads(text)["step"]
        for text in (folder / "log.jsonl").read_text().splitlines()
        if '"train"' in text
    ]
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (steps[-1], [])
    for rank in (0, 1):
        assert (folder / "logs" / f"rank_0{rank}.txt").read_text().count(
            "stopping as soon as the work so far is safe"
        ) == 1


def test_launch__of_a_line_that_accelerate_does_not_understand_is_no_silence(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an accelerate that has dropped a flag."""
    prepare_run(load(**{"machine.processes": 2}), tmp_path)
    monkeypatch.setattr(launcher, "accelerate_arguments", lambda *_: ["--no_such_flag", "--module", "x"])
    monkeypatch.delenv("RANK", raising=False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.raises(RuntimeError, match=r"the processes ended \(.*\) without an error message"):
        launch(tmp_path, lambda _: None)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


def test_line__pasted_by_a_person_says_how_it_ended(load: Load, tmp_path: Path) -> None:
    """The process that vitctl starts is silent; one that a person starts says in one line where to look, and
    in another how it ended.
    """
    folder = tmp_path / "run"
    prepare_run(load(**{"schedule.total_steps": 6, "evaluation.every_steps": 0}), folder)
    line = shlex.split((folder / "launch.txt").read_text())
    done = warm.run(line, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "")
    said = [
        f"{folder}: progress is in log.jsonl, the output of each process in logs/",
        f"done: {folder / 'result.json'}",
    ]
    assert done.stderr.splitlines() == said
    recipe = folder / "recipe.toml"
    recipe.write_text(re.sub(r"(?m)^lr = .*$", 'lr = "x"', recipe.read_text()))
    done = warm.run(line, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("vitctl: recipe.toml:")
    done = warm.run([*line[:-1], str(tmp_path / "none")], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "not a prepared run folder; type the vitctl command" in done.stderr
    assert not (tmp_path / "none").exists()


def test_errors_into__a_full_disk_is_no_error_of_its_own() -> None:
    """It hid why the processes had ended."""
    code = (
        "import logging; from pathlib import Path; from vitctl.launch import launcher\n"
        "with launcher._errors_into(Path('/dev/full')):\n"
        "    logging.getLogger('vitctl').error('why')\n"
        "print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr
