"""Losses of a batch: classification and masked patches; mixing.py blends and erases its images first."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.mixing import Mixing, blended, draw_blend, erased
from vitctl.engine.runtime import given, sent
from vitctl.errors import DataError
from vitctl.models.masked_patch import draw_corruption, masked_patch_loss, targets
from vitctl.models.variants import MaskedPatchConfig
from vitctl.recipe.sections import Loss

Objective = Callable[[nn.Module, Batch, int], Tensor]
Normalise = Callable[[Tensor], Tensor]
Measured = Callable[..., Tensor]  # outputs, labels, ... -> loss
Smoothing = Literal["spread", "per_class"]
_MASKED_STREAM = 0x6D7070  # separates these random draws from those of the augmentation


def classify(
    model: nn.Module,
    batch: Batch,
    step: int,  # noqa: ARG001 - every objective gets it
    *,
    normalise: Normalise,
    measured: Measured | None = None,
    **how: Any,
) -> Tensor:
    """Return the summed loss of a batch in supervised training; `how`: see `classification_loss`, or what
    computes the same, `measured`.
    """
    own = given(batch)
    logits = model(normalise(own.images))
    labels, weights = sent(own.labels, logits.device), sent(own.weights, logits.device)
    return (measured or classification_loss)(logits, labels, weights, **how)


def predict_masked_patches(
    model: nn.Module,
    batch: Batch,
    step: int,
    *,
    normalise: Normalise,
    measured: Measured | None = None,
    config: MaskedPatchConfig,
    rate: float,
    seed: int,
) -> Tensor:
    """Return the summed loss of a batch in masked patch prediction.

    The corrupted patches are a pure function of (seed, step, sample).

    Paper: Appendix B.1.2
    """
    own = given(batch)
    images = normalise(own.images)
    num_patches = config.grid[0] * config.grid[1]
    streams = [np.random.default_rng((seed, step, int(i), _MASKED_STREAM)) for i in batch.samples]
    drawn = [draw_corruption(num_patches, stream, rate) for stream in streams]
    corrupted, source = (sent(torch.stack(parts), images.device) for parts in zip(*drawn, strict=True))
    weights = sent(own.weights, images.device)
    found = model(images, source), targets(images, config), corrupted, config, weights
    return (measured or masked_patch_loss)(*found)


def classification_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    *,
    name: str,
    label_smoothing: float = 0.0,
    smoothing: Smoothing = "spread",
    class_weights: Tensor | None = None,
) -> Tensor:
    """Return the sum over the batch of the weighted loss of each image, a scalar in float32 or wider.

    Args:
        logits: [B, K].
        labels: [B] integers; or [B, L] where images may have several, padded with -1, for "sigmoid" alone.
        weights: [B], 0 for images that do not count; None: the loss of each image is returned, [B].
        name: "sigmoid": sum over the classes of binary cross-entropies; "softmax": cross-entropy.
        label_smoothing: distance of targets from 0 and 1.
        smoothing: "spread": that share of the target is spread evenly over the K classes; "per_class", for
            "sigmoid": 1 at a label becomes 1 - label_smoothing, 0 elsewhere label_smoothing, as in the
            authors' configurations.
        class_weights: [K] on the logits' device, applied by label whatever the smoothing. The sum is not
            divided by the batch's weights, so it does not depend on how a batch is split. None: 1 each.

    Raises:
        DataError: several labels under "softmax".

    Paper: Section 3.1, Table 3; sigmoid in pre-training as in the authors' code.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    num_classes = logits.shape[-1]
    if name == "softmax" and labels.ndim == 1 and not label_smoothing:
        each = F.cross_entropy(logits, labels, reduction="none")
        return _weighted(each, labels, weights, class_weights)
    if labels.ndim == 1:
        targets = F.one_hot(labels, num_classes).to(logits.dtype)
    elif name == "sigmoid":
        targets = multi_hot(labels, num_classes).to(logits.dtype)
    else:
        raise DataError(
            f"loss '{name}' needs one label per image and these may have several",
            fix="use loss.name = 'sigmoid'",
        )
    if label_smoothing and smoothing == "per_class":
        targets = targets * (1 - 2 * label_smoothing) + label_smoothing
    elif label_smoothing:
        targets = targets * (1 - label_smoothing) + label_smoothing / num_classes
    if name == "sigmoid":
        each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=-1)
    else:
        each = -(targets * F.log_softmax(logits, dim=-1)).sum(dim=-1)
    return _weighted(each, labels, weights, class_weights)


def _weighted(each: Tensor, labels: Tensor, weights: Tensor | None, class_weights: Tensor | None) -> Tensor:
    if weights is None:
        return each
    if class_weights is not None:
        weights = weights * class_weights[labels]
    return (each * weights.to(each.dtype)).sum()


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return int64 `[B, K]` with ones at the labels, from `[B, L]` integers padded with -1."""
    behind = torch.where(labels < 0, num_classes, labels)
    return labels.new_zeros(len(labels), num_classes + 1).scatter_(1, behind, 1)[:, :num_classes]


def classify_mixed(
    model: nn.Module,
    batch: Batch,
    step: int,
    *,
    normalise: Normalise,
    measured: Measured | None = None,
    mixing: Mixing,
    seed: int,
    **how: Any,
) -> Tensor:
    """Return the loss of `classify` for images and targets blended with their neighbours'.

    An image without a usable partner stays as it is; an unusable image has weight 0. The loss and both
    kinds of smoothing are affine in the target, so the loss of a blended target is the blend of the two
    losses. Each counts with the class weight of its label.
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
    measured = measured or classification_loss
    loss = measured(logits, labels[1:], weights[1:] * (1 - lent), **how)
    return loss + measured(logits, labels[:-1], weights[1:] * lent, **how)


def classification(
    loss: Loss, mixing: Mixing, seed: int, class_weights: Tensor | None = None
) -> Callable[..., Tensor]:
    """Return the objective of [loss] with labels, without `normalise`; see `classify`."""
    objective = partial(classify_mixed, mixing=mixing, seed=seed) if mixing.is_on else classify
    if mixing.random_erasing:
        objective = partial(
            classify_erased,
            objective=objective,
            erase=partial(
                erased,
                probability=mixing.random_erasing,
                seed=seed,
                mode=mixing.erasing_mode,
                count=mixing.erasing_count,
            ),
        )
    return partial(
        objective,
        name=loss.name,
        label_smoothing=loss.label_smoothing,
        smoothing=loss.smoothing,
        class_weights=class_weights,
    )


def classify_erased(
    model: nn.Module,
    batch: Batch,
    step: int,
    *,
    normalise: Callable[[Tensor], Tensor],
    objective: Callable[..., Tensor],
    erase: Callable[[Tensor, Tensor], Tensor],
    **more: Any,
) -> Tensor:
    """Return the loss of another objective, with images and mixing partners erased first."""
    own, before = given(batch), batch.neighbour

    if before is not None and own.neighbour is not None:
        before = replace(own.neighbour, images=erase(normalise(own.neighbour.images), before.positions))
    own = replace(own, images=erase(normalise(own.images), batch.positions), neighbour=before)
    return objective(model, own, step, normalise=_as_is, **more)


def _as_is(images: Tensor) -> Tensor:
    return images
