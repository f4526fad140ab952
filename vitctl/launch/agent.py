"""`accelerate launch`, the agent that starts the processes of a run: its arguments, and the child process.

RUN/launch.txt holds the same line for a person.
"""

import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from vitctl.engine.preemption import RESUMABLE, say
from vitctl.errors import LaunchError
from vitctl.launch.cluster import PORT, UNUSED_SIGNAL, WORKER, LaunchConfig, without_settings
from vitctl.launch.peers import first_error, is_cause, note_killed
from vitctl.recipe.schema import Machine, Recipe
from vitctl.system.process import (
    SIGNALS,
    end_with_parent,
    handles_signal,
    is_repeated,
    signal_handler,
    usable_cores,
)

ACCELERATE = "accelerate.commands.launch"
CONFIG = Path(__file__).with_name("accelerate.yaml")  # it only sets what flags also set
POLL_SECONDS, _WAIT_SECONDS = 2.0, 0.1  # a poll reads files of the run, and scans all processes
GRACE_SECONDS = 15.0  # for processes to end, once killed or once another one has failed for good


def parse_nodes(text: str, restarts: int = 0) -> LaunchConfig:
    """Read --nodes, such as "2@gpu01:29400"; "1" needs no address. Raises LaunchError."""
    match = re.fullmatch(r"(\d+)(?:@([\w.-]+|\[[\da-fA-F:]+\])(?::(\d+))?)?", text)
    nodes, host, port = (match[1], match[2] or "", int(match[3] or PORT)) if match else ("0", "", PORT)
    if int(nodes) < 1 or (int(nodes) > 1 and not host) or port not in range(1, 65_536):
        raise LaunchError(
            f"--nodes {text}",
            "should be the number of machines and, if there are several, the address and port of "
            "one of them, such as --nodes 2@gpu01:29400",
        )
    return LaunchConfig(int(nodes), host, port, restarts)


def check_spread(config: LaunchConfig, processes: int) -> None:
    """Raise LaunchError unless the processes spread evenly over the machines."""
    if processes % config.nodes:
        raise LaunchError(
            f"--nodes {config.nodes}",
            f"{processes} process{'es' * (processes > 1)} cannot be spread evenly over the "
            f"machines; --processes is the total: give a multiple of {config.nodes}",
        )


def own_address(config: LaunchConfig) -> str:
    """Return the address at which the other machines reach this one. Raises LaunchError.

    It is that of the network interface towards the rendezvous address. The host name, which torchrun would
    use, is often unknown to the other machines, or a loopback address.
    """
    if config.nodes == 1:
        return "127.0.0.1"
    try:
        host = config.host.strip("[]")
        family, kind, _, _, place = socket.getaddrinfo(host, config.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # UDP: nothing is sent
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            "--nodes", f"{config.host} cannot be reached from here ({error.strerror or error})"
        ) from None
    return host if address == place[0] or address.startswith("127.") else address


def accelerate_arguments(run_dir: Path, machine: Machine, config: LaunchConfig) -> list[str]:
    """Return the arguments of `accelerate launch`, the same on each machine.

    The agents assign the ranks of the machines at the rendezvous. With a rank other than 0 accelerate does
    not check that the port is still free: another machine of this run may already listen there.
    """
    processes, seconds = machine.processes, math.ceil(machine.start_timeout)
    flags = {
        "--config_file": CONFIG,
        "--num_processes": processes,
        "--num_machines": config.nodes,
        "--machine_rank": 0 if config.nodes == 1 else 1,
        "--main_process_ip": config.host or "127.0.0.1",
        "--main_process_port": config.port if config.nodes > 1 else 0,
        "--rdzv_backend": "c10d",
        "--rdzv_conf": f"join_timeout={seconds},read_timeout={seconds}",  # also for the first one's address
        "--max_restarts": config.restarts,
        "--monitor_interval": 0.1,
        "--gpu_ids": "all",
        "--num_cpu_threads_per_process": _threads(processes // config.nodes),
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--log_dir": os.devnull,
    }
    several = ["--multi_gpu"] if processes > 1 else []  # on CPUs, too; for one process the file sets it
    words = [str(word) for pair in flags.items() for word in pair]
    return [*several, *words, "--module", WORKER, str(run_dir)]


def _threads(processes: int) -> int:
    """Return the threads per process: OMP_NUM_THREADS (its first level), or a share of the cores."""
    match = re.match(r"\s*([0-9]{1,4})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    return int(match[1]) if match and int(match[1]) else max(1, usable_cores() // processes)


def accelerate_environment(run_dir: Path, config: LaunchConfig) -> dict[str, str]:
    """Return the settings of torchrun that accelerate's command line has no flag for."""
    if config.nodes == 1:
        return {"PET_STANDALONE": "1"}  # chooses a free port
    # By default torch reuses the address and the store of the first rendezvous, with the old keys in it:
    # after a restart processes would wait for each other at different addresses.
    return {"PET_RDZV_ID": run_dir.resolve().name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def accelerate_line(run_dir: Path, recipe: Recipe, config: LaunchConfig) -> str:
    """Return the shell command of `accelerate launch` for a prepared folder."""
    script = Path(sys.executable).with_name("accelerate")
    program = [str(script), "launch"] if script.exists() else [sys.executable, "-m", ACCELERATE]
    words = [*program, *accelerate_arguments(run_dir, recipe.machine, config)]
    settings = accelerate_environment(run_dir, config).items()
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings), shlex.join(words)])


class Agent:
    """`accelerate launch` as a child process, with its workers. All of them die with this process.

    The agent has a separate session, so that a terminal signals only this process. It forwards the first
    signal once to each worker, and kills all of them at the second.

    Args:
        words: arguments of `accelerate launch`.
        settings: environment variables of this launch. Other settings of accelerate and torchrun are ignored.
        output: file for the agent's output; signals are then announced here. None: the screen.
    """

    def __init__(
        self, words: Sequence[str], settings: Mapping[str, str], output: IO[Any] | None = None
    ) -> None:
        # The agent would kill everything at a signal, so it listens to one that is never sent.
        settings = {**settings, "PET_SIGNALS_TO_HANDLE": UNUSED_SIGNAL}
        self.process = subprocess.Popen(
            [sys.executable, "-m", ACCELERATE, *words],
            env={**without_settings(os.environ), **settings},
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self.announces = output is not None
        self.signals: list[int] = []
        self.is_killed = False  # by a second signal
        self._signalled: set[int] = set()
        self._family: set[psutil.Process] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle signals within the block. At its end no process is left."""
        with signal_handler(self._on_signal):
            try:
                yield
            finally:
                self.kill()
                self.process.wait()
                psutil.wait_procs(self._family, timeout=GRACE_SECONDS)

    @property
    def had_workers(self) -> bool:
        return bool(self._family)

    def runs(self) -> bool:
        """Wait for the next poll, the agent's end or a signal. Return whether the agent still runs."""
        until = time.monotonic() + POLL_SECONDS
        while self.process.poll() is None:
            time.sleep(_WAIT_SECONDS)
            if self.signals or time.monotonic() > until:
                return True
        return False

    def workers(self) -> list[psutil.Process]:
        """Return the processes that the agent started; only they have a rank in their environment."""
        workers = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.Error):
                    workers += [child] if "RANK" in child.environ() else []
        self._family.update(workers)
        return workers

    def forward_signal(self) -> None:
        """Tell each process once to stop: a second signal would end it before it has saved."""
        for worker in self.workers() if self.signals else ():
            if worker.pid not in self._signalled and handles_signal(worker.pid, signal.SIGUSR1):
                self._signalled.add(worker.pid)
                worker.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill what is left of the agent and its processes, without waiting for their end."""
        if self.process.returncode is None:
            with suppress(psutil.Error):
                self._family.update(psutil.Process(self.process.pid).children(recursive=True))
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        for process in list(self._family):  # a copy: a signal may add some meanwhile
            with suppress(psutil.Error):
                process.kill()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.process.returncode is not None:
            return
        is_second = is_repeated(number, self.signals)
        self.signals.append(number)
        if is_second:
            self.is_killed = True
            self.kill()
        elif len(self.signals) == 1 and self.announces:
            name = signal.Signals(number).name
            say(f"{name}: stopping as soon as the work so far is safe; a second signal stops at once")


# torchrun's final output about the process that failed first.
_ROOT_CAUSE = re.compile(r"Root Cause .*?\n\s*rank +: (\d+) .*?\n\s*exitcode +: (-?\d+) ", re.DOTALL)


def note_first_killed(run_dir: Path, printed: str) -> None:
    """Write the note of the first killed process in an agent's output, unless a cause is known."""
    for rank, code in _ROOT_CAUSE.findall(printed):
        was_killed = int(code) < 0 and -int(code) not in SIGNALS
        if was_killed and not is_cause(first_error(run_dir)):
            note_killed(run_dir, int(rank), signal.Signals(-int(code)).name)


def run_in_processes(recipe: Recipe) -> int:
    """Start the typed command in as many processes as the recipe says; return the exit code.

    A signal is forwarded to each of them, and the code is then 3; a second one, or the end of this process,
    kills them.
    """
    config = LaunchConfig()
    words = accelerate_arguments(Path(), recipe.machine, config)
    words = [*words[: words.index("--module") + 1], "vitctl", *sys.argv[1:]]
    agent = Agent(words, accelerate_environment(Path(), config))
    with agent.watched():
        while agent.runs():
            agent.forward_signal()
            if agent.signals and not agent.had_workers:
                break
    return RESUMABLE if agent.signals else agent.process.returncode
