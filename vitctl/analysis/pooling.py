"""The class token beside the mean of the patches: two representations of an image, from one forward pass.

Paper: Section 3.1, Appendix D.3
"""

from typing import NamedTuple

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny


class Separation(NamedTuple):
    """Images that the nearest class mean gets right, and those that were counted: of classes with two images
    or more.
    """

    correct: int
    total: int


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """The cosine between two representations of each image.

    Args:
        one, other: `[N, D]`.

    Returns:
        float64 `[N]`.
    """
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), eps=_TINY)


def separation(features: Tensor, labels: Tensor) -> Separation:
    """How well a linear classifier without any setting tells the classes apart: the nearest class mean.

    Each image is left out of the mean of its own class. An image is right if that mean is nearer (Euclidean)
    than the mean of any other class; of equal distances the lower class wins.

    Args:
        features: `[N, D]`.
        labels: int64 `[N]`; negative: no label, the image is left out.
    """
    features, labels = features[labels >= 0].double(), labels[labels >= 0]
    classes, own = torch.unique(labels, return_inverse=True)  # [K], [N]
    counts = torch.bincount(own, minlength=len(classes))
    counted = counts[own] > 1
    if not bool(counted.any()) or len(classes) < 2:
        return Separation(0, 0)
    sums = features.new_zeros(len(classes), features.shape[1]).index_add_(0, own, features)
    distances = torch.cdist(features, sums / counts[:, None], compute_mode="donot_use_mm_for_euclid_dist")
    others = (sums[own] - features) / (counts[own] - 1).clamp(min=1)[:, None]
    distances.scatter_(1, own[:, None], (features - others).norm(dim=1, keepdim=True))
    hits = distances.argmin(dim=1) == own
    return Separation(int(hits[counted].sum()), int(counted.sum()))


def plane(features: Tensor) -> Tensor:
    """The two coordinates in which representations differ most: their first principal components.

    Args:
        features: `[N, D]`.

    Returns:
        float64 `[N, 2]` of mean 0; zeros where there are fewer directions than two.
    """
    centred = features.double() - features.double().mean(dim=0)
    left, deviations, _ = torch.linalg.svd(centred, full_matrices=False)
    found = (left * deviations)[:, :2]
    return torch.nn.functional.pad(found, (0, 2 - found.shape[1]))
