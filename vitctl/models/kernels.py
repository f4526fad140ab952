"""Kernels: the attention product, and GELU and linear layers on a CPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

AttentionKernel = Literal["fused", "math", "mixed"]
# Tokens up to which plain products are the faster kernel, by device and type of the products, and those from
# which this ends without gradients on a CPU with AMX: benchmarks/kernels.py prints them.
_PLAIN_UP_TO = {("cpu", torch.bfloat16): 1024}
_MIXED_FROM = 128

_attention_kernel: AttentionKernel = "fused"


def set_attention(kernel: AttentionKernel) -> None:
    """Choose the kernel of every model in this process."""
    global _attention_kernel
    _attention_kernel = kernel


def used_attention() -> AttentionKernel:
    """Return the kernel that was chosen."""
    return _attention_kernel


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
    is_plain = {"fused": False, "math": True, "mixed": torch.is_grad_enabled()}[_attention_kernel]
    plain = bias is not None or is_plain
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


def attention_rule(device: str, dtype: torch.dtype, tokens: int) -> AttentionKernel:
    """Return the kernel of machine.attention = "auto": the same at any load and batch, on every machine
    with this kind of device; a CPU with AMX is a kind.

    Args:
        device: kind, such as "cpu".
        dtype: of the products.
        tokens: of a sequence, at most; a fused kernel needs no `[N, N]` matrix.
    """
    if tokens > _PLAIN_UP_TO.get((device, dtype), 0):
        return "fused"
    return "mixed" if tokens >= _MIXED_FROM and has_amx() else "math"


def has_amx() -> bool:
    """Return whether the fused kernel of this CPU multiplies bf16 in tiles, which needs AVX-512 too."""
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_wide and bool(torch.cpu._is_amx_tile_supported())


def _math(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    # The sums of the softmax are in float32; its result is kept in the type of the product, once for both
    # products behind it.
    return _logits(query, key, bias).softmax(dim=-1).to(value.dtype) @ value


_TABLE_THREADS = 2  # one thread reads the table; with more threads than these torch's arithmetic is faster
_PIECE = 2**16  # numbers looked up at once: what is between table and result stays in the cache


def gelu_tanh(inputs: Tensor) -> Tensor:
    """Return GELU in its tanh form, in the type of the inputs.

    There are 65,536 numbers of bf16. On a CPU their results are looked up: the same bits as those of torch's
    kernel, which computes each, in half the time.
    """
    is_looked_up = (
        type(inputs) is Tensor  # no traced or distributed one
        and (inputs.device.type, inputs.dtype) == ("cpu", torch.bfloat16)
        and torch.get_num_threads() <= _TABLE_THREADS
        and not torch.compiler.is_compiling()
    )
    outputs: Tensor = _GELU.apply(inputs) if is_looked_up else F.gelu(inputs, approximate="tanh")
    return outputs


class _GELU(torch.autograd.Function):
    """`gelu_tanh` of bf16 by tables."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        for bits, found in zip(_pieces(inputs.view(torch.uint16)), _pieces(outputs), strict=True):
            torch.index_select(_gelu_tables()[0], 0, bits.to(torch.int32), out=found)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        result = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        pieces = _pieces(inputs.view(torch.uint16)), _pieces(gradient), _pieces(result)
        for bits, given, found in zip(*pieces, strict=True):
            slope = _gelu_tables()[1].index_select(0, bits.to(torch.int32))
            found.copy_(slope.mul_(given))  # rounded once, as torch does it
        return result


def _pieces(numbers: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = torch.split(numbers.reshape(-1), _PIECE)
    return pieces


@cache
def _gelu_tables() -> tuple[Tensor, Tensor]:
    """Return GELU of the bf16 number with each pattern of 16 bits, and its derivative in float32."""
    numbers = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    wide = numbers.float()
    slopes = torch.ops.aten.gelu_backward(torch.ones_like(wide), wide, approximate="tanh")
    return F.gelu(numbers, approximate="tanh"), slopes


LinearKernel = Literal["torch", "onednn"]

_linear_kernel: LinearKernel = "torch"


def set_linear(kernel: LinearKernel) -> None:
    """Choose the library for every model in this process; on a GPU, and for float64, torch's is used in any
    case.
    """
    global _linear_kernel
    _linear_kernel = kernel


def used_linear() -> LinearKernel:
    """Return the library that was chosen."""
    return _linear_kernel


class Linear(nn.Linear):
    """A linear layer, `[..., in_features]` to `[..., out_features]`."""

    packed: tuple[Tensor, Tensor | None, torch.dtype] | None = None  # weight and bias, see `pack`

    def forward(self, inputs: Tensor) -> Tensor:
        if self.packed is not None:
            return self._by_packed(inputs, "none", "")
        device, weight, bias = inputs.device.type, self.multiplied(), self.added()
        if _linear_kernel == "torch" or device != "cpu" or weight.dtype == torch.float64:
            return F.linear(inputs, weight, bias)
        is_mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_mixed else inputs.dtype
        bias = None if bias is None else bias.to(dtype)
        outputs: Tensor = _OneDNN.apply(inputs.to(dtype), weight.to(dtype), bias)
        return outputs

    def then(self, inputs: Tensor, activation: nn.Module) -> Tensor:
        """Return `activation(self(inputs))`. With packed weights, the product computes a GELU on its sums in
        float32.
        """
        if self.packed is None or not isinstance(activation, nn.GELU):
            outputs: Tensor = activation(self(inputs))
            return outputs
        return self._by_packed(inputs, "gelu", activation.approximate)

    def _by_packed(self, inputs: Tensor, then: str, how: str) -> Tensor:
        assert self.packed is not None
        weight, bias, dtype = self.packed
        return _product(inputs.to(dtype), weight, bias, then, how)

    def multiplied(self) -> Tensor:
        """Return the matrix that inputs are multiplied by, `[out_features, in_features]`."""
        return self.weight

    def added(self) -> Tensor | None:
        """Return what is added to each output, `[out_features]`."""
        return self.bias


class QKV(Linear):
    """Query, key and value `[..., 3 D]` of tokens `[..., D]`, of which queries and values alone have a bias.

    A bias of the keys changes no attention, so that weights without one must not train one.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 3 * hidden_size, bias=False)
        self.query_bias = nn.Parameter(torch.empty(hidden_size))
        self.value_bias = nn.Parameter(torch.empty(hidden_size))

    def added(self) -> Tensor | None:
        """Return the biases, with zeros for the keys."""
        return torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])


class Head(Linear):
    """A linear layer of the classifier, `[..., R]` to `[..., K]`, in the precision of its weights whatever
    autocast says.

    In bf16 two answers of a thousand are often equal, and a logit near the initial bias of -10 is off by up
    to 0.03.
    """

    def forward(self, features: Tensor) -> Tensor:
        device = features.device.type
        # Left alone where nothing is on: exporters would otherwise find a region in the graph. torch 2.11
        # cannot compile `is_autocast_available`, and `meta` is the one device without autocast that a network
        # meets.
        is_on = device != "meta" and torch.is_autocast_enabled(device)
        off = torch.autocast(device, enabled=False) if is_on else nullcontext()
        with off:
            return super().forward(features.to(self.weight.dtype))


def onednn_problem(dtype: torch.dtype, device: torch.device) -> str:
    """Return why oneDNN cannot multiply here, or ""."""
    if device.type != "cpu":
        return "oneDNN computes on CPUs"
    if dtype == torch.float64:
        return "oneDNN has no float64"
    library: Any = torch.backends.mkldnn  # not all of it has types
    if not library.is_available():
        return "this PyTorch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bf16 product on this processor, which lacks AVX-512"
    return ""


def pack(model: nn.Module, dtype: torch.dtype) -> None:
    """Lay the weights of linear layers out for oneDNN, once, on a CPU whose products are oneDNN's.

    Otherwise every product converts its weights from float32 and reorders them. The copies do not follow the
    weights: `packed` drops them.

    Args:
        model: not trained while it is packed. Compiled ones stay as they are; so do layers of `Head`, whose
            weights stay wide.
        dtype: of the products.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    is_onednn = dtype == torch.bfloat16 or _linear_kernel == "onednn"
    if is_compiled or not is_onednn or not layers or onednn_problem(dtype, layers[0].weight.device):
        return
    for layer in layers:
        if not isinstance(layer, Head):
            weight, bias = layer.multiplied().detach().to(dtype), layer.added()
            layout = torch.ops.mkldnn._reorder_linear_weight(weight)
            layer.packed = layout, None if bias is None else bias.detach().to(dtype), dtype


@contextmanager
def packed(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute with packed weights within the block, in which they do not change; see `pack`."""
    pack(model, dtype)
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, Linear):
                module.packed = None


class _OneDNN(torch.autograd.Function):
    """inputs weight^T + bias by oneDNN; all of one dtype."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)  # frozen: not needed
        ctx.has_bias = bias is not None
        outputs: Tensor = _outputs(inputs, weight, bias)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        for_inputs, for_weight, for_bias = ctx.needs_input_grad
        return (
            _inputs_gradient(gradient, weight) if for_inputs else None,
            _weight_gradient(gradient, inputs) if for_weight else None,
            gradient.flatten(0, -2).sum(dim=0) if ctx.has_bias and for_bias else None,
        )


# Operators of our own, because torch's compiler takes its operator below for inference alone.
@torch.library.custom_op("vitctl::linear", mutates_args=())
def _outputs(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(inputs, weight, bias)


@torch.library.custom_op("vitctl::linear_inputs_gradient", mutates_args=())
def _inputs_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return _product(gradient, weight.t(), None)


@torch.library.custom_op("vitctl::linear_weight_gradient", mutates_args=())
def _weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    return _product(gradient.flatten(0, -2).t(), inputs.flatten(0, -2).t(), None)


@_outputs.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001 - the signature
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


@_inputs_gradient.register_fake
def _(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], weight.shape[1])


@_weight_gradient.register_fake
def _(gradient: Tensor, inputs: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[-1], inputs.shape[-1])


def _product(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, then: str = "none", how: str = ""
) -> Tensor:
    """inputs weight^T + bias: `[..., I]` and `[O, I]` to `[..., O]`, and what is applied to it then."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, then, [], how)
    outputs: Tensor = product.contiguous()
    return outputs
