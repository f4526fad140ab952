"""Loader processes: their signals, their end, and what is said of one that died."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

import pytest

from tests import warm
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader import workers as lifecycle
from vitctl.data.loader.batches import Batch, train_batches
from vitctl.data.loader.workers import Workers, oom_kills
from vitctl.data.source.order import Order
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.data.source.views import Source
from vitctl.errors import DataError


def endless(source: Source) -> Iterator[Batch]:
    sizes = {
        "batch_size": 10,
        "micro_batch": 4,
        "rank": 0,
        "num_processes": 1,
        "first_step": 0,
        "num_workers": 2,
    }
    return train_batches(source, Order(len(source), 1), TrainTransform(8), seed=5, **sizes)


def test_workers__ignore_signals_and_a_dead_one_is_reported() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    others = set(active_children())
    batches = endless(SyntheticSource(20, 3, 12))
    list(islice(batches, 8))
    workers = [child for child in active_children() if child not in others]
    assert len(workers) == 2
    assert signal.getsignal(signal.SIGCHLD) == handler
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    list(islice(batches, 8))
    assert all(worker.is_alive() for worker in workers)
    workers[0].kill()
    said = r"a loader process was killed \(SIGKILL\), most often out of memory; use fewer loader workers \("
    with pytest.raises(DataError, match=said):
        list(islice(batches, 200))
    del batches
    assert not any(worker.is_alive() for worker in workers)


SCRIPT = """
import sys, threading, time
from itertools import islice
from multiprocessing import active_children
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.data.images.transforms import TrainTransform
{source}
batches = train_batches(Chosen(99, 3, 64), Order(99, 0), TrainTransform(64), seed=0, batch_size=16,
                        micro_batch=16, rank=0, num_processes=1, first_step=0, num_workers=2)
{held}
print(*[child.pid for child in active_children()], flush=True)
{end}
"""


EAGER = """
import os, signal
from vitctl.data.loader import workers
from vitctl.engine.preemption import stop_on_signals
begin = workers._init_worker
def hit(*given):
    os.kill(os.getpid(), signal.SIGINT)
    begin(*given)
workers._init_worker = hit
block = stop_on_signals()
flag = block.__enter__()
Chosen = SyntheticSource
"""


def test_workers__that_are_hit_while_they_start_do_not_stop_their_parent() -> None:
    """As Ctrl-C hits all processes of a terminal: two that count it in the parent's pipe would make the
    parent leave at once.
    """
    process, workers = start("sys.exit(7 + flag.raised)", source=EAGER)
    assert len(workers) == 2
    assert process.wait(timeout=60) == 7


STUCK = """
class Chosen(SyntheticSource):
    def read(self, sample):
        time.sleep(600)
def tell():
    while len(active_children()) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    print(*[child.pid for child in active_children()], flush=True)
threading.Thread(target=tell).start()
"""


def start(
    end: str, *, source: str = "Chosen = SyntheticSource", held: str = "held = list(islice(batches, 6))"
) -> tuple[warm.Popen, list[int]]:
    line = [sys.executable, "-c", SCRIPT.format(end=end, source=source, held=held)]
    process = warm.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        return process, [int(pid) for pid in output.readline().split()]


def alive(pids: list[int]) -> list[int]:
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in states.items() if stat.exists() and stat.read_text().split()[2] != "Z"]


def named_memory(pids: list[int]) -> list[str]:
    """What these processes left in /dev/shm; torch names its files by the process."""
    return [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]


def test_workers__do_not_hold_up_an_exit() -> None:
    process, workers = start("sys.exit(7)")
    assert len(workers) == 2
    assert process.wait(timeout=60) == 7
    assert not alive(workers)


@pytest.mark.parametrize("held", ["held = list(islice(batches, 6))", "next(batches)"], ids=["busy", "stuck"])
def test_workers__kill_leaves_no_process_and_no_shared_memory(held: str) -> None:
    stuck = held == "next(batches)"
    process, workers = start(
        "time.sleep(600)", source=STUCK if stuck else "Chosen = SyntheticSource", held=held
    )
    assert len(workers) == 2 == len(alive(workers))
    process.kill()
    process.wait(timeout=60)
    assert soon(
        lambda: not alive(workers), seconds=3
    )  # torch's own watch takes five, and never sees a stuck one
    assert not named_memory([process.pid, *workers])


def soon(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (there := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return there


def test_workers__a_killed_one_leaves_no_shared_memory() -> None:
    others = set(active_children())
    batches = endless(SyntheticSource(20, 3, 12))
    list(islice(batches, 8))
    workers = set(active_children()) - others
    for worker in workers:
        worker.kill()
    with pytest.raises(DataError, match="a loader process was killed"):
        list(islice(batches, 200))
    del batches
    assert not named_memory([worker.pid or 0 for worker in workers])


def end_by(how: int) -> None:
    if how < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -how)
    os._exit(how)


@pytest.mark.parametrize(
    ("how", "kills", "said"),
    [
        (-signal.SIGKILL, 1, "killed by the kernel because it was out of memory (OOM killer)"),
        (-signal.SIGKILL, 0, "killed (SIGKILL), most often out of memory"),
        (-signal.SIGTERM, 1, "killed by SIGTERM"),
        (3, 0, "ended by its exit code 3"),
    ],
)
def test_cause_of_death(monkeypatch: pytest.MonkeyPatch, how: int, kills: int, said: str) -> None:
    monkeypatch.setattr(lifecycle, "oom_kills", lambda: 5 + kills)
    process = multiprocessing.get_context("fork").Process(target=end_by, args=(how,))
    process.start()
    assert Workers((process,), 5).cause_of_death() == said
    process.join()


def test_cause_of_death__nobody_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_GRACE_SECONDS", 0.05)
    assert Workers((), 0).cause_of_death() == "lost"


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/job/7", "sys/fs/cgroup/job/7/memory.events"),
        ("0::/not/mounted", "sys/fs/cgroup/memory.events"),
        ("0::/", "proc/vmstat"),
    ],
)
def test_oom_kills__are_those_of_the_control_group(tmp_path: Path, group: str, file: str) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(group + "\n")
    assert oom_kills(tmp_path) == 0
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("oom 9\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    (tmp_path / file).write_text("no such\nthing here\n")
    assert oom_kills(tmp_path) == 0


def test_oom_kills__without_any_counter(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
