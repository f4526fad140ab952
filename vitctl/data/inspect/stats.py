"""Statistics of a split: classes, sizes, formats, bytes, and mean and standard deviation of the channels."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

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


@dataclass(frozen=True)
class _Image:
    format: str
    num_bytes: int
    height: int = 0
    width: int = 0
    mean: tuple[float, ...] = ()
    mean_square: tuple[float, ...] = ()
    is_turned: bool = False


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

    images = [
        one
        for found in run_tasks(block, -(-len(chosen) // _IMAGES_PER_TASK), workers=workers, done=done)
        for one in found
    ]
    labels = source.labels()
    read = [image for image in images if image.height]
    means = np.array([image.mean for image in read]).reshape(-1, 3)
    squares = np.array([image.mean_square for image in read]).reshape(-1, 3)
    mean = means.mean(axis=0) if read else np.zeros(3)
    std = np.sqrt(np.maximum(squares.mean(axis=0) - mean**2, 0)) if read else np.zeros(3)
    return Stats(
        num_images=len(source),
        num_classes=len(source.class_names),
        num_unlabelled=int((~has_label(labels)).sum()),
        images_per_class=tuple(np.bincount(labels[labels >= 0], minlength=len(source.class_names)).tolist()),
        num_sampled=len(images),
        num_unreadable=len(images) - len(read),
        num_turned=sum(image.is_turned for image in read),
        formats=dict(Counter(image.format for image in images).most_common()),
        mean_bytes=float(np.mean([image.num_bytes for image in images])),
        widths=_quantiles([image.width for image in read]),
        heights=_quantiles([image.height for image in read]),
        aspects=_quantiles([image.width / image.height for image in read]),
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
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
    mean, square = flat.mean(axis=0, dtype=np.float64), (flat * flat).mean(axis=0, dtype=np.float64)
    height, width = pixels.shape[:2]
    return _Image(
        form,
        len(data),
        height,
        width,
        tuple(mean.tolist()),
        tuple(square.tolist()),
        is_turned=picture.is_turned,
    )


def _quantiles(values: list[float] | list[int]) -> tuple[float, ...]:
    return tuple(np.percentile(values, _PERCENTILES).tolist()) if values else ()
