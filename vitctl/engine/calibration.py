"""Calibration: whether the probability of an answer is the share of such answers that are right."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

BINS = 15


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
    probability of their bin; the bins are 15 of equal width, each with its upper end.

    Args:
        likely: float64 `[N]`, the probability of the answer; N is at least 1.
        right: bool `[N]`, whether it is correct.
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
