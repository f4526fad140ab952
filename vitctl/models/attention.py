"""The attention product, and which of two kernels computes it: torch's fused one, or plain matrix products.

The fused kernel keeps no `[N, N]` matrix. The plain one is often faster in training where sequences are short, on a
CPU above all. Both compute the same, up to rounding; a run that must repeat another bit for bit forces one of them.
"""

import math
import time
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["fused", "math"]
_ROUNDS = 3

_mode: Literal["fused", "math", "auto"] = "fused"


def set_attention(mode: Literal["fused", "math", "auto"]) -> None:
    """Choose the kernel of every model in this process. `auto` measures once for each shape: fast, not repeatable.

    A run that is to be resumed bit for bit calls `choose_attention` once, stores the answer, and sets that.
    """
    global _mode
    _mode = mode


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(Dh) + bias) value, `[B, ..., H, N, Dh]` like each of the three.

    `bias`, where there is one, is `[B, ..., H, N, N]`, and decides for plain products.
    Paper: Appendix A, equations 6 and 7
    """
    leading = query.shape[:-3]
    query, key, value = (tensor.flatten(0, -4) for tensor in (query, key, value))  # fused kernels know one batch
    bias = None if bias is None else bias.flatten(0, -4)
    # A bias that learns has no fused kernel on most devices.
    plain = bias is not None or _kernel(query) == "math"
    mixed = _math(query, key, value, bias) if plain else F.scaled_dot_product_attention(query, key, value)
    return torch.unflatten(mixed, 0, leading)


def attention_weights(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(Dh) + bias), `[B, ..., H, N, N]`, queries before keys, in float32 or wider.

    Paper: Appendix A, equation 6
    """
    logits = (query * (1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)  # [B, ..., H, N, N]
    if bias is not None:
        logits = logits + bias
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.softmax(dim=-1, dtype=wide)


@cache
def choose_attention(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return the kernel whose forward and backward pass is the faster for query, key and value of `shape`.

    Measured at the first call, remembered for the life of the process. No random number is drawn.

    Args:
        shape: `[B, H, N, Dh]`.
    """
    return min(("fused", "math"), key=lambda kernel: _seconds(kernel, shape, dtype, device))


def _kernel(query: Tensor) -> Kernel:
    if _mode != "auto":
        return _mode
    if torch.compiler.is_compiling() or query.device.type == "meta":
        return "fused"  # there is nothing to measure while a graph is traced
    return choose_attention(tuple(query.shape), query.dtype, query.device)


def _math(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    return attention_weights(query, key, bias).to(value.dtype) @ value


@torch.inference_mode(False)
@torch.enable_grad()
def _seconds(kernel: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
    """The least time of a few passes, after one to warm up."""
    attention = F.scaled_dot_product_attention if kernel == "fused" else _math
    query, key, value = (torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    seconds = []
    for _ in range(1 + _ROUNDS):
        _wait(device)
        start = time.perf_counter()
        mixed = attention(query, key, value)
        torch.autograd.grad(mixed, (query, key, value), torch.ones_like(mixed))
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
