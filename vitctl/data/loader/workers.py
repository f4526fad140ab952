"""Loader workers: start, cleanup, cause of death; their shared memory, where small images stay decoded; and
prefetching of remote shards.
"""

import atexit
import gc
import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import DupFd
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from vitctl.data.images.decode import BadSample
from vitctl.data.images.transforms import TrainTransform, open_for
from vitctl.data.source.order import LaneOrder, SampleOrder, lanes_read
from vitctl.data.source.views import Source, fetch_ahead, is_remote, split_sources
from vitctl.errors import writing
from vitctl.system import limits, process, remote
from vitctl.system.process import blocked_signals, ensure_descriptors, ignore_signals

_WORKERS: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_GRACE_SECONDS = 2.0
_LOST_BATCH = 74  # EX_IOERR of sysexits.h


def cause_of_death(workers: Collection[BaseProcess]) -> str:
    """Describe why the first dead worker ended, after a short wait for the kernel to report it."""
    until = time.monotonic() + _GRACE_SECONDS
    while not (dead := [p for p in workers if p.exitcode]) and time.monotonic() < until:
        time.sleep(0.01)
    if not dead:
        return "lost"
    code = dead[0].exitcode or 0
    if code == -signal.SIGKILL:
        return "killed (SIGKILL), most often out of memory"
    if code == _LOST_BATCH:
        return "unable to send a batch; the output above says why"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended by its exit code {code}"


def start_workers(loader: Any) -> tuple[Iterator[Any], Collection[BaseProcess]]:
    """Start iterating over a DataLoader, and remove the SIGCHLD handler that torch installs.

    That handler would raise at any line of the training loop; without it a dead worker is detected while the
    loop waits for its batch.
    """
    if not loader.num_workers:
        return iter(loader), ()
    ensure_descriptors(loader.num_workers)
    handler, others = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children())
    # Until a worker ignores signals, it would write them to the signal pipe of this process: they would be
    # counted twice.
    with (
        blocked_signals(),
        writing("/dev/shm"),
    ):  # queues create their locks there; a full disk's error names no path
        batches = iter(loader)
    workers = set(multiprocessing.active_children()) - others
    _WORKERS.update(workers)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return batches, workers


def _lost_batch(error: BaseException, _: object) -> None:
    """End a worker that cannot send a batch, so that the parent does not wait for it forever."""
    print(f"a loader process cannot send a batch: {error}", file=sys.stderr, flush=True)
    os._exit(_LOST_BATCH)


def worker_init() -> Callable[[int], None]:
    """Return a DataLoader's `worker_init_fn`; a worker forked by the main thread dies with that thread."""
    tied = (
        threading.current_thread() is threading.main_thread()
        and multiprocessing.get_start_method() != "forkserver"
    )
    return partial(_init_worker, os.getpid() if tied else None, process.shared_lock(), remote.PATIENCE)


def _init_worker(parent: int | None, lock: process.MemoryLock | None, patience: list[float], _: int) -> None:
    process.use_lock(lock)
    remote.PATIENCE[:] = patience
    ignore_signals()  # the parent decides when to stop, and stops its workers itself
    Queue._on_queue_feeder_error = staticmethod(_lost_batch)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    gc.freeze()  # garbage collection skips existing objects, so that their shared pages are not copied
    if parent is not None:
        process.end_with_parent(parent)


@atexit.register
def _kill_workers() -> None:
    """Kill the workers at exit: they ignore Python's SIGTERM, and it would wait for them forever."""
    for worker in _WORKERS:
        worker.kill()


def original_message(text: str) -> str:
    """Return a worker's original error message, the last line of the traceback that torch makes of it."""
    return text.strip().rpartition("\n")[2].partition(": ")[2] if text.startswith("Caught ") else text


def is_worker_death(error: Exception) -> bool:
    """Return whether a worker died: torch reports it, or its connection broke while it sent a batch."""
    text = str(error)
    return (
        text.startswith("DataLoader worker")
        if isinstance(error, RuntimeError)
        else not text.startswith("Caught")
    )


class SharedMemory:
    """Shared memory behind a descriptor, which is passed to other processes by pickling.

    Torch shares a tensor by creating a file in /dev/shm and unlinking it at once; a process that is killed in
    between leaks the file. This memory never has a name. The descriptor is closed with this object. One more
    byte tells the process that allocated it whether the receiver has dropped its tensor.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size

    @classmethod
    def zeros(cls, size: int) -> "SharedMemory":
        memory = cls(os.memfd_create("vitctl"), size)
        os.ftruncate(memory.descriptor, size + 1)
        return memory

    def tensor(self, *, at_once: bool = False) -> Tensor:
        """Map the memory and the byte after it as uint8 `[size + 1]`, as long as the tensor exists."""
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
        pages = _Pages(self.descriptor, self.size + 1, flags)
        pages.process = os.getpid()
        return torch.frombuffer(pages, dtype=torch.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (DupFd(self.descriptor), self.size)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _attached(descriptor: Any, size: int) -> SharedMemory:
    return SharedMemory(descriptor.detach(), size)


class _Pages(mmap.mmap):
    """Mapped shared memory, whose last byte is set when nothing in this process refers to it."""

    process = 0

    def __del__(self) -> None:
        if os.getpid() == self.process:  # a forked process may drop its copy earlier
            self[-1] = _DROPPED


_DROPPED = 1
_MOST_KEPT = 3  # per worker: a batch in use, one waiting, one being written
_KEPT: list[tuple[SharedMemory, Tensor]] = []  # the memory of this worker's batches


def new_images(num_images: int, image_size: int) -> tuple[Tensor, SharedMemory | None]:
    """Return new images, uint8 `[num_images, 3, S, S]`, channels last, and in a worker their memory.

    The shared memory of a dropped batch is reused if possible: the kernel would clear new pages first.
    """
    shape = (num_images, image_size, image_size, 3)
    if get_worker_info() is None or sys.platform != "linux":
        return torch.empty(shape, dtype=torch.uint8).permute(0, 3, 1, 2), None
    size = math.prod(shape)
    for memory, content in _KEPT:
        if memory.size == size and content[-1] == _DROPPED:
            break
    else:
        memory = SharedMemory.zeros(size)
        content = memory.tensor(at_once=True)
        if len(_KEPT) < _MOST_KEPT:
            _KEPT.append((memory, content))
    content[-1] = 0
    return content[:-1].view(shape).permute(0, 3, 1, 2), memory


_NOTES = 16  # bytes of two CRC-32, height and width


@dataclass
class SmallImages:
    """The pixels that `TrainTransform.kept` returns for each sample, filled in as they are read.

    Only pages that were written take memory. Beside its pixels a sample has the CRC-32 of its file, and
    that of both together: it counts as there if this is right, so that nothing depends on the order in which
    processes see each other's writes. The first image that is too large ends this: `is_off`.
    """

    memory: SharedMemory
    num_images: int
    is_off: bool = False

    @classmethod
    def of(cls, source: Source, transform: TrainTransform) -> "SmallImages | None":
        """Return room for a source's images; None if they are not few, local and kept small."""
        side = transform.kept_side or limits.SMALL_SIDE
        size = len(source) * (3 * side**2 + _NOTES)
        if sys.platform != "linux" or transform.decode != "exact" or is_remote(source):
            return None
        if side > limits.SMALL_SIDE or not 0 < size <= limits.SMALL_IMAGES:
            return None
        return cls(SharedMemory.zeros(size), len(source))

    def __reduce__(self) -> tuple[Any, ...]:
        return SmallImages, (self.memory, self.num_images)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The notes, uint32 `[N, 4]`, and the room for pixels, uint8 `[N, bytes]`."""
        content, ends = self.memory.tensor().numpy(), _NOTES * self.num_images
        notes, pixels = content[:ends].view(np.uint32), content[ends:-1]
        return notes.reshape(self.num_images, 4), pixels.reshape(self.num_images, -1)

    def read(
        self, source: Source, transform: TrainTransform, samples: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray] | None:
        """Return the kept pixels of some samples, and the CRC-32 of each file, int64 `[B]`; None if one is
        unusable, or too large.
        """
        (notes, pixels), is_whole, found = self._arrays, not transform.kept_side, []
        for sample in samples.tolist():
            of_file, of_both, height, width = notes[sample].tolist()
            own = pixels[sample, : 3 * height * width]
            if not of_both or zlib.crc32(own.data, of_file) != of_both:
                try:
                    data = source.read(sample)
                    picture = open_for(transform, data)
                    if is_whole and max(picture.height, picture.width) > limits.SMALL_SIDE:
                        self.is_off = True
                        return None
                    kept = transform.kept(picture)
                except BadSample:
                    return None
                (height, width), of_file = kept.shape[:2], zlib.crc32(data)
                own = pixels[sample, : kept.size]
                own[:] = kept.reshape(-1)
                notes[sample] = of_file, zlib.crc32(own.data, of_file), height, width
            found.append(own.reshape(height, width, 3))
        return found, notes[samples, 0].astype(np.int64)


AHEAD_SECONDS = 20.0  # prefetched training time
_CHUNKS = 4  # in which a window is prefetched
_PROBES = 128  # positions of a chunk and a lane at which shards are looked up


def reads_whole_shards(source: Source) -> bool:
    """Return whether reading a sample fetches its complete remote shard."""
    return any(split.index.is_remote and split.cache is not None for split in split_sources(source))


class Prefetcher:
    """A thread that fetches the shards of the coming positions into the cache, the first needed first.

    It covers the next window, and the next AHEAD_SECONDS at the measured rate as far as they fit into the
    cache. The loader processes of a node share this work: each takes the next shard that no other is
    fetching. `slots` are, with lanes, those of the global batch that this process serves; None: all slots
    read the same window.
    """

    def __init__(self, source: Source, order: SampleOrder, slots: range | None = None) -> None:
        self._source, self._order, self._slots = source, order, slots
        self._window = order.window_size
        self._chunk = max(1, self._window // _CHUNKS)
        self._most = self._window * max(1, windows_held(source, order) - 1)  # one is being read
        self._requested = 0
        self._reached: deque[tuple[float, int]] = deque()
        self._chunks: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def reach(self, position: int) -> None:
        """Report that the loader has reached this position of the order."""
        now = time.monotonic()
        self._reached.append((now, position))
        while len(self._reached) > 2 and self._reached[1][0] <= now - AHEAD_SECONDS:
            self._reached.popleft()
        since, first = self._reached[0]
        coming = int((position - first) * min(1.0, AHEAD_SECONDS / max(now - since, 1e-9)))
        until = position + max(self._window, min(coming, self._most))
        self._requested = max(self._requested, position)
        while self._requested < until:
            self._chunks.put(self._requested)
            self._requested += self._chunk

    def _work(self) -> None:
        while True:
            begin = self._chunks.get()
            positions = self._probed(np.arange(begin, begin + self._chunk))
            fetch_ahead(self._source, self._order.at(positions)[1])

    def _probed(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions of a chunk to look shards up at: _PROBES for each concurrent window."""
        lanes = np.zeros(len(positions), np.int64)
        if self._slots is not None and isinstance(self._order, LaneOrder):
            positions = positions[np.isin(positions % self._order.batch_size, self._slots)]
            lanes = self._order.lane(positions)
        parts = (positions[lanes == lane] for lane in np.unique(lanes))
        return np.concatenate([part[:: max(1, len(part) // _PROBES)] for part in parts] or [positions])


def windows_held(source: Source, order: SampleOrder) -> int:
    """Return how many windows of the order this node's cache holds, for the lanes that the node reads."""
    splits = [split for split in split_sources(source) if split.index.is_remote and split.cache is not None]
    num_bytes = sum(shard.num_bytes for split in splits for shard in split.index.shards)
    window = order.window_size * num_bytes / sum(map(len, splits))
    if isinstance(order, LaneOrder):
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        nodes = -(-processes // int(os.environ.get("LOCAL_WORLD_SIZE", str(processes))))
        window *= max(lanes_read(order.num_lanes, nodes)) / order.num_lanes
    return int(max(split.cache.max_bytes for split in splits if split.cache is not None) / window)
