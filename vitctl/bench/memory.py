"""Memory: how much is free, how much a computation takes, and the largest batch that fits.

On a CPU nothing says "out of memory" before the system kills the process. So a size is tried only if the
sizes before it say that it fits, and under a limit at which an allocation fails with an error instead.
"""

import contextlib
import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from vitctl.errors import is_out_of_memory

KEPT_FREE = 0.1  # share of the free memory that is left to others
NOISE = 32 * 2**20  # bytes; a smaller growth of the peak of main memory may be the allocator's
_CGROUP = Path("/sys/fs/cgroup")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take: of the GPU, or of main memory within the limits of its
    container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(int(psutil.virtual_memory().available), *_limits())


def _limits() -> list[int]:
    """What the limits of a container and of the shell leave."""
    found = [2**62]
    with contextlib.suppress(OSError, ValueError):
        found.append(
            int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text())
        )
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            own = psutil.Process().memory_info()
            found.append(soft - (own.vms if kind == resource.RLIMIT_AS else getattr(own, "data", own.rss)))
    return found


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Within the block an allocation that main memory has no room for fails, where the system would kill the
    process (Linux).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    data = getattr(psutil.Process().memory_info(), "data", 0)
    if device.type == "cuda" or not data or not _STATUS.exists():
        yield
        return
    wanted = data + int((1 - KEPT_FREE / 2) * free_bytes(device))
    bound = min(wanted, *(one for one in (soft, hard) if one != resource.RLIM_INFINITY), 2**62)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def used_bytes(device: torch.device) -> int:
    """Bytes in use now."""
    return int(
        torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    )


def reset_peak(device: torch.device) -> None:
    """Return what is unused, and measure the peak from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The most that was in use since `reset_peak`; where the system cannot reset it, since the process began."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError, StopIteration):
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class Attempt:
    """So many images at once: whether they fit, the peak of the memory in bytes, and seconds."""

    images: int
    fits: bool
    peak: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits.

    `tried`: it was computed; else it follows from the memory that smaller batches took. `bound`: what ends
    it, "memory", "batch" (no more are asked for) or "time". `image_bytes` are those of one more image.
    """

    images: int
    tried: bool
    bound: str
    image_bytes: int = 0


def attempted(device: torch.device, images: int, compute: Callable[[int], float]) -> Attempt:
    """Compute with so many images; `compute` returns its seconds."""
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
    """The largest batch that fits, by trying: twice as many images each time, then in between.

    Args:
        attempt: computes with so many images.
        most: images that are asked for at most.
        room: bytes that the peak may reach; infinite where an allocation that fails is an error, as on a GPU.
        left: seconds that are left; a size that would take longer is not tried.
        known: attempts that were made before, such as 0 images with the memory before all of them; those made
            here are added.
    """

    def fits(images: int) -> bool:
        known.append(attempt(images))
        return known[-1].fits

    fitting = max((one.images for one in known if one.fits), default=0)
    too_many = min((one.images for one in known if not one.fits), default=most + 1)
    while fitting < most < too_many:
        images = min(2 * fitting or 1, most)
        if images > _foreseen(known, room):
            break
        if left() < _seconds(known, images):
            return _derived(known, fitting, most, room)
        fitting, too_many = (images, too_many) if fits(images) else (fitting, images)
    if fitting == most:
        return Largest(fitting, True, "batch", _slope(known))
    foreseen = _foreseen(known, room)
    if too_many > most and fitting < foreseen < most:
        if left() < _seconds(known, int(foreseen)):
            return _derived(known, fitting, most, room)
        if fits(int(foreseen)):
            return Largest(int(foreseen), True, "memory", _slope(known))
        too_many = int(foreseen)
    too_many = min(too_many, max(fitting, int(min(foreseen, most))) + 1)
    while fitting + 1 < too_many:
        middle = (fitting + too_many) // 2
        if left() < _seconds(known, middle):
            return Largest(fitting, True, "time", _slope(known))
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return Largest(fitting, True, "memory", _slope(known))


def _derived(known: list[Attempt], fitting: int, most: int, room: float) -> Largest:
    """What the measured bytes say, where there is no time to try it."""
    foreseen = _foreseen(known, room)
    if foreseen == float("inf"):
        return Largest(fitting, True, "time", _slope(known))
    return Largest(int(min(foreseen, most)), False, "memory" if foreseen < most else "batch", _slope(known))


def _fits(known: list[Attempt]) -> list[Attempt]:
    return sorted((one for one in known if one.fits), key=lambda one: one.images)


def _slope(known: list[Attempt]) -> int:
    """Bytes of one more image, between the smallest and the largest size that fitted: between two near ones
    the allocator decides.
    """
    ends = _ends(known)
    return max(0, (ends[1].peak - ends[0].peak) // (ends[1].images - ends[0].images)) if ends else 0


def _ends(known: list[Attempt]) -> tuple[Attempt, Attempt] | None:
    """The smallest and the largest size that fitted; no images at all is one of them only where there is but
    one other.
    """
    fits = _fits(known)
    some = fits[1:] if len(fits) > 2 and not fits[0].images else fits
    return (some[0], some[-1]) if len(some) > 1 else None


def _foreseen(known: list[Attempt], room: float) -> float:
    """The most images whose memory fits into `room`, by those that were measured; infinite where that tells
    nothing.
    """
    ends, slope = _ends(known), _slope(known)
    if room == float("inf") or ends is None or not slope or ends[1].peak - ends[0].peak < NOISE:
        return float("inf")
    return max(ends[1].images, int(ends[1].images + (room - ends[1].peak) / slope))


def _seconds(known: list[Attempt], images: int) -> float:
    """That so many images take, by the largest size that fitted."""
    fits = [one for one in _fits(known) if one.images]
    return fits[-1].seconds / fits[-1].images * images if fits else 0.0
