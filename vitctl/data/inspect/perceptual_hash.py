"""Two hashes of an image: the digest of its bytes, and a 64-bit perceptual hash that is robust to resizing
and compression.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.source.exclusion import DIGEST, bytes_digest, image_digest
from vitctl.data.source.views import Source
from vitctl.system.pool import Done, run_tasks

_SIDE = 32  # of the grey thumbnail
_SMALLEST_DECODED = 64
_FREQUENCIES = 11  # per axis; they include the 64 lowest
_FLAT = 32.0  # norm of the 64 coefficients below which an image is flat: one grey level of contrast
_IMAGES_PER_TASK = 512


@dataclass(frozen=True, eq=False)
class ImageHashes:
    """The hashes of all images of a source, in its order.

    Args:
        digests: of the bytes, `[n]` of 16 bytes.
        perceptual: uint64 `[n]`, see `perceptual_hash`; 0 where there is none.
        has_perceptual: bool `[n]`, False for images that cannot be decoded or are flat.
    """

    digests: np.ndarray
    perceptual: np.ndarray
    has_perceptual: np.ndarray


def hash_images(
    source: Source, *, workers: int = 0, done: Done = lambda _: None, perceptual: bool = True
) -> ImageHashes:
    """Read every image of a source, and compute its digest and its perceptual hash.

    Args:
        source: whose images may be damaged.
        workers: worker processes; 0: this process.
        done: called with the number of images processed since the last call.
        perceptual: False to compute digests only, without decoding.
    """

    def block(task: int, done: Done) -> list[tuple[bytes, int | None]]:
        found = []
        for sample in range(task * _IMAGES_PER_TASK, min((task + 1) * _IMAGES_PER_TASK, len(source))):
            found.append(_fingerprint(source, sample, perceptual=perceptual))
            done(1)
        return found

    blocks = run_tasks(block, -(-len(source) // _IMAGES_PER_TASK), workers=workers, done=done)
    digests = [digest for found in blocks for digest, _ in found]
    hashes = [one for found in blocks for _, one in found]
    return ImageHashes(
        np.array(digests, DIGEST),
        np.array([one or 0 for one in hashes], np.uint64),
        np.array([one is not None for one in hashes], bool),
    )


def _fingerprint(source: Source, sample: int, *, perceptual: bool) -> tuple[bytes, int | None]:
    if not perceptual:
        return image_digest(source, sample), None
    try:
        data = source.read(sample)
    except BadSample:
        return image_digest(source, sample), None
    return bytes_digest(data), perceptual_hash(data)


def perceptual_hash(data: bytes) -> int | None:
    """The 64-bit perceptual hash (pHash): whether each of the 64 lowest DCT coefficients is above their
    median.

    The image is resized to 32 x 32 grey pixels, for JPEG partly while decoding. The mean (DC coefficient) is
    not used. Copies that differ in size, compression or brightness have a Hamming distance of a few bits;
    unrelated images of 32 bits on average.

    Returns:
        None for an image that cannot be decoded, or is flat.
    """
    try:
        picture = open_picture(data)
        shorter = min(picture.height, picture.width)
        reduce = next(by for by in (8, 4, 2, 1) if by == 1 or shorter >= by * _SMALLEST_DECODED)
        pixels = picture.region(0, 0, picture.height, picture.width, reduce=reduce)
    except BadSample:
        return None
    small = Image.fromarray(pixels).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    transform, lowest = _transform()
    coefficients = (transform @ np.asarray(small, np.float64) @ transform.T).ravel()[lowest]
    if np.linalg.norm(coefficients) < _FLAT:
        return None
    bits = coefficients > np.median(coefficients)
    return int.from_bytes(np.packbits(bits).tobytes())


@cache
def _transform() -> tuple[np.ndarray, np.ndarray]:
    """The orthonormal DCT matrix `[11, 32]`, and the flat indices of the 64 lowest frequencies without DC."""
    frequency, pixel = np.arange(_FREQUENCIES)[:, None], np.arange(_SIDE)[None]
    rows = np.cos(np.pi * frequency * (2 * pixel + 1) / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    rows[0] /= np.sqrt(2)
    order = sorted(range(_FREQUENCIES**2), key=lambda place: (sum(divmod(place, _FREQUENCIES)), place))
    return rows, np.array(order[1:65])
