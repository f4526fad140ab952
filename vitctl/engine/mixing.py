"""MixUp, CutMix and Random Erasing of batches on the device.

An image's partner is the image before it in the global batch; the first image's partner is the last. A
batch's blend is a function of (seed, step), an image's rectangle one of (seed, position). So the result
depends neither on micro-batches nor on processes or workers, and a micro-batch needs one additional image.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitctl.engine.runtime import sent

Box = tuple[int, int, int, int]  # top, left, bottom, right
# Separates these random draws from those of the augmentation.
_MIXING_STREAM, _ERASING_STREAM = 0x6D6978, 0x657261
_AREAS, _LOG_ASPECTS, _ATTEMPTS = (0.02, 1 / 3), (math.log(0.3), math.log(1 / 0.3)), 10


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
