"""Closed-form few-shot classification: regularised least squares from frozen representations to {-1, 1}^K.

N images, R features, K classes. With X [N, R + 1] (standardised, and a constant column) and Y [N, K] of -1 and 1,
W = (X'X + l2 I)^-1 X'Y = X' (XX' + l2 I)^-1 Y; the smaller of the two matrices is decomposed.

Paper: Section 4.1; constants of the authors' later fewshot_lsr evaluator.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitctl.errors import DataError

BIAS = 100.0
STD_EPS = 1e-5


def choose_shots(labels: NDArray[np.int64], shots: int, *, num_classes: int, seed: int) -> NDArray[np.int64]:
    """`shots` images of each class, drawn from one generator per seed; fewer shots are prefixes of more.

    Args:
        labels: [N] of the training split.
        shots: images per class.
        num_classes: classes 0 .. num_classes - 1.
        seed: of the draw.

    Returns:
        [num_classes * shots] positions in `labels`, class by class.

    Raises:
        DataError: a class has fewer images.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label in range(num_classes):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        if len(of_class) < shots:
            raise DataError(
                f"class {label} has {len(of_class)} training images, {shots} shots were asked; set fewshot.shots lower"
            )
        chosen.append(of_class[:shots])
    return np.concatenate(chosen)


def fit_and_score(train: Tensor, train_labels: Tensor, test: Tensor, *, num_classes: int, l2: float) -> Tensor:
    """Scores [M, K] of the test images.

    Args:
        train: [N, R] representations of the chosen images, float32 or float64; the solve is done in this type.
        train_labels: [N] integers.
        test: [M, R].
        num_classes: K.
        l2: regulariser, not divided by N.
    """
    mean, std = train.mean(dim=0), train.std(dim=0, correction=0) + STD_EPS
    x, x_test = (_with_bias((t - mean) / std) for t in (train, test))
    y = torch.full((len(x), num_classes), -1.0, dtype=x.dtype)
    y[torch.arange(len(x)), train_labels] = 1.0
    if x.shape[0] >= x.shape[1]:
        values, vectors = torch.linalg.eigh(x.T @ x)
        weights = vectors @ ((vectors.T @ (x.T @ y)) / (values + l2).unsqueeze(1))
    else:
        values, vectors = torch.linalg.eigh(x @ x.T)
        weights = x.T @ (vectors @ ((vectors.T @ y) / (values + l2).unsqueeze(1)))
    return x_test @ weights


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full((len(x), 1), BIAS, dtype=x.dtype)], dim=1)
