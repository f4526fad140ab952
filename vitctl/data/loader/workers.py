"""Loader processes: how they begin, that none is left behind, and what one died of."""

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from vitctl.errors import writing
from vitctl.system import memory_lock
from vitctl.system.descriptors import ensure_descriptors
from vitctl.system.signals import blocked_signals, ignore_signals

_WORKERS: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_GRACE_SECONDS = 2.0
_LOST_BATCH = 74  # EX_IOERR of sysexits.h


@dataclass(frozen=True)
class Workers:
    """The processes of one loader.

    Args:
        processes: that were started.
        oom_kills: processes that the out-of-memory killer had killed before.
    """

    processes: tuple[BaseProcess, ...]
    oom_kills: int

    def cause_of_death(self) -> str:
        """What killed the first process found dead, in words; the kernel takes a moment to tell."""
        until = time.monotonic() + _GRACE_SECONDS
        while not (dead := [p for p in self.processes if p.exitcode]) and time.monotonic() < until:
            time.sleep(0.01)
        if not dead:
            return "lost"
        code = dead[0].exitcode or 0
        if code == -signal.SIGKILL and oom_kills() > self.oom_kills:
            return "killed by the kernel for want of memory (out-of-memory killer)"
        if code == -signal.SIGKILL:
            return "killed (SIGKILL), most often for want of memory"
        if code == _LOST_BATCH:
            return "unable to hand over a batch; the output above says why"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended by its exit code {code}"


def start_workers(loader: Any) -> tuple[Iterator[Any], Workers]:
    """Begin to iterate over a DataLoader, and take back the SIGCHLD handler that torch installs.

    Left in place it raises out of whatever line the training loop has reached; without it a dead worker is noticed
    where its batch is waited for.
    """
    ensure_descriptors(loader.num_workers)
    handler, others, kills = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children()), oom_kills()
    # A process that is not ready to ignore a signal would count it a second time, in the pipe of this one's.
    with blocked_signals(), writing("/dev/shm"):  # the locks of queues lie there, and a full one does not say where
        batches = iter(loader)
    workers = set(multiprocessing.active_children()) - others
    _WORKERS.update(workers)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return batches, Workers(tuple(workers), kills)


def _lost_batch(error: BaseException, _: object) -> None:
    """A batch that cannot be handed over would be waited for in vain: the worker ends, which its parent notices."""
    print(f"a loader process cannot hand over a batch: {error}", file=sys.stderr, flush=True)
    os._exit(_LOST_BATCH)


def worker_start() -> Callable[[int], None]:
    """What a worker of this thread does first. Its end is tied to that of the thread that forks it, if that is the main one."""
    tied = threading.current_thread() is threading.main_thread() and multiprocessing.get_start_method() != "forkserver"
    return partial(_begin, os.getpid() if tied else None, memory_lock.shared_lock())


def _begin(parent: int | None, own: memory_lock.MemoryLock | None, _: int) -> None:
    memory_lock.use_lock(own)
    ignore_signals()  # the parent decides when to stop, and stops its workers itself
    Queue._on_queue_feeder_error = staticmethod(_lost_batch)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    gc.freeze()  # what is there stays: collections need not look at it, nor copy its pages by looking
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it went before it could be tied to
            os._exit(1)


@atexit.register
def _kill_workers() -> None:
    """At exit Python asks its daemons to leave by SIGTERM, which ours ignore, and would wait for them forever."""
    for worker in _WORKERS:
        worker.kill()


def oom_kills(root: Path = Path("/")) -> int:
    """Processes that the out-of-memory killer has killed so far in our control group; else on this machine; else 0."""
    for file in _counters(root):
        try:
            counts = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def _counters(root: Path) -> Iterator[Path]:
    groups = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"
    yield groups / "memory.events"  # within a container the path is that of the host, and the group is the root
    yield groups / "memory" / "memory.oom_control"
    yield root / "proc" / "vmstat"
