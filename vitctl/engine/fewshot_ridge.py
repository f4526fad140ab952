"""Closed-form few-shot classification: regularised least squares from frozen representations to {-1, 1}^K.

N images, R features, K classes. With X [N, R + 1] (standardised, and a constant column) and Y [N, K] of -1
and 1, W = (X'X + l2 I)^-1 X'Y = X' (XX' + l2 I)^-1 Y; the smaller of the two matrices is decomposed, once for
all l2.

In float64 by default: the constant column alone makes X'X of 10,000 images as large as 1e8, and float32 then
loses regularisers below 1. Large tensors are processed in chunks to avoid a second copy.

Paper: Section 4.1; constants of the authors' later fewshot_lsr evaluator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitctl.errors import DataError
from vitctl.system.text import count_text

BIAS = 100.0
STD_EPS = 1e-5
_CHUNK = 2**14  # images at a time
_MOST_SCALE, _HALVINGS = 2.0**20, 40
L2_GRID = tuple(2.0**power for power in range(-10, 20))  # as in the authors' earlier evaluator


def choose_shots(
    labels: NDArray[np.int64],
    shots: int,
    *,
    num_classes: int,
    seed: int,
    class_names: Sequence[str] = (),
    fix: str = "use fewer shots",
) -> NDArray[np.int64]:
    """Draw `shots` images of each class with one generator per seed; fewer shots are prefixes of more.

    `labels` are [N]; the result is [num_classes * shots] positions in them, class by class.

    Raises:
        DataError: a class has too few images.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label in range(num_classes):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        if len(of_class) < shots:
            raise DataError(
                f"class {repr(class_names[label]) if class_names else label} has "
                f"{count_text(len(of_class), 'training image')}, {shots} are needed",
                fix=fix,
            )
        chosen.append(of_class[:shots])
    return np.concatenate(chosen)


@dataclass(frozen=True)
class Ridge:
    """A decomposed problem. Any regulariser then costs one product: W = basis (targets / (values + l2)).

    Args:
        mean, std: [R], for standardising images.
        basis: [R + 1, E], E = min(N, R + 1).
        values: [E], eigenvalues of the smaller of X'X and XX'.
        targets: [E, K].
    """

    mean: Tensor
    std: Tensor
    basis: Tensor
    values: Tensor
    targets: Tensor

    def weights(self, l2: float) -> Tensor:
        """Return W [R + 1, K] for a regulariser, which is not divided by N."""
        return self.basis @ self._shrunk(l2)

    def project(self, images: Tensor) -> Tensor:
        """Project representations [M, R] to the basis, [M, E]; compute this once for all regularisers."""
        return _with_bias((images.to(self.mean.dtype) - self.mean) / self.std) @ self.basis

    def scores(self, projected: Tensor, l2: float) -> Tensor:
        """Return scores [M, K] of projected images [M, E]."""
        return projected @ self._shrunk(l2)

    def layer(self, l2: float) -> tuple[Tensor, Tensor]:
        """Return weight [K, R] and bias [K] of the same classifier for unstandardised representations."""
        *_, constant = weights = self.weights(l2)
        weight = (weights[:-1] / self.std.unsqueeze(1)).T
        return weight, BIAS * constant - weight @ self.mean

    def left_out(self, train: Tensor, labels: Tensor, l2: float) -> Tensor:
        """Return leave-one-out scores [M, K] of training images [M, R], each from the solution of all others.

        In closed form, (f - h y) / (1 - h) for a score f with target y and leverage h; mean and std remain
        those of all images.
        """
        projected = self.project(train)
        norms = self.basis.square().sum(dim=0)
        scale = (norms * (self.values + l2)).clamp_min(torch.finfo(norms.dtype).tiny)
        leverage = (projected.square() / scale).sum(dim=1, keepdim=True)
        targets = 2.0 * torch.nn.functional.one_hot(labels, self.targets.shape[1]) - 1
        return (self.scores(projected, l2) - leverage * targets) / (1 - leverage)

    def _shrunk(self, l2: float) -> Tensor:
        return self.targets / (self.values + l2).unsqueeze(1)


def decompose(
    train: Tensor, train_labels: Tensor, *, num_classes: int, dtype: torch.dtype = torch.float64
) -> Ridge:
    """Standardise [N, R] representations, append the constant column, and decompose, computing in `dtype`."""
    num = len(train)
    mean = torch.stack([part.to(dtype).sum(dim=0) for part in torch.split(train, _CHUNK)]).sum(dim=0) / num
    spread = torch.stack(
        [(part.to(dtype) - mean).square().sum(dim=0) for part in torch.split(train, _CHUNK)]
    ).sum(dim=0)
    std = (spread / num).sqrt() + STD_EPS
    if num > train.shape[1]:
        gram, products = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
        for part, labels in zip(torch.split(train, _CHUNK), torch.split(train_labels, _CHUNK), strict=True):
            x = _with_bias((part.to(dtype) - mean) / std)
            gram, products = gram + x.T @ x, products + _times_targets(x, labels, num_classes)
        values, vectors = torch.linalg.eigh(gram)
        return Ridge(mean, std, vectors, values, vectors.T @ products)
    x = _with_bias((train.to(dtype) - mean) / std)
    values, vectors = torch.linalg.eigh(x @ x.T)
    return Ridge(mean, std, x.T @ vectors, values, _times_targets(vectors, train_labels, num_classes))


def fitted_scale(scores: Tensor, labels: Tensor, loss: str) -> float:
    """Return the factor that minimises the cross-entropy of scores [N, K]; 0 if the scores do not help.

    The loss is convex in the factor, and its derivative is bisected. The target is 1 - 1 / (N + 1) for the
    label, the rest spread over all classes, as if one more image had no class: the factor stays finite
    even if every image is right.

    Args:
        scores: float64, of images that the classifier has not seen.
        labels: [N] integers.
        loss: softmax, or sigmoid for the sum over classes of binary cross-entropies.
    """
    num, classes = scores.shape
    blank = 1 / (num + 1)
    targets = (1 - blank) * torch.nn.functional.one_hot(labels, classes) + blank / classes

    def falls(scale: float) -> bool:
        scaled = scale * scores
        likely = scaled.softmax(dim=1) if loss == "softmax" else scaled.sigmoid()
        return bool(((likely - targets) * scores).sum() < 0)

    low, high = 0.0, 1.0
    while high < _MOST_SCALE and falls(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falls(middle) else (low, middle)
    return low


def count_correct(
    ridge: Ridge, test: Tensor, test_labels: Tensor, l2s: Sequence[float]
) -> list[NDArray[np.int64]]:
    """Count correct test images [M, R] per class, [K] for each regulariser; ties go to the first class."""
    num_classes = ridge.targets.shape[1]
    correct = [np.zeros(num_classes, np.int64) for _ in l2s]
    for images, labels in zip(torch.split(test, _CHUNK), torch.split(test_labels, _CHUNK), strict=True):
        projected = ridge.project(images)
        for counts, l2 in zip(correct, l2s, strict=True):
            hit = ridge.scores(projected, l2).argmax(dim=1) == labels
            counts += torch.bincount(labels[hit], minlength=num_classes).numpy()
    return correct


def choose_l2(accuracies: NDArray[np.float64], *, leave_self_out: bool) -> NDArray[np.int64]:
    """Return the regulariser for each data set, [S] grid positions: the best mean rank over the data sets.

    `accuracies` [S, L] are test accuracies, as in the authors' evaluator. Ranks within a data set are
    argsort of argsort, so the first of equal accuracies has the lower rank. With `leave_self_out` a data
    set's ranks are excluded when choosing for it; otherwise all get the same.

    Raises:
        DataError: leave_self_out with one data set.
    """
    if leave_self_out and len(accuracies) < 2:
        raise DataError(
            "fewshot.choose_l2 = 'leave_self_out' needs at least two data sets; 'all' works with one"
        )
    ranks = np.argsort(np.argsort(accuracies, axis=1, kind="stable"), axis=1, kind="stable")
    counted = ranks.sum(axis=0) - ranks if leave_self_out else np.broadcast_to(ranks.sum(axis=0), ranks.shape)
    return np.asarray(counted.argmax(axis=1), np.int64)


def _times_targets(rows: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return rows'Y [E, K] of rows [N, E] by sums over classes, since Y is -1 but for one entry a row."""
    of_class = torch.zeros(num_classes, rows.shape[1], dtype=rows.dtype).index_add_(0, labels, rows)
    return (2 * of_class - rows.sum(dim=0)).T


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full((len(x), 1), BIAS, dtype=x.dtype)], dim=1)
