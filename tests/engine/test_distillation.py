"""Distillation: its losses in NumPy, what the teacher sees, and that it stays as it is."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.fake_card import FakeCard, card_runtime
from tests.matrix import slow
from tests.models.tiny_models import TINY, VIT
from vitctl.data.loader.batches import Batch
from vitctl.engine.distillation import Colours, Distilled, Teacher, distillation_loss
from vitctl.engine.losses import classification
from vitctl.engine.mixing import Mixing
from vitctl.engine.runtime import Computation
from vitctl.models.build import Model, build
from vitctl.recipe.sections import Distillation, Loss

HALF: Colours = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
ITS: Colours = ((0.3, 0.4, 0.6), (0.2, 0.25, 0.3))
CPU = Computation(torch.device("cpu"), "float64")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
LABELS = np.array([0, 3, 1, 4])
WEIGHTS = np.array([1.0, 1.0, 0.0, 1.0])
SOFTMAX = Loss(name="softmax")


def network(seed: int, name: str = "vit", **changes: Any) -> Model:
    """A network in float64 with a head that is not zero."""
    model = build(replace(TINY[name], **changes), seed=seed, dtype=torch.float64)
    assert model.head is not None
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
    return model


def batch() -> Batch:
    """Four images with their neighbour; the third cannot be used."""
    images, labels, weights = map(torch.from_numpy, (PIXELS, LABELS, WEIGHTS))
    one = Batch(images, labels, weights, torch.arange(4), positions=torch.arange(4))
    return replace(
        one,
        neighbour=Batch(
            images[-1:], labels[-1:], weights[-1:], torch.tensor([3]), positions=torch.tensor([3])
        ),
    )


def distilled(
    student: Model, teacher: Model, its: Colours = ITS, mixing: Mixing = Mixing(), **asked: Any
) -> Distilled:
    objective = partial(classification(SOFTMAX, mixing, 3), normalise=CPU.normaliser(*HALF))
    section = Distillation(teacher="some", **asked)
    return Distilled(objective, section, Teacher(teacher, its, ""), student, HALF, CPU)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return found


def soft(own: np.ndarray, wanted: np.ndarray, temperature: float) -> np.ndarray:
    p, q = softmax(wanted / temperature), softmax(own / temperature)
    found: np.ndarray = temperature**2 * (p * np.log(p / q)).sum(axis=1)
    return found


def hard(own: np.ndarray, wanted: np.ndarray, _: float) -> np.ndarray:
    found: np.ndarray = -np.log(softmax(own)[np.arange(len(own)), wanted.argmax(axis=1)])
    return found


def features(own: np.ndarray, wanted: np.ndarray, _: float) -> np.ndarray:
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(wanted, axis=1)
    found: np.ndarray = 1 - (own * wanted).sum(axis=1) / lengths
    return found


@pytest.mark.parametrize(("each", "temperature"), [(soft, 1.0), (soft, 4.0), (hard, 1.0), (features, 1.0)])
def test_loss__is_its_definition_of_the_same_pixels(
    each: Callable[..., np.ndarray], temperature: float
) -> None:
    """In NumPy from the logits or representations of each network, of images in its own mean and std."""
    student, teacher = network(1), network(2)
    own, wanted = (
        model.eval()(images(*colours)) if each is not features else model.eval().features(images(*colours))
        for model, colours in ((student, HALF), (teacher, ITS))
    )
    logits = student(images(*HALF)).detach().numpy()
    kind = each.__name__
    asked = {"kind": kind, "weight": 0.3, "temperature": temperature}
    loss = distilled(student, teacher, **asked)(student, batch(), 0)
    by_label = WEIGHTS @ -np.log(softmax(logits)[np.arange(4), LABELS])
    learnt = WEIGHTS @ each(own.detach().numpy(), wanted.detach().numpy(), temperature)
    assert float(loss.detach()) == pytest.approx(0.7 * by_label + 0.3 * learnt, rel=1e-12)
    loss.backward()
    trained = [p for p in student.parameters() if p.grad is not None and bool(p.grad.any())]
    assert len(trained) == len(list(student.parameters()))


def images(mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    mean_, std_ = (np.array(values).reshape(1, 3, 1, 1) for values in (mean, std))
    return torch.from_numpy((PIXELS / 255 - mean_) / std_)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft__gradient_is_temperature_times_the_difference_of_the_probabilities(temperature: float) -> None:
    """Hinton et al. 2015, equation 2, times temperature squared; 0 where student and teacher are equal."""
    own, wanted = (torch.from_numpy(RNG.normal(size=(4, 5))) for _ in range(2))
    for teacher in (wanted, own.clone()):
        own = own.detach().requires_grad_()
        weights = torch.ones(4)
        distillation_loss(own, teacher, weights, kind="soft", temperature=temperature).backward()
        difference = softmax(own.detach().numpy() / temperature) - softmax(teacher.numpy() / temperature)
        assert own.grad is not None
        np.testing.assert_allclose(own.grad.numpy(), temperature * difference, atol=1e-15)


@pytest.mark.parametrize("kind", ["soft", "features"])
def test_student__that_is_its_teacher_has_nothing_to_learn(kind: str) -> None:
    student = network(1)
    loss = distilled(student, network(1), its=HALF, kind=kind, weight=1.0)(student, batch(), 0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-13)
    assert max(float(p.grad.abs().max()) for p in student.parameters() if p.grad is not None) < 1e-12


def test_teacher__sees_erased_and_blended_images_and_draws_nothing() -> None:
    mixing = Mixing(mixup_alpha=0.5, random_erasing=1.0)
    student, teacher = network(1), network(2, dropout=0.5, drop_path=0.5)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    seen: dict[str, Tensor] = {}
    student.register_forward_pre_hook(lambda _, given: seen.update(student=given[0]))
    teacher.register_forward_pre_hook(lambda _, given: seen.update(teacher=given[0]))
    drawn = torch.get_rng_state()
    distilled(student, teacher, mixing=mixing)(student.train(), batch(), 5).backward()
    assert torch.equal(torch.get_rng_state(), drawn)
    mean, std, its_mean, its_std = (np.array(one).reshape(1, 3, 1, 1) for one in (*HALF, *ITS))
    pixels = seen["student"].numpy() * std + mean
    np.testing.assert_allclose(seen["teacher"].numpy(), (pixels - its_mean) / its_std, rtol=1e-12, atol=1e-12)
    assert not np.allclose(pixels, PIXELS / 255, atol=0.1)
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert len(student._forward_pre_hooks) == 1, "that of this test"


@pytest.mark.parametrize("kind", [*slow("soft", "hard"), "features"])
def test_distilled__never_makes_the_host_wait_for_the_device(kind: str) -> None:
    student, teacher = build(VIT), build(VIT, seed=1)
    with FakeCard() as card:
        card.put(student)
        card.put(teacher)
        runtime = card_runtime()
        objective = partial(classification(SOFTMAX, Mixing(), 3), normalise=runtime.normaliser(*HALF))
        asked = Distillation(teacher="some", kind=kind)  # type: ignore[arg-type]
        both = Distilled(objective, asked, Teacher(teacher, ITS, ""), student, HALF, runtime)
        with card.watched(), runtime.transfer.ahead([batch(), batch()]) as coming:
            for step, one in enumerate(coming):
                both(student, one, step).backward()
