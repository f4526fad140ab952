"""What this machine multiplies: the rate of large matrix products, against which a training step is held."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.models.hardware import bf16_tflops

_SHAPES = {"cpu": ((1576, 768, 3072), (2048, 2048, 2048)), "cuda": ((8192, 8192, 8192), (50_176, 1024, 4096))}
_TYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


class Peak(NamedTuple):
    """FLOP/s that a utilisation is a share of, and where the number is from."""

    flops: float
    source: str


def matrix_rate(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """FLOP/s of the fastest of some large matrix products of random numbers.

    Args:
        device: that computes.
        precision: bf16, float32, tf32 (which the process has switched on) or float64.
        seconds: spent on it, about.
    """
    best = 0.0
    with nullcontext() if device.type == "cuda" else torch.inference_mode():
        ways = list(_products(device, _TYPES[precision]))
        for flops, multiply in ways:
            multiply()
            deadline = time.monotonic() + seconds / len(ways)
            while True:
                best = max(best, flops / _timed(multiply, device))
                if time.monotonic() > deadline:
                    break
    return best


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Each with its FLOPs: a layer's product as PyTorch computes it, and in float32 on a CPU as oneDNN does."""
    generator = torch.Generator(device).manual_seed(0)
    for rows, inputs, outputs in _SHAPES[device.type]:
        left = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
        right = torch.randn(outputs, inputs, generator=generator, device=device).to(dtype)
        flops = 2 * rows * inputs * outputs
        yield flops, _bound(F.linear, left, right)
        if device.type == "cpu" and dtype == torch.float32:
            with suppress(AttributeError, RuntimeError):
                product = torch.ops.mkldnn._linear_pointwise
                product(left, right, None, "none", [], "")
                yield flops, _bound(product, left, right, None, "none", [], "")


def _bound(product: Callable[..., Any], left: Tensor, right: Tensor, *others: Any) -> Callable[[], Any]:
    return lambda: product(left, right, *others)


def _timed(multiply: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        multiply()
        return time.perf_counter() - began
    make: Any = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    begin.record()
    multiply()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def peak(device: torch.device, precision: str, measured: float) -> Peak:
    """The maker's peak where it is known, else the rate that was measured."""
    if device.type == "cuda" and precision == "bf16":
        name = torch.cuda.get_device_name(device)
        if tera := bf16_tflops(name):
            return Peak(tera * 1e12, f"the maker's dense bf16 peak of {name}")
    threads = (
        f", {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
        if device.type == "cpu"
        else ""
    )
    return Peak(measured, f"matrix products measured in this run, {precision}{threads}")
