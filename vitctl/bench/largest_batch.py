"""Memory: how much is free, how much a computation takes, and the largest batch that fits.

On a CPU the system kills a process that takes too much memory, without an error. So a size is tried only if
smaller sizes predict that it fits, and under a limit at which an allocation raises an error.
"""

import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil
import torch

from vitctl.errors import is_out_of_memory

_KEPT_FREE = 0.1  # share of the free memory that is left to other programs
_NOISE = 32 * 2**20  # bytes; a smaller growth of the peak of main memory may be the allocator's
_CGROUP = Path("/sys/fs/cgroup")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate within the limits of its container and shell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        most, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, most - used)
    memory = psutil.Process().memory_info()
    used_of = {resource.RLIMIT_AS: memory.vms, resource.RLIMIT_DATA: getattr(memory, "data", memory.rss)}
    for limit, used in used_of.items():
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            free = min(free, soft - used)
    return free


def room_of(device: torch.device) -> float:
    """Return the peak memory that this process may reach; infinite on a GPU, where trying is safe."""
    return inf if device.type == "cuda" else used_bytes(device) + (1 - _KEPT_FREE) * free_bytes(device)


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Make an allocation raise an error in the block before the system would kill the process (Linux)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    data = getattr(psutil.Process().memory_info(), "data", 0)
    if device.type == "cuda" or not data or not _STATUS.exists():
        yield
        return
    wanted = data + int((1 - _KEPT_FREE / 2) * free_bytes(device))
    bound = min(wanted, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY), 2**62)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def reset_peak(device: torch.device) -> None:
    """Return unused memory to the system, and restart the measurement of the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak since `reset_peak`, or since the process started if the system cannot reset it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class Attempt:
    """A computation with n images: whether it fits, its peak memory in bytes, and its seconds."""

    images: int
    fits: bool
    peak: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits.

    Args:
        tried: it was computed; else it is extrapolated from smaller batches.
        bound: the limit: "memory", "batch" (no more images are wanted) or "time".
        image_bytes: memory of one more image.
    """

    images: int
    tried: bool
    bound: str
    image_bytes: int = 0


def attempted(device: torch.device, images: int, compute: Callable[[int], float]) -> Attempt:
    """Compute with n images; `compute` returns its seconds."""
    reset_peak(device)
    try:
        with guarded(device):
            seconds = compute(images)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reset_peak(device)
        return Attempt(images, False)
    return Attempt(images, True, peak_bytes(device), seconds)


def largest_batch(
    attempt: Callable[[int], Attempt], most: int, room: float, left: Callable[[], float], known: list[Attempt]
) -> Largest:
    """Find the largest batch that fits by trying: twice as many images each time, then bisection.

    Args:
        most: the most images that are wanted.
        room: peak memory that may be reached, see `room_of`.
        left: returns the seconds left; a size that would take longer is not tried.
        known: earlier attempts, such as 0 images with the memory at the start; new attempts are added.
    """
    fitting = max((one.images for one in known if one.fits), default=0)
    too_many = most + 1
    while fitting + 1 < too_many:
        foreseen = _foreseen(known, room)
        doubling = too_many > most
        images = (2 * fitting or 1) if doubling else (fitting + too_many) // 2
        images = int(min(images, most, foreseen))
        if images <= fitting:
            break  # one more image exceeds the room
        if left() < _seconds(known, images):
            if not doubling or foreseen == inf:
                return Largest(fitting, True, "time", _image_bytes(known))
            bound = "memory" if foreseen < most else "batch"
            return Largest(int(min(foreseen, most)), False, bound, _image_bytes(known))
        known.append(attempt(images))
        fitting, too_many = (images, too_many) if known[-1].fits else (fitting, images)
    return Largest(fitting, True, "batch" if fitting == most else "memory", _image_bytes(known))


def _ends(known: list[Attempt]) -> tuple[Attempt, Attempt] | None:
    """Return the smallest and largest size that fitted; 0 images count only next to a single other size."""
    fits = sorted((one for one in known if one.fits), key=lambda one: one.images)
    if len(fits) > 2 and not fits[0].images:
        fits = fits[1:]
    return (fits[0], fits[-1]) if len(fits) > 1 else None


def _image_bytes(known: list[Attempt]) -> int:
    if (ends := _ends(known)) is None:
        return 0
    small, large = ends
    return max(0, (large.peak - small.peak) // (large.images - small.images))


def _foreseen(known: list[Attempt], room: float) -> float:
    """Return the most images that the attempts predict to fit into `room`; infinite if unknown."""
    ends, slope = _ends(known), _image_bytes(known)
    if room == inf or ends is None or not slope or ends[1].peak - ends[0].peak < _NOISE:
        return inf
    return max(ends[1].images, int(ends[1].images + (room - ends[1].peak) / slope))


def _seconds(known: list[Attempt], images: int) -> float:
    largest = max((one for one in known if one.fits), key=lambda one: one.images, default=None)
    return largest.seconds / largest.images * images if largest and largest.images else 0.0
