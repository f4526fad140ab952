"""Filters, their principal components, and the similarity of positions."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from tests.analysis.conftest import FAMILIES, TRANSFORMERS, noisy_model
from tests.matrix import spread
from vitctl.analysis.parameters import (
    PAPERS,
    by_offset,
    color_filters,
    patch_positions,
    principal_components,
    relative_offsets,
    similarity,
)


@pytest.mark.parametrize("num_filters", [200, 40])  # more and fewer than the 48 numbers of a filter
def test_components__are_eigenvectors_of_the_covariance(num_filters: int) -> None:
    filters = (
        torch.randn(num_filters, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * torch.rand(1, 3, 4, 4)
        + 1
    )
    flat = filters.double().numpy().reshape(num_filters, -1)
    variances, directions = np.linalg.eigh(np.cov(flat, rowvar=False))
    found = principal_components(filters)
    assert found.images.shape == (PAPERS, 3, 4, 4) == (28, 3, 4, 4)
    np.testing.assert_allclose(found.shares.numpy(), variances[::-1][:28] / variances.sum(), atol=1e-12)
    for number, image in enumerate(found.images.numpy().reshape(28, -1)):
        expected = directions[:, -1 - number]
        assert abs(image @ expected) == pytest.approx(1, abs=1e-9)
        assert image[np.abs(image).argmax()] > 0


def test_components__are_no_more_than_there_are() -> None:
    assert principal_components(torch.randn(9, 3, 8, 8)).images.shape == (8, 3, 8, 8)
    assert principal_components(torch.randn(90, 3, 1, 1)).images.shape == (3, 3, 1, 1)
    constant = principal_components(torch.ones(5, 3, 2, 2))
    assert constant.shares.tolist() == [0, 0, 0, 0]
    assert constant.images.isfinite().all()


@pytest.mark.parametrize("name", spread(8, FAMILIES, 2))
def test_filters__see_three_colours_in_every_family(name: str) -> None:
    model = noisy_model(FAMILIES[name])
    filters, what = color_filters(model)
    assert filters.shape[1] == 3
    assert what == ("root convolution" if "resnet" in name or "hybrid" in name else "patch embedding")
    expected = "patch_embedding.weight" if what == "patch embedding" else "backbone.root.conv.weight"
    stored = model.state_dict()[expected].numpy()
    if what == "root convolution":
        stored = stored - stored.mean(axis=(1, 2, 3), keepdims=True)
        stored = stored / stored.std(axis=(1, 2, 3), keepdims=True)
    np.testing.assert_allclose(filters.numpy(), stored, rtol=1e-4)  # their epsilons differ


@pytest.mark.parametrize("name", ["vit", "2d", "every layer"])
def test_similarity__of_patches_equals_loops(name: str) -> None:
    model = noisy_model(TRANSFORMERS[name])
    tables = patch_positions(model)
    rows, columns = model.config.grid
    state = model.state_dict()
    assert tables.shape == (2 if name == "every layer" else 1, rows * columns, 24)
    for layer, found in enumerate(similarity(tables)):
        for a, b in product(range(rows * columns), repeat=2):
            if name == "2d":
                one, other = (
                    torch.cat(
                        [
                            state["position_columns"][layer, p % columns],
                            state["position_rows"][layer, p // columns],
                        ]
                    )
                    for p in (a, b)
                )
            else:
                first = model.config.prefix_tokens
                one, other = (state["position_embedding"][layer, p + first] for p in (a, b))
            cosine = sum(map(math.prod, zip(one.tolist(), other.tolist(), strict=True)))
            cosine /= math.hypot(*one.tolist()) * math.hypot(*other.tolist())
            assert float(found[a, b]) == pytest.approx(cosine, abs=1e-12)


def test_similarity__of_nothing_is_zero() -> None:
    assert similarity(torch.zeros(3, 4)).tolist() == torch.zeros(3, 3).tolist()


def test_positions__of_networks_without_tables() -> None:
    assert patch_positions(noisy_model(TRANSFORMERS["no position"])) is None
    assert patch_positions(noisy_model(TRANSFORMERS["relative"])) is None
    assert relative_offsets(noisy_model(TRANSFORMERS["vit"])) is None
    offsets = relative_offsets(noisy_model(TRANSFORMERS["relative"]))
    assert offsets is not None and offsets.shape == (2, 2 * 17 - 1, 24)


def test_by_offset__is_the_mean_over_pairs() -> None:
    rows, columns = 2, 3
    similarities = torch.arange(36, dtype=torch.float64).reshape(6, 6)
    found = by_offset(similarities, (rows, columns))
    assert found.shape == (3, 5)
    for down, right in product(range(-1, 2), range(-2, 3)):
        values = [
            float(similarities[a, b])
            for a, b in product(range(6), repeat=2)
            if (b // 3 - a // 3, b % 3 - a % 3) == (down, right)
        ]
        assert float(found[down + 1, right + 2]) == pytest.approx(sum(values) / len(values))
