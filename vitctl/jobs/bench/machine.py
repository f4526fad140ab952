"""The machine that numbers of speed belong to: what another one would differ in."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from vitctl.engine.distributed.runtime import Computation
from vitctl.jobs.provenance import versions


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
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        **load,
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor as Linux names it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
