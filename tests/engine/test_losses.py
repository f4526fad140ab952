"""Losses against their definitions in NumPy, float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tests.engine.conftest import batch, rows
from tests.fake_card import FakeCard, card_runtime
from tests.matrix import each, slow
from tests.models.tiny_models import MASKED, TINY
from vitctl.data.images.transforms import augmentation_rng
from vitctl.data.loader.batches import Batch
from vitctl.engine import losses
from vitctl.engine.losses import (
    classification_loss,
    classify,
    classify_mixed,
    multi_hot,
    predict_masked_patches,
)
from vitctl.engine.mixing import Mixing
from vitctl.errors import DataError
from vitctl.models.build import build
from vitctl.models.masked_patch import Corruption, draw_corruption
from vitctl.models.variants import Config, MaskedPatchConfig

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(7, 5)) * 4
LABELS = RNG.integers(0, 5, 7)
WEIGHTS = np.array([1, 1, 0, 1, 0, 1, 1], np.float32)


def reference(name: str, smoothing: float, weights: NDArray[np.float32]) -> float:
    targets = np.eye(5)[LABELS] * (1 - smoothing) + smoothing / 5
    if name == "sigmoid":
        p = 1 / (1 + np.exp(-LOGITS))
        each = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(axis=1)
    else:
        p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
        each = -(targets * np.log(p)).sum(axis=1)
    return float((each * weights).sum())


def ours(
    name: str, smoothing: float, weights: NDArray[np.float32], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    loss = partial(classification_loss, name=name, label_smoothing=smoothing)
    return loss(torch.tensor(LOGITS, dtype=dtype), torch.tensor(LABELS), torch.tensor(weights))


@each("name", ["sigmoid", "softmax"])
@each("smoothing", [0.0, 1e-4, 0.3])
@each("weights", [WEIGHTS, np.ones(7, np.float32)])
def test_loss__equals_its_definition(name: str, smoothing: float, weights: NDArray[np.float32]) -> None:
    got = ours(name, smoothing, weights)
    assert got.dtype == torch.float64
    assert float(got) == pytest.approx(reference(name, smoothing, weights), rel=1e-12)


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
def test_loss__weight_0_is_not_there_at_all(name: str) -> None:
    loss = partial(classification_loss, name=name, label_smoothing=0.1)
    logits, labels = torch.tensor(LOGITS), torch.tensor(LABELS)
    kept = torch.tensor(WEIGHTS) > 0
    without = loss(logits[kept], labels[kept], torch.ones(int(kept.sum())))
    assert float(loss(logits, labels, torch.tensor(WEIGHTS))) == pytest.approx(float(without), rel=1e-14)
    logits.requires_grad_()
    loss(logits, labels, torch.tensor(WEIGHTS)).backward()
    assert logits.grad is not None
    assert logits.grad[~kept].abs().max() == 0
    assert logits.grad[kept].abs().min() > 0


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
def test_loss__is_computed_in_float32_whatever_the_logits(name: str) -> None:
    got = ours(name, 0.0, WEIGHTS, torch.bfloat16)
    assert got.dtype == torch.float32
    rounded = torch.tensor(LOGITS, dtype=torch.bfloat16).float()
    exact = classification_loss(
        rounded, torch.tensor(LABELS), torch.tensor(WEIGHTS), name=name, label_smoothing=0.0
    )
    assert torch.equal(got, exact)


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
def test_loss__large_logits_stay_finite(name: str) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = classification_loss(logits, torch.tensor([1]), torch.ones(1), name=name, label_smoothing=0.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


SEVERAL = [(0,), (4, 1), (), (2, 3, 0), (1,), (3, 4), (2,)]
PADDED = torch.tensor([[*labels, *[-1] * (3 - len(labels))] for labels in SEVERAL])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss__several_labels_are_each_a_one(smoothing: float) -> None:
    targets = np.array([[float(k in labels) for k in range(5)] for labels in SEVERAL])
    assert multi_hot(PADDED, 5).tolist() == targets.tolist()
    targets = targets * (1 - smoothing) + smoothing / 5
    p = 1 / (1 + np.exp(-LOGITS))
    each = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(axis=1)
    got = classification_loss(
        torch.tensor(LOGITS), PADDED, torch.tensor(WEIGHTS), name="sigmoid", label_smoothing=smoothing
    )
    assert float(got) == pytest.approx(float((each * WEIGHTS).sum()), rel=1e-12)


@pytest.mark.parametrize("labels", ["one", "several"])
@pytest.mark.parametrize("smoothing", [0.0, 1e-4, 0.3])
def test_loss__smoothed_per_class_has_the_targets_of_the_authors_configurations(
    labels: str, smoothing: float
) -> None:
    """On is 1 - s and off is s, whatever the number of classes (uncertainty-baselines,
    imagenet21k_vit_base16).
    """
    there = np.array(
        [[k in own for k in range(5)] for own in (SEVERAL if labels == "several" else LABELS[:, None])]
    )
    targets = np.where(there, 1 - smoothing, smoothing)
    p = 1 / (1 + np.exp(-LOGITS))
    each = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(axis=1)
    got = classification_loss(
        torch.tensor(LOGITS),
        PADDED if labels == "several" else torch.tensor(LABELS),
        torch.tensor(WEIGHTS),
        name="sigmoid",
        label_smoothing=smoothing,
        smoothing="per_class",
    )
    assert float(got) == pytest.approx(float((each * WEIGHTS).sum()), rel=1e-12)


def test_loss__softmax_refuses_several_labels() -> None:
    with pytest.raises(
        DataError, match="loss 'softmax' needs one label per image and these may have several"
    ):
        classification_loss(torch.tensor(LOGITS), PADDED, torch.ones(7), name="softmax", label_smoothing=0.0)


def test_masked_patches__are_not_drawn_from_the_stream_of_an_images_augmentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps and epochs are small numbers: the same words for both would tie what is hidden to the crop."""
    streams = []

    def drawn(num_patches: int, rng: np.random.Generator, rate: float) -> Corruption:
        streams.append(str(rng.bit_generator.state))
        return draw_corruption(num_patches, rng, rate)

    monkeypatch.setattr(losses, "draw_corruption", drawn)
    config = MaskedPatchConfig(patch_size=2, hidden_size=8, depth=1, mlp_size=8, num_heads=2, image_size=4)
    model, images = build(config, dtype=torch.float64), batch(6)
    loss = partial(
        predict_masked_patches, normalise=lambda i: i.double() / 127.5 - 1, config=config, rate=0.5, seed=5
    )
    found = [loss(model, images, step).item() for step in range(4)]
    of_images = {
        str(augmentation_rng(5, epoch, sample).bit_generator.state)
        for epoch in range(4)
        for sample in range(6)
    }
    assert len({*streams}) == 24
    assert not {*streams} & of_images
    # A function of seed, step and sample: the same for any split of the batch.
    again = [
        loss(model, batch_of, 2).item() for batch_of in (rows(images, slice(0, 1)), rows(images, slice(1, 6)))
    ]
    assert sum(again) == pytest.approx(found[2], rel=1e-12)


FAMILIES = (
    "vit",
    "gap",
    "2d every layer",
    "relative",
    "hybrid",
    "axial",
    "resnet v1",
    "resnet v2, odd image",
    "axial resnet",
)
CLASSIFY = {"name": "softmax", "label_smoothing": 0.1}
ON_A_GPU: dict[str, tuple[Config, Callable[..., Any]]] = {
    **{name: (TINY[name], partial(classify, **CLASSIFY)) for name in FAMILIES},
    **{
        f"masked, {name}": (config, partial(predict_masked_patches, config=config, rate=0.5, seed=0))
        for name, config in MASKED.items()
    },
    "dropout": (
        replace(TINY["vit"], dropout=0.1, drop_path=0.1),
        partial(classify, name="sigmoid", label_smoothing=0.0),
    ),
    "mixup": (TINY["vit"], partial(classify_mixed, **CLASSIFY, mixing=Mixing(mixup_alpha=0.2), seed=0)),
    "cutmix": (
        TINY["resnet v1"],
        partial(classify_mixed, **CLASSIFY, mixing=Mixing(cutmix_alpha=1.0), seed=0),
    ),
}


def images_of(size: int, image_size: int) -> Batch:
    images = torch.zeros(size, image_size, image_size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    return Batch(images, torch.zeros(size, dtype=torch.int64), torch.ones(size), torch.arange(size))


QUICK = ("mixup", "masked, pixels")


@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [
        *((name, False) for name in QUICK),
        *slow(("dropout", True)),
        *slow(*((name, False) for name in ON_A_GPU if name not in QUICK), ("resnet v1", True)),
    ],
)
def test_objectives__never_make_the_host_wait_for_the_device(name: str, checkpointed: bool) -> None:
    config, objective = ON_A_GPU[name]
    model = build(config)
    model.checkpoint_blocks = checkpointed
    whole = replace(images_of(4, config.image_size), neighbour=images_of(1, config.image_size))
    with FakeCard() as card:
        card.put(model)
        runtime = card_runtime()
        normalise = runtime.normaliser((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        with card.watched(), runtime.transfer.ahead([whole, whole]) as coming:
            for step, one in enumerate(coming):
                loss = objective(model, one, step, normalise=normalise)
                assert (loss.device.type, loss.shape) == ("cuda", ())
                loss.backward()
        assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cuda"}


CLASS_WEIGHTS = np.array([0.5, 2.0, 1.0, 0.1, 3.0])


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights__weigh_each_image_by_its_label(name: str, smoothing: float) -> None:
    got = classification_loss(
        torch.tensor(LOGITS),
        torch.tensor(LABELS),
        torch.tensor(WEIGHTS),
        name=name,
        label_smoothing=smoothing,
        class_weights=torch.tensor(CLASS_WEIGHTS),
    )
    expected = sum(
        reference(name, smoothing, np.eye(7, dtype=np.float32)[image] * WEIGHTS[image]) * CLASS_WEIGHTS[label]
        for image, label in enumerate(LABELS)
    )
    assert float(got) == pytest.approx(expected, rel=1e-12)
    if name == "softmax" and not smoothing:
        torchs = F.cross_entropy(
            torch.tensor(LOGITS), torch.tensor(LABELS), torch.tensor(CLASS_WEIGHTS), reduction="none"
        )
        assert float(got) == pytest.approx(float((torchs * torch.tensor(WEIGHTS)).sum()), rel=1e-12)
