"""The classifier's last layers under bf16: computed in float32, so that answers do not tie and gradients are
not noise.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.matrix import slow, spread
from tests.models.tiny_models import MASKED, TINY
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import build
from vitctl.models.variants import Config

# Torch hides this warning of its own tracing, but not from filters that make warnings errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BF16 = torch.autocast("cpu", torch.bfloat16)
FAMILIES = {**TINY, **{f"masked, {name}": config for name, config in MASKED.items()}}


def drawn(config: Config, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model whose head is not zero."""
    model = build(config, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator) * 0.3)
    return model


def seen_by(layer: nn.Module, seen: list[Tensor]) -> None:
    layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))


COMPILED = ("vit", "hybrid", "axial", "resnet v1", "masked, downsized")


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *spread(6, [(name, False) for name in FAMILIES]),
        *slow(*((name, True) for name in COMPILED)),
    ],
)
def test_head__is_computed_in_float32_under_autocast(name: str, compiled: bool) -> None:
    config = FAMILIES[name]
    model, seen, inside = drawn(config), [], []
    if compiled:
        torch.compiler.reset()
        compile_blocks(model, "eager")
    seen_by(model.head, seen)  # type: ignore[arg-type]
    for block in model.modules():
        if isinstance(block, nn.Conv2d):
            block.register_forward_hook(lambda _m, _i, output: inside.append(output.dtype))
    images = torch.randn(
        2, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(2)
    )
    with BF16:
        logits = model(images)
    assert torch.bfloat16 in inside  # the body is not
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(seen[0].float(), model.head.weight, model.head.bias))


def test_head__float64_stays_float64() -> None:
    logits = drawn(TINY["gap"], torch.float64)(torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert logits.dtype == torch.float64


def test_head__pre_logits_are_computed_in_float32_too() -> None:
    model, seen = drawn(TINY["gap"]), []
    seen_by(model.pre_logits, seen)  # type: ignore[arg-type]
    with BF16:
        features = model.features(torch.randn(2, 3, 32, 32))  # type: ignore[operator]
    assert torch.equal(
        features, F.linear(seen[0].float(), model.pre_logits.weight, model.pre_logits.bias).tanh()
    )  # type: ignore[union-attr]
