"""Memory that a loader process shares with the one that asked for its batches, without a name that could outlive both."""

import mmap
import os
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor


class SharedMemory:
    """Bytes behind a descriptor, which travels to other processes by pickling.

    Torch shares a tensor by creating a file in /dev/shm and removing its name at once; a process that is killed in
    between leaves the file there for good. This has no name at any time.

    Args:
        descriptor: of the memory; closed with this object.
        size: in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size

    @classmethod
    def zeros(cls, size: int) -> "SharedMemory":
        """New memory of `size` bytes."""
        memory = cls(os.memfd_create("vitctl"), size)
        os.ftruncate(memory.descriptor, size)
        return memory

    def tensor(self, *, at_once: bool = False) -> Tensor:
        """The bytes as uint8 `[size]`, which stay as long as the tensor does.

        Args:
            at_once: map every page now, which is quicker than page by page for who writes them all.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
        return torch.frombuffer(mmap.mmap(self.descriptor, self.size, flags), dtype=torch.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (DupFd(self.descriptor), self.size)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _attached(descriptor: Any, size: int) -> SharedMemory:
    return SharedMemory(descriptor.detach(), size)
