"""The `accelerate launch` command line of a run, with every flag given; the options --nodes and --restarts."""

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
