"""A lock shared by the workers of a loader: a worker holds it while it decodes a large image, so that memory
is needed for one large image at a time.

It is a lock of the kernel (fcntl) on an anonymous file that the workers inherit. The kernel releases it when
the holder dies.
"""

import fcntl
import os
import sys
from multiprocessing.reduction import DupFd
from typing import Any

from vitctl.system.bounds import LARGE


class MemoryLock:
    """A lock between processes. Where processes are spawned, it is passed to them by pickling."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_held = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (DupFd(self.descriptor),)


_FOR_CHILDREN: list[MemoryLock] = []  # the lock of the workers that this process starts
_IN_USE: list[MemoryLock] = []  # the lock that this process uses, where it is a worker


def shared_lock() -> MemoryLock | None:
    """The lock that the workers of this process share, created at the first call; None on systems other than
    Linux.
    """
    if not _FOR_CHILDREN and sys.platform == "linux":
        _FOR_CHILDREN.append(MemoryLock(os.memfd_create("vitctl-memory-lock")))
    return _FOR_CHILDREN[0] if _FOR_CHILDREN else None


def use_lock(lock: MemoryLock | None) -> None:
    """Make `acquire` of this worker wait for the lock.

    The parent must not call this: it waits for workers that hold the lock.
    """
    _IN_USE[:] = [] if lock is None else [lock]


def acquire(num_bytes: int) -> None:
    """Acquire the lock before an image is decoded, where that needs more than `VITCTL_MAX_LARGE`. Small
    images never wait.

    Args:
        num_bytes: memory that decoding needs.
    """
    for lock in _IN_USE:
        if num_bytes > LARGE.limit and not lock.is_held:
            fcntl.lockf(lock.descriptor, fcntl.LOCK_EX)
            lock.is_held = True


def release() -> None:
    """Release the lock, where it is held, after the memory of large images is freed."""
    for lock in _IN_USE:
        if lock.is_held:
            lock.is_held = False
            fcntl.lockf(lock.descriptor, fcntl.LOCK_UN)


def _attached(descriptor: Any) -> MemoryLock:
    return MemoryLock(descriptor.detach())
