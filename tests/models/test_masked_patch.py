"""Corruption, targets, loss and model of masked patch prediction."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.numpy_reference import masked_patch
from tests.models.tiny_models import MASKED
from vitctl.models.build import Model, build, transfer
from vitctl.models.masked_patch import (
    MASK,
    Corruption,
    MaskedPatchTransformer,
    draw_corruption,
    masked_patch_loss,
    targets,
)
from vitctl.models.variants import MaskedPatchConfig, ViTConfig

MakeModel = Callable[..., Model]
MakeImages = Callable[..., Tensor]
COLOR = MASKED["mean_color"]


def corruption_for(config: MaskedPatchConfig, batch: int, seed: int = 0) -> Corruption:
    rng = np.random.default_rng(seed)
    return Corruption(
        *map(
            torch.stack, zip(*(draw_corruption(config.grid[0] ** 2, rng) for _ in range(batch)), strict=True)
        )
    )


def test_draw_corruption__has_the_shares_of_the_paper() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_corruption(196, rng) for _ in range(200)]
    assert {int(corruption.corrupted.sum()) for corruption in drawn} == {98}
    own = torch.arange(196)
    chosen = torch.cat([c.source[c.corrupted] for c in drawn])
    stays = torch.cat([c.source[c.corrupted] == own[c.corrupted] for c in drawn])
    shares = [
        (chosen == MASK).float().mean(),
        ((chosen != MASK) & ~stays).float().mean(),
        stays.float().mean(),
    ]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.01)
    assert all(torch.equal(c.source[~c.corrupted], own[~c.corrupted]) for c in drawn)
    assert chosen.max() < 196
    # Every place and every replacement has its turn.
    assert torch.stack([c.corrupted for c in drawn]).float().mean(dim=0) == pytest.approx(0.5, abs=0.15)
    assert len(chosen[(chosen != MASK) & ~stays].unique()) == 196


def class_of(color: np.ndarray) -> int:
    red, green, blue = (min(7, int((value + 1) / 2 * 8)) for value in color)
    return red + 8 * green + 64 * blue


def test_targets__are_what_each_patch_looks_like(masked: MaskedPatchConfig, images_for: MakeImages) -> None:
    config = replace(masked, image_size=37)  # five pixels lie beyond the last patch
    images = images_for(config)
    # Means of noise are all alike: spread the patches over the colours.
    images = (images * 0.3 + F.interpolate(images[..., :5, :5], size=37) * 0.7).contiguous()
    found = targets(images, config)
    patches = [
        images[:, :, 8 * (i // 4) : 8 * (i // 4) + 8, 8 * (i % 4) : 8 * (i % 4) + 8].numpy()
        for i in range(16)
    ]
    assert found.shape == (3, 16, {"mean_color": 1, "downsized": 16, "pixels": 192}[config.target])
    for image in range(3):
        for place, patch in enumerate(patches):
            if config.target == "pixels":
                assert np.array_equal(found[image, place].numpy(), patch[image].reshape(-1))
            elif config.target == "mean_color":
                assert found[image, place].item() == class_of(patch[image].mean((1, 2)))
            else:
                cells = patch[image].reshape(3, 4, 2, 4, 2).mean((2, 4))
                expected = [class_of(cells[:, row, column]) for row in range(4) for column in range(4)]
                assert found[image, place].tolist() == expected
    if config.target != "pixels":
        assert len(found.unique()) > 20


def test_targets__ends_of_the_range_are_the_first_and_the_last_class() -> None:
    assert set(targets(torch.full((1, 3, 32, 32), -1.0), COLOR).flatten().tolist()) == {0}
    assert set(targets(torch.full((1, 3, 32, 32), 1.0), COLOR).flatten().tolist()) == {511}
    green = torch.tensor([-1.0, 1.0, -1.0]).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    assert set(targets(green, COLOR).flatten().tolist()) == {7 * 8}


def test_loss__is_the_mean_over_corrupted_patches_alone(
    masked: MaskedPatchConfig, images_for: MakeImages
) -> None:
    images = images_for(masked)
    wanted, corruption = targets(images, masked), corruption_for(masked, 3)
    generator = torch.Generator().manual_seed(1)
    predictions = torch.randn(3, 16, masked.patch_outputs, dtype=torch.float64, generator=generator)
    found = masked_patch_loss(predictions, wanted, corruption.corrupted, masked)
    assert found.shape == (3,)
    for image in range(3):
        each = []
        for place in corruption.corrupted[image].nonzero().flatten():
            of_place = predictions[image, place]
            if masked.target == "pixels":
                each.append(((of_place - wanted[image, place]) ** 2).mean())
            else:
                each.append(F.cross_entropy(of_place.reshape(-1, 512), wanted[image, place]))
        assert len(each) == 8
        assert found[image].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-12)


def test_forward__equals_an_independent_numpy_model(
    masked: MaskedPatchConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    model, images, source = random_model(masked), images_for(masked), corruption_for(masked, 3).source
    assert isinstance(model, MaskedPatchTransformer)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = masked_patch(masked, weights, images.numpy(), source.numpy())
    found = model(images, source).detach().numpy()
    assert found.shape == (3, 16, masked.patch_outputs)
    assert np.abs(found - expected).max() < 1e-10 * expected.std()
    untouched = torch.arange(16).expand(3, -1)
    assert torch.equal(model(images), model(images, untouched))


def test_backward__reaches_every_weight(
    masked: MaskedPatchConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    model, images, corruption = random_model(masked), images_for(masked), corruption_for(masked, 3)
    masked_patch_loss(
        model(images, corruption.source), targets(images, masked), corruption.corrupted, masked
    ).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert [
        name
        for name, grad in gradients.items()
        if grad is None or not grad.any() or not grad.isfinite().all()
    ] == []


def test_transfer__gives_the_body_to_a_plain_model(
    tiny: ViTConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    pretrained, model = random_model(COLOR), build(replace(tiny, image_size=56), dtype=torch.float64).eval()
    lines = transfer(model, COLOR, pretrained.state_dict())
    assert lines[1:] == [
        "position embedding 4x4 -> 7x7 (bilinear, corners aligned)",
        "head and mask embedding dropped, new zero head with 5 classes",
    ]
    same_size = build(tiny, dtype=torch.float64).eval()
    transfer(same_size, COLOR, pretrained.state_dict())
    images = images_for(tiny)
    expected = pretrained.encode(pretrained.embed(images))[:, 0]
    assert (same_size.features(images) - expected).abs().max() < 1e-12 * expected.abs().max()
