"""A real Slurm, on this machine alone: `srun`, and a submitted job that is signalled, queued again and ends.

It needs Debian's slurm-wlm and munge, and root, who starts their daemons in a folder of their own.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Run, assert_golden, checkpoint, command, free_port, step_images

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "scontrol")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        os.getuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason="needs root and a Slurm: apt-get install slurm-wlm munge",
    ),
]


def until(what: Callable[[], bool], seconds: float = 400, then: Callable[[], str] = str) -> None:
    """Wait for something that must come; `then` says more where it did not."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"it did not come; {then()}"
        time.sleep(0.2)


def said(*line: str | Path) -> str:
    """The standard output of a command that succeeds."""
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """A cluster of this one machine, named by SLURM_CONF for all that the tests start."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/vitctl_slurm.XXXXXX"], text=True).strip())
    key, meeting = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config, host = folder / "slurm.conf", socket.gethostname().split(".")[0]
    values = {
        "ClusterName": "vitctl",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmctldPort": free_port(),
        "SlurmdPort": free_port(),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={meeting}",
        "CredType": "cred/munge",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.log",
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "JobRequeue": 1,
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
    }
    nodes = [
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN",
        "PartitionName=all Nodes=ALL Default=YES State=UP",
    ]
    config.write_text(
        "".join(f"{name}={value}\n" for name, value in values.items()) + "\n".join(nodes) + "\n"
    )
    for part in ("state", "spool"):
        (folder / part).mkdir()
    files = {"key-file": key, "socket": meeting, "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    daemons = [
        [
            "munged",
            "--foreground",
            "--force",
            *(f"--{name}={folder / value}" for name, value in files.items()),
        ],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config)],
    ]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(config)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, daemon in enumerate(daemons):
            with (folder / f"daemon_{number}.txt").open("wb") as file:
                started.append(subprocess.Popen(daemon, stdout=file, stderr=file))
            until(meeting.exists, 60)
        until(lambda: "idle" in subprocess.run(["sinfo", "-h"], capture_output=True, text=True).stdout, 60)
        yield
    finally:
        subprocess.run(["scancel", "--full", "-u", "root"], capture_output=True)
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.usefixtures("slurm")
def test_srun__two_tasks_are_the_two_processes_of_the_run(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    out = said("srun", "-n", "2", *command(folder, tiny_data, **{"machine.processes": 2}))
    assert out.count("step 20/20") == 1
    assert "processes 0 to 1, CPU" in out
    assert_golden(folder)
    assert step_images(folder) == step_images(run("one"))


@pytest.mark.usefixtures("slurm")
def test_job__is_signalled_saves_is_queued_again_and_ends_bit_for_bit(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    """As at the end of its time: USR1 reaches the tasks, and the job goes back into the queue by itself."""
    folder = tmp_path / "run"
    values = {"optimizer.clip_norm": 0.0, "machine.micro_batch": 8, "schedule.total_steps": 400}
    line = command(folder, tiny_data, **values, **{"evaluation.every_steps": 0, "checkpoint.every_steps": 0})
    said(*line, "--slurm", "nodes=1,tasks=2,time=30:00,submit")
    [job] = said("squeue", "-h", "-o", "%i").split()
    log = folder / "log.jsonl"
    until(lambda: log.exists() and '"step": 10,' in log.read_text(), then=lambda: queue(folder, job))
    said("scancel", "--signal=USR1", job)
    until(lambda: "Requeued" in log_of(folder, job) or "Restarts=1" in said("scontrol", "show", "job", job))
    state = folder / "result.json"
    until(lambda: state.exists() and json.loads(state.read_text())["status"] == "done")
    until(lambda: not said("squeue", "-h"))
    steps = [json.loads(record)["step"] for record in log.read_text().splitlines() if '"train"' in record]
    assert steps == sorted(set(steps))
    straight = run("straight", **values, **{"evaluation.every_steps": 0, "checkpoint.every_steps": 0})
    assert checkpoint(folder, 400) == checkpoint(straight, 400)
    assert step_images(folder) == step_images(straight)


@pytest.mark.usefixtures("slurm")
def test_job__that_is_cancelled_saves_and_is_not_queued_again(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = {"schedule.total_steps": 100_000, "evaluation.every_steps": 0, "checkpoint.every_steps": 0}
    said(*command(folder, tiny_data, **values), "--slurm", "nodes=1,tasks=2,time=30:00,submit")
    [job] = said("squeue", "-h", "-o", "%i").split()
    log = folder / "log.jsonl"
    until(lambda: log.exists() and '"step": 10,' in log.read_text(), then=lambda: queue(folder, job))
    said("scancel", job)
    until(lambda: not said("squeue", "-h"))
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped", log_of(folder, job)
    assert next((folder / "checkpoints").glob("step_*"))


def queue(folder: Path, job: str) -> str:
    """What Slurm says of a job, and the job of itself."""
    return said("scontrol", "show", "job", job) + log_of(folder, job)


def log_of(folder: Path, job: str) -> str:
    """What the job printed."""
    file = folder / "logs" / f"slurm_{job}.txt"
    return file.read_text() if file.exists() else ""
