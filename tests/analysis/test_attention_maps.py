"""Attention weights are those of the paper's equations, and so are distance and rollout."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.conftest import (
    FAMILIES,
    TRANSFORMERS,
    expected_attentions,
    noisy_model,
    random_images,
)
from tests.matrix import spread
from vitctl.analysis.attention_maps import (
    AttentionLayer,
    attention_distance,
    attention_layers,
    overlay,
    patch_distances,
    pixels_per_patch,
    uniform_distance,
    watch_attention,
)
from vitctl.analysis.observe import observe
from vitctl.models.kernels import set_attention
from vitctl.models.variants import variant


def watched(model: Any, images: Tensor) -> tuple[list[tuple[AttentionLayer, Tensor]], Tensor]:
    found: list[tuple[AttentionLayer, Tensor]] = []
    with watch_attention(model, lambda number, layer, weights: found.insert(number, (layer, weights))):
        return found, model(images)


@pytest.mark.parametrize(
    ("name", "mode"), [*spread(8, [(name, "fused") for name in FAMILIES]), ("vit", "math")]
)
def test_watch__output_and_gradients_are_the_same_bits(name: str, mode: Any) -> None:
    model, images = noisy_model(FAMILIES[name]).train(), random_images(FAMILIES[name].image_size)
    set_attention(model, mode)
    plain = model(images)
    plain.square().sum().backward()
    before = {
        key: parameter.grad.clone()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    found, output = watched(model, images)
    output.square().sum().backward()
    assert torch.equal(output, plain)
    assert before
    assert all(torch.equal(before[key], p.grad) for key, p in model.named_parameters() if key in before)
    assert len(found) == len(attention_layers(model))
    assert not any(weights.requires_grad for _, weights in found)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_watch__weights_equal_numpy(name: str) -> None:
    model, images, expected = expected_attentions(name)
    found, _ = watched(model, images)
    assert len(found) == len(expected) > 1
    for (layer, weights), all_tokens in zip(found, expected, strict=True):
        assert layer.grid == model.config.grid
        np.testing.assert_allclose(weights.numpy(), all_tokens, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "relative"])
def test_watch__weights_are_wide_under_autocast(name: str) -> None:
    model = noisy_model(FAMILIES[name]).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = watched(model, random_images(32).float())
    assert {weights.dtype for _, weights in found} == {torch.float32}


@pytest.mark.parametrize("name", ["resnet v1", "resnet v2", "axial", "axial resnet"])
def test_watch__nothing_without_attention_over_all_tokens(name: str) -> None:
    assert attention_layers(noisy_model(FAMILIES[name])) == []


@pytest.mark.parametrize(
    ("name", "pixels"), [("H/14", 14), ("R50+B/32", 32), ("R50+B/16", 16), ("R+Ti/16", 32)]
)
def test_pixels_per_patch__is_the_stride_of_the_tokens(name: str, pixels: int) -> None:
    """R+Ti/16 has 8x8 patches at stride 4, whatever its name says."""
    config: Any = variant(name)
    assert pixels_per_patch(config) == pixels == 224 // config.grid[0]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_distance__equals_loops_in_numpy(name: str) -> None:
    model, images, attentions = expected_attentions(name)
    config = model.config
    rows, columns = config.grid
    places = list(product(range(rows), range(columns)))
    expected = []
    for weights in attentions:
        of_layer = np.zeros(weights.shape[:2])
        for image, head in np.ndindex(*of_layer.shape):
            for q, (row, column) in enumerate(places):
                own = weights[image, head, q + config.prefix_tokens, config.prefix_tokens :]
                pixels = [pixels_per_patch(config) * math.hypot(row - r, column - c) for r, c in places]
                of_layer[image, head] += own @ pixels / own.sum() / len(places)
        expected.append(of_layer)
    found = observe(model, images).distances
    np.testing.assert_allclose(found.numpy(), np.stack(expected, 1), rtol=1e-12)
    assert float(found.std()) > 0.5  # attention is far from uniform


def test_distance__of_four_patches_by_hand() -> None:
    layer = AttentionLayer(1, (2, 2), 1, 16)
    assert uniform_distance(layer) == pytest.approx(16 * (2 + math.sqrt(2)) / 4)
    assert patch_distances(layer)[0].tolist() == pytest.approx([0, 16, 16, 16 * math.sqrt(2)])
    to_itself, to_class_token, to_next = torch.eye(5), torch.zeros(5, 5), torch.zeros(5, 5)
    to_class_token[:, 0], to_class_token[:, 1:] = 0.6, 0.1
    to_next[torch.arange(5), torch.tensor([0, 2, 1, 4, 3])] = 1
    weights = torch.stack([to_itself, to_class_token, to_next])[None].double()
    found = attention_distance(weights, layer)
    assert found.shape == (1, 3)
    assert found[0].tolist() == pytest.approx(
        [0, uniform_distance(layer), 16]
    )  # the class token does not count


def test_distance__everything_to_the_class_token_is_no_nan() -> None:
    weights = torch.zeros(1, 1, 5, 5)
    weights[..., 0] = 1
    assert attention_distance(weights, AttentionLayer(1, (2, 2), 1, 16)).tolist() == [[0.0]]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rollout__equals_numpy(name: str) -> None:
    model, images, attentions = expected_attentions(name)
    config = model.config
    products = {True: np.eye(config.num_tokens), False: np.eye(config.num_tokens)}
    for weights in attentions:
        mean = weights.mean(axis=1)
        with_residual = mean + np.eye(config.num_tokens)
        with_residual /= with_residual.sum(axis=2, keepdims=True)
        products = {True: with_residual @ products[True], False: mean @ products[False]}
    seen = observe(model, images)
    for identity, found in ((True, seen.mask), (False, seen.mask_without_identity)):
        of_output = (
            products[identity][:, 0, 1:] if config.classifier == "token" else products[identity].mean(axis=1)
        )
        np.testing.assert_allclose(found.numpy(), of_output.reshape(3, *config.grid), rtol=1e-11)
    assert not torch.allclose(seen.mask, seen.mask_without_identity)


def test_overlay__is_as_bright_as_the_mask() -> None:
    images = torch.full((2, 3, 18, 18), 200, dtype=torch.uint8)
    masks = torch.full((2, 2, 2), 0.1)
    masks[1] = torch.tensor([[0.2, 0.0], [0.0, 0.0]])
    bright, partly = overlay(images, masks, 8)
    assert bright[:, :16, :16].unique().tolist() == [200]
    assert (
        bright[:, 16:].unique().tolist() == bright[:, :, 16:].unique().tolist() == [0]
    )  # no patch covers these
    assert partly[0, 0, 0] == 200 and partly[0, 15, 15] == 0
    assert 0 < partly[0, 8, 3] < partly[0, 7, 3] < 200


def test_overlay__of_a_map_that_is_larger_than_the_image() -> None:
    """A ResNet rounds odd sides up."""
    larger = overlay(torch.zeros(1, 3, 37, 37, dtype=torch.uint8), torch.ones(1, 5, 5), 8)
    assert larger.shape == (1, 3, 37, 37)
    empty = overlay(torch.zeros(1, 3, 9, 9, dtype=torch.uint8), torch.zeros(1, 1, 1), 8)
    assert empty.unique().tolist() == [0]
