"""What tests of launches share: prepared recipes, machines, which are several vitctls on loopback here, and
their processes.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.conftest import TINY, command, free_port, paced
from vitctl.recipe.load import Loaded, Override, load_recipe
from vitctl.system.process import SIGNALS

Load = Callable[..., Loaded]

FOREGROUND = {"checkpoint.background": False}  # a step that is in the log has been saved before the next
HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', "
    "flush=True); input()"
)


@contextmanager
def lock_held(folder: Path) -> Iterator[None]:
    """Another process holds the lock of a run folder, as one that works on it does."""
    line = [sys.executable, "-c", HOLD, str(folder / ".lock")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield
        holder.communicate("\n")


@pytest.fixture
def load(tiny_data: Path) -> Load:
    """load(**{"a.b": value}): the tiny recipe."""

    def do(**values: Any) -> Loaded:
        given = {"data.path": str(tiny_data), **values}
        return load_recipe(str(TINY), [Override(key, value) for key, value in given.items()])

    return do


def machine(folder: Path, data: Path, *flags: str, **values: Any) -> "subprocess.Popen[str]":
    """One machine's vitctl; its steps are slow enough to be hit."""
    line = paced([*command(folder, data, **{**FOREGROUND, **values}), *flags], launched=True)
    return warm.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def machines(folder: Path, data: Path, *flags: str, **values: Any) -> "list[subprocess.Popen[str]]":
    """Two that meet."""
    nodes = ("--nodes", f"2@127.0.0.1:{free_port()}", *flags)
    return [machine(folder, data, *nodes, **values) for _ in range(2)]


def ended(processes: "Sequence[subprocess.Popen[str]]") -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    said = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def wait_for(condition: Callable[[], Any], processes: "Sequence[subprocess.Popen[str]]") -> Any:
    """What the condition gives, once it holds."""
    until = time.monotonic() + 240
    while not (found := condition()):
        if any(process.poll() is not None for process in processes) or time.monotonic() > until:
            for process in processes:
                process.kill()
            pytest.fail(f"still waiting, and they ended or were killed with: {ended(processes)}")
        time.sleep(0.02)
    return found


def logged(folder: Path, step: int) -> Callable[[], bool]:
    log = folder / "log.jsonl"
    return lambda: log.exists() and f'"step": {step},' in log.read_text()


def family_of(processes: "Sequence[subprocess.Popen[str]]") -> list[psutil.Process]:
    return [one for process in processes for one in psutil.Process(process.pid).children(recursive=True)]


def rank_of(process: psutil.Process) -> str | None:
    """The rank of a process, None of one that is no rank or has ended."""
    try:
        return process.environ().get("RANK")
    except (psutil.Error, ProcessLookupError, OSError):
        return None


@contextmanager
def held(processes: "Sequence[subprocess.Popen[str]]") -> Iterator[list[psutil.Process]]:
    """Their ranks, which stand still inside of the block."""
    ranks = [one for one in family_of(processes) if rank_of(one) is not None]
    for rank in ranks:
        rank.suspend()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.resume()


def is_signalled(process: psutil.Process) -> bool:
    """Whether a signal of ours waits for a process that stands still."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    waiting = int(next(line for line in status.splitlines() if line.startswith("ShdPnd:")).split()[1], 16)
    return any(waiting >> (number - 1) & 1 for number in SIGNALS)


def kill_rank(rank: int, processes: "Sequence[subprocess.Popen[str]]") -> None:
    """End one process as the out-of-memory killer would."""
    (lost,) = [one for one in family_of(processes) if rank_of(one) == str(rank)]
    lost.kill()


def assert_gone(family: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def says(process: "subprocess.Popen[str]", text: str) -> Callable[[], bool]:
    """Whether it has said so by now on its standard error."""
    assert process.stderr is not None
    pipe, so_far = process.stderr.fileno(), bytearray()
    os.set_blocking(pipe, False)

    def look() -> bool:
        with suppress(BlockingIOError):
            so_far.extend(os.read(pipe, 10_000))
        return text.encode() in so_far

    return look


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
