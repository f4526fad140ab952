"""Processes that do not find each other are told so, in time."""

import os
import re
import socket
import subprocess
import sys

import pytest
from accelerate.state import PartialState

from tests import warm
from tests.conftest import free_port
from vitctl.engine import runtime

JOIN = """
import sys, time
from vitctl.engine.runtime import broadcast_text, check_all_reduce, join, node_lines
from vitctl.errors import LaunchError, is_lost_peer
rank, mode = int(sys.argv[1]), sys.argv[2]
try:
    join(cpu=True, seconds=1 if mode == "alone" else 60, group_seconds=2 if mode == "late" else 60)
    if mode == "late":
        check_all_reduce(cpu=True, seconds=60)
    if mode in ("hangs", "late") and rank == 1:
        print("met", flush=True)
        input()
    if mode != "late":
        check_all_reduce(cpu=True, seconds=1 if mode == "hangs" else 60)
    print(broadcast_text(f"rank {rank} says ü"), node_lines(cpu=True))
except LaunchError as error:
    print(error)
except RuntimeError as error:
    print(f"lost: {is_lost_peer(str(error))}; {error}")
"""


def start(rank: int, port: int, mode: str) -> warm.Popen:
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    line = [sys.executable, "-c", JOIN, str(rank), mode]
    return warm.Popen(line, **streams, text=True, env={**os.environ, **env, "MASTER_PORT": str(port)})


def test_join__the_other_never_comes() -> None:
    port = free_port()
    said = start(0, port, "alone").communicate(timeout=60)[0]
    taken = re.search(rf"the 2 processes did not all connect to 127.0.0.1:{port} in (\d+) s \(", said)
    assert taken and int(taken[1]) >= 1
    assert said.strip().endswith("every node can reach that address, or raise machine.start_timeout = 1")
    assert said.count("\n") == 1


def test_check_all_reduce__the_other_hangs() -> None:
    port = free_port()
    waiting, hanging = (start(rank, port, "hangs") for rank in (0, 1))
    said = waiting.communicate(timeout=60)[0]
    assert said.startswith(
        f"process 0 on {socket.gethostname()}: 2 processes met, "
        "but a test all-reduce failed or took more than 1 s"
    )
    assert said.count("\n") == 1
    assert hanging.poll() is None
    assert hanging.communicate("\n", timeout=60)[0].startswith("met\n")


def test_operation__takes_at_most_the_timeout_of_the_group() -> None:
    port = free_port()
    waiting, hanging = (start(rank, port, "late") for rank in (0, 1))
    said = waiting.communicate(timeout=60)[0]
    assert said.startswith("lost: True; ") and "imed out waiting 2000ms" in said
    assert hanging.communicate("\n", timeout=60)[0].startswith("met\n")


def test_together__words_and_places() -> None:
    port = free_port()
    both = [start(rank, port, "well") for rank in (0, 1)]
    said = [process.communicate(timeout=60)[0].strip() for process in both]
    line = f"node {socket.gethostname()}: processes 0 to 1, CPU, "
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 0 says ü ['{line}")


SILENT = """
import sys
from vitctl.engine import runtime
from vitctl.errors import LaunchError
from vitctl.system.screen import silence, speak
runtime.SAY_SECONDS = 0.2
silence()
print("an ordinary note", file=sys.stderr, flush=True)
try:
    runtime.join(cpu=True, seconds=float(sys.argv[1]))
except LaunchError as error:
    pass
speak()
print("an error", file=sys.stderr)
"""


def silent(rank: int, port: int, seconds: float) -> warm.Popen:
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = [sys.executable, "-c", SILENT, str(seconds)]
    return warm.Popen(line, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})


def test_join__a_silent_process_says_that_it_waits_and_its_error_until_they_have_met() -> None:
    port, met = free_port(), free_port()
    lines = silent(0, port, 1).communicate(timeout=60)[1].splitlines()
    waits = f"vitctl: process 0: waiting for the 2 processes at 127.0.0.1:{port}, for at most 1 s"
    assert (lines[0], lines[-1]) == (waits, "an error")
    assert "an ordinary note" not in lines
    both = [silent(rank, met, 60) for rank in (0, 1)]
    for process in both:
        assert "an error" not in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    "left",
    [
        {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "MASTER_ADDR": "127.0.0.1"},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "x"},
    ],
)
def test_start__of_one_process_ignores_the_ranks_of_any_launcher(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, str]
) -> None:
    """Also where no command has read the environment, as in `verify --replay`: accelerate would wait."""
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    PartialState._reset_state()
    found = runtime.start(precision="float32", device="cpu", processes=1)
    assert (found.num_processes, found.is_main) == (1, True)
