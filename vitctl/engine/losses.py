"""Losses summed over a batch: classification, and masked patch prediction."""

from collections.abc import Callable
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

Objective = Callable[[nn.Module, Batch, int], Tensor]
Normalise = Callable[[Tensor], Tensor]
Smoothing = Literal["spread", "per_class"]
_STREAM = 0x6D7070  # separates the random draws of masked patches from those of the augmentation


def classify(
    model: nn.Module,
    batch: Batch,
    step: int,  # noqa: ARG001 - every objective gets it
    *,
    normalise: Normalise,
    name: str,
    label_smoothing: float,
    smoothing: Smoothing = "spread",
    class_weights: Tensor | None = None,
) -> Tensor:
    """Return the summed classification loss of a batch: the objective of supervised training."""
    own = given(batch)
    logits = model(normalise(own.images))
    labels, weights = sent(own.labels, logits.device), sent(own.weights, logits.device)
    return classification_loss(
        logits,
        labels,
        weights,
        name=name,
        label_smoothing=label_smoothing,
        smoothing=smoothing,
        class_weights=class_weights,
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
    streams = [np.random.default_rng((seed, step, int(i), _STREAM)) for i in batch.samples]
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
    class_weights: Tensor | None = None,
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
        class_weights: [K] on the device of the logits: the loss of an image counts with the weight of its
            label, which label smoothing does not change. The sum is not divided by the weights of the batch,
            so that it does not depend on how a batch is divided. None: 1 each.

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
    if class_weights is not None:
        weights = weights * class_weights[labels]
    return (each * weights.to(each.dtype)).sum()


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return ones at the labels of each image: [B, L] integers, padded with -1, to [B, K] int64."""
    behind = torch.where(labels < 0, num_classes, labels)
    return labels.new_zeros(len(labels), num_classes + 1).scatter_(1, behind, 1)[:, :num_classes]
