"""What one forward pass shows."""

import pytest
import torch

from tests.analysis.conftest import FAMILIES, noisy_model, random_images
from tests.matrix import spread
from vitctl.analysis.observe import Observed, missing_parts, observe

MISSING = {
    "resnet v1": {"position_similarity", "attention_distance", "rollout"},
    "resnet v2": {"position_similarity", "attention_distance", "rollout"},
    "axial resnet": {"position_similarity", "attention_distance", "rollout"},
    "axial": {"attention_distance", "rollout"},
    "no position": {"position_similarity"},
    "dinov3": {"position_similarity"},
    "beit": {"position_similarity"},
}


@pytest.mark.parametrize("name", spread(8, FAMILIES, 1))
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
    for one, other in zip(joined, whole, strict=True):
        torch.testing.assert_close(one, other)
