"""The filters that a network applies to the colours of an image, and their principal components.

Paper: Section 4.5, Figure 7 left
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitctl.models.build import Model
from vitctl.models.configs import HybridConfig
from vitctl.models.hybrid import HybridTransformer
from vitctl.models.resnet import ResNet, RootV1, RootV2, standardise
from vitctl.models.vit import VisionTransformer

PAPERS = 28  # components in Figure 7


class Components(NamedTuple):
    """Principal components of filters.

    Args:
        images: float64 `[k, 3, h, w]` of length 1 each, the one with the largest variance first; the number
            of largest magnitude in each is positive, because a component has no sign of its own.
        shares: float64 `[k]`, of the variance of the filters that each explains, 0..1.
    """

    images: Tensor
    shares: Tensor


def color_filters(model: Model) -> tuple[Tensor, str]:
    """The filters of a network that see red, green and blue, as they are applied.

    Those of the patch embedding; of a hybrid, whose patch embedding sees a feature map, and of a ResNet those
    of the convolution in the root, standardised.

    Args:
        model: of any family.

    Returns:
        `[filters, 3, h, w]`, and what they are, in words.
    """
    if isinstance(model, VisionTransformer) and not isinstance(model.config, HybridConfig):
        return model.patch_embedding.weight.detach(), "patch embedding"
    assert isinstance(model, HybridTransformer | ResNet)
    root = model.backbone.root
    assert isinstance(root, RootV1 | RootV2)
    return standardise(root.conv.weight.detach(), root.conv.numerics), "root convolution"


def principal_components(filters: Tensor, count: int = PAPERS) -> Components:
    """The first principal components of filters: the directions in which they differ most from their mean.

    Args:
        filters: `[filters, 3, h, w]`; each is one observation of 3 * h * w numbers.
        count: at most so many; there are no more than the numbers of a filter, or than filters less one.

    Paper: Figure 7 left
    """
    flat = filters.double().cpu().flatten(1)
    centred = flat - flat.mean(dim=0)
    _, deviations, directions = torch.linalg.svd(centred, full_matrices=False)
    kept = max(1, min(count, flat.shape[1], len(flat) - 1))
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    variances = deviations.square()
    shares = variances / variances.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return Components(directions[:kept].unflatten(1, tuple(filters.shape[1:])), shares[:kept])
