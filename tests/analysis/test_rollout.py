"""Attention rollout against products of matrices in NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.conftest import TRANSFORMERS, noisy_model, numpy_attentions, random_images, uniform
from vitctl.analysis.attention import AttentionLayer, watch_attention
from vitctl.analysis.observe import observe
from vitctl.analysis.rollout import overlay, roll
from vitctl.models.configs import ViTConfig


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rollout__equals_numpy(name: str) -> None:
    model, images = noisy_model(TRANSFORMERS[name]), random_images(32)
    config = model.config
    assert isinstance(config, ViTConfig)
    products = {True: np.eye(config.num_tokens), False: np.eye(config.num_tokens)}
    for weights in numpy_attentions(model, images):
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


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("identity", [True, False])
def test_rollout__rows_sum_to_one(name: str, identity: bool) -> None:
    model, rolled = noisy_model(TRANSFORMERS[name]), list[Tensor]()

    def seen(_: int, layer: AttentionLayer, weights: Tensor) -> None:
        rolled.append(roll(rolled[-1] if rolled else None, weights, layer, identity=identity))

    with watch_attention(model, seen):
        model(random_images(32))
    for one in rolled:
        torch.testing.assert_close(one.sum(-1), torch.ones_like(one[..., 0]))


def test_rollout__of_uniform_attention_is_uniform() -> None:
    for name in ("vit", "gap", "axial"):
        model = uniform(noisy_model(TRANSFORMERS[name]))
        seen = observe(model, random_images(32))
        for mask in (seen.mask, seen.mask_without_identity):
            torch.testing.assert_close(mask, mask.mean(dim=(1, 2), keepdim=True).expand_as(mask))
    assert float(seen.mask.sum(dim=(1, 2))[0]) == pytest.approx(1)


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
    assert overlay(torch.zeros(1, 3, 37, 37, dtype=torch.uint8), torch.ones(1, 5, 5), 8).shape == (
        1,
        3,
        37,
        37,
    )
    assert overlay(torch.zeros(1, 3, 9, 9, dtype=torch.uint8), torch.zeros(1, 1, 1), 8).unique().tolist() == [
        0
    ]
