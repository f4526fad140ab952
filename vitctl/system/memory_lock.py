"""Large pictures are decoded one at a time, by whichever of a loader's processes comes to one first: together they take no more memory.

The turn is a lock of the kernel's on a nameless file that all of them inherit; it ends with the process that holds it.
"""

import fcntl
import os
import sys
from multiprocessing.reduction import DupFd
from typing import Any

from vitctl.system.bounds import LARGE


class Turns:
    """The turn of some processes. It travels to a process by pickling where that is not forked."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_held = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (DupFd(self.descriptor),)


_OWN: list[Turns] = []  # of the processes that this one starts
_TAKEN_PART_IN: list[Turns] = []  # of this process, where it is a worker


def shared() -> Turns | None:
    """What the workers of this process share, made at the first call; None where there is no such file."""
    if not _OWN and sys.platform == "linux":
        _OWN.append(Turns(os.memfd_create("vitctl-turn")))
    return _OWN[0] if _OWN else None


def take_part(turns: Turns | None) -> None:
    """From now on this process, a worker, waits for its turn. The process that waits for workers must never do so itself."""
    _TAKEN_PART_IN[:] = [] if turns is None else [turns]


def wait_for_turn(num_bytes: int) -> None:
    """Before so much memory is taken for a picture: wait where it is large, until no other worker holds a large one."""
    for turns in _TAKEN_PART_IN:
        if num_bytes > LARGE.most and not turns.is_held:
            fcntl.lockf(turns.descriptor, fcntl.LOCK_EX)
            turns.is_held = True


def end_turn() -> None:
    """After large pictures are done with and let go of."""
    for turns in _TAKEN_PART_IN:
        if turns.is_held:
            turns.is_held = False
            fcntl.lockf(turns.descriptor, fcntl.LOCK_UN)


def _attached(descriptor: Any) -> Turns:
    return Turns(descriptor.detach())
