"""What one forward pass shows, and two representations compared."""

import numpy as np
import pytest
import torch

from tests.analysis.conftest import FAMILIES, TRANSFORMERS, noisy_model, random_images
from tests.models import numpy_reference as reference
from vitctl.analysis.observe import Observed, cosines, missing_parts, observe, plane, separation

MISSING = {
    "resnet v1": {"position_similarity", "attention_distance", "rollout", "pooling"},
    "resnet v2": {"position_similarity", "attention_distance", "rollout", "pooling"},
    "axial resnet": {"position_similarity", "rollout", "pooling"},
    "axial": {"pooling"},
    "gap": {"pooling"},
    "2d every layer, shared": {"pooling"},
    "no position": {"position_similarity"},
    "dinov3": {"position_similarity"},
    "beit": {"position_similarity"},
    "siglip": {"pooling"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_observe__has_all_that_is_not_missing(name: str) -> None:
    config = FAMILIES[name]
    missing = missing_parts(config)
    assert set(missing) == MISSING.get(name.removesuffix(", odd image"), set())
    images = random_images(config.image_size)
    model = noisy_model(config)
    seen = observe(model, images)
    assert len(seen.mask) == len(seen.distances) == len(seen.logits) == 3
    assert (seen.distances.numel() == 0) == ("attention_distance" in missing)
    assert (seen.mask.numel() == 0) == (seen.mask_without_identity.numel() == 0) == ("rollout" in missing)
    assert (seen.class_token.numel() == 0) == (seen.patch_mean.numel() == 0) == ("pooling" in missing)
    assert seen.logits.shape == (3, config.num_classes)
    if config.num_classes:
        with torch.no_grad():
            assert torch.equal(seen.logits, model(images).float())


def test_observe__batches_join() -> None:
    model, images = noisy_model(FAMILIES["vit"]), random_images(32)
    whole, joined = (
        observe(model, images),
        Observed.joined([observe(model, images[:2]), observe(model, images[2:])]),
    )
    for name in vars(whole):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name))


def test_tokens__are_those_of_the_encoder() -> None:
    model, images = noisy_model(TRANSFORMERS["vit"]), random_images(32)
    w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    encoded = reference.encode(model.config, w, reference.embed(model.config, w, images.numpy()))[-1]
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
