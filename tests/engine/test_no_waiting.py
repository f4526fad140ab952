"""In a training step nothing waits for the GPU, shown on a fake card: see `tests.fake_card`."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.conftest import batch
from tests.fake_card import CARD, FakeCard, card_runtime
from tests.matrix import few, slow
from vitctl.data.loader.batches import Batch
from vitctl.data.source.order import Lanes
from vitctl.engine import lanes as engine
from vitctl.engine.lanes import ByLanes, LaneSum
from vitctl.engine.losses import classify, classify_mixed, predict_masked_patches
from vitctl.engine.mixing import Mixing
from vitctl.engine.optimizer import Average, build_optimizer
from vitctl.engine.update import AllReduced, TrainStep
from vitctl.models.build import Model, build
from vitctl.models.kernels import Narrowed
from vitctl.models.variants import Config, MaskedPatchConfig, variant
from vitctl.recipe.sections import Optimizer

SIZE, CLASSES = 32, 5
TINY: dict[str, dict[str, Any]] = {"hidden_size": 24, "depth": 2, "mlp_size": 48, "num_heads": 3}
LOSS = {"name": "softmax", "label_smoothing": 0.1}


def config(name: str, **changes: Any) -> Config:
    return variant(name, **{"image_size": SIZE, "num_classes": CLASSES, **changes})


FAMILIES = {
    "vit": config("Ti/16", **TINY, dropout=0.1, drop_path=0.1),
    "hybrid": config("R+Ti/16", **TINY),
    "resnet": config("R50x1", stage_depths=(1, 1)),
    "axial": config("Axial-B/16", **TINY),
}
CASES = {
    "plain": {},
    "clipped": {"clip_norm": 1.0},
    "averaged": {"decay": 0.9},
    "debiased": {"decay": 0.9, "debias": True},
    "sgd": {"optimizer": "sgd", "clip_norm": 1.0},
    "lamb": {"optimizer": "lamb", "clip_norm": 1.0, "decay": 0.9, "holding": True},
    "lanes": {"lanes": True, "clip_norm": 1.0},
    "sigmoid": {"loss": {"name": "sigmoid", "label_smoothing": 0.1, "smoothing": "per_class"}},
    "mixed": {"mixing": Mixing(mixup_alpha=0.2, cutmix_alpha=1.0)},
}


def objective(card_config: Config, loss: dict[str, Any], mixing: Mixing | None) -> Callable[..., Tensor]:
    normalise = card_runtime().normaliser((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    if isinstance(card_config, MaskedPatchConfig):
        return partial(predict_masked_patches, normalise=normalise, config=card_config, rate=0.5, seed=0)
    if mixing is not None:
        return partial(classify_mixed, normalise=normalise, mixing=mixing, seed=0, **loss)
    return partial(classify, normalise=normalise, **loss)


def on_card(card: FakeCard, model: Model, **case: Any) -> TrainStep:
    """What a training does, with its network on the card."""
    model = card.put(model)
    runtime, decay = card_runtime(), case.get("decay", 0.0)
    gradients: Any = AllReduced(runtime, model, 0)
    if case.get("lanes"):
        gradients = ByLanes(runtime, model, 0, LaneSum(Lanes(8, 2, 4), 0, 1))
    kind = case.get("optimizer", "adam")
    return TrainStep(
        runtime=runtime,
        model=model,
        network=model,
        optimizer=build_optimizer(model, Optimizer(name=kind, lr=1.0, weight_decay=0.1)),
        average=Average(model, decay, debias=case.get("debias", False)) if decay else None,
        objective=objective(model.config, case.get("loss", LOSS), case.get("mixing")),
        gradients=gradients,
        lr=lambda step: 0.1 / (step + 1),
        batch_size=8,
        clip_norm=case.get("clip_norm", 0.0),
        holding=Narrowed(model) if case.get("holding") else nullcontext,
    )


def micro_batches() -> list[Batch]:
    """Two of 4 images, the second with one that cannot be read."""
    found = []
    for number in range(2):
        one = replace(batch(4, seed=number), images=torch.zeros(4, 3, SIZE, SIZE, dtype=torch.uint8))
        found.append(
            replace(
                one,
                neighbour=replace(one, images=one.images[:1], labels=one.labels[:1], weights=one.weights[:1]),
            )
        )
    found[1].weights[2] = 0
    return found


def steps(trainer: TrainStep, card: FakeCard, number: int) -> None:
    """Some steps, in which nothing may wait."""
    with card.watched():
        for step in range(number):
            update = trainer.update(step, micro_batches())
    assert {p.device for p in trainer.network.parameters()} == {CARD}
    assert len(update.parameters) == len(list(trainer.network.parameters()))  # each had a gradient


@pytest.mark.parametrize("name", few([*FAMILIES]))
def test_update__of_every_family_waits_for_nothing(name: str) -> None:
    model = build(FAMILIES[name])
    with FakeCard() as card:
        trainer = on_card(card, model)
        steps(trainer, card, 2)
        assert {p.device for p in model.parameters()} == {CARD}


@pytest.mark.slow
@pytest.mark.parametrize("target", [*slow("mean_color", "downsized"), "pixels"])
def test_update__of_masked_patches_waits_for_nothing(target: str) -> None:
    plain = config("Ti/16", **TINY, num_classes=0)
    model = build(MaskedPatchConfig(**vars(plain), target=target))  # type: ignore[arg-type]
    with FakeCard() as card:
        steps(on_card(card, model), card, 2)


@pytest.mark.parametrize("case", few([*CASES], "plain"))
def test_update__waits_for_nothing(case: str) -> None:
    model = build(FAMILIES["vit"])
    with FakeCard() as card:
        steps(on_card(card, model, **CASES[case]), card, 2)


@pytest.mark.slow
def test_lanes__of_several_processes_exchange_sums_beside_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(FAMILIES["vit"])

    def swap(*_: Any, **__: Any) -> None:
        card.events.append(f"{card.stream.name} exchanges")

    monkeypatch.setattr(engine.dist, "all_to_all_single", swap)
    monkeypatch.setattr(engine, "_gather", swap)
    monkeypatch.setattr(engine.LaneSum, "table", lambda _, rows: rows)
    monkeypatch.setattr(engine, "BUCKET_BYTES", 2**12)
    with FakeCard() as card:
        trainer = on_card(card, model)
        total = LaneSum(Lanes(16, 4, 4), 0, 2, None, torch.cuda.Stream())
        trainer.gradients = ByLanes(trainer.runtime, model, 0, total)
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: card.events.append("last gradient"))
        steps(trainer, card, 1)
    told = ("side waits for all", "compute waits for all", "side exchanges", "last gradient")
    taken = [event for event in card.events if event.startswith(told)]
    a_bucket = ["side waits for all of compute", "side exchanges", "side exchanges"]
    first_leaf, last_leaf = [place for place, event in enumerate(taken) if event == "last gradient"]
    assert first_leaf == 0 and taken[1:last_leaf] == (last_leaf // 3) * a_bucket != []
    assert taken[-4:] == [*a_bucket, "compute waits for all of side"]


def test_result__waits_for_an_event_of_its_own_and_for_no_later_step() -> None:
    model: nn.Module = build(FAMILIES["vit"])
    with FakeCard() as card:
        trainer = on_card(card, model)  # type: ignore[arg-type]
        card.waits.clear()
        with card.watched():
            first = trainer.update(0, micro_batches())
            recorded = card.events[-1].removeprefix("compute records ")
            trainer.update(1, micro_batches())
        assert card.waits == []
        first.result()
    assert card.waits == [f"{recorded}.synchronize()"]
