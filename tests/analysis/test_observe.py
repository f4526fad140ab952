"""Which parts a network has, and that what it has is there."""

import pytest
import torch

from tests.analysis.conftest import FAMILIES, noisy_model, random_images
from vitctl.analysis.observe import PARTS, Observed, missing_parts, observe

NO_TOKEN = "the network has no class token: its classifier averages the patches"
REASONS = {
    "resnet v1": {
        "position_similarity": "a ResNet has no position embedding",
        "attention_distance": "a ResNet has no attention",
        "rollout": "a ResNet has no attention",
        "pooling": "a ResNet has no class token: the map is averaged",
    },
    "axial resnet": {
        "position_similarity": "its positions are offsets within rows and columns, inside each attention; "
        "none belongs to a patch",
        "rollout": "its attentions lie between convolutions that change the map, so that no token keeps "
        "its place",
        "pooling": "it has no class token: the map is averaged",
    },
    "axial": {"pooling": NO_TOKEN},
    "gap": {"pooling": NO_TOKEN},
    "no position": {"position_similarity": "the network was built without position embedding"},
    "vit": {},
    "hybrid": {},
    "relative": {},
    "masked patch": {},
}


@pytest.mark.parametrize("name", REASONS)
def test_missing__says_why_in_one_line(name: str) -> None:
    assert missing_parts(FAMILIES[name]) == REASONS[name]
    assert set(REASONS[name]) <= set(PARTS)
    assert not any("\n" in reason for reason in REASONS[name].values())


@pytest.mark.parametrize("name", FAMILIES)
def test_observe__has_all_that_is_not_missing(name: str) -> None:
    config = FAMILIES[name]
    missing = missing_parts(config)
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
