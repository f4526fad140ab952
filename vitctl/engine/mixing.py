"""MixUp and CutMix: images and targets blended with their neighbours', on the device, after normalisation.

The partner of an image is the image before it in the global batch; the partner of the first is the last. The
blend of a batch is a function of (seed, step). So the result depends neither on micro-batches nor on
processes or workers, and a micro-batch needs only one image more than its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.erasing import classify_erased
from vitctl.engine.losses import Normalise, Smoothing, classification_loss, classify
from vitctl.engine.runtime import given, sent
from vitctl.recipe.sections import Loss

Box = tuple[int, int, int, int]  # top, left, bottom, right
_STREAM = 0x6D6978  # separates these random draws from those of the augmentation


@dataclass(frozen=True)
class Mixing:
    """Settings of MixUp and CutMix; with both on, each global batch gets one of them, with probability one
    half.

    Args:
        mixup_alpha: MixUp's share of an image is drawn from Beta(alpha, alpha); 0 switches it off.
        cutmix_alpha: CutMix's share of the area likewise; 0 switches it off.
        random_erasing: probability of erasing a rectangle of each image before, see `erased`.

    Source: MixUp (arXiv 1710.09412), CutMix (arXiv 1905.04899)
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    random_erasing: float = 0.0

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
    rng = np.random.default_rng((seed, step, 0, _STREAM))
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
    class_weights: Tensor | None = None,
    mixing: Mixing,
    seed: int,
) -> Tensor:
    """Return the summed classification loss of a batch whose images and targets are blended with their
    neighbours'.

    An image whose partner cannot be used stays as it is; one that cannot be used itself has weight 0. Both
    losses are affine in the target, and so are both forms of smoothing: the loss of a blended target is the
    blend of the two losses. Each of the two counts with the class weight of its own label.
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
    loss = partial(
        classification_loss,
        name=name,
        label_smoothing=label_smoothing,
        smoothing=smoothing,
        class_weights=class_weights,
    )
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


def classification(
    loss: Loss, mixing: Mixing, seed: int, class_weights: Tensor | None = None
) -> Callable[..., Tensor]:
    """Return the objective of [loss] with labels: without `normalise`, see `classify`."""
    objective = partial(classify_mixed, mixing=mixing, seed=seed) if mixing.is_on else classify
    if mixing.random_erasing:
        objective = partial(
            classify_erased, objective=objective, probability=mixing.random_erasing, erasing_seed=seed
        )
    return partial(
        objective,
        name=loss.name,
        label_smoothing=loss.label_smoothing,
        smoothing=loss.smoothing,
        class_weights=class_weights,
    )
