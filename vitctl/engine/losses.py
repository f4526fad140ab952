"""Losses of a batch: classification and masked patches, after MixUp, CutMix and Random Erasing.

An image's partner is the image before it in the global batch; the first image's partner is the last. A
batch's blend is a function of (seed, step), an image's rectangle one of (seed, position). So the result
depends neither on micro-batches nor on processes or workers, and a micro-batch needs one additional image.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

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
Measured = Callable[..., Tensor]  # outputs, labels, ... -> loss
Box = tuple[int, int, int, int]  # top, left, bottom, right
Smoothing = Literal["spread", "per_class"]
# Separates these random draws from those of the augmentation.
_MASKED_STREAM, _MIXING_STREAM, _ERASING_STREAM = 0x6D7070, 0x6D6978, 0x657261
_AREAS, _LOG_ASPECTS, _ATTEMPTS = (0.02, 1 / 3), (math.log(0.3), math.log(1 / 0.3)), 10


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


@dataclass(frozen=True)
class Mixing:
    """Settings of MixUp and CutMix; with both on, each global batch gets one of them.

    Args:
        mixup_alpha: MixUp's share of an image is drawn from Beta(alpha, alpha); 0 switches it off.
        cutmix_alpha: CutMix's share of the area likewise; 0 switches it off.
        random_erasing: probability of erasing rectangles of each image before, see `erased`.
        erasing_mode, erasing_count: see `erased`.
        probability: that a batch is blended.
        cutmix_share: with both on, of CutMix among blended batches.
        until: blends the batches of so many steps; None: all.

    Source: MixUp (arXiv 1710.09412), CutMix (arXiv 1905.04899); timm
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    random_erasing: float = 0.0
    erasing_mode: str = "pixel"
    erasing_count: int = 1
    probability: float = 1.0
    cutmix_share: float = 0.5
    until: int | None = None

    @property
    def is_on(self) -> bool:
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0


@dataclass(frozen=True)
class Blend:
    """Blend of one global batch: `own` is an image's share, 0 to 1, in pixels or area, and in the target.

    `box` is the part that CutMix takes from the partner; None: MixUp.
    """

    own: float
    box: Box | None = None


def draw_blend(mixing: Mixing, *, seed: int, step: int, image_size: int) -> Blend:
    """Return the blend of the batch after `step` finished steps, the same on every process."""
    rng = np.random.default_rng((seed, step, 0, _MIXING_STREAM))
    if mixing.until is not None and step >= mixing.until:
        return Blend(1.0)
    if mixing.probability < 1 and rng.random() >= mixing.probability:
        return Blend(1.0)
    cut = (
        rng.random() < mixing.cutmix_share
        if mixing.mixup_alpha and mixing.cutmix_alpha
        else mixing.cutmix_alpha > 0
    )
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


def blended(images: Tensor, partners: Tensor, usable: Tensor, blend: Blend) -> Tensor:
    """Blend images with their partners, `[B, 3, S, S]` each, except where `usable` `[B]` is false."""
    usable = usable.view(-1, 1, 1, 1)
    if blend.box is None:
        return torch.where(usable, images * blend.own + partners * (1 - blend.own), images)
    top, left, bottom, right = blend.box
    area = (..., slice(top, bottom), slice(left, right))
    result = images.clone()
    result[area] = torch.where(usable, partners[area], images[area])
    return result


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


def draw_rectangle(size: int, rng: np.random.Generator, count: int = 1) -> tuple[int, int, int, int] | None:
    """Draw top, left, height and width of 2 to 33 % of a square of `size` pixels, divided by `count`, of
    aspect ratio 0.3 to 1 / 0.3, uniform in its logarithm, smaller than the square in both directions. None
    after ten failures.
    """
    for _ in range(_ATTEMPTS):
        area, aspect = rng.uniform(*_AREAS) * size * size / count, math.exp(rng.uniform(*_LOG_ASPECTS))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < size and width < size:
            top, left = rng.integers(size - height + 1), rng.integers(size - width + 1)
            return int(top), int(left), height, width
    return None


def erased(
    images: Tensor, positions: Tensor, *, probability: float, seed: int, mode: str = "pixel", count: int = 1
) -> Tensor:
    """Fill rectangles of some images, in place: a function of (seed, position of the image), the same on
    every device.

    Args:
        images: normalised, `[B, 3, S, S]`.
        positions: int64 `[B]`, in the order of the samples.
        probability: of erasing, for each image.
        seed: of the training.
        mode: "pixel": normal noise; "rand": a colour of it for each rectangle; "const": zeros.
        count: most rectangles of an image.

    Source: Random Erasing (arXiv 1708.04896), as timm's modes; DeiT and MAE use "pixel"
    """
    places, fills = list[Tensor](), list[Tensor]()
    for row, position in enumerate(positions.tolist()):
        rng = np.random.default_rng((seed, position, 0, _ERASING_STREAM))
        drawn = 0 if rng.random() >= probability else 1 if count == 1 else int(rng.integers(1, count + 1))
        for _ in range(drawn):
            if box := draw_rectangle(images.shape[-1], rng, drawn):
                top, left, height, width = box
                shape = (3, height, width) if mode == "pixel" else (3, 1, 1)
                make = np.zeros if mode == "const" else rng.standard_normal
                fills.append(torch.from_numpy(make(shape, dtype=np.float32)))
                places.append(images[row, :, top : top + height, left : left + width])
    if fills:  # one copy to the device
        joined = sent(torch.cat([fill.flatten() for fill in fills]), images.device)
        parts = torch.split(joined, [fill.numel() for fill in fills])
        for place, own, fill in zip(places, parts, fills, strict=True):
            place.copy_(own.view_as(fill))
    return images


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
