"""This process: signals, its state while it waits, open files, memory."""

import ctypes
import fcntl
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from vitctl.errors import LaunchError
from vitctl.system import limits

# Sent by a person, a batch system or a launcher to stop a job; a second one means "stop at once".
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2, signal.SIGQUIT)
# Sent by the system: a closed terminal (which sends it twice, once through the shell), a limit on CPU time
# (which sends it every second), a timer. The job saves a checkpoint and stops; a second one does not
# interrupt that.
_SYSTEM_SIGNALS = (signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM)
SIGNALS = (*STOP_SIGNALS, *_SYSTEM_SIGNALS)
# Handled even if ignored at start: a shell script ignores SIGINT for what it starts in the background.
_ALWAYS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Handler = Callable[[int, FrameType | None], Any]
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_TRIM_THRESHOLD, _NUM_MAPPINGS = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of mallopt(3)


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this process handles; those ignored at start, as nohup does, stay ignored."""
    return tuple([one for one in SIGNALS if one in _ALWAYS or signal.getsignal(one) != signal.SIG_IGN])


@contextmanager
def signal_handler(handler: Handler, afterwards: signal.Handlers | None = None) -> Iterator[None]:
    """Install `handler` for all handled signals within the block, then `afterwards` (None: as before)."""
    before = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if afterwards is None else afterwards)


def is_repeated(number: int, before: Iterable[int]) -> bool:
    """Return whether a stop signal follows an earlier one: the job should stop at once, without saving."""
    return number in STOP_SIGNALS and any(other in STOP_SIGNALS for other in before)


def handles_signal(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; one that starts or ends may have none."""
    if sys.platform != "linux":
        return True
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def ignore_signals(numbers: Sequence[int] = SIGNALS) -> None:
    """Ignore signals from now on, in a worker that was forked with them blocked: the parent stops it."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent, a process number, ends for any reason; it may already have ended.

    On Linux the parent is the thread that started this process: start it from a long-lived one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory, instead of fetching zeroed pages for each pass."""
    if hasattr(library := ctypes.CDLL(None), "mallopt"):  # glibc only
        library.mallopt(_NUM_MAPPINGS, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)


@contextmanager
def blocked_signals(numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Block signals within the block, so that a worker forked there receives none before it ignores them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def usable_cores() -> int:
    """Return the number of cores that this process may use, which a batch system may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# MPI's, which accelerate also reads, and torchrun's.
_OTHERS = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_RANK", "MPI_LOCAL", "TORCHELASTIC_")


def forget_ranks(env: MutableMapping[str, str] = os.environ) -> None:
    """Remove a launcher's ranks from a single process's environment: accelerate would wait for others."""
    for name in [name for name in env if name in RANKS or name.startswith(_OTHERS)]:
        del env[name]


def is_main_process() -> bool:
    """Return whether this process has rank 0, or was not started by a launcher."""
    return os.environ.get("RANK", "0") == "0"


@dataclass
class Place:
    """The current place of the main thread.

    Args:
        arrivals: collective operations entered so far; all processes enter them in the same order.
        operation: the last of them, in words.
        images_since: `time.monotonic()` when it began to wait for images; None while it does not.
        waits_for_device: whether it waits for work that a GPU has queued.
        told: what a request waits for, for a thread that reports it; None without such a thread.
        is_stopping: whether a signal came, after which nothing is waited for.
    """

    arrivals: int = 0
    operation: str = ""
    step: int = 0
    images_since: float | None = None
    loaders: Sequence[int] = ()
    waits_for_device: bool = False
    told: str | None = None
    is_stopping: bool = False

    def arrive(self, operation: str) -> None:
        """Count a collective operation, right before it."""
        self.arrivals, self.operation = self.arrivals + 1, operation

    @contextmanager
    def waiting_for_images(self, loaders: Sequence[int]) -> Iterator[None]:
        """Mark the block as waiting for images of these processes."""
        self.images_since, self.loaders = time.monotonic(), loaders
        try:
            yield
        finally:
            self.images_since = None


HERE = Place()


# Reserve of this process; then, for each worker, its queues, its sentinel and its batches in flight.
_FILES, _FILES_PER_WORKER = 12, 6
_OPEN_SHARDS = 16_384  # a random order comes back to each of so many


def max_open_shards(limit: int) -> int:
    """Return how many shards a process with `limit` descriptors may keep open; batches need the rest."""
    return _OPEN_SHARDS if limit == resource.RLIM_INFINITY else max(4, min(_OPEN_SHARDS, limit // 2))


def ensure_descriptors(num_workers: int) -> None:
    """Raise the soft limit on descriptors for workers and shards; LaunchError if the hard one is too low."""
    if not num_workers or sys.platform != "linux":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + _FILES + _FILES_PER_WORKER * num_workers + max_open_shards(64)
    most = 2 * _OPEN_SHARDS if hard == resource.RLIM_INFINITY else hard
    wanted = max(needed, min(most, 2 * _OPEN_SHARDS))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if most < needed:
        raise LaunchError(
            f"{num_workers} loader workers need {needed} open files, the limit is {hard}",
            fix=f"raise it (ulimit -n {needed}), or lower machine.workers",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class MemoryLock:
    """A lock between processes. Pickling passes it to spawned processes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_held = False

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _attached, (DupFd(self.descriptor),)


_FOR_CHILDREN: list[MemoryLock] = []  # the lock of the workers that this process starts
_IN_USE: list[MemoryLock] = []  # the lock that this process uses as a worker


def shared_lock() -> MemoryLock | None:
    """Return the lock shared by this process's workers, created on first call; None except on Linux."""
    if not _FOR_CHILDREN and sys.platform == "linux":
        _FOR_CHILDREN.append(MemoryLock(os.memfd_create("vitctl-memory-lock")))
    return _FOR_CHILDREN[0] if _FOR_CHILDREN else None


def use_lock(lock: MemoryLock | None) -> None:
    """Make `acquire` of this worker wait for the lock; not in the parent, which waits for its workers."""
    _IN_USE[:] = [] if lock is None else [lock]


def acquire(num_bytes: int) -> None:
    """Acquire the lock before decoding an image that needs over `limits.LARGE` bytes; others never wait."""
    for lock in _IN_USE:
        if num_bytes > limits.LARGE and not lock.is_held:
            fcntl.lockf(lock.descriptor, fcntl.LOCK_EX)
            lock.is_held = True


def release_lock() -> None:
    """Release the lock, if held, after the memory of large images is freed."""
    for lock in _IN_USE:
        if lock.is_held:
            lock.is_held = False
            fcntl.lockf(lock.descriptor, fcntl.LOCK_UN)


START = "VITCTL_START"


def mark_start() -> None:
    """Name this start of a command in the environment, the same for all its processes on this node.

    Processes started by another launcher share their parent, which gives the name.
    """
    is_rank = "RANK" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if is_rank and START in os.environ:
        return
    if is_rank:
        import psutil

        parent = psutil.Process(os.getppid())
        os.environ[START] = f"{parent.pid} {parent.create_time()}"
    else:
        os.environ[START] = f"{os.getpid()} {time.time_ns()}"


_TOLD_BYTES = 500


def tell(text: str) -> None:
    """Report what this worker or process waits for, to its parent or watching thread; "" for nothing more.

    Without either, the text is printed as a warning.
    """
    for lock in _IN_USE:
        os.pwrite(lock.descriptor, text.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES), 0)
    if HERE.told is not None:
        HERE.told = text
    elif text and not _IN_USE:
        with suppress(OSError):  # a closed terminal must not stop the job
            print(f"warning: {text}", file=sys.stderr, flush=True)


def told() -> str:
    """Return what this process waits for, or what one of its workers reported last."""
    return HERE.told or "".join(
        os.pread(lock.descriptor, _TOLD_BYTES, 0).decode(errors="replace").rstrip(" \0")
        for lock in _FOR_CHILDREN
    )


def _attached(descriptor: Any) -> MemoryLock:
    return MemoryLock(descriptor.detach())


def cpu_name() -> str:
    import platform  # here, as below: `vitctl --help` needs neither

    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return model[1].strip()
    return platform.processor() or platform.machine()


NOT_INSTALLED = "not installed"


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the version of each package, NOT_INSTALLED where it is not."""
    return {name: _version(name) for name in names}


@cache
def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return NOT_INSTALLED
