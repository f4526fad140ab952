"""Random Erasing: a rectangle of an image filled with noise, on the device, after normalisation."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.runtime import given, sent

_STREAM = 0x657261  # separates these random draws from those of the augmentation
_AREAS, _LOG_ASPECTS, _ATTEMPTS = (0.02, 1 / 3), (math.log(0.3), math.log(1 / 0.3)), 10

Box = tuple[int, int, int, int]  # top, left, height, width


def draw_rectangle(size: int, rng: np.random.Generator) -> Box | None:
    """Draw a rectangle of 2 to 33 % of a square of `size` pixels, of aspect ratio 0.3 to 1 / 0.3, uniform in
    its logarithm, smaller than the square in both directions. None after ten failures.
    """
    for _ in range(_ATTEMPTS):
        area, aspect = rng.uniform(*_AREAS) * size * size, math.exp(rng.uniform(*_LOG_ASPECTS))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < size and width < size:
            top, left = rng.integers(size - height + 1), rng.integers(size - width + 1)
            return int(top), int(left), height, width
    return None


def erased(images: Tensor, positions: Tensor, *, probability: float, seed: int) -> Tensor:
    """Fill a rectangle of some images with normal noise, in place: a function of (seed, position of the
    image), the same on every device.

    Args:
        images: normalised, `[B, 3, S, S]`.
        positions: int64 `[B]`, in the order of the samples.
        probability: of erasing, for each image.
        seed: of the training.

    Returns:
        the images.

    Source: Random Erasing (arXiv 1708.04896), as timm's mode "pixel", which DeiT and MAE use
    """
    for row, position in enumerate(positions.tolist()):
        rng = np.random.default_rng((seed, position, 0, _STREAM))
        box = draw_rectangle(images.shape[-1], rng) if rng.random() < probability else None
        if box:
            top, left, height, width = box
            noise = torch.from_numpy(rng.standard_normal((3, height, width), dtype=np.float32))
            images[row, :, top : top + height, left : left + width] = sent(noise, images.device)
    return images


def classify_erased(
    model: nn.Module,
    batch: Batch,
    step: int,
    *,
    normalise: Callable[[Tensor], Tensor],
    objective: Callable[..., Tensor],
    probability: float,
    erasing_seed: int,
    **more: Any,
) -> Tensor:
    """Return the loss of another objective, whose images and mixing partners are erased first."""
    own, before = given(batch), batch.neighbour

    def ready(images: Tensor, positions: Tensor) -> Tensor:
        return erased(normalise(images), positions, probability=probability, seed=erasing_seed)

    if before is not None and own.neighbour is not None:
        before = replace(own.neighbour, images=ready(own.neighbour.images, before.positions))
    own = replace(own, images=ready(own.images, batch.positions), neighbour=before)
    return objective(model, own, step, normalise=_as_is, **more)


def _as_is(images: Tensor) -> Tensor:
    return images
