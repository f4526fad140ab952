"""Launchers and batch systems: this process's rank among several, and the Slurm job of a run."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil

from vitctl.engine.journal import CHECKPOINTS
from vitctl.engine.store import kept_in
from vitctl.errors import LaunchError
from vitctl.launch.run_folder import LOGS
from vitctl.recipe.schema import Recipe
from vitctl.system.files import read_bytes, write_text
from vitctl.system.process import RANKS, forget_ranks
from vitctl.system.text import has_control, one_line

Environment = MutableMapping[str, str]
# Prefixes of accelerate's and torchrun's settings; the user did not set them for this run.
_SETTINGS = ("ACCELERATE_", "FSDP_", "PET_")
_AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent, which accelerate launch runs
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
# Variables that vitctl and torch read as whole numbers.
_NUMBERS = (*RANKS, *_RESTARTS, "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
# Variables of unsupported launchers: sizes, and ranks, of which the first is 0.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
_UNUSED_RANKS = ("SLURM_PROCID", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
UNUSED_SIGNAL = signal.SIGRTMAX.name  # the agent listens to it, because it kills everything at a signal
PORT = 29_400  # of the rendezvous
WORKER = "vitctl.launch.worker"
LOCKED = "--locked"  # the launcher holds the lock of the run folder
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below Linux's ephemeral ports


def without_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without accelerate's and torchrun's settings: recipe and launch line decide."""
    return {name: value for name, value in env.items() if not name.startswith(_SETTINGS)}


def has_agent(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether accelerate launch or torchrun started this process and watches it."""
    return _AGENT in env


def started_by_vitctl(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the vitctl command started this process and shows its progress."""
    return env.get("PET_SIGNALS_TO_HANDLE") == UNUSED_SIGNAL


def restarts_left(env: Mapping[str, str] = os.environ) -> int:
    return int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))


# Only accelerate launch sets it: the settings that follow are then meant for this command.
_ACCELERATE = "ACCELERATE_DYNAMO_MODE"
# Setting -> its flag of accelerate launch, and vitctl's equivalent.
_FOREIGN = {
    "ACCELERATE_MIXED_PRECISION": ("--mixed_precision", "--precision bf16"),
    "ACCELERATE_USE_FSDP": ("--use_fsdp", "--set machine.sharding=fsdp"),
    "ACCELERATE_USE_DEEPSPEED": ("--use_deepspeed", "--set machine.sharding=fsdp"),
    "ACCELERATE_USE_MEGATRON_LM": ("--use_megatron_lm", "--set machine.sharding=fsdp"),
    "ACCELERATE_DYNAMO_BACKEND": ("--dynamo_backend", "--set machine.compile=true"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "--gradient_accumulation_steps",
        "--set machine.micro_batch=IMAGES",
    ),
}


def check_arrives(env: Mapping[str, str] = os.environ) -> None:
    """Refuse options of accelerate launch that vitctl would ignore. The LaunchError names vitctl's flag."""
    if _ACCELERATE not in env or started_by_vitctl(env):
        return
    if "MASTER_ADDR" in env and "RANK" not in env:
        raise LaunchError(
            "accelerate launch --num_processes",
            "starts one process without --multi_gpu",
            "leave accelerate launch out, and give vitctl --processes, or add --multi_gpu",
        )
    for name, (flag, ours) in _FOREIGN.items():
        if (value := env.get(name, "")).lower() not in ("", "no", "false", "0", "1"):
            raise LaunchError(
                f"accelerate launch {flag} ({name}={one_line(value[:20])}): has no effect in vitctl",
                fix=f"leave it out, and give vitctl {ours}",
            )


@dataclass(frozen=True)
class Member:
    """This process as one of several that a launcher started.

    `job` is the id that all of them share; "" if only the addresses are known.
    """

    launcher: str
    rank: int
    num_processes: int
    job: str

    def run_dir(self, name: str) -> Path:
        """Return this recipe and job's run folder, in which a requeued job resumes. Raises LaunchError."""
        if not self.job:
            raise LaunchError(
                f"one of {self.num_processes} processes started by {self.launcher}: give all of them the "
                f"same run folder with --out"
            )
        return Path("runs") / f"{Path(name).stem}_{self.job}"


@dataclass(frozen=True)
class LaunchConfig:
    """The machines of a run, their rendezvous address, and how often lost processes are restarted."""

    nodes: int = 1
    host: str = ""
    port: int = PORT
    restarts: int = 0

    def starts(self, recipe: Recipe) -> bool:
        """Return whether a run needs a launcher: for several processes, or for restarts."""
        return recipe.machine.processes > 1 or self.nodes > 1 or self.restarts > 0


def check_environment(env: Environment = os.environ) -> None:
    """Raise LaunchError if a variable such as RANK is not a whole number."""
    for name in _NUMBERS:
        text = env.get(name, "0")
        if not re.fullmatch("[0-9]{1,18}", text):
            raise LaunchError(
                "environment",
                f"{name} is '{one_line(text[:50])}', should be a whole number",
                f"correct it, or `unset {name}`",
            )
    if "RANK" in env and "WORLD_SIZE" in env and int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        raise LaunchError(
            "environment",
            f"RANK is {env['RANK']} of WORLD_SIZE {env['WORLD_SIZE']}, should be below it",
            "correct them, or unset both",
        )


def find_member(env: Environment = os.environ) -> Member | None:
    """Return this process's rank among several, or None if no launcher started it.

    Under srun the variables that torch reads are added. A Slurm step of one task, such as an interactive
    shell, is not a launcher, and neither is an environment of one process. Without a launcher, ranks left by
    another one are removed from the environment, because accelerate would obey them.

    Raises:
        LaunchError: the environment contradicts itself, lacks the address where the processes meet, or has
            values that are not numbers; or this is a shell in one of several tasks, or one of several
            processes of an unsupported launcher, such as mpirun.
    """
    check_environment(env)
    is_alone = "RANK" in env and env.get("WORLD_SIZE") == "1" and not has_agent(env)  # e.g. in a single pod
    if "RANK" in env and "WORLD_SIZE" in env and not is_alone:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing and env["WORLD_SIZE"] != "1":
            raise LaunchError(
                "environment",
                f"RANK is {env['RANK']} of WORLD_SIZE {env['WORLD_SIZE']}, without "
                f"{' and '.join(missing)}: all processes meet at MASTER_ADDR:MASTER_PORT",
                "set both for each process, or `unset RANK WORLD_SIZE` to compute in this process alone",
            )
        job = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID", "")
        return Member("torchrun", int(env["RANK"]), int(env["WORLD_SIZE"]), "" if job == "none" else job)
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and not is_alone:
        if "SLURM_PTY_PORT" in env and ("SLURM_TASK_PID" not in env or psutil.Process().terminal()):
            raise LaunchError(
                f"srun --pty started {env['SLURM_STEP_NUM_TASKS']} tasks, and only the first has "
                "this terminal",
                fix=(
                    "to compute in this process alone, type `unset SLURM_STEP_NUM_TASKS` first; for "
                    "all tasks leave --pty out"
                ),
            )
        return _slurm_member(env)
    if int(env.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            "environment",
            "WORLD_SIZE is set and RANK is not",
            "set both for each process, or `unset WORLD_SIZE`",
        )
    others = [name for name in _SIZES if env.get(name, "1") != "1"]
    others += [name for name in _UNUSED_RANKS if env.get(name, "0") != "0"]
    if others and not is_alone:
        said = " and ".join(f"{name} is {one_line(env[name][:50])}" for name in others)
        raise LaunchError(
            "environment",
            f"{said}, as in one of several processes; vitctl is started by srun, torchrun or "
            "accelerate launch, not under mpirun: leave mpirun out, or to compute in this "
            f"process alone `unset {' '.join(others)}`",
        )
    forget_ranks(env)
    return None


def num_nodes(member: Member, env: Mapping[str, str] = os.environ) -> int:
    """Return the number of machines, if every machine has as many processes as this one."""
    return -(-member.num_processes // max(1, int(env.get("LOCAL_WORLD_SIZE", member.num_processes))))


def _slurm_member(env: Environment) -> Member:
    try:
        rank, num_tasks, job = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_JOB_ID"]
        tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"])
        step = int(env.get("SLURM_STEP_ID", "0")) % 997
        if int(rank) >= int(num_tasks):
            raise LaunchError(
                "environment",
                f"SLURM_PROCID is {rank} of SLURM_STEP_NUM_TASKS {num_tasks}, should be below it",
                "start all tasks with srun, or `unset SLURM_STEP_NUM_TASKS SLURM_PROCID`",
            )
        added = {
            "RANK": rank,
            "WORLD_SIZE": num_tasks,
            "LOCAL_RANK": env["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(tasks[int(env["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]),
            "MASTER_PORT": str(FIRST_PORT + (int(job) * 31 + step) % NUM_PORTS),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise LaunchError(
            f"srun started {env['SLURM_STEP_NUM_TASKS']} tasks, but its environment does not say "
            f"on which nodes ({error!r})",
            fix=(
                "start them with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            ),
        ) from None
    given = {name: value for name, value in env.items() if name.startswith("MASTER_")}
    env.update({**added, **given})  # a lone RANK or WORLD_SIZE comes from another launcher
    return Member("srun", int(rank), int(num_tasks), job)


def tasks_per_node(text: str) -> list[int]:
    """Return Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"tasks per node: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Return the first name of a Slurm host list such as "gpu[007-012,15],login1" or "rack[1-2]n[3-4]"."""
    first = re.split(r",(?![^\[]*\])", text.strip())[0]
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError(f"host list: {text!r}")
    return host


MAX_RESTARTS = 3
_LONGEST_NAME = 64
SAVE_SECONDS = 300  # before the time limit: enough for a step, an evaluation batch and a save
LEAST_MINUTES = 10  # of a time limit: as long to start and train as to save
_MOST_SETUP_BYTES = 2**16
_TIME = r"([0-9]+-)?[0-9]+(:[0-9][0-9]){0,2}"
_WORD = r"[A-Za-z0-9_.@:&|*+-]+"
# In an #SBATCH line these end or change a quoted path, even when they are escaped.
_NOT_IN_A_PATH = ('"', "\\")


@dataclass(frozen=True)
class Resources:
    """The resources requested from a batch system.

    Args:
        gpus, cpus: per node, and per process.
        tasks: processes of a node without GPUs.
        setup: file with lines of the shell that come before vitctl: modules, variables of the network.
        submit: also submit the job.
    """

    launcher: ClassVar[str]  # its flag
    example: ClassVar[str]
    submits: ClassVar[tuple[str, ...]]  # command that submits a file
    file: ClassVar[str]  # its name in the run folder

    nodes: int = 1
    gpus: int = 0
    tasks: int = 1
    cpus: int = 0
    setup: str = field(default="", metadata={"pattern": r"[^\0\n]+"})
    submit: bool = False

    @property
    def tasks_per_node(self) -> int:
        return self.gpus or self.tasks

    @property
    def num_processes(self) -> int:
        return self.nodes * self.tasks_per_node

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the flag's words, such as "nodes=4,gpus=8,time=24:00:00". Raises LaunchError."""
        known = {one.name: one.type for one in fields(cls)}
        patterns = {one.name: one.metadata.get("pattern", _WORD) for one in fields(cls)}
        values: dict[str, Any] = {}
        then = f"for example {cls.launcher} {cls.example}"
        for word in filter(None, text.split(",")):
            name, equals, value = word.strip().partition("=")
            if name not in known or (known[name] is bool) == bool(equals):
                raise LaunchError(cls.launcher, f"{word!r} is unknown; known: {', '.join(known)}", then)
            if known[name] is int and not _is_count(value, 1 if name in ("nodes", "tasks") else 0):
                least = " from 1" * (name in ("nodes", "tasks"))
                raise LaunchError(cls.launcher, f"{word!r} should be a whole number{least}", then)
            if known[name] is str and not re.fullmatch(patterns[name], value):
                raise LaunchError(cls.launcher, f"{word!r} is not a valid {name}", then)
            values[name] = not equals or (int(value) if known[name] is int else value)
        if missing := [
            one.name for one in fields(cls) if "needed" in one.metadata and one.name not in values
        ]:
            raise LaunchError(cls.launcher, f"{missing[0]} is missing", then)
        if values.get("gpus") and values.get("tasks", values["gpus"]) != values["gpus"]:
            raise LaunchError(
                cls.launcher,
                f"tasks={values['tasks']} with gpus={values['gpus']}: each GPU has one process, "
                "and `tasks` is for nodes without GPUs",
                "leave it out",
            )
        return cls(**values)

    @property
    def setup_text(self) -> str:
        """The lines of `setup`. Raises LaunchError."""
        if not self.setup:
            return ""
        try:
            text = read_bytes(Path(self.setup), _MOST_SETUP_BYTES, error=LaunchError).decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if {*"\0\r"} & {*text}:
            raise LaunchError(self.setup, "is not text with Unix line ends", "give lines of the shell")
        with suppress(FileNotFoundError):  # a machine without bash; of an open quote or heredoc it warns
            said = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True).stderr
            if said:
                raise LaunchError(self.setup, one_line(said), "correct its lines")
        return text.rstrip() + "\n"

    def text(self, run_dir: Path, store: str = "") -> str:
        """Return the file that starts or resumes a run, which may also be kept in a store.

        Raises LaunchError if such a path cannot be used.
        """
        raise NotImplementedError

    @classmethod
    def line(cls, run_dir: Path) -> str:
        return shlex.join([*cls.submits, str(run_dir.resolve() / cls.file)])

    def write(self, run_dir: Path) -> Path:
        """Write the file of a prepared run, and return its path. Raises as `text`."""
        folder = run_dir.resolve()
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        write_text(folder / self.file, self.text(folder, kept_in(folder)))
        return folder / self.file


def _is_count(text: str, least: int) -> bool:
    return re.fullmatch("[0-9]{1,6}", text) is not None and int(text) >= least


@dataclass(frozen=True)
class Job(Resources):
    """A Slurm job, see `job_text`."""

    launcher = "--slurm"
    example = "nodes=4,gpus=8,time=24:00:00"
    submits = ("sbatch",)
    file = "job.sbatch"

    time: str = field(default="", metadata={"pattern": _TIME, "needed": True})
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    mem: str = field(default="", metadata={"pattern": "[0-9]+[KMGT]?"})
    exclusive: bool = False

    def __post_init__(self) -> None:
        minutes = _minutes(self.time or "0")
        if 0 < minutes < LEAST_MINUTES:  # 0: no limit
            raise LaunchError(
                f"--slurm time={self.time}",
                f"is {minutes:g} minutes, of which the last {SAVE_SECONDS // 60} are for saving",
                f"give at least {LEAST_MINUTES}, as in time=0:{LEAST_MINUTES}:00",
            )

    def text(self, run_dir: Path, store: str = "") -> str:
        return job_text(self, run_dir, sys.executable, store)


def _minutes(time: str) -> float:
    """Return the minutes of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(one) for one in rest.split(":")]
    if not dash:
        numbers = [0] * (len(numbers) < 3) + numbers  # minutes come first
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def resume_words(run_dir: Path, store: str) -> list[str]:
    """Return the arguments of Python that resume a run, on a machine without its folder from its store."""
    kept = ["--set", f"checkpoint.store={store}"] if store else []
    return ["-m", "vitctl", "resume", str(run_dir), *kept]


def job_text(job: Job, run_dir: Path, python: str, store: str = "") -> str:
    """Return the batch script. Raises LaunchError if a path contains a character that would break it.

    Slurm sends USR1 to the tasks; they save and exit with code 3, and the job is requeued. After
    `MAX_RESTARTS` of these without a new checkpoint it ends. A cancelled job gets TERM: it saves, too, and is
    not requeued. Its name is the run folder's, with underscores for characters that Slurm does not allow.
    """
    for path in (str(run_dir), python, store):
        if has_control(path) or any(letter in path for letter in _NOT_IN_A_PATH):
            raise LaunchError(
                one_line(path),
                "a Slurm job cannot use a path with quotes, backslashes or control characters",
                "choose another folder with --out",
            )
    options = {
        "job-name": re.sub("[^A-Za-z0-9_.-]+", "_", run_dir.name)[:_LONGEST_NAME] or "vitctl",
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "gpus-per-node": job.gpus or None,
        "cpus-per-task": job.cpus or None,
        "time": job.time,
        "partition": job.partition or None,
        "account": job.account or None,
        "qos": job.qos or None,
        "constraint": job.constraint or None,
        "reservation": job.reservation or None,
        "mem": job.mem or None,
        "signal": f"USR1@{SAVE_SECONDS}",
        "open-mode": "append",
        "output": f'"{str(run_dir).replace("%", "%%")}/logs/slurm_%j.txt"',  # Slurm expands a single %
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    given = job.setup_text.splitlines()
    wanted = [line for line in given if line.startswith("#SBATCH")]
    own = "|".join((*options, "requeue", "no-requeue", "ntasks", "[NntoJpACq]"))
    for line in wanted:
        if re.match(rf"#SBATCH\s+--?({own})(?![\w-])", line):
            raise LaunchError(job.setup, f"has {line}, which --slurm sets itself", "leave the line out")
    resume, folder = shlex.join([python, *resume_words(run_dir, store)]), shlex.quote(str(run_dir))
    cpus = f"--cpus-per-task={job.cpus} " if job.cpus else ""  # srun takes none of the job's since 22.05
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            *["#SBATCH --exclusive"] * job.exclusive,
            *wanted,  # sbatch reads none after a command
            *(line for line in given if line not in wanted),
            "set +eu",
            "cancelled=",
            "trap 'cancelled=1' TERM",
            "# One process may finish before another: that kills no other; one that hangs is killed.",
            f"srun {cpus}--kill-on-bad-exit=0 --wait=120 {resume}",
            "code=$?",
            "# 3: it may go on later; above 128: a process was killed.",
            'if { [ "$code" -eq 3 ] || [ "$code" -gt 128 ]; } && [ -z "$cancelled" ]; then',
            f'  tried={folder}/{LOGS}/requeued_"$SLURM_JOB_ID".txt  # a line for each since the last save',
            "  shopt -s globstar nullglob",
            f"  for saved in {folder}/**/{CHECKPOINTS}; do",
            '    if [ "$saved" -nt "$tried" ]; then : > "$tried"; fi',
            "  done",
            '  : >> "$tried"',
            '  mapfile -t before < "$tried"',
            f'  if [ "${{#before[@]}}" -lt {MAX_RESTARTS} ]; then',
            '    echo requeued >> "$tried"',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "  else",
            f'    echo "vitctl: not requeued: {MAX_RESTARTS} times without a new checkpoint"',
            "  fi",
            "fi",
            'exit "$code"',
            "",
        ]
    )


def submit(job: Resources, file: Path) -> str:
    """Submit a written job and return the command's output. Raises LaunchError if that fails."""
    program, line = job.submits[0], [*job.submits, str(file)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"{program} is not on this machine", fix=f"submit it where it is: {shlex.join(line)}"
        ) from None
    if done.returncode:
        raise LaunchError(f"{program} refused {file}", (done.stderr or done.stdout).strip())
    return done.stdout.strip()
