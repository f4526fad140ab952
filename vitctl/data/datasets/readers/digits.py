"""The 1,797 hand-written digits that come with scikit-learn: real scans that need no download."""

from functools import partial

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.source.splits import md5_order
from vitctl.data.writer.items import Item

CLASS_NAMES = tuple("0123456789")
SIZES = {"train": 1437, "test": 360}
SIDE = 32


def items(split: str) -> list[Item]:
    """Digits of one split, as PNG files of 32x32 pixels.

    The scans have 8x8 pixels of 17 grey levels; they are enlarged to 32x32 with a bicubic filter.
    The first 1,437 in md5 order are the training split, the other 360 the test split.

    Args:
        split: `train` or `test`.

    Raises:
        KeyError: there is no such split.

    Source: scikit-learn `load_digits`, the test set of UCI "Optical Recognition of Handwritten Digits".
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = md5_order(range(len(digits.images)), "train")
    chosen = {"train": order[: SIZES["train"]], "test": order[SIZES["train"] :]}[split]
    return [
        Item(f"digit_{number:04d}", int(digits.target[number]), partial(_png, digits.images[number]))
        for number in chosen
    ]


def _png(scan: np.ndarray) -> bytes:
    grey = np.round(scan * (255 / 16)).astype(np.uint8)
    enlarged = np.asarray(Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    return encode_png(np.repeat(enlarged[:, :, None], 3, axis=2))
