"""A Slurm job for a prepared run: it saves before its time limit, is requeued, and resumes."""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vitctl.errors import LaunchError
from vitctl.launch.errors import LOGS
from vitctl.system.files import write_text
from vitctl.system.text import has_control, one_line, typed

FILE = "job.sbatch"
_LONGEST_NAME = 64
SAVE_SECONDS = 300  # before the time limit: enough to finish a step, an evaluation batch and a save
_EXAMPLE = "for example --slurm nodes=4,gpus=8,time=24:00:00"
_TIME = r"([0-9]+-)?[0-9]+(:[0-9][0-9]){0,2}"
_WORD = r"[A-Za-z0-9_.@:&|*+-]+"
# In a #SBATCH line these end or change a quoted path, even when they are escaped.
_NOT_IN_A_PATH = ('"', "\\")


@dataclass(frozen=True)
class Job:
    """The resources requested from Slurm.

    `gpus` is per node, and so is `tasks`, the number of processes where there are no GPUs.
    """

    nodes: int = 1
    gpus: int = 0
    tasks: int = 1
    cpus: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    submit: bool = False

    @property
    def tasks_per_node(self) -> int:
        """Processes on each node."""
        return self.gpus or self.tasks

    @property
    def num_processes(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.tasks_per_node


def parse_job(text: str) -> Job:
    """Read the words of --slurm.

    Args:
        text: such as "nodes=4,gpus=8,time=24:00:00,partition=long,submit".

    Raises:
        LaunchError: a name is unknown, or its value is invalid.
    """
    known = {field.name: field.type for field in fields(Job)}
    values: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.strip().partition("=")
        if name not in known or (name == "submit") == bool(equals):
            raise LaunchError(f"--slurm: {word!r} is unknown; known: {', '.join(known)}; {_EXAMPLE}")
        if known[name] is int and not _is_count(value, 1 if name in ("nodes", "tasks") else 0):
            raise LaunchError(f"--slurm: {word!r} should be a whole number; {_EXAMPLE}")
        if known[name] is str and not re.fullmatch(_TIME if name == "time" else _WORD, value):
            raise LaunchError(f"--slurm: {word!r} is not a valid {name}; {_EXAMPLE}")
        values[name] = True if name == "submit" else int(value) if known[name] is int else value
    if "time" not in values:
        raise LaunchError(f"--slurm: time is missing; {_EXAMPLE}")
    return Job(**values)


def _is_count(text: str, least: int) -> bool:
    return re.fullmatch("[0-9]{1,6}", text) is not None and int(text) >= least


def write_job(job: Job, run_dir: Path, name: str) -> Path:
    """Write RUN/job.sbatch, which starts or resumes the prepared run, and return it.

    Raises LaunchError, see `job_text`.
    """
    folder = run_dir.resolve()
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, job_text(job, folder, name, sys.executable))
    return folder / FILE


def job_text(job: Job, run_dir: Path, name: str, python: str) -> str:
    """The batch script. Slurm sends USR1 to the tasks; they save and exit with code 3, and the job is
    requeued.

    A job that is cancelled gets TERM: it saves too, and is not requeued.

    Args:
        job: the requested resources.
        run_dir: absolute.
        name: of the job; characters that Slurm does not allow become underscores.
        python: the interpreter that has vitctl.

    Raises:
        LaunchError: a path holds a character that would break the script.
    """
    for path in (str(run_dir), python):
        if has_control(path) or any(letter in path for letter in _NOT_IN_A_PATH):
            raise LaunchError(
                f"{one_line(path)}: a Slurm job cannot use a path with quotes, backslashes or control "
                f"characters; "
                "choose another folder with --out"
            )
    options = {
        "job-name": re.sub("[^A-Za-z0-9_.-]+", "_", name)[:_LONGEST_NAME] or "vitctl",
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "gpus-per-node": job.gpus or None,
        "cpus-per-task": job.cpus or None,
        "time": job.time,
        "partition": job.partition or None,
        "account": job.account or None,
        "qos": job.qos or None,
        "constraint": job.constraint or None,
        "signal": f"USR1@{SAVE_SECONDS}",
        "open-mode": "append",
        "output": f'"{str(run_dir).replace("%", "%%")}/logs/slurm_%j.txt"',  # Slurm expands a single %
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    resume = shlex.join([python, "-m", "vitctl", "resume", str(run_dir)])
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "",
            "cancelled=",
            "trap 'cancelled=1' TERM",
            "# One process may finish before another: that kills no other; one that hangs is killed.",
            f"srun --kill-on-bad-exit=0 --wait=120 {resume}",
            "code=$?",
            'if [ "$code" -eq 3 ] && [ -z "$cancelled" ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def submit(file: Path) -> str:
    """Submit a job to Slurm; returns the output of sbatch.

    Raises:
        LaunchError: there is no sbatch on this machine, or it fails.
    """
    try:
        done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"sbatch is not on this machine; submit it where it is: sbatch {typed(file)}"
        ) from None
    if done.returncode:
        raise LaunchError(f"sbatch refused {file}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()
