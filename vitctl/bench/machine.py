"""The machine that numbers of speed belong to: what another one would differ in."""

import os
import platform
import time
from contextlib import suppress
from typing import Any

import psutil
import torch

from vitctl.engine.computation import processor, versions
from vitctl.engine.distributed.runtime import Computation
from vitctl.models.hardware import cpu_name

_BUSY = 0.25  # cores


def machine_facts(computation: Computation) -> dict[str, Any]:
    """Processor, device, cores, threads, load, memory, versions."""
    device = computation.device
    load = {}
    with suppress(OSError):
        load = {"load": round(os.getloadavg()[0], 2)}
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu": cpu_name(),
        "hardware": processor(device),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        **load,
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
    }


class OtherWork:
    """What other programs compute from here on: they make every number smaller."""

    def __init__(self) -> None:
        self._began, self._all, self._own = time.perf_counter(), _all_seconds(), cpu_seconds()

    def notes(self) -> list[str]:
        """A line where they kept a good part of a core busy; else none."""
        seconds = time.perf_counter() - self._began
        others = (_all_seconds() - self._all - (cpu_seconds() - self._own)) / max(seconds, 1e-9)
        if others < _BUSY:
            return []
        return [
            f"other programs kept {others:.1f} of {os.cpu_count()} cores busy: measure again without them"
        ]


def cpu_seconds() -> float:
    """Of this process and those that it started."""
    own = psutil.Process()
    times = own.cpu_times()
    total = float(times.user + times.system + times.children_user + times.children_system)
    for process in own.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _all_seconds() -> float:
    """That all processors of the machine have computed since it started."""
    times = psutil.cpu_times()
    return float(times.user + getattr(times, "nice", 0.0) + times.system)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
