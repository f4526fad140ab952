"""Transforms from an image to a model's square input, with random choices from a given generator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np
from PIL import Image

from vitctl.data.images.augment import (
    big_vision_randaugment,
    color_jitter,
    three_augment,
    timm_autoaugment,
    timm_randaugment,
)
from vitctl.data.images.decode import BadSample, Picture, Truncated, open_picture
from vitctl.errors import CheckpointError
from vitctl.system import limits
from vitctl.system.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

Resample = Literal["bilinear", "bilinear_antialias", "bicubic_antialias"]
EvalResample = Literal[Resample, "area", "lanczos", "box", "hamming", "nearest"]
Decode = Literal["exact", "scaled"]
EvalMethod = Literal["square", "shorter_side", "torchvision", "transformers", "letterbox"]
Crop = Literal["inception", "random_resized", "random", "padded", "none", "letterbox"]
_FILTERS = {name: Image.Resampling[name.upper()] for name in ("lanczos", "box", "hamming")}
RandAugmentRules = Literal["torchvision", "big_vision", "timm"]
Box = tuple[int, int, int, int]  # top, left, height, width
Colour = tuple[int, int, int]
GREY: Colour = (128, 128, 128)  # the mean colour of weights whose mean is 0.5
_CROP_ATTEMPTS, _RESIZED_ATTEMPTS = 100, 10
_MAX_MAGNITUDE = 30
_AUTO_AUGMENTS = "imagenet", "cifar10", "svhn"
_TORCHVISIONS = *_AUTO_AUGMENTS, "trivial"
_OF_TIMM = "probability", "std", "increasing"
_GREY = [128.0, 128.0, 128.0]  # fill colour outside the image, as in the code of AutoAugment's authors


class Drawn(NamedTuple):
    """The random choices for one image. `corner` is that of the square within the resized image."""

    box: Box
    corner: tuple[int, int]
    flip: bool
    rng: np.random.Generator
    vertical_flip: bool = False


@dataclass(frozen=True)
class TrainTransform:
    """Random crop, resize, flips, then RandAugment or AutoAugment, 3-Augment and colour jitter, in order.

    Args:
        image_size: height and width of the result, in pixels.
        crop: `inception` and `random_resized` crop a random box and resize it: TensorFlow's distribution
            (`inception_box`) or torchvision's (`random_resized_box`); `random` resizes to a square of
            `resize` pixels and crops at a random position (as in BiT); `padded` resizes to `image_size`, pads
            with black to `resize`, and crops so (torchvision's RandomCrop with padding); `none` only resizes;
            `letterbox`: see `EvalTransform`.
        resample: `bilinear` as in TensorFlow, without antialiasing; `bilinear_antialias` and
            `bicubic_antialias` as in Pillow.
        area_range: area of a random box, as a fraction of the image, 0 to 1.
        aspect_range: aspect ratio of a random box, width / height.
        resize: for `random` and `padded`: size before the crop, in pixels.
        decode: `exact`, or `scaled` to decode a large JPEG to 1/2, 1/4 or 1/8 of its size where the crop is
            still at least as large as the result. This is faster, and antialiases.
        randaugment_layers: number of RandAugment operations; 0 for none.
        randaugment_magnitude: 0 to 30; see `rand_augment`.
        randaugment_rules: torchvision's (`rand_augment`), `big_vision_randaugment` or `timm_randaugment`.
        fill: for `letterbox` and timm's RandAugment: colour outside the image; see `fill_colour`.
        randaugment_probability, randaugment_std, randaugment_increasing: see `timm_randaugment`.
        auto_augment: `imagenet`, `cifar10` and `svhn` are torchvision's AutoAugment, `trivial` its
            TrivialAugmentWide, `original` and `v0` of `timm_autoaugment`; '': none. Without RandAugment.

    Paper: Section 4.1 and Appendix B.1.1; the crop is that of the authors' code.
    """

    image_size: int
    crop: Crop = "inception"
    flip: bool = True
    resample: Resample = "bilinear"
    area_range: tuple[float, float] = (0.05, 1.0)
    aspect_range: tuple[float, float] = (0.75, 1.33)
    resize: int = 0
    decode: Decode = "exact"
    randaugment_layers: int = 0
    randaugment_magnitude: int = 9
    exif_orientation: bool = False
    truncated: Truncated = "refuse"
    randaugment_rules: RandAugmentRules = "torchvision"
    vertical_flip: bool = False
    augment3: bool = False
    color_jitter: tuple[float, ...] = ()
    fill: Colour = GREY
    randaugment_probability: float = 0.5
    randaugment_std: float = 0.0
    randaugment_increasing: bool = False
    auto_augment: str = ""

    def __post_init__(self) -> None:
        if self.auto_augment in _TORCHVISIONS or (
            self.randaugment_layers and self.randaugment_rules == "torchvision"
        ):
            # imported before workers are forked, so that they share its memory
            _distortion(self.randaugment_layers, self.randaugment_magnitude, self.auto_augment)

    def __call__(self, image: Picture | np.ndarray, rng: np.random.Generator) -> "Tensor":
        """Transform a picture, of which only the crop is decoded, or uint8 `[H, W, 3]`.

        Returns uint8 `[3, image_size, image_size]`.
        """
        picture = image if isinstance(image, Picture) else Picture(image)
        return self.apply(picture, self.draw(picture.height, picture.width, rng))

    def draw(self, height: int, width: int, rng: np.random.Generator) -> Drawn:
        """Draw the random choices for an image of this size.

        `apply` draws from `rng` again for what changes pixels: RandAugment, 3-Augment and colour jitter.
        """
        corner, box = (0, 0), (0, 0, height, width)
        if self.crop in ("inception", "random_resized"):
            draw_box = inception_box if self.crop == "inception" else random_resized_box
            box = draw_box(height, width, rng, self.area_range, self.aspect_range)
        elif self.crop in ("random", "padded"):
            num_offsets = self.resize - self.image_size + 1
            corner = (int(rng.integers(num_offsets)), int(rng.integers(num_offsets)))
        flip = self.flip and rng.random() < 0.5
        return Drawn(box, corner, flip, rng, self.vertical_flip and rng.random() < 0.5)

    def apply(self, picture: Picture, drawn: Drawn) -> "Tensor":
        """Apply the random choices to an image; returns uint8 `[3, image_size, image_size]`."""
        size, (top, left) = self.image_size, drawn.corner
        pixels = self._before_crop(picture, drawn.box)[:, top : top + size, left : left + size]
        pixels = pixels.flip(2) if drawn.flip else pixels
        pixels = pixels.flip(1) if drawn.vertical_flip else pixels
        return self._distorted(pixels, drawn.rng)

    def kept(self, picture: Picture) -> np.ndarray:
        """Return uint8 `[H, W, 3]`, the same in every epoch: the picture, or what its crop is cut from."""
        whole = 0, 0, picture.height, picture.width
        if not self._crops_last:
            return picture.region(*whole)
        return self._before_crop(picture, whole).permute(1, 2, 0).numpy()

    def write(self, kept: np.ndarray, rng: np.random.Generator, out: np.ndarray) -> None:
        """Write into uint8 `[S, S, 3]` what a call returns for the picture that was `kept`."""
        drawn = self.draw(kept.shape[0], kept.shape[1], rng)
        if not self._crops_last:
            out[:] = self.apply(Picture(kept), drawn).permute(1, 2, 0)
            return
        size, (top, left) = self.image_size, drawn.corner
        down, right = 1 - 2 * drawn.vertical_flip, 1 - 2 * drawn.flip
        out[:] = kept[top : top + size, left : left + size][::down, ::right]
        if self.randaugment_layers or self.auto_augment or self.augment3 or self.color_jitter:
            out[:] = self._distorted(_tensor(out), rng).permute(1, 2, 0)

    @property
    def kept_side(self) -> int:
        """Return the side of what is `kept`, in pixels; 0: that of the picture."""
        resized = self.resize if self.crop in ("random", "padded") else self.image_size
        return resized if self._crops_last else 0

    @cached_property
    def _crops_last(self) -> bool:
        """Return whether the picture is resized as a whole, so that only the crop's position is drawn."""
        return self.crop not in ("inception", "random_resized")

    def _before_crop(self, picture: Picture, box: Box) -> "Tensor":
        size = self.image_size
        if self.crop == "letterbox":
            return _letterboxed(picture, size, self.resample, self.decode, self.fill)
        side = self.resize if self.crop == "random" else size
        pixels = _resized(picture, box, (side, side), self.resample, self.decode)
        return _framed(pixels, (self.resize - size) // 2) if self.crop == "padded" else pixels

    def _distorted(self, pixels: "Tensor", rng: np.random.Generator) -> "Tensor":
        """Return the cropped image after what else changes it."""
        strength: dict[str, Any] = {
            "layers": self.randaugment_layers,
            "magnitude": self.randaugment_magnitude,
        }
        if self.auto_augment in _TORCHVISIONS or (
            self.randaugment_layers and self.randaugment_rules == "torchvision"
        ):
            pixels = rand_augment(pixels, rng, **strength, policy=self.auto_augment)
        elif self.randaugment_layers and self.randaugment_rules == "big_vision":
            pixels = _tensor(big_vision_randaugment(pixels.permute(1, 2, 0).numpy(), rng, **strength))
        elif self.randaugment_layers or self.auto_augment:
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            cubic = self.resample == "bicubic_antialias"
            how: dict[str, Any] = {
                "resample": Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR,
                "fill": self.fill,
            }
            if self.auto_augment:
                image = timm_autoaugment(image, rng, policy=self.auto_augment, **how)
            else:
                how |= {name: getattr(self, f"randaugment_{name}") for name in _OF_TIMM}
                image = timm_randaugment(image, rng, **strength, **how)
            pixels = _tensor(np.array(image))
        if not (self.augment3 or self.color_jitter):
            return pixels
        coloured = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        if self.augment3:
            coloured = three_augment(coloured, rng)
        if self.color_jitter:
            coloured = color_jitter(coloured, self.color_jitter, rng)
        return _tensor(np.array(coloured))


@dataclass(frozen=True)
class EvalTransform:
    """Resize and centre crop.

    Args:
        image_size: height and width of the result, in pixels.
        method: `square` resizes to a square, whatever the aspect ratio; `shorter_side` keeps the aspect ratio
            and resizes the shorter side; `torchvision` is `shorter_side` with torchvision's (and timm's)
            rounding: the longer side is rounded down, a margin of half a pixel to the even number;
            `transformers` rounds such a margin down; `letterbox` resizes the longer side to image_size and
            centres the image, uncropped, on a square of `fill`, with the rounding of timm's crop mode
            `border`.
        resize: size of the square, or of the shorter side, before the centre crop; 0 for image_size.
            `letterbox` ignores it.
        resample: see `TrainTransform`; or `area`, TensorFlow's `ResizeMethod.AREA`, which the authors use in
            evaluation during pre-training: see `area_resized`; `lanczos`, `box` and `hamming` are Pillow's
            filters, `nearest` takes the pixel whose area holds the centre of the new pixel.
        decode, exif_orientation, truncated: see `TrainTransform`.
        fill: colour outside a letterboxed image; see `fill_colour`.

    Raises:
        CheckpointError: `resample`, read from third-party weights, is unknown.

    Paper: the authors' code; Section 4.1 for the resolution.
    """

    image_size: int
    method: EvalMethod = "square"
    resize: int = 0
    resample: EvalResample = "bilinear"
    decode: Decode = "exact"
    exif_orientation: bool = False
    truncated: Truncated = "refuse"
    fill: Colour = GREY

    def __post_init__(self) -> None:
        if self.resample not in (known := get_args(EvalResample)):  # read from third-party weights
            raise CheckpointError(
                f"these weights resize images by {one_line(repr(self.resample))}, which vitctl does not have",
                fix=f"set data.eval_resample to one of {', '.join(known)}",
            )

    def __str__(self) -> str:
        resize = self.resize or self.image_size
        if self.method == "letterbox":
            how = "whole on a square"
        elif self.method != "square":
            how = f"the centre of shorter side {resize}"
        else:
            how = f"the centre of square {resize}" if resize > self.image_size else "squashed"
        return f"images of {self.image_size} pixels, {how}"

    def __call__(self, image: Picture | np.ndarray) -> "Tensor":
        """Transform a picture, or uint8 `[H, W, 3]`, to uint8 `[3, image_size, image_size]`.

        Raises BadSample `too large` for an image so narrow that the resized one exceeds the pixel limit.
        """
        size, picture = self.image_size, image if isinstance(image, Picture) else Picture(image)
        if self.method == "letterbox":
            return _letterboxed(picture, size, self.resample, self.decode, self.fill)
        height = width = self.resize or size
        if self.method != "square":
            height, width = self.scaled(picture.height, picture.width)
            if height * width > limits.PIXELS:
                raise BadSample(
                    "too large",
                    f"{picture.width}x{picture.height} pixels would become {width}x{height}, should be at "
                    f"most {limits.PIXELS:,}",
                )
        whole = 0, 0, picture.height, picture.width
        pixels = _resized(picture, whole, (height, width), self.resample, self.decode)
        top, left = self.margin(height), self.margin(width)
        return pixels[:, top : top + size, left : left + size]

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after the shorter side is scaled to `resize`."""
        target, shorter = self.resize or self.image_size, min(height, width)
        if self.method in ("torchvision", "transformers"):
            return int(target * height / shorter), int(target * width / shorter)
        ratio = target / shorter
        return round(height * ratio), round(width * ratio)

    def margin(self, side: int) -> int:
        """Return the pixels before the centre crop, along one side."""
        spare = side - self.image_size
        return round(spare / 2) if self.method == "torchvision" else spare // 2


def open_for(transform: TrainTransform | EvalTransform, data: bytes) -> Picture:
    """Open an image as a transform reads it; errors are those of `decode`."""
    return open_picture(data, exif_orientation=transform.exif_orientation, truncated=transform.truncated)


def fill_colour(mean: Sequence[float]) -> Colour:
    """Return the colour outside a letterboxed image: the weights' mean, 0 to 1, so about 0 if normalised."""
    red, green, blue = (min(max(round(255 * value), 0), 255) for value in mean)
    return red, green, blue


def augmentation_rng(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return the random generator for one sample in one epoch, independent of worker, rank and order."""
    return np.random.default_rng((seed, epoch, sample))


def inception_box(
    height: int,
    width: int,
    rng: np.random.Generator,
    area_range: tuple[float, float],
    aspect_range: tuple[float, float],
) -> Box:
    """Draw a random crop box with the distribution of `tf.image.sample_distorted_bounding_box`.

    The aspect ratio is uniform in its range; then the height is uniform among those that keep the area in its
    range and the box inside the image (so the side is uniform, not the area). A box that is too small after
    rounding is made one pixel higher, one that is too large one pixel lower, which matters for small images.
    After 100 failures the whole image is returned. As in TensorFlow, arithmetic is float32.

    Args:
        area_range: fraction of the image area, 0 to 1.
        aspect_range: aspect ratio of the box, width / height.

    Returns:
        top, left, height and width of the box, in pixels.
    """
    smallest, largest = (
        np.float32(fraction) * np.float32(width) * np.float32(height) for fraction in area_range
    )
    for _ in range(_CROP_ATTEMPTS):
        aspect = np.float32(rng.uniform(*aspect_range))
        highest = min(height, _highest(width, largest, aspect))
        lowest = min(highest, round(np.sqrt(smallest / aspect)))
        rows = int(rng.integers(lowest, highest + 1))
        columns, area = _width_and_area(rows, aspect)
        if area < smallest:
            rows += 1
            columns, area = _width_and_area(rows, aspect)
        if area > largest:
            rows -= 1
            columns, area = _width_and_area(rows, aspect)
        if smallest <= area <= largest and 0 < rows <= height and 0 < columns <= width:
            return _offset(height - rows, rng), _offset(width - columns, rng), rows, columns
    return 0, 0, height, width


def random_resized_box(
    height: int,
    width: int,
    rng: np.random.Generator,
    area_range: tuple[float, float],
    aspect_range: tuple[float, float],
) -> Box:
    """Draw a random crop box with the distribution of torchvision's (and timm's) RandomResizedCrop.

    Area and logarithm of the aspect ratio are uniform in their ranges; a box that does not fit the image is
    drawn again, ten times in all. Then: the largest box in the centre whose aspect ratio is in its range.
    Arguments and result are those of `inception_box`.
    """
    narrowest, widest = aspect_range
    for _ in range(_RESIZED_ATTEMPTS):
        area = height * width * rng.uniform(*area_range)
        aspect = math.exp(rng.uniform(math.log(narrowest), math.log(widest)))
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            return int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns
    rows, columns = min(height, round(width / narrowest)), min(width, round(height * widest))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def _highest(width: int, largest: np.float32, aspect: np.float32) -> int:
    """Return the largest height of a box with this aspect ratio that fits the image and `largest` area."""
    height: int = round(np.sqrt(largest / aspect))
    if _width_and_area(height, aspect)[0] > width:
        # the largest height whose width still rounds to that of the image
        height = int((width + 0.5 - 1e-7) / float(aspect))
        height -= _width_and_area(height, aspect)[0] > width
    return height


def _width_and_area(height: int, aspect: np.float32) -> tuple[int, np.float32]:
    width = round(np.float32(height) * aspect)
    return width, np.float32(height * width)


def _offset(largest: int, rng: np.random.Generator) -> int:
    """Draw an offset below `largest`; as in TensorFlow, `largest` itself is drawn only if it is 0."""
    return int(rng.integers(largest)) if largest else 0


def area_resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize uint8 `[H, W, C]` to height and width `size` by area averaging, rounded to nearest.

    Each new pixel is the mean of the rectangle that it covers, with fractional weights at the edges. This is
    TensorFlow's `ResizeMethod.AREA` (and OpenCV's INTER_AREA for downsampling). Pillow's BOX and torch's
    `area` differ: they use whole pixels only.
    """
    rows = _area_means(pixels, size[0])
    columns = _area_means(rows.swapaxes(0, 1), size[1]).swapaxes(0, 1)
    return np.floor(columns + 0.5).astype(np.uint8)


def _area_means(values: np.ndarray, size: int) -> np.ndarray:
    """Average `[N, ...]` to float64 `[size, ...]`, by differences of the running sum at pixel edges."""
    number = len(values)
    sums = np.cumsum(values, axis=0, dtype=np.int64 if values.dtype == np.uint8 else np.float64)
    edges = np.arange(size + 1) * (number / size)
    whole = np.minimum(edges.astype(np.int64), number - 1)
    part = (edges - whole).reshape(-1, *[1] * (values.ndim - 1))
    before = sums[whole] - values[whole]  # sum of the pixels that end at or before the edge
    means: np.ndarray = np.diff(before + part * values[whole], axis=0) * (size / number)
    return means


def _resized(
    picture: Picture, box: Box, size: tuple[int, int], resample: EvalResample, decode: Decode
) -> "Tensor":
    """Crop a box and resize it with half-pixel centres, to uint8 `[3, *size]`, channels last in memory."""
    import torch  # here, because a plan needs transforms without torch

    reduce = 1
    if decode == "scaled":
        reduce = next(
            by for by in (8, 4, 2, 1) if by == 1 or (box[2] >= by * size[0] and box[3] >= by * size[1])
        )
    region = picture.region(*box, reduce=reduce, reuse_buffer=True)
    if resample == "area":
        return torch.from_numpy(area_resized(region, size)).permute(2, 0, 1)
    pixels = torch.from_numpy(region)[None].permute(0, 3, 1, 2)
    if pixels.shape[2:] == size:
        return pixels[0].clone()
    if resample in _FILTERS:  # not every version of torch has them
        return _tensor(np.array(Image.fromarray(region).resize(size[::-1], _FILTERS[resample])))
    if resample == "nearest":
        return torch.nn.functional.interpolate(pixels, size, mode="nearest-exact")[0]
    # torch resizes twice as fast in the channels-last layout; [None] after the permutation would hide it.
    mode, _, antialias = resample.partition("_")
    resized = torch.nn.functional.interpolate(
        pixels, size, mode=mode, align_corners=False, antialias=bool(antialias)
    )
    return resized[0]


def _letterboxed(
    picture: Picture, size: int, resample: EvalResample, decode: Decode, fill: Colour
) -> "Tensor":
    """Resize the longer side to `size` and centre the image on a square; result as in `_resized`."""
    ratio = max(picture.height, picture.width) / size
    height, width = (max(1, round(side / ratio)) for side in (picture.height, picture.width))
    whole = 0, 0, picture.height, picture.width
    square = _tensor(np.full((size, size, 3), fill, np.uint8))
    top, left = (size - height) // 2, (size - width) // 2
    square[:, top : top + height, left : left + width] = _resized(
        picture, whole, (height, width), resample, decode
    )
    return square


def _framed(pixels: "Tensor", border: int) -> "Tensor":
    """Put black pixels around an image."""
    import torch

    return torch.nn.functional.pad(pixels, (border,) * 4)


def _tensor(image: np.ndarray) -> "Tensor":
    """Convert uint8 `[H, W, 3]` to `[3, H, W]`, channels last in memory."""
    import torch

    return torch.from_numpy(image).permute(2, 0, 1)


def rand_augment(
    image: "Tensor", rng: np.random.Generator, *, layers: int = 0, magnitude: int = 0, policy: str = ""
) -> "Tensor":
    """Distort one image by `layers` operations, each drawn from the fourteen of RandAugment, or by a policy.

    Args:
        image: uint8 `[3, H, W]`.
        rng: the only source of randomness. torchvision draws from torch's global CPU generator, which is
            seeded from `rng` here and restored afterwards; a policy of AutoAugment draws the same numbers
            from another generator.
        layers: number of operations, at least 1 without a policy.
        magnitude: 0 to 30, as torchvision counts it: 30 is the strongest that AutoAugment had (10 in its
            authors' code).
        policy: `imagenet`, `cifar10` or `svhn` of AutoAugment, or `trivial` for TrivialAugmentWide, instead.

    Returns:
        uint8 `[3, H, W]`, channels last in memory.

    Source: RandAugment (arXiv 1909.13719), AutoAugment (1805.09501), TrivialAugment (2103.10158), by
    torchvision.transforms.v2
    """
    import torch

    seed, pixels = int(rng.integers(2**63)), image.permute(1, 2, 0).numpy()
    if policy in _AUTO_AUGMENTS:
        return _tensor(_auto_augmented(pixels, seed, policy))
    picture = Image.fromarray(pixels)  # takes a third of the time of tensors
    generator = torch.default_generator  # `torch.manual_seed` would also reset the generators of GPUs
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        distorted = _distortion(layers, magnitude, policy)(picture)
    finally:
        generator.set_state(state)
    return _tensor(np.array(distorted))


@lru_cache
def _distortion(layers: int, magnitude: int, policy: str) -> Callable[[Image.Image], Image.Image]:
    """Return torchvision's RandAugment, or its policy of this name."""
    from torchvision.transforms import v2

    if policy == "trivial":
        transform = v2.TrivialAugmentWide(fill=_GREY)
    elif policy:
        transform = v2.AutoAugment(v2.AutoAugmentPolicy(policy), fill=_GREY)
    else:
        transform = v2.RandAugment(layers, magnitude, num_magnitude_bins=_MAX_MAGNITUDE + 1, fill=_GREY)
    return cast(Callable[[Image.Image], Image.Image], transform)


def _auto_augmented(pixels: np.ndarray, seed: int, policy: str) -> np.ndarray:
    """Return what torchvision's AutoAugment makes of uint8 `[H, W, 3]` after `torch.manual_seed(seed)`.

    Its draws and Pillow's results, several times as fast: Pillow computes tables of levels in Python, and
    torchvision draws numbers one by one.
    """
    import torch

    generator, transform = torch.Generator().manual_seed(seed), cast(Any, _distortion(0, 0, policy))
    steps = transform._policies[int(torch.randint(len(transform._policies), (), generator=generator))]
    drawn = iter(torch.rand(4, generator=generator).tolist())  # at most two for each of two operations
    for name, probability, level in steps:
        if next(drawn) > np.float32(probability):
            continue
        strength, is_signed = _strength(policy, name, level, *pixels.shape[:2])
        if is_signed and next(drawn) <= 0.5:
            strength *= -1
        if (table := _levels(name, strength, pixels)) is not None:
            pixels = table.astype(np.uint8).ravel()[pixels + _OFFSETS]
        else:
            apply, how = transform._apply_image_or_video_transform, (transform.interpolation, transform._fill)
            pixels = np.array(apply(Image.fromarray(pixels), name, strength, *how))
    return pixels


@lru_cache(maxsize=1024)
def _strength(policy: str, name: str, level: int | None, height: int, width: int) -> tuple[float, bool]:
    """Return torchvision's strength of an operation, and whether its sign is drawn."""
    strengths, is_signed = cast(Any, _distortion(0, 0, policy))._AUGMENTATION_SPACE[name]
    return (0.0 if level is None else float(strengths(10, height, width)[level])), is_signed


_CHANNELS = np.arange(3)
_OFFSETS = 256 * _CHANNELS
_LEVELS = np.tile(np.arange(256), (3, 1))


def _levels(name: str, strength: float, pixels: np.ndarray) -> np.ndarray | None:
    """Return Pillow's new level for each channel and level, `[3, 256]`; None if it depends on more."""
    levels = _LEVELS
    if name == "Invert":
        return np.asarray(255 - levels)
    if name == "Posterize":
        return np.asarray(levels & -(2 ** (8 - int(strength))))
    if name == "Solarize":
        return np.where(levels < 255.0 * strength, levels, 255 - levels)
    if name not in ("AutoContrast", "Equalize"):
        return None
    counts = np.bincount((pixels + _OFFSETS).ravel(), minlength=768).reshape(3, 256)
    low, high = (counts > 0).argmax(1), 255 - (counts[:, ::-1] > 0).argmax(1)
    if name == "AutoContrast":
        scale = 255.0 / np.maximum(high - low, 1)[:, None]
        spread = np.clip(levels * scale - low[:, None] * scale, 0, 255).astype(np.int64)
        return np.where((high > low)[:, None], spread, levels)
    step = ((counts.sum(1) - counts[_CHANNELS, high]) // 255)[:, None]
    ranks = step // 2 + counts.cumsum(1) - counts
    return np.where(step > 0, np.minimum(ranks // np.maximum(step, 1), 255), levels)
