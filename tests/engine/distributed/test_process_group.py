"""Processes that do not find each other are told so, in time."""

import os
import socket
import subprocess
import sys
import time

JOIN = """
import sys
from vitctl.engine.distributed.process_group import broadcast_text, check_all_reduce, join, node_lines
from vitctl.errors import LaunchError
rank, mode = int(sys.argv[1]), sys.argv[2]
try:
    join(cpu=True, seconds=3 if mode == "alone" else 60)
    if mode == "hangs" and rank == 1:
        import time
        time.sleep(8)
    check_all_reduce(cpu=True, seconds=2)
    print(broadcast_text(f"rank {rank} says ü"), node_lines(cpu=True))
except LaunchError as error:
    print(error)
"""


def start(rank: int, port: int, mode: str) -> "subprocess.Popen[str]":
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    line = [sys.executable, "-c", JOIN, str(rank), mode]
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env, "MASTER_PORT": str(port)},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_join__the_other_never_comes() -> None:
    port, began = free_port(), time.monotonic()
    said = start(0, port, "alone").communicate(timeout=60)[0]
    assert f"the 2 processes did not all meet at 127.0.0.1:{port} within 3 s (" in said
    assert said.strip().endswith("check that all were started and that every node can reach that address")
    assert said.count("\n") == 1
    assert time.monotonic() - began < 50


def test_check_all_reduce__the_other_hangs() -> None:
    port = free_port()
    both = [start(rank, port, "hangs") for rank in (0, 1)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert said[0].startswith(
        f"process 0 on {socket.gethostname()}: 2 processes met, but could not add a number within 2 s"
    )
    assert said[0].count("\n") == 1


def test_together__words_and_places() -> None:
    port = free_port()
    both = [start(rank, port, "well") for rank in (0, 1)]
    said = [process.communicate(timeout=60)[0].strip() for process in both]
    line = f"node {socket.gethostname()}: processes 0 to 1, CPU, "
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 0 says ü ['{line}")
