"""Calibration: how well the probability of an answer matches the share of such answers that are right."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitctl.errors import DataError

BINS = 15
_LOWEST, _HIGHEST = 0.01, 100.0  # limits of the temperature; beyond them the images do not determine it
_HALVINGS, _ROWS = 60, 4096


def image_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the negative log likelihood and the Brier score of each image, float64 `[B, 2]`.

    Args:
        logits: `[B, K]`, of a softmax.
        classes: int64 `[B]`, the correct classes.

    Source: Brier 1950, Verification of forecasts expressed in terms of probability: the sum over the classes
    """
    log_shares = logits.double().log_softmax(dim=1)
    own = log_shares.gather(1, classes[:, None])
    shares, truth = log_shares.exp(), own.exp()
    brier = (shares**2).sum(dim=1, keepdim=True) - 2 * truth + 1
    return torch.cat([-own, brier], dim=1)


def calibration(likely: np.ndarray, right: np.ndarray, losses: np.ndarray) -> dict[str, Any]:
    """Return `ece`, `nll`, `brier`, and `calibration_bins`: images, mean probability and accuracy of each.

    The expected calibration error is the mean over the images of the gap between the accuracy and the mean
    probability of their bin; the 15 bins have equal width and include their upper ends.

    Args:
        likely, right: float64 and bool `[N]`, the answer's probability, and whether it is correct; N >= 1.
        losses: float64 `[N, 2]`, see `image_losses`.

    Source: Guo et al. 2017, On calibration of modern neural networks, Section 2
    """
    bins = np.clip(np.ceil(likely * BINS).astype(np.int64) - 1, 0, BINS - 1)
    images, shares, correct = (np.bincount(bins, of, BINS) for of in (None, likely, right))
    nll, brier = losses.mean(axis=0).tolist()
    rows = [
        {
            "images": int(n),
            "probability": float(p / n) if n else None,
            "accuracy": float(c / n) if n else None,
        }
        for n, p, c in zip(images, shares, correct, strict=True)
    ]
    ece = float(np.abs(correct - shares).sum() / len(likely))
    return {"ece": ece, "nll": nll, "brier": brier, "calibration_bins": rows}


def fit_temperature(logits: Tensor, classes: Tensor) -> float:
    """Return the temperature T > 0 that minimises the negative log likelihood of softmax(logits / T).

    The likelihood is concave in 1 / T, so its derivative has a single root, located by bisection in log T.

    Args:
        logits: `[N, K]`, of images that were not trained on.
        classes: int64 `[N]`, the correct classes.

    Raises:
        DataError: there is no minimum between 0.01 and 100, for example because every answer is right.

    Source: Guo et al. 2017, Section 4.2
    """
    parts = []
    for begin in range(0, len(logits), _ROWS):
        wide, own = logits[begin : begin + _ROWS].double(), classes[begin : begin + _ROWS, None]
        parts.append((wide, wide.gather(1, own)))

    def slope(temperature: float) -> float:
        means = (((rows / temperature).softmax(dim=1) * rows).sum() - own.sum() for rows, own in parts)
        return float(sum(means))

    if slope(_LOWEST) <= 0 or slope(_HIGHEST) >= 0:
        raise DataError(
            "evaluation.fit_temperature",
            f"the best temperature for these {len(logits):,} images is not between {_LOWEST:g} "
            f"and {_HIGHEST:g}",
            "give more images",
        )
    low, high = np.log([_LOWEST, _HIGHEST])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(float(np.exp(middle))) > 0 else (low, middle)
    return float(np.exp((low + high) / 2))


def suspected_labels(
    classes: np.ndarray, own: np.ndarray, answers: np.ndarray, likely: np.ndarray
) -> np.ndarray:
    """Return the images whose label may be wrong, int64 `[M]`, the most suspicious first.

    A class's threshold is the mean probability of the label over its images. An image is suspect if the
    answer differs from its label, and the answer's probability reaches that class's threshold.

    Args:
        classes, own: the labels, at least 0, and their probability, `[N]`.
        answers, likely: the most likely classes, and their probability, `[N]`.

    Source: Northcutt, Jiang and Chuang 2021, Confident learning, Section 3.1; of the classes that reach their
    threshold, the most likely one is taken to be the answer
    """
    size = int(max(classes.max(), answers.max())) + 1
    images, sums = np.bincount(classes, minlength=size), np.bincount(classes, own, size)
    thresholds = np.divide(sums, images, out=np.full(size, np.inf), where=images > 0)
    found = np.flatnonzero((answers != classes) & (likely >= thresholds[answers]))
    return found[np.argsort((own - likely)[found], kind="stable")]
