"""What the two ResNet versions are made of; their forward passes are compared in test_families.py."""

import math
from dataclasses import replace

import pytest
import torch

from tests.models.tiny_models import TINY
from vitctl.models.build import build
from vitctl.models.resnet import GroupNorm, StdConv
from vitctl.models.variants import ResNetConfig


def test_group_norm__stays_wide_in_autocast() -> None:
    norm, images = GroupNorm(2, 4), torch.randn(2, 4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(images.bfloat16()).dtype == torch.float32


def test_initialise__convolutions_are_lecun_normal() -> None:
    model = build(ResNetConfig(stage_depths=(1, 1), width=128, num_classes=7, head_bias=-10.0))
    convolutions = [module for module in model.modules() if isinstance(module, StdConv)]
    assert len(convolutions) == 1 + 2 * 4
    for conv in convolutions:
        fan_in = conv.weight[0].numel()
        assert conv.bias is None
        assert conv.weight.std().item() == pytest.approx(1 / math.sqrt(fan_in), rel=0.03)
        assert conv.weight.abs().max().item() < 2 / math.sqrt(fan_in) / 0.8796 * 1.001
    assert model.head is not None
    assert not model.head.weight.any()
    assert torch.equal(model.head.bias, torch.full((7,), -10.0))


@pytest.mark.parametrize("name", ["resnet v1", "resnet v2", "hybrid"])
def test_initialise__last_norm_of_a_v1_unit_is_zero_and_all_others_are_one(name: str) -> None:
    model = build(TINY[name])
    norms = {key: module for key, module in model.named_modules() if isinstance(module, GroupNorm)}
    assert len(norms) > 8
    for key, module in norms.items():
        zero = key.endswith("norm3") and name != "resnet v2"
        assert torch.equal(module.weight, torch.full_like(module.weight, 0.0 if zero else 1.0)), key
        assert not module.bias.any()


def test_resnet__takes_any_image_size_that_the_network_was_not_built_for() -> None:
    model = build(TINY["resnet v1"]).eval()
    for size in (16, 33, 64):
        assert model(torch.zeros(1, 3, size, size)).shape == (1, 5)
    assert replace(TINY["resnet v1"], image_size=64).feature_size == 64
