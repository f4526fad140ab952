"""A split at a glance: statistics, and contact sheets with a caption under each thumbnail."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo

from vitctl.data.images.decode import BadSample, decode, open_picture
from vitctl.data.images.image_types import image_extension
from vitctl.data.images.pixel_digest import pixel_digest, pixel_notes
from vitctl.data.images.transforms import TrainTransform, augmentation_rng
from vitctl.data.shards.index import has_label
from vitctl.data.source.views import Source, sample_key
from vitctl.system.figures import drawable
from vitctl.system.files import atomic_write
from vitctl.system.pool import Done, run_each
from vitctl.system.text import one_line

_CELL, _GAP, _MARGIN = 148, 14, 36
_CAPTION, _TITLE = 15, 26
_LINE = 21
_PAPER, _FRAME, _INK, _PALE = (252, 252, 250), (238, 238, 234), (32, 33, 36), (120, 122, 126)
_BAD = (200, 60, 50)
_TITLE_HEIGHT = 76
_DRAWS = 5
MARK = b"Software\0vitctl"  # distinguishes a page from a photo, which is never replaced


@dataclass(frozen=True, eq=False)
class Cell:
    """A thumbnail and up to two lines of caption, the second in grey; "unreadable" without pixels."""

    pixels: np.ndarray | None
    caption: str
    remark: str = ""


def draw_sheet(cells: Sequence[Cell], *, columns: int, title: str, subtitle: str = "") -> Image.Image:
    """Lay out pictures, uint8 `[H, W, 3]` of any size, in rows; small ones are enlarged without blur."""
    rows = -(-len(cells) // columns)
    pitch, height = _CELL + _GAP, _CELL + 2 * _LINE + _GAP + 6
    page = Image.new(
        "RGB", (2 * _MARGIN + columns * pitch - _GAP, _TITLE_HEIGHT + rows * height + _MARGIN // 2), _PAPER
    )
    pen = ImageDraw.Draw(page)
    title, large = drawable(one_line(title), _TITLE)
    small = ImageFont.load_default(_CAPTION)
    pen.text((_MARGIN, 24), title, _INK, large)
    begin = _MARGIN + pen.textlength(title, large) + 18
    _write(pen, (begin, 34), subtitle, _PALE, page.width - _MARGIN - begin)
    for number, cell in enumerate(cells):
        left, top = _MARGIN + number % columns * pitch, _TITLE_HEIGHT + number // columns * height
        pen.rounded_rectangle((left, top, left + _CELL - 1, top + _CELL - 1), 6, _FRAME)
        if cell.pixels is None:
            pen.text((left + _CELL / 2, top + _CELL / 2), "unreadable", _BAD, small, anchor="mm")
        else:
            picture = _fitted(cell.pixels)
            page.paste(picture, (left + (_CELL - picture.width) // 2, top + (_CELL - picture.height) // 2))
        _write(pen, (left, top + _CELL + 5), cell.caption, _INK)
        _write(pen, (left, top + _CELL + 5 + _LINE), cell.remark, _PALE)
    return page


def show_augmented(
    source: Source,
    samples: Sequence[int],
    transform: TrainTransform,
    *,
    seed: int,
    title: str,
    subtitle: str = "",
) -> Image.Image:
    """Draw a row for each image: the original, and what training sees of it in its first five epochs."""
    cells = []
    for sample in samples:
        original = cell(source, sample)
        cells.append(original)
        for epoch in range(_DRAWS):
            pixels = None
            if original.pixels is not None:
                drawn = transform(original.pixels, augmentation_rng(seed, epoch, sample))
                pixels = drawn.permute(1, 2, 0).numpy()
            cells.append(Cell(pixels, f"epoch {epoch}", f"{transform.image_size} x {transform.image_size}"))
    return draw_sheet(cells, columns=1 + _DRAWS, title=title, subtitle=subtitle)


def cell(source: Source, sample: int) -> Cell:
    labels = np.atleast_1d(source.labels(np.array([sample]))[0])
    names = [source.class_names[label] for label in labels.tolist() if label >= 0]
    caption = ", ".join(names) or "no label"
    try:
        pixels = decode(source.read(sample))
    except BadSample as error:
        return Cell(None, caption, error.reason)
    return Cell(pixels, caption, f"{pixels.shape[1]} x {pixels.shape[0]}")


def choose(num_samples: int, num_images: int, seed: int) -> list[int]:
    """Choose samples at random, in ascending order, by seed."""
    rng = np.random.default_rng(seed)
    return sorted(rng.choice(num_samples, min(num_images, num_samples), replace=False).tolist())


def save(page: Image.Image, path: Path) -> None:
    """Write a page as PNG, atomically; `MARK` is near its start."""
    with atomic_write(path) as aside:
        about = PngInfo()
        about.add_text("Software", "vitctl")
        page.save(aside, "PNG", optimize=True, pnginfo=about)


def _fitted(pixels: np.ndarray) -> Image.Image:
    image = Image.fromarray(np.ascontiguousarray(pixels))
    is_small = 2 * max(image.size) <= _CELL
    return ImageOps.contain(
        image, (_CELL, _CELL), Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
    )


def _write(
    pen: ImageDraw.ImageDraw,
    place: tuple[float, float],
    text: str,
    colour: tuple[int, int, int],
    width: float = _CELL,
) -> None:
    """Write a text, or as much of its beginning as fits."""
    text, font = drawable(one_line(" ".join(text.split())), _CAPTION)
    if pen.textlength(text, font) > width:
        while text and pen.textlength(text + " …", font) > width:
            text = text[:-1]
        text = text.rstrip() + " …"
    pen.text((place[0], place[1] + _CAPTION), text, colour, font, anchor="ls")  # fonts differ in height


# Statistics: classes, sizes, formats, bytes, and mean and standard deviation of the channels

_PERCENTILES = (0, 25, 50, 75, 100)
_MEASURED_PER_TASK = 64


@dataclass(frozen=True)
class Stats:
    """A split in numbers. Quantiles are the minimum, the three quartiles and the maximum.

    Args:
        images_per_class: in label order; an image of several classes counts in each.
        num_sampled: images measured for the fields below, spread evenly over the split.
        num_unreadable: images that cannot be decoded; they count in formats and bytes only.
        num_turned: images rotated by their Exif orientation; sizes are upright.
        formats: images of each format, by their first bytes.
        widths, heights: quantiles, in pixels.
        aspects: quantiles of width / height.
        mean: of red, green and blue, 0 to 1; every image counts equally, whatever its size.
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
    notes: tuple[str, ...]


class _Measured(NamedTuple):
    """Measurements of one image.

    `numbers`: height, width, whether turned, mean and mean square of red, green and blue; None if unreadable.
    """

    format: str
    num_bytes: int
    numbers: tuple[float, ...] | None = None
    digest: bytes = b""


def measure(
    source: Source, *, num_images: int = 1000, workers: int = 0, done: Done = lambda _: None
) -> Stats:
    """Count the labels of a split, and decode `num_images` of it, spread evenly; 0 for all."""
    chosen = np.unique(
        np.linspace(0, len(source) - 1, min(num_images or len(source), len(source))).round().astype(np.int64)
    ).tolist()
    images = run_each(
        lambda number: _measured(source, chosen[number]),
        len(chosen),
        _MEASURED_PER_TASK,
        workers=workers,
        done=done,
    )
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
        notes=look_alikes(source, chosen, [image.digest for image in images]),
    )


def look_alikes(source: Source, samples: Sequence[int], digests: Sequence[bytes]) -> tuple[str, ...]:
    """Return the `pixel_notes` of some samples, given the pixel digest of each."""
    notes = pixel_notes(
        digests,
        lambda number: sample_key(source, samples[number]),
        lambda number: label_text(source, samples[number]),
    )
    return tuple(notes)


def label_text(source: Source, sample: int) -> str:
    """Return the class names of an image, joined by `;`; empty without a label."""
    labels = source.labels(np.array([sample])).reshape(-1).tolist()
    return ";".join(sorted(source.class_names[label] for label in labels if label >= 0))


def _measured(source: Source, sample: int) -> _Measured:
    try:
        data = source.read(sample)
    except BadSample:
        return _Measured("unreadable", 0)
    form = image_extension(data) or "other"
    try:
        picture = open_picture(data)
        pixels = picture.region(0, 0, picture.height, picture.width)
    except BadSample:
        return _Measured(form, len(data))
    flat = pixels.reshape(-1, 3).astype(np.float32) / 255
    means = (*flat.mean(axis=0, dtype=np.float64), *(flat * flat).mean(axis=0, dtype=np.float64))
    numbers = (*pixels.shape[:2], picture.is_turned, *means)
    return _Measured(form, len(data), numbers, pixel_digest(pixels))


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.percentile(values, _PERCENTILES).tolist()) if len(values) else ()
