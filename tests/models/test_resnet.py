"""What the two ResNet versions are made of; their forward passes are compared in test_families.py."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.numpy_reference import std_conv, symmetric, windows
from tests.models.tiny_models import TINY
from vitctl.models.build import build
from vitctl.models.resnet import V1, V2, GroupNorm, Numerics, RootV2, StdConv, pad_same, standardise
from vitctl.models.variants import ResNetConfig


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "pads"),
    [
        (224, 7, 2, (2, 3)),
        (112, 3, 2, (0, 1)),
        (56, 3, 2, (0, 1)),
        (56, 3, 1, (1, 1)),
        (37, 3, 2, (1, 1)),
        (5, 1, 2, (0, 0)),
    ],
)
def test_pad_same__is_that_of_tensorflow(side: int, kernel: int, stride: int, pads: tuple[int, int]) -> None:
    images = torch.ones(1, 1, side, side)
    padded, padding = pad_same(images, kernel, stride, value=-2.0)
    shown = torch.nn.functional.pad(padded, (padding,) * 4, value=-2.0)
    expected = torch.nn.functional.pad(images, (pads[0], pads[1]) * 2, value=-2.0)
    assert torch.equal(shown, expected)
    assert (shown.shape[-1] - kernel) // stride + 1 == math.ceil(side / stride)


@pytest.mark.parametrize("numerics", [V1, V2])
def test_standardise__adds_its_own_epsilon_in_its_own_place(numerics: Numerics) -> None:
    # Kernels so flat that the epsilons decide.
    weight = 1e-5 * torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    eps = {"std_eps": 1e-5} if numerics is V1 else {"variance_eps": 1e-10}
    expected = std_conv(symmetric(images.numpy(), 1), weight.numpy(), 1, **eps)
    found = torch.nn.functional.conv2d(images, standardise(weight, numerics), padding=1).numpy()
    assert np.abs(found - expected).max() < 1e-12
    other = standardise(weight, V2 if numerics is V1 else V1)
    assert (standardise(weight, numerics) - other).abs().max() > 0.01


def test_group_norm__stays_wide_in_autocast() -> None:
    norm, images = GroupNorm(2, 4), torch.randn(2, 4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(images.bfloat16()).dtype == torch.float32


def test_root_v2__sees_zeros_at_the_border_and_not_minus_infinity() -> None:
    root = RootV2(8).double()
    images = torch.rand(1, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        found = root(images).numpy()
        map_ = root.conv(images).numpy()
    framed = symmetric(map_, 1)
    assert np.array_equal(found, windows(framed, 3, 2).max((-1, -2)))
    assert (found[:, :, 0] >= 0).all()


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
