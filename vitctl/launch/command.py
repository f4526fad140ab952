"""The line `accelerate launch ...` of a run, every flag given, and what --nodes and --restarts say."""

import os
import re
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from vitctl.errors import LaunchError
from vitctl.recipe.schema import Recipe
from vitctl.system.files import write_text

PORT = 29_400
WORKER = "vitctl.launch.worker"
CONFIG = "accelerate.yaml"
_EXAMPLE = "for example --nodes 2@gpu01:29400"
# Without this file accelerate would take what a flag does not say from one that somebody made for something else.
_CONFIG_TEXT = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n"


@dataclass(frozen=True)
class LaunchConfig:
    """The machines of a run, the address of one of them, where they meet, and how often lost processes are started again."""

    nodes: int = 1
    host: str = ""
    port: int = PORT
    restarts: int = 0

    def starts(self, recipe: Recipe) -> bool:
        """Whether a run needs a launcher: it has several processes, or one that may be started again."""
        return recipe.machine.processes > 1 or self.nodes > 1 or self.restarts > 0


def parse_nodes(text: str, restarts: int = 0) -> LaunchConfig:
    """Read --nodes.

    Args:
        text: such as "2@gpu01:29400"; without the port it is 29400; "1" needs no address.
        restarts: of --restarts.

    Raises:
        LaunchError: it is neither.
    """
    found = re.fullmatch(r"(\d+)(?:@([\w.-]+|\[[\da-fA-F:]+\])(?::(\d+))?)?", text)
    if found is None or int(found[1]) < 1 or int(found[3] or PORT) not in range(1, 65_536):
        raise LaunchError(f"--nodes {text}: should be the number of machines, an address and a port; {_EXAMPLE}")
    config = LaunchConfig(int(found[1]), found[2] or "", int(found[3] or PORT), restarts)
    if config.nodes > 1 and not config.host:
        raise LaunchError(f"--nodes {text}: where they meet is missing, the address of one of them; {_EXAMPLE}")
    return config


def check_processes(config: LaunchConfig, processes: int) -> None:
    """The processes are a whole number on each machine, and this one has a way to where they meet.

    Raises:
        LaunchError: they are not, there is none, or the restarts are negative.
    """
    if processes % config.nodes:
        raise LaunchError(
            f"--nodes {config.nodes}: {processes} process{'es' * (processes > 1)} cannot be spread evenly over them; "
            f"--processes is their number on all machines, a multiple of {config.nodes}"
        )
    if config.restarts < 0:
        raise LaunchError(f"--restarts {config.restarts}: should be 0 or more")
    own_address(config)


def own_address(config: LaunchConfig) -> str:
    """The address by which the other machines reach this one: that of its way to where they meet.

    Its own name, which torchrun would take, is often unknown to others, or a loopback address.

    Raises:
        LaunchError: there is no way.
    """
    if config.nodes == 1:
        return "127.0.0.1"
    try:
        host = config.host.strip("[]")
        family, kind, _, _, place = socket.getaddrinfo(host, config.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # of datagrams: it sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"--nodes: no way from here to {config.host} ({error.strerror or error})") from None
    return host if own == place[0] or own.startswith("127.") else own


def accelerate_arguments(run_dir: Path, processes: int, config: LaunchConfig) -> list[str]:
    """The arguments of `accelerate launch`, the same on each machine.

    The agents give out the ranks of the machines where they meet. Any rank but 0 keeps accelerate from asking that nobody
    listens there yet, which another machine of this run may do.
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
        "--num_cpu_threads_per_process": os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // here),
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--log_dir": os.devnull,
    }
    several = ["--multi_gpu"] if processes > 1 else []  # also on CPUs; of one process the file says it
    return [*several, *(str(word) for pair in flags.items() for word in pair), "--module", WORKER, str(run_dir)]


def accelerate_environment(run_dir: Path, config: LaunchConfig) -> dict[str, str]:
    """What torchrun can be told and accelerate's command line cannot say."""
    if config.nodes == 1:
        return {"PET_STANDALONE": "1"}  # meets at a port that is free
    # By default torch keeps the address of the first round for all rounds, and a store that has the first round's keys:
    # after a restart processes would wait for each other at different places.
    return {"PET_RDZV_ID": run_dir.resolve().name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch_line(run_dir: Path, recipe: Recipe, config: LaunchConfig = LaunchConfig()) -> str:
    """The line for a shell that runs a prepared folder without vitctl's command; of several machines, on each of them."""
    processes = recipe.machine.processes
    if not config.starts(recipe):
        return shlex.join([sys.executable, "-m", WORKER, str(run_dir)])
    script = Path(sys.executable).with_name("accelerate")
    accelerate = [str(script)] if script.exists() else [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    settings = [f"{name}={shlex.quote(value)}" for name, value in accelerate_environment(run_dir, config).items()]
    return " ".join([*settings, shlex.join([*accelerate, "launch", *accelerate_arguments(run_dir, processes, config)])])


def write_accelerate_config(run_dir: Path, recipe: Recipe, config: LaunchConfig) -> None:
    """RUN/accelerate.yaml for a run that needs a launcher; it says nothing that a flag does not say."""
    if config.starts(recipe):
        write_text(run_dir / CONFIG, _CONFIG_TEXT)
