"""Losses summed over a batch: classification with MixUp and CutMix, and masked patch prediction."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.runtime import given, sent
from vitctl.errors import DataError
from vitctl.models.masked_patch import draw_corruption, masked_patch_loss, targets
from vitctl.models.variants import MaskedPatchConfig
from vitctl.recipe.sections import Loss

Objective = Callable[[nn.Module, Batch, int], Tensor]
Normalise = Callable[[Tensor], Tensor]
Smoothing = Literal["spread", "per_class"]
_MASK_STREAM = 0x6D7070  # separates the random draws of masked patches from those of the augmentation


def classify(
    model: nn.Module,
    batch: Batch,
    step: int,  # noqa: ARG001 - every objective gets it
    *,
    normalise: Normalise,
    name: str,
    label_smoothing: float,
    smoothing: Smoothing = "spread",
) -> Tensor:
    """Return the summed classification loss of a batch: the objective of supervised training."""
    own = given(batch)
    logits = model(normalise(own.images))
    labels, weights = sent(own.labels, logits.device), sent(own.weights, logits.device)
    return classification_loss(
        logits, labels, weights, name=name, label_smoothing=label_smoothing, smoothing=smoothing
    )


def predict_masked_patches(
    model: nn.Module,
    batch: Batch,
    step: int,
    *,
    normalise: Normalise,
    config: MaskedPatchConfig,
    rate: float,
    seed: int,
) -> Tensor:
    """Return the summed loss of a batch in masked patch prediction.

    The corrupted patches are a pure function of (seed, step, sample), independent of a resume and of how the
    batch is split.

    Paper: Appendix B.1.2
    """
    own = given(batch)
    images = normalise(own.images)
    num_patches = config.grid[0] * config.grid[1]
    streams = [np.random.default_rng((seed, step, int(i), _MASK_STREAM)) for i in batch.samples]
    drawn = [draw_corruption(num_patches, stream, rate) for stream in streams]
    corrupted, source = (sent(torch.stack(parts), images.device) for parts in zip(*drawn, strict=True))
    each = masked_patch_loss(model(images, source), targets(images, config), corrupted, config)
    return (each * sent(own.weights, each.device).to(each.dtype)).sum()


def classification_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    name: str,
    label_smoothing: float,
    smoothing: Smoothing = "spread",
) -> Tensor:
    """Return the sum over the batch of the weighted loss of each image, in float32 or wider.

    Args:
        logits: [B, K].
        labels: [B] integers; or [B, L] where images may have several, padded with -1, for "sigmoid" alone.
        weights: [B], 0 for images that do not count.
        name: "sigmoid": sum over the classes of binary cross-entropies; "softmax": cross-entropy.
        label_smoothing: how far targets are from 0 and 1.
        smoothing: "spread": that share of the target is spread evenly over the K classes; "per_class", for
            "sigmoid": 1 at a label becomes 1 - label_smoothing, 0 elsewhere label_smoothing, as in the
            authors' configurations.

    Returns:
        a scalar.

    Raises:
        DataError: several labels under "softmax".

    Paper: Section 3.1, Table 3; sigmoid in pre-training as in the authors' code.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    num_classes = logits.shape[-1]
    if labels.ndim == 1:
        targets = F.one_hot(labels, num_classes).to(logits.dtype)
    elif name == "sigmoid":
        targets = multi_hot(labels, num_classes).to(logits.dtype)
    else:
        raise DataError(
            f"loss '{name}' needs one label per image and these may have several; use loss.name = 'sigmoid'"
        )
    if label_smoothing and smoothing == "per_class":
        targets = targets * (1 - 2 * label_smoothing) + label_smoothing
    elif label_smoothing:
        targets = targets * (1 - label_smoothing) + label_smoothing / num_classes
    if name == "sigmoid":
        each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=-1)
    else:
        each = -(targets * F.log_softmax(logits, dim=-1)).sum(dim=-1)
    return (each * weights.to(each.dtype)).sum()


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return ones at the labels of each image: [B, L] integers, padded with -1, to [B, K] int64."""
    behind = torch.where(labels < 0, num_classes, labels)
    return labels.new_zeros(len(labels), num_classes + 1).scatter_(1, behind, 1)[:, :num_classes]


Box = tuple[int, int, int, int]  # top, left, bottom, right
_MIX_STREAM = 0x6D6978  # separates these random draws from those of the augmentation


@dataclass(frozen=True)
class Mixing:
    """Settings of MixUp and CutMix; with both on, each global batch gets one of them, with probability one
    half.

    Args:
        mixup_alpha: MixUp's share of an image is drawn from Beta(alpha, alpha); 0 switches it off.
        cutmix_alpha: CutMix's share of the area likewise; 0 switches it off.

    Source: MixUp (arXiv 1710.09412), CutMix (arXiv 1905.04899)
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    @property
    def is_on(self) -> bool:
        """Whether batches are blended at all."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0


@dataclass(frozen=True)
class Blend:
    """How one global batch is blended.

    Args:
        own: share of the image itself, 0 to 1, in its pixels or its area, and in its target.
        box: the part that CutMix takes from the partner; None: MixUp.
    """

    own: float
    box: Box | None = None


def draw_blend(mixing: Mixing, *, seed: int, step: int, image_size: int) -> Blend:
    """Return the blend of the batch after `step` finished steps, the same on every process."""
    rng = np.random.default_rng((seed, step, 0, _MIX_STREAM))
    cut = rng.random() < 0.5 if mixing.mixup_alpha and mixing.cutmix_alpha else mixing.cutmix_alpha > 0
    alpha = mixing.cutmix_alpha if cut else mixing.mixup_alpha
    own = float(rng.beta(alpha, alpha))
    if not cut:
        return Blend(own)
    half = int(0.5 * math.sqrt(1 - own) * image_size)
    row, column = rng.integers(0, image_size, 2).tolist()
    top, bottom = max(row - half, 0), min(row + half, image_size)
    left, right = max(column - half, 0), min(column + half, image_size)
    return Blend(1 - (bottom - top) * (right - left) / image_size**2, (top, left, bottom, right))


def classify_mixed(
    model: nn.Module,
    batch: Batch,
    step: int,
    *,
    normalise: Normalise,
    name: str,
    label_smoothing: float,
    smoothing: Smoothing = "spread",
    mixing: Mixing,
    seed: int,
) -> Tensor:
    """Return the summed classification loss of a batch whose images and targets are blended with their
    neighbours'.

    An image whose partner cannot be used stays as it is; one that cannot be used itself has weight 0. Both
    losses are affine in the target, and so are both forms of smoothing: the loss of a blended target is the
    blend of the two losses.
    """
    own = given(batch)
    before = own.neighbour
    assert before is not None, "train_batches(..., neighbours=True) gives each micro-batch its neighbour"
    images, first = normalise(own.images), normalise(before.images)
    labels = sent(torch.cat((before.labels, own.labels)), images.device)
    weights = sent(torch.cat((before.weights, own.weights)), images.device).double()
    blend = draw_blend(mixing, seed=seed, step=step, image_size=images.shape[-1])
    usable = weights[:-1] > 0
    logits = model(blended(images, torch.cat((first, images[:-1])), usable, blend))
    lent = usable.to(weights) * (1 - blend.own)
    loss = partial(classification_loss, name=name, label_smoothing=label_smoothing, smoothing=smoothing)
    return loss(logits, labels[1:], weights[1:] * (1 - lent)) + loss(logits, labels[:-1], weights[1:] * lent)


def blended(images: Tensor, partners: Tensor, usable: Tensor, blend: Blend) -> Tensor:
    """Blend images with their partners.

    Args:
        images: `[B, 3, S, S]`.
        partners: `[B, 3, S, S]`.
        usable: `[B]`, false for partners that leave their image as it is.
        blend: how.

    Returns:
        `[B, 3, S, S]`.
    """
    usable = usable.view(-1, 1, 1, 1)
    if blend.box is None:
        return torch.where(usable, images * blend.own + partners * (1 - blend.own), images)
    top, left, bottom, right = blend.box
    area = (..., slice(top, bottom), slice(left, right))
    result = images.clone()
    result[area] = torch.where(usable, partners[area], images[area])
    return result


def classification(loss: Loss, mixing: Mixing, seed: int) -> Callable[..., Tensor]:
    """Return the objective of [loss] with labels: without `normalise`, see `classify`."""
    objective = partial(classify_mixed, mixing=mixing, seed=seed) if mixing.is_on else classify
    return partial(objective, name=loss.name, label_smoothing=loss.label_smoothing, smoothing=loss.smoothing)
