import copy

import pytest
import torch
from torch import nn

from tests.matrix import few
from tests.models.tiny_models import OF_EACH_KIND, TINY
from vitctl.models import kernels
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import build
from vitctl.models.kernels import Head, Linear, packed
from vitctl.models.variants import variant

needs_bf16 = pytest.mark.skipif(
    not kernels._has_bf16(torch.device("cpu")), reason="oneDNN has no bf16 product on this processor"
)


@needs_bf16
@pytest.mark.parametrize("name", few(sorted(TINY), *OF_EACH_KIND))
def test_packed_weights_compute_what_weights_do(name: str) -> None:
    model = build(TINY[name]).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    images = torch.randn(3, 3, model.config.image_size, model.config.image_size)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images.double())
        with torch.autocast("cpu", torch.bfloat16):
            plain = model(images)
            with packed(model, torch.bfloat16):
                fast = model(images)
            after = model(images)
    assert torch.equal(after, plain)
    assert fast.dtype == plain.dtype
    off, before = ((logits - exact).abs().max() / exact.std() for logits in (fast, plain))
    assert off < max(1.5 * before, 0.02)


@needs_bf16
def test_packed_weights__what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(variant("Ti/16", image_size=32, num_classes=3, depth=1))
    layers = [module for module in model.modules() if isinstance(module, Linear)]

    def not_packed(dtype: torch.dtype) -> list[Linear]:
        with packed(model, dtype):
            return [layer for layer in layers if layer.packed is None]

    assert not_packed(torch.float32) == layers
    assert not_packed(torch.bfloat16) == [layer for layer in layers if isinstance(layer, Head)]
    assert not any(layer.packed for layer in layers)
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        assert not_packed(torch.bfloat16) == layers
    compile_blocks(model, backend="eager")
    assert not_packed(torch.bfloat16) == layers
