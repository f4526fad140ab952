"""The fastest of several ways to compute the same, measured where the numbers are to be computed."""

import time
from collections.abc import Callable, Mapping

import torch

_ROUNDS = 5
_CLEARLY = 1.1  # by less it would be chance that decides, and two runs of one recipe would differ in their last bits


def fastest(ways: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    """Return the name of the way that is clearly the fastest; the first where none is clearly faster than it.

    They take turns; of each the least time of a few rounds counts, after one to warm up. One that fails is left out, unless it
    is the first.

    Args:
        ways: by name, each a computation; the first is the one to fall back to.
        device: where they compute.
    """
    default, *_ = ways
    seconds: dict[str, float] = {}
    for turn in range(1 + _ROUNDS):
        for name, way in ways.items():
            try:
                took = _seconds(way, device)
            except RuntimeError:
                if name == default:
                    raise
                took = float("inf")
            if turn:
                seconds[name] = min(seconds.get(name, took), took)
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] * _CLEARLY < seconds[default] else default


def _seconds(way: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    way()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
