"""Ben Graham's treatment of eye photographs: equal radius, local contrast, a disc on grey."""

import io

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.files import library

RADIUS = 300
_KEPT = 270  # the rim of the eye, 0.9 of the radius and beyond, is cut away
_GREY = 128
_QUALITY = 72


def process_jpeg(data: bytes) -> bytes:
    """The picture as the benchmark stores it, from the bytes of a photograph to the bytes of a JPEG of
    quality 72.
    """
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
    """Half of the bright pixels in the middle row; half of the height when there are none.

    `[H, W, 3]`, in pixels.
    """
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
    """Bilinear without antialiasing, pixel centres at half."""
    rows, columns = (_neighbours(length, scale) for length in image.shape[:2])
    tall = _blend(image[rows[0]].astype(np.float32), image[rows[1]], rows[2][:, None, None])
    both = _blend(tall[:, columns[0]], tall[:, columns[1]], columns[2][None, :, None])
    return np.asarray(np.rint(both), np.uint8)


def _neighbours(length: int, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every new position along an axis: the old one before it, the old one after it, and how far it lies
    between.
    """
    places = np.clip((np.arange(max(1, round(length * scale))) + 0.5) / scale - 0.5, 0, length - 1)
    before = np.floor(places).astype(np.int64)
    return before, np.minimum(before + 1, length - 1), (places - before).astype(np.float32)


def _blend(before: np.ndarray, after: np.ndarray, share: np.ndarray) -> np.ndarray:
    return np.asarray(before + (after - before) * share)
