"""How this process was started, read from the environment: by srun, torchrun or accelerate launch, or by a
person.
"""

import os
import re
import signal
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from vitctl.errors import LaunchError
from vitctl.system.text import one_line

Environment = MutableMapping[str, str]
# Prefixes of the settings of accelerate and torchrun; the user did not set these for this run.
_SETTINGS = ("ACCELERATE_", "FSDP_", "PET_")
_AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent, which accelerate launch runs
# Variables that vitctl and torch read as whole numbers.
_NUMBERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "SLURM_STEP_NUM_TASKS",
)
UNUSED_SIGNAL = signal.SIGRTMAX.name  # for the agent, which would kill everything at one that comes
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below those that Linux hands out to whoever connects


def without_settings(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without settings of accelerate and torchrun: a run depends on its recipe and its launch
    line alone.
    """
    return {name: value for name, value in env.items() if not name.startswith(_SETTINGS)}


def has_agent(env: Mapping[str, str] = os.environ) -> bool:
    """Whether accelerate launch, or torchrun, started this process and watches it."""
    return _AGENT in env


def started_by_vitctl(env: Mapping[str, str] = os.environ) -> bool:
    """Whether vitctl's own launcher started this process and shows its progress: it gives the agent a signal
    that is never sent.
    """
    return env.get("PET_SIGNALS_TO_HANDLE") == UNUSED_SIGNAL


def restarts_left(env: Mapping[str, str] = os.environ) -> int:
    """How often the agent will still restart the processes."""
    return int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True)
class Member:
    """This process as one of several that a launcher started.

    `job` is the id that all of them share; "" when only the addresses are known.
    """

    launcher: str
    rank: int
    num_processes: int
    job: str

    def run_dir(self, name: str) -> Path:
        """The run folder of this recipe and job, so that a requeued job resumes in it.

        Raises:
            LaunchError: the processes share no job id to name it by.
        """
        if not self.job:
            raise LaunchError(
                f"one of {self.num_processes} processes started by {self.launcher}: give all of them the "
                f"same run folder "
                "with --out"
            )
        return Path("runs") / f"{Path(name).stem}_{self.job}"


def check_environment(env: Environment = os.environ) -> None:
    """Raise LaunchError where a variable such as RANK is not a whole number."""
    for name in _NUMBERS:
        text = env.get(name, "0")
        if not re.fullmatch("[0-9]{1,18}", text):
            raise LaunchError(
                f"environment: {name} is '{one_line(text[:50])}', should be a whole number; correct it, or "
                f"`unset {name}`"
            )
    if "RANK" in env and "WORLD_SIZE" in env and int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        raise LaunchError(
            f"environment: RANK is {env['RANK']} of WORLD_SIZE {env['WORLD_SIZE']}, should be below it; "
            f"correct them, or unset both"
        )


def find_member(env: Environment = os.environ) -> Member | None:
    """This process's rank among several; None when no launcher started it. Under srun the variables that
    torch reads are added.

    Ranks that another launcher left in the environment are removed where they make no member: accelerate
    would obey them.

    A Slurm step of one task, such as an interactive shell, does not count as a launcher.

    Raises:
        LaunchError: the environment contradicts itself, or holds values that are not numbers.
    """
    check_environment(env)
    if "RANK" in env and "WORLD_SIZE" in env:
        job = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID", "")
        return Member("torchrun", int(env["RANK"]), int(env["WORLD_SIZE"]), "" if job == "none" else job)
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _slurm_member(env)
    if int(env.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            "environment: WORLD_SIZE is set and RANK is not; set both for each process, or `unset WORLD_SIZE`"
        )
    for name in (*_RANKS, *(name for name in env if name.startswith("TORCHELASTIC_"))):
        env.pop(name, None)  # left by another launcher: this process is the only one
    return None


def _slurm_member(env: Environment) -> Member:
    try:
        rank, num_tasks, job = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_JOB_ID"]
        tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"])
        step = int(env.get("SLURM_STEP_ID", "0")) % 997
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
            f"srun started {env['SLURM_STEP_NUM_TASKS']} tasks, but its environment does not say on which "
            f"nodes ({error!r}); "
            "start them with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        ) from None
    for name, value in added.items():
        env.setdefault(name, value)
    return Member("srun", int(rank), int(num_tasks), job)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ValueError(f"tasks per node: {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(text: str) -> str:
    """The first name of a Slurm host list such as "gpu[007-012,15],login1" or "rack[1-2]n[3-4]"."""
    first = re.split(r",(?![^\[]*\])", text.strip())[0]
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError(f"host list: {text!r}")
    return host
