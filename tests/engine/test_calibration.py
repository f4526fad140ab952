"""Calibration against plain loops over the definition, and against scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import brier_score_loss, log_loss

from vitctl.engine.calibration import (
    BINS,
    calibration,
    fit_temperature,
    image_losses,
    suspected_labels,
)
from vitctl.errors import DataError


def draw(num_images: int, num_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[N, K]` that say more than they know, and labels."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 1, (num_images, num_classes))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = [generator.choice(num_classes, p=row) for row in chances]
    return 3 * logits, np.array(labels)


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("num_classes", [1, 2, 7])
def test_calibration__is_the_published_definition(num_classes: int) -> None:
    logits, labels = draw(300, num_classes, seed=num_classes)
    shares = softmax(logits)
    likely, right = shares.max(axis=1), shares.argmax(axis=1) == labels
    losses = image_losses(torch.from_numpy(logits), torch.from_numpy(labels)).numpy()
    found = calibration(likely, right, losses)
    error = 0.0
    for number, bin_ in enumerate(found["calibration_bins"]):  # Guo et al. 2017: (m-1)/M < p <= m/M
        inside = (number / BINS < likely) & (likely <= (number + 1) / BINS)
        assert bin_["images"] == inside.sum()
        if inside.any():
            assert bin_["accuracy"] == right[inside].mean()
            assert bin_["probability"] == pytest.approx(likely[inside].mean(), rel=1e-12)
            error += inside.mean() * abs(right[inside].mean() - likely[inside].mean())
    assert found["ece"] == pytest.approx(error, rel=1e-9, abs=1e-12)
    if num_classes > 1:
        names = list(range(num_classes))
        assert found["nll"] == pytest.approx(log_loss(labels, shares, labels=names), rel=1e-12)
        brier = brier_score_loss(np.eye(num_classes)[labels], shares, scale_by_half=False)
        assert found["brier"] == pytest.approx(brier, rel=1e-12)


def test_image_losses__of_a_certain_wrong_answer_are_finite() -> None:
    nll, brier = image_losses(torch.tensor([[900.0, 0.0]]), torch.tensor([1]))[0].tolist()
    assert (nll, brier) == (900.0, 2.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_fit_temperature__is_where_the_likelihood_is_highest(seed: int) -> None:
    logits, labels = draw(500, 4, seed)
    found = fit_temperature(torch.from_numpy(logits).float(), torch.from_numpy(labels))
    logits = logits.astype(np.float32).astype(np.float64)
    expected = minimize_scalar(
        lambda log: log_loss(labels, softmax(logits / np.exp(log))),
        bounds=(-3, 3),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert found == pytest.approx(np.exp(expected.x), rel=1e-6)
    assert 2 < found < 4  # the logits were multiplied by 3


@pytest.mark.parametrize("sign", [1, -1])
def test_fit_temperature__refuses_images_that_do_not_tell(sign: int) -> None:
    with pytest.raises(DataError, match="give more images"):
        fit_temperature(sign * torch.eye(3), torch.arange(3))


def test_suspected_labels__are_those_of_a_loop_over_the_rule() -> None:
    logits, labels = draw(400, 6, seed=3)
    labels[labels == 5] = 0  # a class without images has no threshold
    labels[::20] = (labels[::20] + 1) % 5
    shares = softmax(logits)
    own, answers, likely = shares[np.arange(400), labels], shares.argmax(axis=1), shares.max(axis=1)
    expected = {}
    for n in range(400):
        others = own[labels == answers[n]]
        if answers[n] != labels[n] and len(others) and likely[n] >= others.mean():
            expected[n] = likely[n] - own[n]
    found = suspected_labels(labels, own, answers, likely).tolist()
    assert found == sorted(expected, key=lambda n: -expected[n])
    assert 20 < len(found) < 400
