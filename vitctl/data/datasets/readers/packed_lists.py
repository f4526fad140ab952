"""Facts about large data sets that their archives lack, packed small: see assets/README.md."""

import hashlib
from collections.abc import Sequence

import numpy as np

from vitctl.data.datasets.readers.files import ASSETS
from vitctl.errors import DataError

SUN397_PATHS_SHA256 = "ff5eec74118daf4eba10b0bae39a26a9c2ccd27464fd1cbdd74029241c38d1ca"
SUN397_SPLITS = ("train", "validation", "test")
# Undecodable for the authors of the split, so in none of its lists.
SUN397_LEFT_OUT = "/c/church/outdoor/sun_bhenjvsvrtumjuri.jpg"
_NUM_SUN397, _DIGITS, _BITS = 108_753, 5, 10


def imagenet_validation_labels() -> np.ndarray:
    """Labels of ILSVRC2012_val_00000001.JPEG to 00050000, as places of wnids in sorted order: int64
    `[50000]`.
    """
    bits = np.unpackbits(np.fromfile(ASSETS / "imagenet_validation_labels.u10", np.uint8)).reshape(-1, _BITS)
    return bits @ (1 << np.arange(_BITS, dtype=np.int64)[::-1])


def sun397_split(paths: Sequence[str]) -> dict[str, list[str]]:
    """Split the images of SUN397 as TensorFlow Datasets does: split name -> sorted paths.

    Args:
        paths: all images, as `/a/abbey/sun_aaalbzqrimafwbiv.jpg`, in any order.

    Raises:
        DataError: they are not the images of SUN397.
    """
    ordered = sorted(path for path in paths if path != SUN397_LEFT_OUT)
    digest = hashlib.sha256("".join(f"{path}\n" for path in ordered).encode()).hexdigest()
    if digest != SUN397_PATHS_SHA256:
        raise DataError(
            f"these {len(ordered):,} images are not the {_NUM_SUN397:,} of SUN397, whose split goes by the "
            f"place of a path "
            f"among all; unpack SUN397.tar.gz again, or put sun397_tfds_tr.txt, _va.txt and _te.txt beside "
            f"the images"
        )
    splits: dict[str, list[str]] = {split: [] for split in SUN397_SPLITS}
    for path, number in zip(ordered, _sun397_numbers(), strict=False):
        splits[SUN397_SPLITS[number]].append(path)
    return splits


def _sun397_numbers() -> list[int]:
    """The split of each path, five digits of base 3 in a byte, the highest first."""
    packed = np.fromfile(ASSETS / "sun397_split.base3", np.uint8)
    digits = packed[:, None] // 3 ** np.arange(_DIGITS)[::-1] % 3
    return [int(digit) for digit in digits.ravel()[:_NUM_SUN397]]
