import copy

import pytest
import torch
from torch import Tensor, nn

from vitctl.models import kernels
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import build
from vitctl.models.kernels import Head, Linear, onednn_problem, set_linear
from vitctl.models.variants import variant

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(
    bool(onednn_problem(torch.float32, CPU)), reason="this PyTorch has no oneDNN"
)


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by each product of oneDNN."""
    calls: list[str] = []
    product = kernels._product

    def counted(*given: Tensor | None) -> Tensor:
        calls.append("product")
        found: Tensor = product(*given)
        return found

    monkeypatch.setattr(kernels, "_product", counted)
    return calls


def results(layer: nn.Module, inputs: Tensor, *, mixed: bool = False) -> list[Tensor]:
    """Output and gradients of a layer."""
    layer.zero_grad()
    inputs = inputs.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        outputs = layer(inputs)
    outputs.double().square().sum().backward()
    return [outputs, inputs.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@needs_onednn
@pytest.mark.parametrize("shape", [(5, 24), (2, 7, 24), (2, 3, 7, 24)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Linear, Head])
@pytest.mark.parametrize("mixed", [False, True])
def test_linear__both_libraries_agree_to_rounding(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool, kind: type[Linear], mixed: bool
) -> None:
    if mixed and kind is Linear and onednn_problem(torch.bfloat16, CPU):
        pytest.skip("this processor has no bf16 product")
    calls = called(monkeypatch)
    torch.manual_seed(0)
    layer, inputs = kind(24, 40, bias=bias), torch.randn(shape)
    exact = results(copy.deepcopy(layer).double(), inputs.double())
    plain = results(layer, inputs, mixed=mixed)
    assert calls == []
    set_linear("onednn")
    found = results(layer, inputs, mixed=mixed)
    assert len(calls) == 3
    rounding = 0.02 if mixed and kind is Linear else 1e-6
    for one, other, reference in zip(found, plain, exact, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert (one - reference).abs().max() < rounding * reference.abs().max()


def test_linear__float64_and_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = called(monkeypatch)
    set_linear("onednn")
    results(Linear(8, 8).double(), torch.randn(3, 8).double())
    assert calls == []  # oneDNN has no float64
    frozen = Linear(8, 8).requires_grad_(False)
    kept: list[tuple[int, ...]] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append((*saved.shape,))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        frozen(torch.randn(3, 8, requires_grad=True))
    assert kept == [(8, 8)]  # the weight; before, its inputs were kept too, which nothing needs
    calls.clear()
    results(frozen, torch.randn(3, 8))
    assert len(calls) == 2  # no gradient of the weight
    with torch.no_grad():
        frozen(torch.randn(3, 8))
    assert len(calls) == 3


@needs_onednn
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # see test_blocks.py
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11, tracing
@pytest.mark.parametrize("frozen", [False, True])
def test_linear__a_compiled_model_computes_the_same(frozen: bool) -> None:
    set_linear("onednn")
    model = build(variant("Ti/16", image_size=32, num_classes=10, depth=1))
    model.get_submodule("blocks").requires_grad_(not frozen)
    images = torch.rand(3, 3, 32, 32)
    plain = results(model, images)
    compile_blocks(model, backend="aot_eager")
    for one, other in zip(results(model, images), plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_onednn_problem__bf16_needs_a_processor_with_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the library alone was asked for, and the first product ended in a traceback."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert onednn_problem(torch.bfloat16, CPU).startswith("oneDNN has no bf16 product on this processor")
    assert onednn_problem(torch.float32, CPU) == ""
    assert onednn_problem(torch.float64, CPU) and onednn_problem(torch.float32, torch.device("cuda"))
