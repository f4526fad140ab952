import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny_models import TINY
from vitctl.models import kernels
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import build
from vitctl.models.kernels import Head, Linear, onednn_problem, packed, set_linear
from vitctl.models.variants import variant

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(
    bool(onednn_problem(torch.float32, CPU)), reason="this PyTorch has no oneDNN"
)


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by each product of oneDNN."""
    calls: list[str] = []
    product = kernels._product

    def counted(*given: Any) -> Tensor:
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


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(TINY))
def test_packed_weights_compute_what_weights_do(name: str, dtype: torch.dtype) -> None:
    if onednn_problem(dtype, CPU):
        pytest.skip("this processor has no bf16 product")
    model = build(TINY[name]).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    images = torch.randn(3, 3, model.config.image_size, model.config.image_size)
    set_linear("onednn")
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images.double())
        with mixed:
            plain = model(images)
            with packed(model, dtype):
                fast = model(images)
            after = model(images)
    assert torch.equal(after, plain)
    assert fast.dtype == plain.dtype
    off, before = ((logits - exact).abs().max() / exact.std() for logits in (fast, plain))
    assert off < (1e-5 if dtype == torch.float32 else max(1.5 * before, 0.02))


@needs_onednn
def test_packed_weights__what_is_packed() -> None:
    set_linear("torch")
    model = build(variant("Ti/16", image_size=32, num_classes=3, depth=1))
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    with packed(model, torch.float32):  # torch's library multiplies in float32
        assert not any(layer.packed for layer in layers)
    set_linear("onednn")
    with packed(model, torch.float32):
        assert [isinstance(layer, Head) for layer in layers if layer.packed is None] == [True]
    assert not any(layer.packed for layer in layers)
    with packed(model.double(), torch.float64):
        assert not any(layer.packed for layer in layers)
    compile_blocks(model.float(), backend="eager")
    with packed(model, torch.float32):
        assert not any(layer.packed for layer in layers)
