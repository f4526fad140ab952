"""Diabetic Retinopathy: photographs of the retina in five grades, treated as in the benchmark's btgraham-300.

The treatment is Ben Graham's: equal radius, local contrast, a disc on grey.
"""

import csv
import io
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.files import file_items, library, need, numbered_labels, read_lines
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError

_CLASSES = ("no retinopathy", "mild", "moderate", "severe", "proliferative")
RADIUS = 300
_KEPT = 270  # the rim of the eye, 0.9 of the radius and beyond, is cut away
_GREY = 128
_QUALITY = 72


def read_retinopathy(root: Path) -> dict[str, Originals]:
    """Read the competition's images, which are treated when they are read; keys are names like `10_left`.

    Both `validation` and `test` come from the competition's test images, by the column Usage of the solution.

    Args:
        root: holds `train/`, `test/`, `trainLabels.csv` and `retinopathy_solution.csv`.
    """
    labels, solution = need(root, "trainLabels.csv"), need(root, "retinopathy_solution.csv")
    parts = {
        "train": (need(root, "train"), labels, ""),
        "validation": (need(root, "test"), solution, "Public"),
        "test": (need(root, "test"), solution, "Private"),
    }
    return {split: _split(*part) for split, part in parts.items()}


def _split(folder: Path, path: Path, usage: str) -> Originals:
    rows = list(csv.DictReader(read_lines(path)))
    columns = ("image", "level", "Usage") if usage else ("image", "level")
    if not rows or any(row.get(name) is None for row in rows for name in columns):
        raise DataError(f"{path}: every row should have the columns {', '.join(columns)}")
    rows = [row for row in rows if not usage or row["Usage"] == usage]
    if not rows:
        raise DataError(f"{path}: no row has Usage {usage}")
    labels = numbered_labels((row["level"] for row in rows), len(_CLASSES), path, first=0)
    keys = [row["image"] for row in rows]
    photographs = file_items(folder, [f"{key}.jpeg" for key in keys], labels, keys)
    treated = [Item(item.key, item.label, partial(_treated, item)) for item in photographs]
    return Originals(treated, _CLASSES, "Diabetic Retinopathy, btgraham-300")


def _treated(photograph: Item) -> bytes:
    return process_jpeg(photograph.read())


def process_jpeg(data: bytes) -> bytes:
    """Return the picture as the benchmark stores it, a JPEG of quality 72, from the bytes of a photograph."""
    with Image.open(io.BytesIO(data)) as image:
        treated = process(np.asarray(image.convert("RGB")))
    file = io.BytesIO()
    Image.fromarray(treated).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def process(image: np.ndarray) -> np.ndarray:
    """Scale the eye to a radius of 300 pixels, subtract the local mean colour, and crop to the disc of radius
    270.

    Args:
        image: uint8 `[H, W, 3]`.

    Returns:
        uint8, at most `[540, 540, 3]`; 128 outside of the disc. Within 4 levels of OpenCV's arithmetic.
    """
    scaled = _resize(image, RADIUS / eye_radius(image))
    sharpened = _subtract_local_mean(scaled)
    height, width = scaled.shape[:2]
    y, x = np.ogrid[:height, :width]
    middle_y, middle_x = height // 2, width // 2
    disc = (y - middle_y) ** 2 + (x - middle_x) ** 2 <= _KEPT**2
    treated = np.where(disc[:, :, None], sharpened, np.uint8(_GREY))
    return treated[max(middle_y - _KEPT, 0) : middle_y + _KEPT, max(middle_x - _KEPT, 0) : middle_x + _KEPT]


def eye_radius(image: np.ndarray) -> float:
    """Return half the number of bright pixels in the middle row of `[H, W, 3]`; half the height if none."""
    line = image[image.shape[0] // 2].sum(axis=1, dtype=np.int64)
    radius = float((line > line.mean() / 10).sum()) / 2
    return radius if radius >= 1 else image.shape[0] / 2


def _subtract_local_mean(image: np.ndarray) -> np.ndarray:
    ndimage = library("scipy.ndimage")
    planes = [
        ndimage.gaussian_filter(image[:, :, c].astype(np.float32), 10, mode="mirror", truncate=3.0)
        for c in range(3)
    ]
    local_mean = np.rint(np.stack(planes, axis=2))  # to whole levels, as an 8-bit filter gives them
    levels: np.ndarray = np.clip(4 * (image - local_mean) + _GREY, 0, 255)
    return levels.astype(np.uint8)


def _resize(image: np.ndarray, scale: float) -> np.ndarray:
    """Resize bilinearly without antialiasing, with pixel centres at half."""
    rows, columns = (_neighbours(length, scale) for length in image.shape[:2])
    above, below = image[rows[0]].astype(np.float32), image[rows[1]]
    tall = above + (below - above) * rows[2][:, None, None]
    left, right = tall[:, columns[0]], tall[:, columns[1]]
    return np.asarray(np.rint(left + (right - left) * columns[2][None, :, None]), np.uint8)


def _neighbours(length: int, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each new position on an axis the old ones before and after it, and how far between it is."""
    places = np.clip((np.arange(max(1, round(length * scale))) + 0.5) / scale - 0.5, 0, length - 1)
    before = np.floor(places).astype(np.int64)
    return before, np.minimum(before + 1, length - 1), (places - before).astype(np.float32)
