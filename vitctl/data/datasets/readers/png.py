"""Pixels to PNG, for data sets that are arrays or programs."""

import io

import numpy as np
from PIL import Image


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode an image without loss.

    Args:
        pixels: uint8 `[H, W]` or `[H, W, 3]`.
    """
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()
