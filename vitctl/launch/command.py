"""The command that starts the processes of a run, and what their environment tells."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from vitctl.engine.preemption import die_with_parent
from vitctl.errors import LaunchError
from vitctl.recipe.schema import Recipe
from vitctl.system.files import write_text
from vitctl.system.process import handles_signal, is_repeated, signal_handler
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


PORT = 29_400
WORKER = "vitctl.launch.worker"
CONFIG = "accelerate.yaml"
_EXAMPLE = "for example --nodes 2@gpu01:29400"
# Without this file accelerate would read the user's default configuration for everything that no flag sets.
_CONFIG_TEXT = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n"


@dataclass(frozen=True)
class LaunchConfig:
    """The machines of a run, their rendezvous address, and how often lost processes are restarted."""

    nodes: int = 1
    host: str = ""
    port: int = PORT
    restarts: int = 0

    def starts(self, recipe: Recipe) -> bool:
        """Whether a run needs a launcher: it has several processes, or one that may be restarted."""
        return recipe.machine.processes > 1 or self.nodes > 1 or self.restarts > 0


def parse_nodes(text: str, restarts: int = 0) -> LaunchConfig:
    """Read --nodes.

    Args:
        text: such as "2@gpu01:29400"; without the port it is 29400; "1" needs no address.
        restarts: of --restarts.

    Raises:
        LaunchError: the text has another form.
    """
    found = re.fullmatch(r"(\d+)(?:@([\w.-]+|\[[\da-fA-F:]+\])(?::(\d+))?)?", text)
    if found is None or int(found[1]) < 1 or int(found[3] or PORT) not in range(1, 65_536):
        raise LaunchError(
            f"--nodes {text}: should be the number of machines, an address and a port; {_EXAMPLE}"
        )
    config = LaunchConfig(int(found[1]), found[2] or "", int(found[3] or PORT), restarts)
    if config.nodes > 1 and not config.host:
        raise LaunchError(
            f"--nodes {text}: the address of one of the machines, for the rendezvous, is missing; {_EXAMPLE}"
        )
    return config


def check_processes(config: LaunchConfig, processes: int) -> None:
    """Check that the processes spread evenly over the machines, and that this machine reaches the rendezvous
    address.

    Raises:
        LaunchError: one of these does not hold, or the number of restarts is negative.
    """
    if processes % config.nodes:
        raise LaunchError(
            f"--nodes {config.nodes}: {processes} process{'es' * (processes > 1)} cannot be spread evenly "
            f"over the machines; "
            f"--processes counts those of all machines: give a multiple of {config.nodes}"
        )
    if config.restarts < 0:
        raise LaunchError(f"--restarts {config.restarts}: should be 0 or more")
    own_address(config)


def own_address(config: LaunchConfig) -> str:
    """The address at which the other machines reach this one: that of its network interface towards the
    rendezvous address.

    The host name, which torchrun would use, is often unknown to the other machines, or a loopback address.

    Raises:
        LaunchError: the rendezvous address cannot be reached.
    """
    if config.nodes == 1:
        return "127.0.0.1"
    try:
        host = config.host.strip("[]")
        family, kind, _, _, place = socket.getaddrinfo(host, config.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # UDP: nothing is sent
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"--nodes: {config.host} cannot be reached from here ({error.strerror or error})"
        ) from None
    return host if own == place[0] or own.startswith("127.") else own


def accelerate_arguments(run_dir: Path, processes: int, config: LaunchConfig) -> list[str]:
    """The arguments of `accelerate launch`, the same on each machine.

    The agents assign the ranks of the machines at the rendezvous. With a rank other than 0 accelerate does
    not check that the port is still free: another machine of this run may already listen there.
    """
    here = processes // config.nodes
    flags = {
        "--config_file": run_dir / CONFIG,
        "--num_processes": processes,
        "--num_machines": config.nodes,
        "--machine_rank": 0 if config.nodes == 1 else 1,
        "--main_process_ip": config.host or "127.0.0.1",
        "--main_process_port": config.port if config.nodes > 1 else 0,
        "--rdzv_backend": "c10d",
        "--max_restarts": config.restarts,
        "--monitor_interval": 0.1,
        "--gpu_ids": "all",
        "--num_cpu_threads_per_process": _openmp_threads() or max(1, (os.cpu_count() or 1) // here),
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--log_dir": os.devnull,
    }
    several = (
        ["--multi_gpu"] if processes > 1 else []
    )  # also on CPUs; for one process the configuration file says it
    return [
        *several,
        *(str(word) for pair in flags.items() for word in pair),
        "--module",
        WORKER,
        str(run_dir),
    ]


def _openmp_threads() -> int:
    """OMP_NUM_THREADS, of a list as 4,2 its outermost level; 0 where it is not set or is no number, which
    OpenMP ignores too.
    """
    found = re.match(r"\s*([0-9]{1,4})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    return int(found[1]) if found else 0


def accelerate_environment(run_dir: Path, config: LaunchConfig) -> dict[str, str]:
    """Settings of torchrun that accelerate's command line has no flag for."""
    if config.nodes == 1:
        return {"PET_STANDALONE": "1"}  # chooses a free port
    # By default torch reuses the address and the store of the first rendezvous, with the old keys in it:
    # after a restart processes would wait for each other at different addresses.
    return {"PET_RDZV_ID": run_dir.resolve().name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch_line(run_dir: Path, recipe: Recipe, config: LaunchConfig = LaunchConfig()) -> str:
    """The shell command that runs a prepared folder without the vitctl command; with several machines, on
    each of them.
    """
    run_dir = run_dir.absolute()  # typed in any folder
    processes = recipe.machine.processes
    if not config.starts(recipe):
        return shlex.join([sys.executable, "-m", WORKER, str(run_dir)])
    script = Path(sys.executable).with_name("accelerate")
    accelerate = (
        [str(script)] if script.exists() else [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    )
    settings = [
        f"{name}={shlex.quote(value)}" for name, value in accelerate_environment(run_dir, config).items()
    ]
    return " ".join(
        [*settings, shlex.join([*accelerate, "launch", *accelerate_arguments(run_dir, processes, config)])]
    )


def write_accelerate_config(run_dir: Path, recipe: Recipe, config: LaunchConfig) -> None:
    """RUN/accelerate.yaml for a run that needs a launcher; it sets nothing that no flag sets."""
    if config.starts(recipe):
        write_text(run_dir / CONFIG, _CONFIG_TEXT)


STOPPED = 3


def run_in_processes(recipe: Recipe) -> int:
    """Start the typed command in as many processes as the recipe says, by `accelerate launch`; returns the
    exit code.

    A signal is forwarded to each of them, and the code is then 3; a second one, or the end of this process,
    kills them.
    """
    with tempfile.TemporaryDirectory(prefix="vitctl-bench-") as folder:
        config = LaunchConfig()
        write_accelerate_config(Path(folder), recipe, config)
        words = accelerate_arguments(Path(folder), recipe.machine.processes, config)
        words = words[: words.index("--module") + 1]  # after it come the module and its arguments
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            *words,
            "vitctl",
            *sys.argv[1:],
        ]
        # The agent would kill everything at a signal; in a session of its own it gets none.
        own = {"PET_SIGNALS_TO_HANDLE": UNUSED_SIGNAL}
        started = subprocess.Popen(
            command,
            env={**os.environ, **accelerate_environment(Path(folder), config), **own},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        signals: list[int] = []

        def forward(number: int, _frame: FrameType | None) -> None:
            again = is_repeated(number, signals)
            signals.append(number)
            if len(signals) == 1 or again:
                _stop(started.pid, again)

        with signal_handler(forward):
            code = started.wait()
        return STOPPED if signals else code


def _stop(agent: int, at_once: bool) -> None:
    """Tell the processes of an agent to stop; kill it, and them with it, where that is to be at once or none
    of them can be told.
    """
    told = False
    with suppress(psutil.Error):
        for process in psutil.Process(agent).children(recursive=True) if not at_once else ():
            if handles_signal(process.pid, signal.SIGUSR1):
                process.send_signal(signal.SIGUSR1)
                told = True
        if not told:
            psutil.Process(agent).kill()
