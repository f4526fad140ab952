"""Distortions of one training image: RandAugment by big_vision's and timm's rules, timm's AutoAugment,
3-Augment, colour jitter.

Images are uint8 `[H, W, 3]`, or Pillow's RGB; random choices come from the caller's generator.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

_FULL = 10.0  # magnitude of full strength for AutoAugment's operations
_DEGREES, _SHEAR, _TRANSLATION, _CUTOUT, _ADDITION = 30.0, 0.3, 100.0, 40, 110
_SHIFT = 0.45  # timm: fraction of the image size
_FILL = np.uint8(128)
_LUMA = np.array([0.2989, 0.5870, 0.1140], np.float32)
_BLUR_RADIUS = 0.1, 2.0  # 3-Augment, in pixels

Weights = tuple[float | np.floating, float | np.floating, float | np.floating]
Operation = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


def big_vision_randaugment(
    image: np.ndarray, rng: np.random.Generator, *, layers: int, magnitude: int
) -> np.ndarray:
    """Distort an image by `layers` operations, each drawn from the sixteen of the paper's authors.

    Unlike torchvision's list, theirs has Invert, Cutout and SolarizeAdd, and no Identity. A magnitude of 10
    is full strength, and larger ones exceed it. Shifts and the cutout are in pixels, whatever the image size.
    Oddities are kept, because the authors trained with them: the grey that Contrast blends with is the number
    of pixels / 256; the numbers of Solarize and Posterize wrap around at 256, so Solarize of magnitude 10 or
    20 inverts; Posterize removes at most 7 bits, which is what it does at magnitude 0.

    Args:
        magnitude: 0 to 30; the authors' configurations have 0 to 20.

    Source: big_vision, pp/autoaugment.py; verified against it with TensorFlow 2.21
    """
    for _ in range(layers):
        name = list(OPERATIONS)[int(rng.integers(len(OPERATIONS)))]
        image = OPERATIONS[name](image, magnitude / _FULL, rng)
    return image


def _blend(first: np.ndarray, second: np.ndarray, factor: float) -> np.ndarray:
    """Blend in float32 and round down; a factor above 1 goes beyond the second image."""
    first, second = first.astype(np.float32), second.astype(np.float32)
    mixed: np.ndarray = np.clip(first + np.float32(factor) * (second - first), 0, 255).astype(np.uint8)
    return mixed


def _strength(level: float) -> float:
    return level * 1.8 + 0.1


def _either_sign(value: float, rng: np.random.Generator) -> np.float32:
    return np.float32(value if rng.random() < 0.5 else -value)


def _affine(image: np.ndarray, x: Weights, y: Weights) -> np.ndarray:
    """Move pixels by nearest neighbour; pixels from outside the image are grey.

    The new pixel at column c and row r is the old one at column x[0] c + x[1] r + x[2] and row y[0] c +
    y[1] r + y[2].
    """
    rows, columns = np.indices(image.shape[:2], np.float32)

    def nearest(weights: Weights) -> np.ndarray:
        a, b, c = (np.float32(weight) for weight in weights)
        place = a * columns + b * rows + c
        rounded: np.ndarray = np.trunc(place + np.copysign(np.float32(0.5), place)).astype(np.int64)
        return rounded

    left, top = nearest(x), nearest(y)
    inside = (left >= 0) & (left < image.shape[1]) & (top >= 0) & (top < image.shape[0])
    moved = image[np.where(inside, top, 0), np.where(inside, left, 0)]
    return np.where(inside[..., None], moved, _FILL)


def _rotate(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    angle = _either_sign(level * _DEGREES, rng) * np.float32(math.pi / 180)
    cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    bottom, right = (np.float32(side - 1) for side in image.shape[:2])
    across = (right - (cosine * right - sine * bottom)) / 2
    down = (bottom - (sine * right + cosine * bottom)) / 2
    return _affine(image, (cosine, -sine, across), (sine, cosine, down))


def _cutout(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    half = int(level * _CUTOUT)
    row, column = (int(rng.integers(side)) for side in image.shape[:2])
    result = image.copy()
    result[max(0, row - half) : row + half, max(0, column - half) : column + half] = _FILL
    return result


def _autocontrast(image: np.ndarray, _level: float, _rng: np.random.Generator) -> np.ndarray:
    low, high = (edge(axis=(0, 1)).astype(np.float32) for edge in (image.min, image.max))
    scale = np.float32(255) / np.where(high > low, high - low, 1)
    stretched = np.clip(image.astype(np.float32) * scale + -low * scale, 0, 255).astype(np.uint8)
    return np.where(high > low, stretched, image)


def _equalize(image: np.ndarray, _level: float, _rng: np.random.Generator) -> np.ndarray:
    result = image.copy()
    for colour in range(3):
        counts = np.bincount(image[..., colour].ravel(), minlength=256)
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        if step:
            table = np.concatenate(([0], ((counts.cumsum() + step // 2) // step)[:-1]))
            result[..., colour] = np.clip(table, 0, 255)[image[..., colour]]
    return result


def _posterize(image: np.ndarray, level: float, _rng: np.random.Generator) -> np.ndarray:
    bits = min((8 - int(level * 4)) % 256, 7)
    return image >> bits << bits


def _solarize_add(image: np.ndarray, level: float, _rng: np.random.Generator) -> np.ndarray:
    added = np.minimum(image.astype(np.int64) + int(level * _ADDITION), 255).astype(np.uint8)
    return np.where(image < 128, added, image)


def _color(image: np.ndarray, level: float, _rng: np.random.Generator) -> np.ndarray:
    red, green, blue = np.moveaxis(image.astype(np.float32) * np.float32(1 / 255) * _LUMA, 2, 0)
    grey = (red + green + blue) * np.float32(255.5)
    return _blend(grey.astype(np.uint8)[..., None], image, _strength(level))


def _contrast(image: np.ndarray, level: float, _rng: np.random.Generator) -> np.ndarray:
    grey = min(image.shape[0] * image.shape[1] // 256, 255)
    return _blend(np.full_like(image, grey), image, _strength(level))


def _sharpness(image: np.ndarray, level: float, _rng: np.random.Generator) -> np.ndarray:
    height, width = image.shape[:2]
    pixels, smooth = image.astype(np.float32), np.zeros((height - 2, width - 2, 3), np.float32)
    for row in range(3):
        for column in range(3):
            weight = np.float32(5 if row == column == 1 else 1) / np.float32(13)
            taps = pixels[row : row + height - 2, column : column + width - 2]
            smooth = (smooth + np.float64(weight) * taps).astype(np.float32)  # one rounding, as in TensorFlow
    blurred = image.copy()
    blurred[1:-1, 1:-1] = np.clip(smooth, 0, 255).astype(np.uint8)
    return _blend(blurred, image, _strength(level))


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Invert": lambda image, _level, _rng: 255 - image,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": lambda image, by, _rng: np.where(image < int(by * 256) % 256, image, 255 - image),
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": lambda image, by, _rng: _blend(np.zeros_like(image), image, _strength(by)),
    "Sharpness": _sharpness,
    "ShearX": lambda image, by, rng: _affine(image, (1, _either_sign(by * _SHEAR, rng), 0), (0, 1, 0)),
    "ShearY": lambda image, by, rng: _affine(image, (1, 0, 0), (_either_sign(by * _SHEAR, rng), 1, 0)),
    "TranslateX": lambda image, by, rng: _affine(
        image, (1, 0, _either_sign(by * _TRANSLATION, rng)), (0, 1, 0)
    ),
    "TranslateY": lambda image, by, rng: _affine(
        image, (1, 0, 0), (0, 1, _either_sign(by * _TRANSLATION, rng))
    ),
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}


class Strength(NamedTuple):
    """Strength of timm's operations: `share` of the full strength, 0 to 1, with a drawn `sign`.

    `increasing`: enhancements differ from the unchanged image by `share`, in the direction of `sign`, and
    Posterize and Solarize grow with it. Otherwise AutoAugment's: factors from 0.1 to 1.9, and less change at
    a larger share.
    """

    share: float
    sign: int
    increasing: bool
    resample: Image.Resampling
    fill: tuple[int, int, int]

    def signed(self, full: float) -> float:
        """Return the share of `full`, with the drawn sign."""
        return self.sign * (self.share * full)

    def kept(self, full: int) -> int:
        """Return the share of `full`, rounded down; or what remains of `full` if strength increases."""
        part = int(self.share * full)
        return full - part if self.increasing else part

    @property
    def factor(self) -> float:
        """Factor of Pillow's enhancements; 1 changes nothing."""
        return max(0.1, 1.0 + self.signed(0.9)) if self.increasing else self.share * 1.8 + 0.1


def timm_randaugment(
    image: Image.Image,
    rng: np.random.Generator,
    *,
    layers: int,
    magnitude: float,
    probability: float,
    std: float,
    increasing: bool,
    resample: Image.Resampling,
    fill: tuple[int, int, int],
) -> Image.Image:
    """Distort an image by up to `layers` operations, each drawn from the fifteen of timm.

    There is no Cutout and no Identity. An operation is applied with `probability`, so many images stay
    unchanged. Shifts are fractions of the image size.

    Args:
        magnitude: 0 to 10, the full strength.
        std: standard deviation of a magnitude, which is drawn for each operation and then clipped to 0..10.
        resample: filter of rotations, shears and shifts.
        fill: colour of the pixels from outside the image.

    Source: timm, data/auto_augment.py
    """
    for _ in range(layers):
        operation = list(TIMM_OPERATIONS.values())[int(rng.integers(len(TIMM_OPERATIONS)))]
        applies, sign = rng.random() < probability, 1 if rng.random() < 0.5 else -1
        share = min(max(float(rng.normal(magnitude, std)), 0.0), _FULL) / _FULL
        if applies:
            image = operation(image, Strength(share, sign, increasing, resample, fill))
    return image


def timm_autoaugment(
    image: Image.Image,
    rng: np.random.Generator,
    *,
    policy: str,
    resample: Image.Resampling,
    fill: tuple[int, int, int],
) -> Image.Image:
    """Distort an image by a pair of operations of a policy in `TIMM_POLICIES`, each with equal chance.

    Args:
        image: RGB.
        rng: the only source of randomness.
        policy: its name.
        resample, fill: see `timm_randaugment`.

    Source: AutoAugment (arXiv 1805.09501), Table 9, by timm, data/auto_augment.py
    """
    pairs = TIMM_POLICIES[policy].split(";")
    for step in pairs[int(rng.integers(len(pairs)))].split(","):
        name, probability, level = step.split()
        applies, sign = rng.random() < float(probability), 1 if rng.random() < 0.5 else -1
        if applies:
            strength = Strength(int(level) / _FULL, sign, False, resample, fill)
            image = _OF_POLICIES[name](image, strength)
    return image


def _warped(image: Image.Image, by: Strength, matrix: tuple[float, ...]) -> Image.Image:
    """Fetch each pixel from its position under Pillow's affine matrix."""
    affine = Image.Transform.AFFINE
    return image.transform(image.size, affine, matrix, resample=by.resample, fillcolor=by.fill)


def _posterized(image: Image.Image, by: Strength, at_least: int = 0) -> Image.Image:
    """Keep the highest bits; none at full strength, which Pillow allowed before version 13."""
    cut = 8 - at_least - by.kept(4)
    return image.point([value >> cut << cut for value in range(256)] * 3)


def _brightened_below_half(image: Image.Image, by: Strength) -> Image.Image:
    added = int(by.share * _ADDITION)
    return image.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


TIMM_OPERATIONS: dict[str, Callable[[Image.Image, Strength], Image.Image]] = {
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Invert": lambda image, _: ImageOps.invert(image),
    "Rotate": lambda image, by: image.rotate(by.signed(_DEGREES), resample=by.resample, fillcolor=by.fill),
    "Posterize": _posterized,
    "Solarize": lambda image, by: ImageOps.solarize(image, by.kept(256)),
    "SolarizeAdd": _brightened_below_half,
    "Color": lambda image, by: ImageEnhance.Color(image).enhance(by.factor),
    "Contrast": lambda image, by: ImageEnhance.Contrast(image).enhance(by.factor),
    "Brightness": lambda image, by: ImageEnhance.Brightness(image).enhance(by.factor),
    "Sharpness": lambda image, by: ImageEnhance.Sharpness(image).enhance(by.factor),
    "ShearX": lambda image, by: _warped(image, by, (1, by.signed(_SHEAR), 0, 0, 1, 0)),
    "ShearY": lambda image, by: _warped(image, by, (1, 0, 0, by.signed(_SHEAR), 1, 0)),
    "TranslateX": lambda image, by: _warped(image, by, (1, 0, by.signed(_SHIFT) * image.width, 0, 1, 0)),
    "TranslateY": lambda image, by: _warped(image, by, (1, 0, 0, 0, 1, by.signed(_SHIFT) * image.height)),
}

_OF_POLICIES: dict[str, Callable[[Image.Image, Strength], Image.Image]] = {
    **TIMM_OPERATIONS,
    "Posterize4": partial(_posterized, at_least=4),
}

# Pairs of operations, each with its probability and level, 0 to 10. "original" is the policy of the paper for
# ImageNet, where Posterize keeps 4 to 8 bits; "v0" that of EfficientNet's code.
TIMM_POLICIES = {
    "original": """
        Posterize4 .4 8, Rotate .6 9; Solarize .6 5, AutoContrast .6 5; Equalize .8 8, Equalize .6 3;
        Posterize4 .6 7, Posterize4 .6 6; Equalize .4 7, Solarize .2 4; Equalize .4 4, Rotate .8 8;
        Solarize .6 3, Equalize .6 7; Posterize4 .8 5, Equalize 1 2; Rotate .2 3, Solarize .6 8;
        Equalize .6 8, Posterize4 .4 6; Rotate .8 8, Color .4 0; Rotate .4 9, Equalize .6 2;
        Equalize 0 7, Equalize .8 8; Invert .6 4, Equalize 1 8; Color .6 4, Contrast 1 8;
        Rotate .8 8, Color 1 2; Color .8 8, Solarize .8 7; Sharpness .4 7, Invert .6 8;
        ShearX .6 5, Equalize 1 9; Color .4 0, Equalize .6 3; Equalize .4 7, Solarize .2 4;
        Solarize .6 5, AutoContrast .6 5; Invert .6 4, Equalize 1 8; Color .6 4, Contrast 1 8;
        Equalize .8 8, Equalize .6 3""",
    "v0": """
        Equalize .8 1, ShearY .8 4; Color .4 9, Equalize .6 3; Color .4 1, Rotate .6 8;
        Solarize .8 3, Equalize .4 7; Solarize .4 2, Solarize .6 2; Color .2 0, Equalize .8 8;
        Equalize .4 8, SolarizeAdd .8 3; ShearX .2 9, Rotate .6 8; Color .6 1, Equalize 1 2;
        Invert .4 9, Rotate .6 0; Equalize 1 9, ShearY .6 3; Color .4 7, Equalize .6 0;
        Posterize .4 6, AutoContrast .4 7; Solarize .6 8, Color .6 9; Solarize .2 4, Rotate .8 9;
        Rotate 1 7, TranslateY .8 9; ShearX 0 0, Solarize .8 4; ShearY .8 0, Color .6 4;
        Color 1 0, Rotate .6 2; Equalize .8 4, Equalize 0 8; Equalize 1 4, AutoContrast .6 2;
        ShearY .4 7, SolarizeAdd .6 7; Posterize .8 2, Solarize .6 10; Solarize .6 8, Equalize .6 1;
        Color .8 6, Rotate .4 5""",
}


def three_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Convert an image to grey, solarize it or blur it: one of the three, with equal probability.

    Source: DeiT III (arXiv 2204.07118), section 3, and its authors' code: a blur of radius 0.1 to 2 pixels
    """
    match int(rng.integers(3)):
        case 0:
            return image.convert("L").convert("RGB")
        case 1:
            return ImageOps.solarize(image)
        case _:
            return image.filter(ImageFilter.GaussianBlur(float(rng.uniform(*_BLUR_RADIUS))))


def color_jitter(image: Image.Image, strengths: tuple[float, ...], rng: np.random.Generator) -> Image.Image:
    """Change brightness, contrast, saturation and hue, in random order.

    Args:
        strengths: one for each; the first three draw a factor from 1 - strength, at least 0, to 1 + strength,
            the hue a shift from -strength to +strength, as a fraction of the colour circle.

    Source: the rules of torchvision's ColorJitter
    """
    for number in rng.permutation(len(strengths)).tolist():
        strength = strengths[number]
        if not strength:
            continue
        if number == _HUE:
            from torchvision.transforms.functional import adjust_hue

            image = adjust_hue(image, float(rng.uniform(-strength, strength)))
        else:
            factor = float(rng.uniform(max(0.0, 1 - strength), 1 + strength))
            image = _ENHANCERS[number](image).enhance(factor)
    return image


_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_HUE = len(_ENHANCERS)
