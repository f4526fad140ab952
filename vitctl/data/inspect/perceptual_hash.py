"""What an image is, twice: the digest of its bytes, and 64 bits of what it looks like that survive another size or quality."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.source.image_digest import DIGEST, bytes_digest, image_digest
from vitctl.data.source.read import Source
from vitctl.system.pool import Done, run_tasks

_SIDE = 32  # of the grey thumbnail
_SMALLEST_DECODED = 64
_FREQUENCIES = 11  # of each axis, among which lie the 64 lowest
_FLAT = 32.0  # length of the 64 coefficients below which a picture shows nothing: one grey level of contrast
_TOGETHER = 512


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """Of all images of a source, in its order.

    Args:
        digests: of the bytes, `[n]` of 16 bytes.
        looks: uint64 `[n]`, see `perceptual_hash`; 0 where there is none.
        has_look: bool `[n]`, False for pictures that cannot be decoded or show nothing.
    """

    digests: np.ndarray
    looks: np.ndarray
    has_look: np.ndarray


def fingerprints(source: Source, *, workers: int = 0, done: Done = lambda _: None, looks: bool = True) -> Fingerprints:
    """Read every image of a source, and take its digest and its look.

    Args:
        source: whose images may be damaged.
        workers: processes; 0: this one.
        done: called with how many images were done since the last call.
        looks: False to leave the pictures undecoded.
    """

    def block(task: int, done: Done) -> list[tuple[bytes, int | None]]:
        found = []
        for sample in range(task * _TOGETHER, min((task + 1) * _TOGETHER, len(source))):
            found.append(_fingerprint(source, sample, looks=looks))
            done(1)
        return found

    blocks = run_tasks(block, -(-len(source) // _TOGETHER), workers=workers, done=done)
    digests = [digest for found in blocks for digest, _ in found]
    looked = [look for found in blocks for _, look in found]
    return Fingerprints(
        np.array(digests, DIGEST),
        np.array([look or 0 for look in looked], np.uint64),
        np.array([look is not None for look in looked], bool),
    )


def _fingerprint(source: Source, sample: int, *, looks: bool) -> tuple[bytes, int | None]:
    if not looks:
        return image_digest(source, sample), None
    try:
        data = source.read(sample)
    except BadSample:
        return image_digest(source, sample), None
    return bytes_digest(data), perceptual_hash(data)


def perceptual_hash(data: bytes) -> int | None:
    """Sixty-four bits of what a picture looks like: the signs of its lowest spatial frequencies around their median.

    The picture is shrunk to 32 x 32 grey pixels, a JPEG as far as possible while it is decoded. Of their cosine transform
    the 64 lowest frequencies without the mean count. Pictures that differ in size, compression or brightness differ in a
    few bits; unrelated ones in 32 on average.

    Returns:
        None for a picture that cannot be decoded, or is flat.
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
    """The orthonormal cosine transform `[11, 32]`, and where the 64 lowest frequencies without the mean lie in its result."""
    frequency, pixel = np.arange(_FREQUENCIES)[:, None], np.arange(_SIDE)[None]
    rows = np.cos(np.pi * frequency * (2 * pixel + 1) / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    rows[0] /= np.sqrt(2)
    order = sorted(range(_FREQUENCIES**2), key=lambda place: (sum(divmod(place, _FREQUENCIES)), place))
    return rows, np.array(order[1:65])
