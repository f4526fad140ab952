"""Attention kernels, and linear layers that are packed to score in bf16 on a CPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# "fused" is torch's own choice: on a GPU `attention_rule` names one. "flash" is also that of a CPU.
AttentionKernel = Literal["fused", "flash", "efficient", "cudnn", "math"]
_PINNED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# Tokens up to which plain products are faster, by device and type of the products; measured by
# benchmarks/kernels.py.
_PLAIN_UP_TO = {("cpu", torch.bfloat16): 1024}


class Attending(nn.Module):
    """A layer that attends with `kernel`, see `set_attention`."""

    kernel: AttentionKernel = "fused"


def set_attention(model: nn.Module, kernel: AttentionKernel) -> None:
    """Set a network's attention kernel; call it before compiling."""
    for module in model.modules():
        if isinstance(module, Attending):
            module.kernel = kernel


def attention_of(model: nn.Module) -> AttentionKernel:
    """Return the kernel of a network; "fused" if it does not attend."""
    return next((module.kernel for module in model.modules() if isinstance(module, Attending)), "fused")


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, kernel: AttentionKernel = "fused"
) -> Tensor:
    """Return softmax(query key^T / sqrt(Dh) + bias) value, `[B, ..., H, N, Dh]` like each of the three.

    A `bias` `[B, ..., H, N, N]` forces plain products.
    Paper: Appendix A, equations 6 and 7
    """
    leading = query.shape[:-3]
    query, key, value = (
        tensor.flatten(0, -4) for tensor in (query, key, value)
    )  # fused kernels support one batch dimension
    # On most devices a trained bias has no fused kernel.
    if bias is not None or kernel == "math":
        logits = _logits(query, key, None if bias is None else bias.flatten(0, -4))
        # The softmax sums in float32; its result is kept in the type of the product, once for both later
        # products.
        mixed = logits.softmax(dim=-1).to(value.dtype) @ value
    elif kernel in _PINNED:
        with sdpa_kernel(_PINNED[kernel]):
            mixed = F.scaled_dot_product_attention(query, key, value)
    else:
        mixed = F.scaled_dot_product_attention(query, key, value)
    return torch.unflatten(mixed, 0, leading)


def attention_weights(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(Dh) + bias), `[B, ..., H, N, N]`, queries before keys.

    The result is in float32 or wider. Paper: Appendix A, equation 6
    """
    logits = _logits(query, key, bias)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.softmax(dim=-1, dtype=wide)


def _logits(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    logits = (query * (1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)  # [B, ..., H, N, N]
    return logits if bias is None else logits + bias


def attention_rule(
    device: str, dtype: torch.dtype, tokens: int, head: int = 64, *, deterministic: bool = True
) -> AttentionKernel:
    """Return the kernel for machine.attention = "auto", the same at any load and batch.

    `device` is a kind such as "cpu", `dtype` that of the products, `tokens` the longest sequence, `head` the
    numbers of a head. On a GPU flash needs 16 bits, efficient at most 32 and multiples of 16 bytes; both have
    a backward pass in a fixed order where `deterministic` algorithms are on, and cuDNN has none. Without,
    cuDNN is torch's choice on Hopper and Blackwell.
    Source: torch 2.11 and 2.14, sdp_utils.cpp and attention_backward.cu in aten's transformers/cuda
    """
    if device != "cuda":
        return "math" if tokens <= _PLAIN_UP_TO.get((device, dtype), 0) else "fused"
    major = torch.cuda.get_device_capability()[0]
    half, fits = dtype.itemsize == 2 and major >= 8, head * dtype.itemsize % 16 == 0
    if half and not deterministic and major in (9, 10) and head <= 128 and fits:
        return "cudnn"
    if half and head <= 256:
        return "flash"
    return "efficient" if fits and (half or dtype.itemsize == 4) else "math"


class Linear(nn.Linear):
    """A linear layer, `[..., in_features]` to `[..., out_features]`."""

    packed: tuple[Tensor, Tensor | None] | None = None  # weight and bias in bf16, see `pack`
    narrow: tuple[Tensor, ...] = ()  # the same, in training, see `Narrowed`

    def forward(self, inputs: Tensor) -> Tensor:
        if self.packed is not None:
            return self._by_packed(inputs, "none", "")
        return F.linear(inputs, self.multiplied(), self.added())

    def then(self, inputs: Tensor, activation: nn.Module) -> Tensor:
        """Return `activation(self(inputs))`; with packed weights, GELU is fused into the float32 product."""
        if self.packed is None or not isinstance(activation, nn.GELU):
            outputs: Tensor = activation(self(inputs))
            return outputs
        return self._by_packed(inputs, "gelu", activation.approximate)

    def _by_packed(self, inputs: Tensor, then: str, how: str) -> Tensor:
        assert self.packed is not None
        product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs.bfloat16(), *self.packed, then, [], how)
        return product.contiguous()

    def multiplied(self) -> Tensor:
        """Return the matrix that inputs are multiplied by, `[out_features, in_features]`."""
        return self._as_multiplied(self.weight, 0)

    def added(self) -> Tensor | None:
        return self.bias if self.bias is None else self._as_multiplied(self.bias, 1)

    def _as_multiplied(self, weight: Tensor, place: int) -> Tensor:
        if torch.compiler.is_compiling() or not self.narrow:
            return weight
        held: Tensor = _Held.apply(weight, self.narrow[place])
        return held


class _Held(torch.autograd.Function):
    """A copy in place of a weight: its gradient goes to the weight, in the weight's type."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


class QKV(Linear):
    """Query, key and value `[..., 3 D]` of tokens `[..., D]`; only queries and values have a bias.

    A key bias does not affect attention, so weights without one must not train one.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 3 * hidden_size, bias=False)
        self.query_bias = nn.Parameter(torch.empty(hidden_size))
        self.value_bias = nn.Parameter(torch.empty(hidden_size))

    def added(self) -> Tensor | None:
        return torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])


class Head(Linear):
    """The classification layer, `[..., R]` to `[..., K]`, in the precision of its weights despite autocast.

    In bf16 two answers of a thousand are often equal, and a logit near the initial bias of -10 is off by up
    to 0.03.
    """

    def forward(self, features: Tensor) -> Tensor:
        device = features.device.type
        # Skipped without autocast: exporters would otherwise see a region in the graph. torch 2.11 cannot
        # compile `is_autocast_available`, and `meta` is the only device without autocast used here.
        is_on = device != "meta" and torch.is_autocast_enabled(device)
        off = torch.autocast(device, enabled=False) if is_on else nullcontext()
        with off:
            return super().forward(features.to(self.weight.dtype))


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def pack(model: nn.Module, dtype: torch.dtype) -> None:
    """Reorder the weights of linear layers for oneDNN, once, if they are multiplied in bf16 on a CPU.

    Otherwise every product converts its weights from float32 and reorders them. The copies do not follow the
    weights: a packed model must not be trained. Compiled models and `Head` layers stay as they are.
    """
    layers = [one for one in model.modules() if isinstance(one, Linear) and not isinstance(one, Head)]
    if is_compiled(model) or dtype != torch.bfloat16 or not layers or not _has_bf16(layers[0].weight.device):
        return
    for layer in layers:
        weight, bias = layer.multiplied().detach().to(dtype), layer.added()
        layout = torch.ops.mkldnn._reorder_linear_weight(weight)
        layer.packed = layout, None if bias is None else bias.detach().to(dtype)


def _has_bf16(device: torch.device) -> bool:
    """Return whether oneDNN multiplies bf16 here, which needs AVX-512."""
    library: Any = torch.backends.mkldnn  # only partly typed
    return bool(
        device.type == "cpu" and library.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@contextmanager
def packed(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute with packed weights within the block, where weights must not change; see `pack`."""
    pack(model, dtype)
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, Linear):
                module.packed = None


class Narrowed:
    """Linear layers with bf16 copies of their weights within the block, made by one kernel a step.

    They are those that autocast makes of each weight in each pass. Weights must not change within.
    """

    def __init__(self, model: nn.Module) -> None:
        # Not heads, which multiply in float32, nor adapted layers, which merge float32 weights.
        layers = (one for one in model.modules() if type(one) in (Linear, QKV))
        self._layers = [one for one in layers if isinstance(one, Linear) and one.weight.requires_grad]
        self._copies: list[list[Tensor]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        weights = [[p for p in (one.weight, one.bias) if p is not None] for one in self._layers]
        self._copies = self._copies or [
            [torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False) for p in own] for own in weights
        ]
        with torch.no_grad():
            if weights:  # a network may have adapted layers alone
                torch._foreach_copy_([*chain(*self._copies)], [*chain(*weights)])
        for layer, copies in zip(self._layers, self._copies, strict=True):
            layer.narrow = tuple(copies)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.narrow = ()
