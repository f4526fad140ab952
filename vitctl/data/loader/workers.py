"""Loader worker processes: start, cleanup, and the cause of death of a worker."""

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
    """The workers of one loader.

    Args:
        processes: the worker processes.
        oom_kills: count of the out-of-memory killer at the start.
    """

    processes: tuple[BaseProcess, ...]
    oom_kills: int

    def cause_of_death(self) -> str:
        """Why the first dead worker ended, as text.

        Waits shortly, because the kernel needs a moment to report it.
        """
        until = time.monotonic() + _GRACE_SECONDS
        while not (dead := [p for p in self.processes if p.exitcode]) and time.monotonic() < until:
            time.sleep(0.01)
        if not dead:
            return "lost"
        code = dead[0].exitcode or 0
        if code == -signal.SIGKILL and oom_kills() > self.oom_kills:
            return "killed by the kernel because it was out of memory (OOM killer)"
        if code == -signal.SIGKILL:
            return "killed (SIGKILL), most often out of memory"
        if code == _LOST_BATCH:
            return "unable to send a batch; the output above says why"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended by its exit code {code}"


def start_workers(loader: Any) -> tuple[Iterator[Any], Workers]:
    """Start iterating over a DataLoader, and remove the SIGCHLD handler that torch installs.

    That handler would raise at any line of the training loop; without it a dead worker is detected while the
    loop waits for its batch.
    """
    ensure_descriptors(loader.num_workers)
    handler, others, kills = (
        signal.getsignal(signal.SIGCHLD),
        set(multiprocessing.active_children()),
        oom_kills(),
    )
    # Until a worker ignores signals, it would write them to the signal pipe of this process: they would be
    # counted twice.
    with (
        blocked_signals(),
        writing("/dev/shm"),
    ):  # queues create their locks there; the error for a full disk names no path
        batches = iter(loader)
    workers = set(multiprocessing.active_children()) - others
    _WORKERS.update(workers)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return batches, Workers(tuple(workers), kills)


def _lost_batch(error: BaseException, _: object) -> None:
    """End a worker that cannot send a batch: the parent detects that, and does not wait for the batch
    forever.
    """
    print(f"a loader process cannot send a batch: {error}", file=sys.stderr, flush=True)
    os._exit(_LOST_BATCH)


def worker_init() -> Callable[[int], None]:
    """The `worker_init_fn` of a DataLoader.

    A worker forked by the main thread is killed when that thread ends.
    """
    tied = (
        threading.current_thread() is threading.main_thread()
        and multiprocessing.get_start_method() != "forkserver"
    )
    return partial(_init_worker, os.getpid() if tied else None, memory_lock.shared_lock())


def _init_worker(parent: int | None, lock: memory_lock.MemoryLock | None, _: int) -> None:
    memory_lock.use_lock(lock)
    ignore_signals()  # the parent decides when to stop, and stops its workers itself
    Queue._on_queue_feeder_error = staticmethod(_lost_batch)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    gc.freeze()  # garbage collection skips existing objects, so that their shared pages are not copied
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before PR_SET_PDEATHSIG was set
            os._exit(1)


@atexit.register
def _kill_workers() -> None:
    """Kill the workers at exit: Python sends SIGTERM to its daemon processes, which workers ignore, and would
    wait forever.
    """
    for worker in _WORKERS:
        worker.kill()


def oom_kills(root: Path = Path("/")) -> int:
    """Processes killed by the out-of-memory killer so far: in our control group, else on this machine, else
    0.
    """
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
    yield (
        groups / "memory.events"
    )  # within a container the path is that of the host, and the group is the root
    yield groups / "memory" / "memory.oom_control"
    yield root / "proc" / "vmstat"


def original_message(text: str) -> str:
    """The original message: torch wraps an exception of a worker into the text of its traceback, message
    last.
    """
    return text.strip().rpartition("\n")[2].partition(": ")[2] if text.startswith("Caught ") else text


def is_worker_death(error: Exception) -> bool:
    """Whether a worker died: torch reports it, or its connection broke while it sent a batch."""
    text = str(error)
    return (
        text.startswith("DataLoader worker")
        if isinstance(error, RuntimeError)
        else not text.startswith("Caught")
    )
