"""Class token against mean of the patches: cosines, nearest class means, and a plane."""

import numpy as np
import pytest
import torch

from tests.analysis.conftest import TRANSFORMERS, noisy_model, random_images
from tests.models import numpy_reference as reference
from vitctl.analysis.observe import observe
from vitctl.analysis.pooling import cosines, plane, separation


def test_tokens__are_those_of_the_encoder() -> None:
    model, images = noisy_model(TRANSFORMERS["vit"]), random_images(32)
    w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    encoded = reference.encode(model.config, w, reference.embed(model.config, w, images.numpy()))  # type: ignore[arg-type]
    seen = observe(model, images)
    np.testing.assert_allclose(seen.class_token.numpy(), encoded[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen.patch_mean.numpy(), encoded[:, 1:].mean(axis=1), rtol=1e-5, atol=1e-6)
    found = cosines(torch.from_numpy(encoded[:, 0]), torch.from_numpy(encoded[:, 1:].mean(axis=1)))
    for one, token, mean in zip(found.tolist(), encoded[:, 0], encoded[:, 1:].mean(axis=1), strict=True):
        assert one == pytest.approx(token @ mean / np.linalg.norm(token) / np.linalg.norm(mean))


def test_separation__equals_loops() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 4, 60)
    labels[labels == 3] = np.where(np.arange((labels == 3).sum()) == 0, 3, 2)  # class 3 has one image
    features = rng.standard_normal((60, 5)) + labels[:, None]
    correct = total = 0
    for image in np.flatnonzero((labels >= 0) & (labels != 3)):
        distances = {}
        for label in range(4):
            members = [i for i in np.flatnonzero(labels == label) if i != image]
            distances[label] = np.linalg.norm(features[image] - features[members].mean(axis=0))
        correct, total = correct + (min(distances, key=distances.__getitem__) == labels[image]), total + 1
    found = separation(torch.from_numpy(features), torch.from_numpy(labels))
    assert (found.correct, found.total) == (correct, total)
    assert 0 < correct < total < 60


@pytest.mark.parametrize("labels", [[-1, -1, -1], [0, 1, 2], [1, 1, 1]])
def test_separation__needs_two_classes_and_two_images_of_one(labels: list[int]) -> None:
    assert separation(torch.eye(3), torch.tensor(labels)) == (0, 0)


def test_plane__keeps_the_distances_of_points_in_a_plane() -> None:
    points = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = points @ torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0][:2] + 3
    found = plane(turned)
    torch.testing.assert_close(torch.cdist(found, found), torch.cdist(points, points))
    assert plane(torch.randn(1, 4)).tolist() == [[0, 0]]
