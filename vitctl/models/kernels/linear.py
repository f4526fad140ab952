"""Linear layers, and which of two libraries multiplies their matrices on a CPU: the one that torch takes, or
oneDNN.

For float32 torch takes MKL, which on AMD CPUs with AVX-512 uses half of their vector units. Both compute the
same, up to rounding. `auto` never takes oneDNN: which one is faster depends on the processor, and a recipe
takes the same kernels on all of them.
"""

from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Kernel = Literal["torch", "onednn"]

_kernel: Kernel = "torch"


def set_linear(kernel: Kernel) -> None:
    """Choose the library for every model in this process; on a GPU, and for float64, torch's is used in any
    case.
    """
    global _kernel
    _kernel = kernel


def used_linear() -> Kernel:
    """Return the library that was chosen."""
    return _kernel


class Linear(nn.Linear):
    """A linear layer, `[..., in_features]` to `[..., out_features]`."""

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        if _kernel == "torch" or device != "cpu" or self.weight.dtype == torch.float64:
            return F.linear(inputs, self.weight, self.bias)
        is_mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_mixed else inputs.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        outputs: Tensor = _OneDNN.apply(inputs.to(dtype), self.weight.to(dtype), bias)
        return outputs


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


class _OneDNN(torch.autograd.Function):
    """inputs weight^T + bias by oneDNN; all of one dtype."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
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
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001 - the signature of the operator
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


@_inputs_gradient.register_fake
def _(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], weight.shape[1])


@_weight_gradient.register_fake
def _(gradient: Tensor, inputs: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[-1], inputs.shape[-1])


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs weight^T + bias: `[..., I]` and `[O, I]` to `[..., O]`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    outputs: Tensor = product.contiguous()
    return outputs
