"""Anonymous shared memory for passing batches from a loader worker to the training process."""

import math
import mmap
import os
import sys
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info


class SharedMemory:
    """Shared memory behind a descriptor, which is passed to other processes by pickling.

    Torch shares a tensor by creating a file in /dev/shm and unlinking it at once; a process that is killed in
    between leaks the file. This memory never has a name.

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
        """The memory as uint8 `[size]`, mapped as long as the tensor exists.

        Args:
            at_once: map all pages now, which is faster when all of them will be written.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
        return torch.frombuffer(mmap.mmap(self.descriptor, self.size, flags), dtype=torch.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (DupFd(self.descriptor), self.size)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _attached(descriptor: Any, size: int) -> SharedMemory:
    return SharedMemory(descriptor.detach(), size)


def empty_images(num_images: int, image_size: int) -> tuple[Tensor, SharedMemory | None]:
    """Zeros, uint8 `[num_images, 3, S, S]`, channels last; in a worker they are allocated in shared memory,
    which is returned too.
    """
    shape = (num_images, image_size, image_size, 3)
    if get_worker_info() is None or sys.platform != "linux":
        return torch.zeros(shape, dtype=torch.uint8).permute(0, 3, 1, 2), None
    memory = SharedMemory.zeros(math.prod(shape))
    return memory.tensor(at_once=True).view(shape).permute(0, 3, 1, 2), memory
