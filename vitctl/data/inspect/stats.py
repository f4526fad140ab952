"""Statistics of a split: classes, sizes, formats, bytes, and mean and standard deviation of the channels."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.images.image_types import image_extension
from vitctl.data.source.views import Source, has_label
from vitctl.system.pool import Done, run_tasks

_PERCENTILES = (0, 25, 50, 75, 100)
_IMAGES_PER_TASK = 64


@dataclass(frozen=True)
class Stats:
    """A split in numbers. Quantiles are the least, the three quartiles and the largest.

    Args:
        num_images: in the split.
        num_classes: with a name.
        num_unlabelled: images without a label.
        images_per_class: in label order; an image of several classes counts in each.
        num_sampled: images that the rest was measured on, spread evenly over the split.
        num_unreadable: of these, images that cannot be decoded; they count in formats and bytes alone.
        num_turned: of these, images that their Exif orientation turns; the rest is measured on them upright.
        formats: images of each format, by their first bytes.
        mean_bytes: of an image's file.
        widths: quantiles, in pixels.
        heights: quantiles, in pixels.
        aspects: quantiles of width by height.
        mean: of red, green and blue, 0 to 1; every image counts the same, whatever its size.
        std: of the pixels around it.
    """

    num_images: int
    num_classes: int
    num_unlabelled: int
    images_per_class: tuple[int, ...]
    num_sampled: int
    num_unreadable: int
    num_turned: int
    formats: dict[str, int]
    mean_bytes: float
    widths: tuple[float, ...]
    heights: tuple[float, ...]
    aspects: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


class _Image(NamedTuple):
    """What was measured on an image.

    `numbers` are height, width, whether it was turned, mean and mean square of red, green and blue; None for
    an image that cannot be decoded.
    """

    format: str
    num_bytes: int
    numbers: tuple[float, ...] | None = None


def measure(
    source: Source, *, num_images: int = 1000, workers: int = 0, done: Done = lambda _: None
) -> Stats:
    """Count the labels of a split, and decode some of its images.

    Args:
        source: the split.
        num_images: how many to decode, spread evenly; 0 for all.
        workers: processes; 0: this one.
        done: called with how many images were decoded since the last call.
    """
    chosen = np.unique(
        np.linspace(0, len(source) - 1, min(num_images or len(source), len(source))).round().astype(np.int64)
    )

    def block(task: int, done: Done) -> list[_Image]:
        found = []
        for sample in chosen[task * _IMAGES_PER_TASK : (task + 1) * _IMAGES_PER_TASK].tolist():
            found.append(_measured(source, sample))
            done(1)
        return found

    blocks = run_tasks(block, -(-len(chosen) // _IMAGES_PER_TASK), workers=workers, done=done)
    images = [image for images in blocks for image in images]
    labels = source.labels()
    numbers = np.array([image.numbers for image in images if image.numbers]).reshape(-1, 9)
    heights, widths, turned = numbers[:, :3].T
    mean, mean_square = np.zeros(3), np.zeros(3)
    if len(numbers):
        mean, mean_square = numbers[:, 3:6].mean(axis=0), numbers[:, 6:].mean(axis=0)
    return Stats(
        num_images=len(source),
        num_classes=len(source.class_names),
        num_unlabelled=int((~has_label(labels)).sum()),
        images_per_class=tuple(np.bincount(labels[labels >= 0], minlength=len(source.class_names)).tolist()),
        num_sampled=len(images),
        num_unreadable=len(images) - len(numbers),
        num_turned=int(turned.sum()),
        formats=dict(Counter(image.format for image in images).most_common()),
        mean_bytes=float(np.mean([image.num_bytes for image in images])),
        widths=_quantiles(widths),
        heights=_quantiles(heights),
        aspects=_quantiles(widths / heights),
        mean=tuple(mean.tolist()),
        std=tuple(np.sqrt(np.maximum(mean_square - mean**2, 0)).tolist()),
    )


def _measured(source: Source, sample: int) -> _Image:
    try:
        data = source.read(sample)
    except BadSample:
        return _Image("unreadable", 0)
    form = image_extension(data) or "other"
    try:
        picture = open_picture(data)
        pixels = picture.region(0, 0, picture.height, picture.width)
    except BadSample:
        return _Image(form, len(data))
    flat = pixels.reshape(-1, 3).astype(np.float32) / 255
    means = (*flat.mean(axis=0, dtype=np.float64), *(flat * flat).mean(axis=0, dtype=np.float64))
    return _Image(form, len(data), (*pixels.shape[:2], picture.is_turned, *means))


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.percentile(values, _PERCENTILES).tolist()) if len(values) else ()
