"""The attention product, and which of two kernels computes it: torch's fused one, or plain matrix products.

The fused kernel keeps no `[N, N]` matrix. The plain one is often faster in training where sequences are short, on a
CPU above all. Both compute the same, up to rounding, which in bf16 is coarser in the plain one: it keeps the logits in bf16. A run
that must repeat another bit for bit forces one of them.
"""

import math
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.models.kernels.fastest import fastest

Kernel = Literal["fused", "math"]
_SHORT = 1024  # tokens; of longer sequences the plain product would keep too large matrices
_WORTH_MEASURING = 2**15  # logits of all heads and images; below, either is done in few milliseconds
_ENOUGH = 2**20  # of more, the measurement takes longer and says the same

_kernel: Kernel = "fused"


def set_attention(kernel: Kernel) -> None:
    """Choose the kernel of every model in this process.

    A run that is to be resumed bit for bit calls `choose_attention` once, stores the answer, and sets that.
    """
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
    query, key, value = (tensor.flatten(0, -4) for tensor in (query, key, value))  # fused kernels know one batch
    bias = None if bias is None else bias.flatten(0, -4)
    # A bias that learns has no fused kernel on most devices.
    plain = bias is not None or _kernel == "math"
    mixed = _math(query, key, value, bias) if plain else F.scaled_dot_product_attention(query, key, value)
    return torch.unflatten(mixed, 0, leading)


def attention_weights(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(Dh) + bias), `[B, ..., H, N, N]`, queries before keys, in float32 or wider.

    Paper: Appendix A, equation 6
    """
    logits = _logits(query, key, bias)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.softmax(dim=-1, dtype=wide)


def _logits(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    logits = (query * (1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)  # [B, ..., H, N, N]
    return logits if bias is None else logits + bias


def choose_attention(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return the kernel whose forward and backward pass is clearly the faster for query, key and value of `shape`, or the fused one.

    Where sequences are short and there is enough to do, it is measured on so many images or fewer, once for the life of the
    process. No random number is drawn.

    Args:
        shape: `[B, H, N, Dh]`.
    """
    images, heads, tokens, size = shape
    logits = heads * tokens * tokens
    if tokens > _SHORT or images * logits < _WORTH_MEASURING:
        return "fused"
    return _measured((min(images, -(-_ENOUGH // logits)), heads, tokens, size), dtype, device)


@cache
@torch.inference_mode(False)
@torch.enable_grad()
def _measured(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel:
    inputs = [torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    ways = {"fused": lambda: _with("fused", *inputs), "math": lambda: _with("math", *inputs)}
    return "math" if fastest(ways, device) == "math" else "fused"


def _math(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    # The sums of the softmax are in float32; its result is kept in the type of the product, once for both products behind it.
    return _logits(query, key, bias).softmax(dim=-1).to(value.dtype) @ value


def _with(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> object:
    mixed = (F.scaled_dot_product_attention if kernel == "fused" else _math)(query, key, value)
    return torch.autograd.grad(mixed, (query, key, value), torch.ones_like(mixed))
