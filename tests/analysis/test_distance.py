"""Mean attention distance against loops over pairs of patches, and against the mean of all distances."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from tests.analysis.conftest import (
    FAMILIES,
    TRANSFORMERS,
    noisy_model,
    numpy_attentions,
    random_images,
    uniform,
)
from vitctl.analysis.attention import AttentionLayer, attention_layers, pixels_per_patch
from vitctl.analysis.distance import attention_distance, patch_distances, uniform_distance
from vitctl.analysis.observe import observe
from vitctl.models.configs import ViTConfig


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_distance__equals_loops_in_numpy(name: str) -> None:
    model, images = noisy_model(TRANSFORMERS[name]), random_images(32)
    config = model.config
    assert isinstance(config, ViTConfig)
    rows, columns = config.grid
    places = list(product(range(rows), range(columns)))
    expected = []
    for weights in numpy_attentions(model, images):
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


@pytest.mark.parametrize("name", [name for name in FAMILIES if "resnet v" not in name])
def test_distance__of_uniform_attention_is_the_mean_of_all_distances(name: str) -> None:
    """In a line of L places the mean of |i - j| over all pairs is (L^2 - 1) / 3 L; on a grid it is summed
    here.
    """
    config = FAMILIES[name]
    model = uniform(noisy_model(config))
    distances = observe(model, random_images(config.image_size)).distances
    for number, (layer, _) in enumerate(attention_layers(model)):
        rows, columns = layer.grid
        line = (rows**2 - 1) / (3 * rows)
        pairs = product(product(range(rows), range(columns)), repeat=2)
        mean = (
            sum(math.dist(a, b) for a, b in pairs) / (rows * columns) ** 2 if layer.along == "grid" else line
        )
        torch.testing.assert_close(
            distances[:, number], torch.full_like(distances[:, number], layer.stride * mean)
        )
        assert uniform_distance(layer) == pytest.approx(layer.stride * mean, rel=1e-12)


def test_distance__of_four_patches_by_hand() -> None:
    layer = AttentionLayer(1, "grid", (2, 2), 1, 16)
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
    assert attention_distance(weights, AttentionLayer(1, "grid", (2, 2), 1, 16)).tolist() == [[0.0]]
