"""Blended batches against torchvision's MixUp and CutMix, and against any split of the batch."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data import mixup
from timm.data.mixup import Mixup
from torch import Tensor
from torchvision.transforms import v2

from tests.engine.conftest import NUM_CLASSES, Tiny, batch, rows
from vitctl.data.loader.batches import Batch
from vitctl.engine import mixing as mixing_module
from vitctl.engine.losses import classification, classify, classify_mixed
from vitctl.engine.mixing import Blend, Mixing, blended, draw_blend
from vitctl.recipe.sections import Loss

SIZE, SEED = 8, 3
BOTH = Mixing(mixup_alpha=0.4, cutmix_alpha=0.7)


def normalise(images: Tensor) -> Tensor:
    return images.double() / 127.5 - 1


def with_neighbour(whole: Batch, chosen: slice) -> Batch:
    part, before = rows(whole, chosen), (chosen.start - 1) % len(whole)
    return Batch(
        part.images, part.labels, part.weights, part.samples, neighbour=rows(whole, slice(before, before + 1))
    )


def loss(
    whole: Batch,
    step: int,
    mixing: Mixing,
    name: str = "softmax",
    micro_batch: int = 100,
    smoothing: str = "spread",
) -> Tensor:
    parts = [
        with_neighbour(whole, slice(at, min(at + micro_batch, len(whole))))
        for at in range(0, len(whole), micro_batch)
    ]
    objective = partial(
        classify_mixed, normalise=normalise, name=name, label_smoothing=0.1, mixing=mixing, seed=SEED
    )
    objective = partial(objective, smoothing=smoothing)
    model = Tiny()
    return torch.stack([objective(model, part, step) for part in parts]).sum().detach()


def torchvisions(whole: Batch, blend: Blend, image_size: int) -> tuple[Tensor, Tensor]:
    """Images and soft targets of torchvision for the same share and box."""
    transform: Any = (v2.MixUp if blend.box is None else v2.CutMix)(num_classes=NUM_CLASSES)
    drawn: dict[str, Any] = {"labels": whole.labels, "batch_size": len(whole), "lam": blend.own}
    if blend.box is not None:
        top, left, bottom, right = blend.box
        drawn |= {"box": (left, top, right, bottom), "lam_adjusted": blend.own}
    assert whole.images.shape[-1] == image_size
    transform.make_params = lambda _inputs: drawn
    images, targets = transform(normalise(whole.images), whole.labels)
    return images, targets


@pytest.mark.parametrize("mixing", [Mixing(mixup_alpha=0.5), Mixing(cutmix_alpha=1.0)])
@pytest.mark.parametrize(
    ("name", "smoothing"), [("sigmoid", "spread"), ("sigmoid", "per_class"), ("softmax", "spread")]
)
def test_classify_mixed__is_torchvisions(mixing: Mixing, name: str, smoothing: str) -> None:
    whole = batch(SIZE)
    for step in range(10):
        blend = draw_blend(mixing, seed=SEED, step=step, image_size=4)
        images, targets = torchvisions(whole, blend, 4)
        usable = torch.ones(SIZE, dtype=torch.bool)
        pixels = normalise(whole.images)
        assert torch.equal(blended(pixels, pixels.roll(1, 0), usable, blend), images)
        if smoothing == "spread":
            targets = targets.double() * 0.9 + 0.1 / NUM_CLASSES
        else:
            targets = targets.double() * 0.9 + (1 - targets.double()) * 0.1
        logits = Tiny()(images).detach()
        if name == "softmax":
            expected = F.cross_entropy(logits, targets, reduction="sum")
        else:
            expected = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        found = float(loss(whole, step, mixing, name, smoothing=smoothing))
        assert found == pytest.approx(float(expected), rel=1e-6)  # torchvision's targets are float32


@pytest.mark.parametrize("mixing", [Mixing(mixup_alpha=0.5), Mixing(cutmix_alpha=1.0), BOTH])
def test_classify_mixed__does_not_depend_on_micro_batches(mixing: Mixing) -> None:
    whole = batch(SIZE)
    whole.weights[2] = 0
    for step in range(5):
        expected = float(loss(whole, step, mixing))
        for micro_batch in (1, 3, 7):
            assert float(loss(whole, step, mixing, micro_batch=micro_batch)) == pytest.approx(
                expected, rel=1e-13
            )


def test_classify_mixed__a_bad_partner_leaves_an_image_as_it_is_and_a_bad_image_weighs_nothing() -> None:
    whole = batch(3)
    whole.weights[1] = 0
    plain = partial(classify, normalise=normalise, name="softmax", label_smoothing=0.1)
    for step in range(5):
        part = with_neighbour(whole, slice(1, 3))  # the bad one, and the one whose partner it is
        found = classify_mixed(
            Tiny(),
            part,
            step,
            normalise=normalise,
            name="softmax",
            label_smoothing=0.1,
            mixing=BOTH,
            seed=SEED,
        )
        expected = plain(Tiny(), rows(whole, slice(2, 3)), step)
        assert found.item() == pytest.approx(expected.item(), rel=1e-14)


def test_draw_blend__follows_from_seed_and_step_alone() -> None:
    drawn = [draw_blend(BOTH, seed=SEED, step=step, image_size=32) for step in range(400)]
    torch.manual_seed(5)
    assert [draw_blend(BOTH, seed=SEED, step=step, image_size=32) for step in range(400)] == drawn
    assert len(set(drawn)) > 390
    assert drawn != [draw_blend(BOTH, seed=SEED + 1, step=step, image_size=32) for step in range(400)]
    assert 150 < sum(blend.box is None for blend in drawn) < 250
    assert not Mixing().is_on


@pytest.mark.parametrize(("probability", "share"), [(0.6, 0.5), (1.0, 0.3), (0.4, 0.8)])
def test_draw_blend__probability_and_share_are_timms_for_the_same_draws(
    probability: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixing = replace(BOTH, probability=probability, cutmix_share=share, until=150)
    theirs = Mixup(0.4, 0.7, prob=probability, switch_prob=share)
    found = {"": 0, "mixup": 0, "cutmix": 0}
    for step in range(160):
        rng = np.random.default_rng((SEED, step, 0, mixing_module._MIXING_STREAM))
        own = SimpleNamespace(beta=rng.beta)
        own.rand = lambda draws=iter([1e-9] if probability == 1 else []), rng=rng: (
            next(draws, None) or rng.random()
        )
        monkeypatch.setattr(mixup, "np", SimpleNamespace(random=own))
        theirs.mixup_enabled = step < 150
        lam, cut = theirs._params_per_batch()
        blend = draw_blend(mixing, seed=SEED, step=step, image_size=32)
        assert (blend.box is not None) == cut and (cut or blend.own == lam)
        found["cutmix" if cut else "mixup" if lam < 1 else ""] += 1
    assert min(found["mixup"], found["cutmix"]) > 3 and (found[""] == 10) == (probability == 1)
    assert loss(batch(SIZE), 200, mixing) == pytest.approx(loss(batch(SIZE), 0, replace(BOTH, until=0)))


def test_draw_blend__mixups_share_is_beta_distributed() -> None:
    from scipy.stats import beta, kstest

    shares = [
        draw_blend(Mixing(mixup_alpha=0.3), seed=0, step=step, image_size=32).own for step in range(2000)
    ]
    assert kstest(shares, beta(0.3, 0.3).cdf).pvalue > 1e-3
    assert kstest(shares, beta(0.5, 0.5).cdf).pvalue < 1e-6  # the test can tell


def test_draw_blend__cutmixs_box_is_its_share_and_stays_inside() -> None:
    sizes = []
    for step in range(500):
        blend = draw_blend(Mixing(cutmix_alpha=1.0), seed=0, step=step, image_size=32)
        assert blend.box is not None
        top, left, bottom, right = blend.box
        assert 0 <= top <= bottom <= 32 and 0 <= left <= right <= 32
        assert blend.own == 1 - np.prod([bottom - top, right - left]) / 32**2
        sizes.append(bottom - top)
    assert min(sizes) < 4 and max(sizes) > 24


@pytest.mark.parametrize("mixing", [Mixing(mixup_alpha=0.5), Mixing(cutmix_alpha=1.0)])
def test_classify_mixed__class_weights_are_torchs_of_soft_targets(mixing: Mixing) -> None:
    whole = with_neighbour(batch(SIZE), slice(0, SIZE))
    class_weights = torch.arange(1, NUM_CLASSES + 1, dtype=torch.float64) / 2
    for step in range(4):
        blend = draw_blend(mixing, seed=SEED, step=step, image_size=4)
        images, targets = torchvisions(batch(SIZE), blend, 4)
        logits = Tiny()(images).detach()
        expected = F.cross_entropy(logits, targets.to(logits.dtype), class_weights, reduction="sum")
        objective = classification(Loss(name="softmax"), mixing, SEED, class_weights)
        found = float(objective(Tiny(), whole, step, normalise=normalise).detach())
        assert found == pytest.approx(float(expected), rel=1e-6)  # torchvision's targets are float32
