"""Runs in one process, in several on this machine, and on several machines, which are several vitctls here.

tests/test_golden.py shows that two processes compute what one does.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from tests import warm
from tests.conftest import (
    TINY,
    WITH_WORKER,
    Run,
    assert_golden,
    checkpoint,
    command,
    free_port,
    step_images,
)
from tests.launch.conftest import (
    FOREGROUND,
    Load,
    assert_gone,
    ended,
    family_of,
    held,
    is_open,
    is_signalled,
    kill_rank,
    lock_held,
    logged,
    machine,
    machines,
    rank_of,
    says,
    wait_for,
)
from tests.matrix import slow
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.engine.journal import append_record, cut_after
from vitctl.errors import LaunchError, LostProcess
from vitctl.launch import launcher, worker
from vitctl.launch.cluster import LaunchConfig
from vitctl.launch.launcher import Follower
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.run_folder import LOGS
from vitctl.launch.worker import launch, work
from vitctl.recipe.load import Override, load_recipe
from vitctl.system.process import SIGNALS

TWO: dict[str, Any] = {"machine.processes": 2}
# One process computes these to the bit as two do: without clipping, each sums the gradients of the same
# halves.
EXACT = {"optimizer.clip_norm": 0.0, "machine.micro_batch": 8, "checkpoint.every_steps": 2}
LONG = {"schedule.total_steps": 100_000, "evaluation.every_steps": 0, "checkpoint.every_steps": 0}
PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def damaged_test_split(data: Path, folder: Path) -> Path:
    """Data whose scored split has one unreadable image: one of two processes meets it."""
    from tests.engine.test_trainer import damaged

    return damaged(data, folder, "test", [20])


def killed_text(rank: int, folder: Path) -> str:
    return (
        f"vitctl: process {rank} of 2 was killed (SIGKILL), most often because it ran out of memory; "
        f"{folder / 'logs' / f'rank_0{rank}.txt'} has its output; resume with: vitctl resume {folder}"
    )


def test_launch__one_run_per_folder(load: Load, tmp_path: Path) -> None:
    prepare_run(load(), tmp_path)
    with lock_held(tmp_path), pytest.raises(LaunchError, match="another vitctl is running in this folder"):
        launch(tmp_path, lambda _: None)
    assert launch(tmp_path, lambda _: None)["status"] == "done"


@pytest.mark.slow
def test_one_process__ignores_settings_of_accelerate(
    run: Run, one_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `accelerate launch` with a configuration file for something else."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert checkpoint(run("run"), 20) == checkpoint(one_process, 20)


def test_processes__are_not_started_inside_a_cluster_job(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under srun or torchrun the processes are there already: each does the job, none starts others."""
    prepare_run(load(**TWO), tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "2950"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "work_as_member", lambda folder, *_: {"status": folder})
    assert launch(tmp_path, lambda _: None) == {"status": tmp_path}


@pytest.mark.slow
def test_launch__reports_progress_before_the_first_logged_step(tiny_data: Path, tmp_path: Path) -> None:
    values = {"data.path": str(tiny_data), "log.every_steps": 10}
    prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in values.items()]), tmp_path)
    seen: list[dict[str, Any]] = []
    launch(tmp_path, seen.append)
    first = next(n for n, record in enumerate(seen) if record["kind"] == "train")
    now = [record for record in seen[:first] if record["kind"] == "now"]
    assert {"starting", "reading weights and data"} <= {record.get("text") for record in now}
    assert any(record.get("step") == 0 for record in now)
    assert '"now"' not in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize("nodes", [1, 2])
def test_launch__of_an_agent_that_starts_nothing(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """As of an accelerate that has dropped a flag, or of machines that do not meet."""
    config = LaunchConfig(nodes, "127.0.0.1")
    prepare_run(load(**TWO), tmp_path, config=config)
    monkeypatch.setattr(launcher, "accelerate_arguments", lambda *_: ["--no_such_flag", "--module", "x"])
    monkeypatch.delenv("RANK", raising=False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    expected = RuntimeError if nodes == 1 else LaunchError
    with pytest.raises(expected, match=r"without an error|before all processes reached") as caught:
        launch(tmp_path, lambda _: None, config)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"
    [log] = (tmp_path / LOGS).glob("launcher_*.txt")
    assert log.name in str(caught.value)
    assert "unrecognized arguments" in log.read_text() or "required" in log.read_text()


@pytest.mark.slow
def test_two_processes__the_error_of_one_is_the_last_line(tiny_data: Path, tmp_path: Path) -> None:
    """The other process must not hang."""
    folder, data = tmp_path / "run", damaged_test_split(tiny_data, tmp_path / "data")
    values = {"schedule.total_steps": 6, "evaluation.every_steps": 0}
    done = warm.run(command(folder, data, **TWO, **values), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "cannot be evaluated" in last
    assert last.endswith(f"(process 1; {folder / 'logs' / 'rank_01.txt'})")
    assert "Traceback" not in done.stderr
    assert "Traceback" in (folder / "logs" / "rank_01.txt").read_text()
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], f"vitctl: {result['error']}") == ("failed", last)


def test_two_processes__a_killed_one_is_named_and_the_run_resumes(
    run: Run, one_process: Path, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    one = machine(folder, tiny_data, **TWO, **{"checkpoint.every_steps": 2})
    wait_for(logged(folder, 5), [one])
    family = family_of([one])
    assert sorted(rank for rank in map(rank_of, family) if rank) == ["0", "1"]
    kill_rank(1, [one])
    [(code, _, text)] = ended([one])
    assert (code, text.splitlines()[-1]) == (3, killed_text(1, folder))
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert (folder / LOGS / "now.json").exists()
    assert_gone(family)
    run("run", **{"checkpoint.every_steps": 2, "checkpoint.background": False})
    assert_golden(folder)
    assert step_images(folder) == step_images(one_process)


@pytest.mark.slow
def test_two_processes__a_killed_launcher_is_named(tiny_data: Path, tmp_path: Path) -> None:
    one = machine(tmp_path, tiny_data, **TWO, **{"checkpoint.every_steps": 2})
    wait_for(logged(tmp_path, 5), [one])
    family = family_of([one])
    alive = (process for process in family if process.status() != psutil.STATUS_ZOMBIE)
    (agent,) = (process for process in alive if "accelerate.commands.launch" in process.cmdline())
    agent.kill()
    [(code, _, text)] = ended([one])
    assert (code, text.count("Traceback")) == (3, 0)
    assert "accelerate launch and its processes were killed by SIGKILL" in text.splitlines()[-1]
    assert f"vitctl resume {tmp_path}" in text.splitlines()[-1]
    assert_gone(family)


@pytest.mark.parametrize("job", ["fewshot", "probe", "evaluate"])
def test_launcher__a_killed_job_that_does_not_train_promises_no_checkpoint(tmp_path: Path, job: str) -> None:
    agent = cast(Any, SimpleNamespace(signals=[], process=SimpleNamespace(returncode=-signal.SIGKILL)))
    recipe = load_recipe(job).recipe
    with pytest.raises(
        LostProcess, match=rf"SIGKILL; (?!.*checkpoint).*; resume with: vitctl resume {tmp_path}"
    ):
        launcher._check_outcome(tmp_path, recipe, LaunchConfig(), agent, tmp_path / "launcher.txt")


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), *slow(((signal.SIGKILL,),))])
def test_two_processes__none_is_left(tiny_data: Path, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """After a second signal, or the end of vitctl itself. The processes hang: they cannot save."""
    one = machine(tmp_path, tiny_data, "--restarts", "3", **LONG, **TWO, **{"machine.workers": 1})
    wait_for(logged(tmp_path, 2), [one])
    family = family_of([one])
    assert len(family) >= 5
    for process in family:
        if rank_of(process) is not None:
            process.suspend()
    one.send_signal(numbers[0])
    if len(numbers) > 1:
        wait_for(says(one, "stopping as soon as the work so far is safe"), [one])
        one.send_signal(numbers[1])
    assert_gone(family)
    [(code, _, text)] = ended([one])
    assert code == (3 if len(numbers) > 1 else -signal.SIGKILL)
    assert not text or "stopped at once; what was saved is complete" in text


def test_signal__is_forwarded_once_and_a_slow_save_completes(tiny_data: Path, tmp_path: Path) -> None:
    code = WITH_WORKER.format(worker="tests.launch.slow_worker")
    values = {**TWO, "checkpoint.every_steps": 0, "schedule.total_steps": 5000}
    line = [sys.executable, "-c", code, *command(tmp_path, tiny_data, **values)[3:]]
    one = warm.Popen(line, **PIPED, start_new_session=True)
    wait_for(logged(tmp_path, 2), [one])
    os.killpg(one.pid, signal.SIGINT)  # as Ctrl-C does
    [(code_, _, text)] = ended([one])
    assert code_ == 3, text
    assert text.splitlines() == [
        "vitctl: SIGINT: stopping as soon as the work so far is safe; a second signal stops at once",
        f"stopped and saved in {tmp_path}; resume with: vitctl resume {tmp_path}",
    ]
    log = (tmp_path / "log.jsonl").read_text().splitlines()
    steps = [json.loads(record)["step"] for record in log if '"train"' in record]
    saved, problems = newest_checkpoint(tmp_path / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (steps[-1], [])
    for rank in (0, 1):
        assert (tmp_path / LOGS / f"rank_0{rank}.txt").read_text().count("stopping as soon as") == 1


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


@pytest.mark.slow
def test_two_launches_at_once__with_settings_for_something_else(
    load: Load, run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    """One by vitctl, one by its pasted line: neither takes the other's port, a rank or a setting."""
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text(HOSTILE)
    pasted_env = {
        **os.environ,
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
        "FSDP_OFFLOAD_PARAMS": "true",
        "HF_HOME": str(tmp_path / "hf"),
    }
    folder, pasted = tmp_path / "run", tmp_path / "pasted"
    two = {**TWO, "optimizer.clip_norm": 0.0, "machine.micro_batch": 8}
    prepare_run(load(**two), pasted)
    typed_env = {**pasted_env, "PET_NNODES": "5", "PET_MAX_RESTARTS": "9"}
    both = [
        warm.Popen(command(folder, tiny_data, **two), env=typed_env, **PIPED),
        subprocess.Popen((pasted / "launch.txt").read_text(), shell=True, env=pasted_env, **PIPED),
    ]
    (code, shown, text), (pasted_code, _, pasted_text) = ended(both)
    assert (code, pasted_code, text) == (0, 0, ""), pasted_text
    assert pasted_text.splitlines()[-1] == f"done: {pasted / 'result.json'}"
    straight = run("straight", **{**two, "machine.processes": 1})
    for one in (folder, pasted):
        assert checkpoint(one, 20) == checkpoint(straight, 20)
        assert step_images(one) == step_images(straight)
        assert json.loads((one / "result.json").read_text())["provenance"]["data_verified"] == "whole"
        parts = sorted(path.name for path in (one / "verified").iterdir())
        assert parts == ["part_0_of_2.jsonl", "part_1_of_2.jsonl"]
    assert "step 20/20" in shown
    assert re.search(r"^node \S+: processes 0 to 1, CPU", shown, re.M)
    assert next((folder / LOGS).glob("launcher_*.txt")).read_text() == ""


@pytest.mark.slow
def test_line__pasted_by_a_person_says_how_it_ended(load: Load, tmp_path: Path) -> None:
    """The process that vitctl starts is silent; one that a person starts says where to look."""
    folder = tmp_path / "run"
    prepare_run(load(**{"schedule.total_steps": 6, "evaluation.every_steps": 0}), folder)
    line = shlex.split((folder / "launch.txt").read_text())
    done = warm.run(line, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        f"{folder}: progress is in log.jsonl, the output of each process in logs/",
        f"done: {folder / 'result.json'}",
    ]
    recipe = folder / "recipe.toml"
    recipe.write_text(re.sub(r"(?m)^lr = .*$", 'lr = "x"', recipe.read_text()))
    done = warm.run(line, capture_output=True, text=True, timeout=240)
    assert (done.returncode, "vitctl: recipe.toml:" in done.stderr.splitlines()[-1]) == (1, True)
    done = warm.run([*line[:-1], str(tmp_path / "none")], capture_output=True, text=True, timeout=240)
    assert (done.returncode, "not a prepared run folder" in done.stderr) == (1, True)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_two_machines__one_gets_a_signal_both_save_and_one_process_resumes(
    run: Run, one_process: Path, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    pair = machines(folder, tiny_data, **TWO)
    wait_for(logged(folder, 2), pair)
    family = family_of(pair)
    with held(pair) as ranks:  # or they might end before the signal has reached them
        pair[1].send_signal(signal.SIGTERM)
        wait_for(lambda: any(map(is_signalled, ranks)), pair)
    both = ended(pair)
    for has_signal, (code, shown, text) in enumerate(both):
        first, *heard, last = text.splitlines()
        assert first.startswith("2 machines: waiting for all to join at 127.0.0.1:")
        assert len(heard) == has_signal
        assert (code, last) == (3, f"stopped and saved in {folder}; resume with: vitctl resume {folder}")
        assert shown.count("step 2/20") == 1
    assert_gone(family)
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    assert "exitcode" not in next((folder / LOGS).glob("launcher_*.txt")).read_text()
    run("run", **{"checkpoint.background": False})
    assert_golden(folder)
    assert step_images(folder) == step_images(one_process)


@pytest.mark.slow
def test_restart__forgets_the_result_of_the_start_that_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 0 may have time to write it; its record is then cut back to the checkpoint."""
    folder = run("run", **{"schedule.total_steps": 8, "checkpoint.every_steps": 4})
    result = json.loads((folder / "result.json").read_text())
    result |= {"status": "failed", "record": {"log.jsonl": "0" * 64}}
    (folder / "result.json").write_text(json.dumps(result))
    shutil.rmtree(folder / "checkpoints" / "step_00000008")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert work(folder, locked=True)["status"] == "done"


def torchrun(folder: Path, data: Path) -> "list[subprocess.Popen[str]]":
    """By torchrun itself."""
    vitctl = command(folder, data, **EXACT, **FOREGROUND)[2:]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [subprocess.Popen([*line, "--max-restarts", "2", "-m", *vitctl], **PIPED)]


def pasted(folder: Path, data: Path) -> "list[subprocess.Popen[str]]":
    """By RUN/launch.txt, typed into two shells."""
    values = {**EXACT, **TWO, "checkpoint.background": False, "data.path": str(data)}
    config = LaunchConfig(2, "127.0.0.1", free_port(), restarts=1)
    prepare_run(load_recipe(str(TINY), [*map(Override, values, values.values())]), folder, config=config)
    line = (folder / "launch.txt").read_text()
    return [subprocess.Popen(line, shell=True, **PIPED) for _ in "12"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["vitctl", "torchrun", "pasted"])
def test_restart__a_killed_process_costs_nothing(run: Run, tiny_data: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    if how == "vitctl":
        started = [machine(folder, tiny_data, "--restarts", "1", **EXACT, **TWO)]
    else:
        started = torchrun(folder, tiny_data) if how == "torchrun" else pasted(folder, tiny_data)
    wait_for(logged(folder, 3), started)
    kill_rank(1, started)
    for code, shown, text in ended(started):
        assert (code, text if how == "vitctl" else "") == (0, ""), text
        assert how == "pasted" or "resuming from step" in shown
    assert "all processes were restarted (restart 1)" in (folder / "log.jsonl").read_text()
    straight = run("straight", **EXACT)
    assert checkpoint(folder, 20) == checkpoint(straight, 20)
    assert step_images(folder) == step_images(straight)


@pytest.mark.slow
def test_two_machines__of_two_processes_each_with_a_killed_one(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    values = {"machine.processes": 4, "checkpoint.every_steps": 2}
    pair = machines(folder, tiny_data, "--restarts", "1", **values)
    wait_for(logged(folder, 5), pair)
    kill_rank(3, pair)
    for code, shown, text in ended(pair):
        assert (code, shown.count("step 20/20")) == (0, 1), text
        assert "resuming from step" in shown
        assert "0 to 3, CPU" in shown
    assert_golden(folder)
    assert step_images(folder) == step_images(run("one"))


@pytest.mark.slow
def test_restarts__used_up_are_one_line_on_every_machine(tiny_data: Path, tmp_path: Path) -> None:
    pair = machines(tmp_path, tiny_data, **LONG, **TWO)
    wait_for(logged(tmp_path, 5), pair)
    family = family_of(pair)
    kill_rank(0, pair)
    for code, _, text in ended(pair):
        assert (code, text.splitlines()[1:]) == (3, [killed_text(0, tmp_path)])
    assert_gone(family)
    assert "was killed (SIGKILL)" in json.loads((tmp_path / "result.json").read_text())["error"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["other", "meeting"])
def test_a_whole_machine__is_replaced(run: Run, tiny_data: Path, tmp_path: Path, lost: str) -> None:
    """All of it is gone at once. The same command on a new machine, and the run resumes. If the lost machine
    has the rendezvous address, the other one ends, and is started again too."""
    folder, port = tmp_path / "run", free_port()
    values = {**EXACT, **TWO}
    flags = ("--nodes", f"2@127.0.0.1:{port}", "--restarts", "1")
    host = machine(folder, tiny_data, *flags, **values)
    wait_for(lambda: is_open(port), [host])
    pair = [host, machine(folder, tiny_data, *flags, **values)]
    wait_for(logged(folder, 5), pair)
    left, gone = pair if lost == "other" else pair[::-1]
    family = family_of([gone])
    gone.kill()
    assert_gone(family)
    ended([gone])
    if lost == "other":
        wait_for(says(left, "if a machine is missing, run the same command there, or on another"), [left])
    else:
        [(code, _, text)] = ended([left])
        assert code == 3, text
        assert text.endswith(f"resume with: vitctl resume {folder}\n")
        left = machine(folder, tiny_data, *flags, **values)
    for code, shown, text in ended([left, machine(folder, tiny_data, *flags, **values)]):
        assert (code, "resuming from step" in shown) == (0, True), text
    assert checkpoint(folder, 20) == checkpoint(run("straight", **EXACT), 20)


@pytest.mark.slow
def test_restarts__are_not_spent_on_what_only_the_user_can_fix(tiny_data: Path, tmp_path: Path) -> None:
    folder, data = tmp_path / "run", damaged_test_split(tiny_data, tmp_path / "data")
    values = {**TWO, "schedule.total_steps": 6, "evaluation.every_steps": 0}
    for code, _, text in ended(machines(folder, data, "--restarts", "2", **values)):
        _, error = text.splitlines()
        assert (code, "cannot be evaluated" in error, error.endswith(".txt)")) == (2, True, True)
    assert "exitcode" not in next((folder / LOGS).glob("launcher_*.txt")).read_text()
    assert "restart 1" not in (folder / "log.jsonl").read_text()


@pytest.mark.slow
def test_signal__while_a_machine_waits_for_the_others(tiny_data: Path, tmp_path: Path) -> None:
    port = free_port()
    one = machine(tmp_path, tiny_data, "--nodes", f"2@127.0.0.1:{port}", **TWO)
    wait_for(lambda: is_open(port), [one])
    one.send_signal(signal.SIGUSR1)
    [(code, _, text)] = ended([one])
    last = f"stopped and saved in {tmp_path}; resume with: vitctl resume {tmp_path}"
    assert (code, text.splitlines()[-1]) == (3, last)


@pytest.mark.slow
def test_resume_and_finetune__with_restarts(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder, tuned = run("run"), tmp_path / "tuned"
    for file in (folder / "checkpoints" / "step_00000020").iterdir():
        file.unlink()
    vitctl = [sys.executable, "-m", "vitctl"]
    again = [*vitctl, "resume", str(folder), "--processes", "2", "--nodes=1", "--restarts=1"]
    done = warm.run(again, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resuming from step 18 of 20" in done.stdout
    assert_golden(folder)
    assert " --max_restarts 1 " in (folder / "launch.txt").read_text()
    places = ["--from", str(folder), "--data", str(tiny_data), "--out", str(tuned)]
    small = ["--lr=0.01", "--steps=4", "--processes=2", "--res=16", "--restarts=1"]
    sets = ["--set", "schedule.batch_size=8", "--set", "schedule.warmup_steps=1"]
    done = warm.run(
        [*vitctl, "finetune", *places, *small, *sets], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tuned / "result.json").read_text())
    assert (result["status"], result["metrics"]["total"]) == ("done", 23)


@pytest.mark.slow
@pytest.mark.parametrize("has_signal", [False, True])
def test_bench__in_two_processes(has_signal: bool) -> None:
    """The typed command itself runs in each of them; one signal ends all of them."""
    line = [sys.executable, "-m", "vitctl", "bench", "model", "--recipe", str(TINY), "--synthetic", "-n", "2"]
    one = warm.Popen([*line, "--seconds", "600" if has_signal else "1"], **PIPED)
    if has_signal:
        wait_for(lambda: sorted(filter(None, map(rank_of, family_of([one])))) == ["0", "1"], [one])
        one.send_signal(signal.SIGINT)
    [(code, shown, text)] = ended([one])
    assert code == (3 if has_signal else 0), text
    assert has_signal or "images/s" in shown


def test_follower__reports_each_complete_record_once_whatever_file_and_clock_do(tmp_path: Path) -> None:
    path, seen = tmp_path / "log.jsonl", list[dict[str, Any]]()
    append_record(path, {"step": 1, "time": 9e9})
    follower = Follower(path, seen.append)
    append_record(path, {"step": 2, "time": 5.0})  # the clock was set back
    with path.open("a") as file:
        file.write('{"step": 3, "ti')
    follower.poll()
    follower.poll()
    assert [r["step"] for r in seen] == [2]
    with path.open("a") as file:
        file.write(f'me": {time.time()}}}\nnot a record\n')
    follower.poll()
    cut_after(path, 1)
    append_record(path, {"step": 2, "time": 6.0})
    follower.poll()
    append_record(path, {"step": 0, "text": "restarted", "time": 6.5})
    follower.poll()
    cut_after(path, 1)
    follower.poll()
    assert [r["step"] for r in seen] == [2, 3, 2, 0]
    aside = tmp_path / "new"
    append_record(aside, {"step": 4, "time": 7.0})
    aside.replace(path)
    follower.poll()
    assert [r["step"] for r in seen] == [2, 3, 2, 0, 4]


def test_follower__reports_each_current_state_once(tmp_path: Path) -> None:
    now, seen = tmp_path / "now.json", list[dict[str, Any]]()
    follower = Follower(tmp_path / "log.jsonl", seen.append, now)
    follower.poll()
    for when in (9e9, 5.0):
        now.write_text(json.dumps({"kind": "now", "step": 7, "time": when}))
        follower.poll()
        follower.poll()
    now.write_text('{"kind": "no')
    follower.poll()
    assert [record["time"] for record in seen] == [9e9, 5.0]
