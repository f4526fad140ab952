"""Shared by all measurements: time budget, facts about the machine, and the rate of its matrix products."""

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from vitctl.engine.computation import processor, versions
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Computation
from vitctl.models.flops import bf16_tflops
from vitctl.system.process import cpu_name, usable_cores
from vitctl.system.text import count_text

_SHAPES = {"cpu": ((1576, 768, 3072), (2048, 2048, 2048)), "cuda": ((8192, 8192, 8192), (50_176, 1024, 4096))}
_TYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@dataclass
class Budget:
    """The seconds for all measurements together. A signal ends them and keeps the numbers so far."""

    seconds: float
    stop: StopFlag = field(default_factory=StopFlag)
    say: Callable[[str], None] = lambda _text: None
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Return the seconds left, 0 after a signal."""
        return 0.0 if self.stop.raised else max(0.0, self.began + self.seconds - time.monotonic())

    def part(self, share: float) -> "Budget":
        """Return a share of the entire budget, at most what is left; it starts now."""
        return Budget(min(share * self.seconds, self.left), self.stop, self.say)

    def restarted(self) -> "Budget":
        """Return the entire budget, starting now, so that preparations are not counted."""
        return Budget(self.seconds, self.stop, self.say)


def seconds_of(device: torch.device, compute: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of a computation, including its work on the device."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    compute()
    wait()
    return time.perf_counter() - began


def machine_facts(computation: Computation) -> dict[str, Any]:
    device = computation.device
    load = {}
    with suppress(OSError):
        load = {"load": round(os.getloadavg()[0], 2)}
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu": cpu_name(),
        "hardware": processor(device),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        **load,
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    me = psutil.Process()
    times = me.cpu_times()
    total = float(times.user + times.system + times.children_user + times.children_system)
    for child in me.children(recursive=True):
        with suppress(psutil.Error):  # the child has ended
            times = child.cpu_times()
            total += times.user + times.system
    return total


def matrix_rate(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """Return the highest FLOP/s of several large matrix products; `seconds` is the approximate time.

    tf32 must already be enabled in this process.
    """
    best, generator = 0.0, torch.Generator(device).manual_seed(0)
    for rows, inputs, outputs in _SHAPES[device.type]:
        left = torch.randn(rows, inputs, generator=generator, device=device).to(_TYPES[precision])
        right = torch.randn(outputs, inputs, generator=generator, device=device).to(_TYPES[precision])
        product = partial(F.linear, left, right)
        with torch.inference_mode():
            product()
            deadline = time.monotonic() + seconds / len(_SHAPES[device.type])
            while True:
                took = seconds_of(device, product)
                best = max(best, 2 * rows * inputs * outputs / took)
                if time.monotonic() > deadline:
                    break
    return best


def peak(device: torch.device, precision: str, measured: float) -> tuple[float, str]:
    """Return the reference FLOP/s for utilisation, and their source: the manufacturer, else measured."""
    if device.type == "cuda" and precision == "bf16":
        name = torch.cuda.get_device_name(device)
        if tera := bf16_tflops(name):
            return (tera * 1e12, f"the manufacturer's dense bf16 peak of {name}")
    count = torch.get_num_threads()
    threads = f", {count_text(count, 'thread')}" if device.type == "cpu" else ""
    return (measured, f"matrix products measured in this run, {precision}{threads}")
