"""Principal components against the eigenvectors of the covariance, in NumPy."""

import numpy as np
import pytest
import torch

from tests.analysis.conftest import FAMILIES, noisy_model
from vitctl.analysis.filters import PAPERS, color_filters, principal_components
from vitctl.models.build import build
from vitctl.models.variants import variant


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


@pytest.mark.parametrize("name", FAMILIES)
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


def test_filters__of_the_paper_l32() -> None:
    """Figure 7 left: 28 components of 1,024 filters of 32 pixels."""
    with torch.device("meta"):
        model = build(variant("L/32"), device="meta")
    filters, _ = color_filters(model)
    assert filters.shape == (1024, 3, 32, 32)
