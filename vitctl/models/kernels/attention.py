"""The attention product, and which of two kernels computes it: torch's fused one, or plain matrix products.

The fused kernel keeps no `[N, N]` matrix. The plain one is faster on a CPU in bf16 where sequences are short.
Both compute the same, up to rounding, which in bf16 is coarser in the plain one: it keeps the logits in bf16.
A rule chooses, no measurement.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["fused", "math"]
# Tokens up to which plain products are the faster kernel, by device and type of the products:
# benchmarks/kernels.py prints them.
_PLAIN_UP_TO = {("cpu", torch.bfloat16): 1024}

_kernel: Kernel = "fused"


def set_attention(kernel: Kernel) -> None:
    """Choose the kernel of every model in this process."""
    global _kernel
    _kernel = kernel


def used_attention() -> Kernel:
    """Return the kernel that was chosen."""
    return _kernel


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(Dh) + bias) value, `[B, ..., H, N, Dh]` like each of the three.

    `bias`, where there is one, is `[B, ..., H, N, N]`, and decides for plain products.
    Paper: Appendix A, equations 6 and 7
    """
    leading = query.shape[:-3]
    query, key, value = (
        tensor.flatten(0, -4) for tensor in (query, key, value)
    )  # fused kernels know one batch
    bias = None if bias is None else bias.flatten(0, -4)
    # A bias that learns has no fused kernel on most devices.
    plain = bias is not None or _kernel == "math"
    mixed = _math(query, key, value, bias) if plain else F.scaled_dot_product_attention(query, key, value)
    return torch.unflatten(mixed, 0, leading)


def attention_weights(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(Dh) + bias), `[B, ..., H, N, N]`, queries before keys, in float32 or
    wider.

    Paper: Appendix A, equation 6
    """
    logits = _logits(query, key, bias)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.softmax(dim=-1, dtype=wide)


def _logits(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    logits = (query * (1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)  # [B, ..., H, N, N]
    return logits if bias is None else logits + bias


def attention_rule(device: str, dtype: torch.dtype, tokens: int) -> Kernel:
    """Return the kernel of machine.attention = "auto": the same on every machine with this kind of device, at
    any load and batch.

    Args:
        device: kind, such as "cpu".
        dtype: of the products.
        tokens: of a sequence, at most; a fused kernel needs no `[N, N]` matrix.
    """
    return "math" if tokens <= _PLAIN_UP_TO.get((device, dtype), 0) else "fused"


def _math(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    # The sums of the softmax are in float32; its result is kept in the type of the product, once for both
    # products behind it.
    return _logits(query, key, bias).softmax(dim=-1).to(value.dtype) @ value
