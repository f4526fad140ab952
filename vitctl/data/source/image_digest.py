"""The digest of an image's bytes, by which images that are the same are told."""

import hashlib

import numpy as np

from vitctl.data.images.decode import BadSample
from vitctl.data.source.read import Source

DIGEST = np.dtype("S16")


def bytes_digest(data: bytes) -> bytes:
    """Of the bytes of a file, 16 bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST.itemsize).digest()


def image_digest(source: Source, sample: int) -> bytes:
    """Of the bytes of an image, 16 bytes; one that cannot be read is like no other."""
    try:
        data = source.read(sample)
    except BadSample:
        data = f"unreadable {sample}".encode()
    return bytes_digest(data)
