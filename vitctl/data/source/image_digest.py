"""The digest of the bytes of an image, to find exact duplicates."""

import hashlib

import numpy as np

from vitctl.data.images.decode import BadSample
from vitctl.data.source.read import Source

DIGEST = np.dtype("S16")


def bytes_digest(data: bytes) -> bytes:
    """BLAKE2b of the bytes of a file, 16 bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST.itemsize).digest()


def image_digest(source: Source, sample: int) -> bytes:
    """Digest of an image, 16 bytes; an image that cannot be read gets a digest that matches no other."""
    try:
        data = source.read(sample)
    except BadSample:
        data = f"unreadable {sample}".encode()
    return bytes_digest(data)
