"""Random Erasing against timm's, and against any split of the batch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm.data.random_erasing as timms
import torch

from tests.engine.conftest import Tiny, batch, rows
from tests.engine.test_mixing import BOTH, normalise
from tests.fake_card import CARD, FakeCard
from vitctl.data.loader.batches import Batch
from vitctl.engine.losses import classification
from vitctl.engine.mixing import _ERASING_STREAM, Mixing, erased
from vitctl.recipe.sections import FinetuneLoss

SEED, PROBABILITY = 5, 0.6


@pytest.mark.parametrize(
    ("size", "mode", "count"), [(16, "pixel", 1), (33, "pixel", 3), (33, "rand", 2), (33, "const", 1)]
)
def test_erased__is_timms_with_the_same_draws(
    size: int, mode: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rectangle and fill: timm's own code, its random numbers taken from the generator of each image."""
    images = torch.rand(40, 3, size, size)
    positions = torch.arange(1000, 1040)
    theirs, changed = images.clone(), 0
    for image, position in zip(theirs, positions.tolist(), strict=True):
        rng = np.random.default_rng((SEED, position, 0, _ERASING_STREAM))
        chance = SimpleNamespace(
            random=rng.random,
            uniform=rng.uniform,
            randint=lambda low, high, rng=rng: rng.integers(low, high + 1),
        )
        monkeypatch.setattr(timms, "random", chance)

        def fill(pixel: bool, colour: bool, shape: Any, rng: Any = rng, **_: Any) -> torch.Tensor:
            shape = shape if pixel else (3, 1, 1)
            drawn = rng.standard_normal(shape, dtype=np.float32) if pixel or colour else np.zeros(shape)
            return torch.from_numpy(drawn)

        monkeypatch.setattr(timms, "_get_pixels", fill)
        timms.RandomErasing(PROBABILITY, max_area=1 / 3, mode=mode, max_count=count, device="cpu")(image)
    ours = erased(images.clone(), positions, probability=PROBABILITY, seed=SEED, mode=mode, count=count)
    assert torch.equal(ours, theirs)
    changed = int((ours != images).any(dim=(1, 2, 3)).sum())
    assert 15 <= changed <= 33


def loss(whole: Batch, micro_batch: int, mixing: Mixing) -> float:
    objective = classification(FinetuneLoss(name="softmax"), mixing, SEED)
    parts = [slice(at, min(at + micro_batch, len(whole))) for at in range(0, len(whole), micro_batch)]

    def part(chosen: slice) -> Batch:
        return replace(rows(whole, chosen), positions=whole.samples[chosen] + 70)

    before = [part(slice(at, at + 1)) for at in ((chosen.start - 1) % len(whole) for chosen in parts)]
    batches = [replace(part(chosen), neighbour=one) for chosen, one in zip(parts, before, strict=True)]
    model = Tiny()
    return sum(float(objective(model, one, 3, normalise=normalise).detach()) for one in batches)


@pytest.mark.parametrize("mixing", [Mixing(), BOTH])
def test_classify_erased__does_not_depend_on_micro_batches(mixing: Mixing) -> None:
    """Also not the partner that MixUp takes from the micro-batch before."""
    whole, mixing = batch(9), replace(mixing, random_erasing=PROBABILITY)
    expected = loss(whole, 9, mixing)
    assert expected != loss(whole, 9, replace(mixing, random_erasing=0.0))
    for micro_batch in (1, 2, 4):
        assert loss(whole, micro_batch, mixing) == pytest.approx(expected, rel=1e-13)


def test_erased__sends_all_fills_of_a_batch_at_once() -> None:
    with FakeCard() as card:
        images = torch.zeros(40, 3, 16, 16, device=CARD)
        with card.watched():
            erased(images, torch.arange(40), probability=PROBABILITY, seed=SEED, count=3)
        assert sum("to the card" in event for event in card.events) == 1
