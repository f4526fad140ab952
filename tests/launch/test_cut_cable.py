"""Two machines, as network namespaces, and the cable between them cut in the middle of a training."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import checkpoint
from tests.faults.conftest import ENVIRONMENT, command, warnings
from tests.faults.test_kills import soon

pytestmark = pytest.mark.slow
LAST = 400
NAMED_SECONDS, ENDED_SECONDS = 60, 120


def ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True).returncode


@pytest.fixture
def cable() -> Iterator[None]:
    """Machines one and two, whose eth0 are the ends of a cable; skipped where none can be made."""
    try:
        if ip("netns", "add", "one"):
            pytest.skip("no network namespace can be made here")
        ip("netns", "add", "two")
        ip("link", "add", "eth0", "netns", "one", "type", "veth", "peer", "name", "eth0", "netns", "two")
        for number, name in enumerate(("one", "two"), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                assert ip("-n", name, "link", "set", device, "up") == 0
        yield
    finally:
        ip("netns", "del", "one")
        ip("netns", "del", "two")


def started(folder: Path, data: Path, each: int, port: int, sharding: str) -> list[subprocess.Popen[str]]:
    """The processes of a run, `each` on either machine."""
    values: dict[str, Any] = {"schedule.total_steps": LAST, "checkpoint.every_steps": 50}
    values |= {"evaluation.every_steps": 0, "machine.sharding": sharding, "machine.precision": "float32"}
    place = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0"}
    place |= {"WORLD_SIZE": str(2 * each), "LOCAL_WORLD_SIZE": str(each)}
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", "one" if rank < each else "two", *command(folder, data, **values)],
            env={**ENVIRONMENT, **place, "RANK": str(rank), "LOCAL_RANK": str(rank % each)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2 * each)
    ]


@pytest.mark.usefixtures("cable")
@pytest.mark.parametrize(("each", "sharding"), [(1, "none"), (1, "fsdp"), (2, "none"), (2, "fsdp")])
def test_cut__is_named_and_ends_and_the_resumed_run_is_equal(
    tiny_data: Path, tmp_path: Path, each: int, sharding: str
) -> None:
    straight, folder = tmp_path / "straight", tmp_path / "run"
    for one in started(straight, tiny_data, each, 29501, sharding):
        text = one.communicate(timeout=600)[0]
        assert one.returncode == 0, text
    processes = started(folder, tiny_data, each, 29502, sharding)
    assert soon(lambda: (folder / "checkpoints" / "step_00000100").is_dir(), 300)
    ip("-n", "one", "link", "set", "eth0", "down")
    began = time.monotonic()
    assert soon(lambda: any("does not end" in text for text in warnings(folder)), NAMED_SECONDS)
    named = time.monotonic() - began
    for one in processes:
        one.communicate(timeout=ENDED_SECONDS)
    ended = time.monotonic() - began
    assert [one.returncode for one in processes] == [3] * len(processes)
    print(f"{2 * each} processes, {sharding}: named after {named:.1f} s, ended after {ended:.0f} s")
    ip("-n", "one", "link", "set", "eth0", "up")
    for one in started(folder, tiny_data, each, 29503, sharding):
        text = one.communicate(timeout=600)[0]
        assert one.returncode == 0, text
    assert checkpoint(folder, LAST) == checkpoint(straight, LAST)
