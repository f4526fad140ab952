"""The classifier's last layers under bf16: computed in float32, so that answers do not tie and gradients are
not noise.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.tiny_models import MASKED, TINY
from vitctl.engine.losses import classification_loss
from vitctl.models.blocks import compile_blocks
from vitctl.models.build import build
from vitctl.models.kernels import Head
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
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator) * 0.3)  # type: ignore[union-attr]
    return model


def seen_by(layer: nn.Module, seen: list[Tensor]) -> None:
    layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))


COMPILED = ("vit", "hybrid", "axial", "resnet v1", "masked, downsized")


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in FAMILIES), *((name, True) for name in COMPILED)]
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
    assert torch.equal(logits, F.linear(seen[0].float(), model.head.weight, model.head.bias))  # type: ignore[union-attr]


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


def features_and_weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1000, 64, generator=generator), torch.randn(1000, 64, generator=generator) * 0.1


def ties(layer: nn.Linear) -> int:
    """Images of 1,000 whose best answer has an equal."""
    features, weight = features_and_weights()
    with torch.no_grad(), BF16:
        layer.weight.copy_(weight)
        two = layer(features).topk(2, dim=1).values
    return int((two[:, 0] == two[:, 1]).sum())


def test_head__no_two_answers_are_equally_likely() -> None:
    assert ties(nn.Linear(64, 1000, bias=False)) > 20  # what bf16 does
    assert ties(Head(64, 1000, bias=False)) == 0


def gradient_noise(layer: nn.Linear) -> float:
    """Of the wrong classes near the initial bias of -10: deviation relative to the true gradient of the
    logits' bias.
    """
    features, weight = features_and_weights()
    with torch.no_grad():
        layer.weight.copy_(weight * 0.1)
        layer.bias.fill_(-10.0)
    features, labels = features[:64], torch.arange(64)
    with BF16:
        logits = layer(features)
    logits.retain_grad()
    classification_loss(
        logits.float(), labels, torch.ones(64), name="sigmoid", label_smoothing=0.0
    ).backward()
    exact = features.double() @ layer.weight.detach().double().T - 10.0
    wrong = F.one_hot(labels, 1000) == 0
    found = torch.sigmoid(logits.detach().double())[wrong]
    assert torch.allclose(logits.grad.double()[wrong], found, rtol=0.01)  # type: ignore[union-attr]
    return float((found / torch.sigmoid(exact)[wrong] - 1).square().mean().sqrt())


def test_head__the_gradient_of_the_wrong_classes_is_no_noise() -> None:
    assert gradient_noise(nn.Linear(64, 1000)) == pytest.approx(0.018, abs=0.002)  # what bf16 does
    assert gradient_noise(Head(64, 1000)) < 1e-5
