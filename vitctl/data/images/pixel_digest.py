"""Detect images of one flat colour, and images of several classes with the same pixels."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from vitctl.system.text import count_text, one_line

_FLAT = b"flat colour: "  # 13 bytes before the colour, with which no digest begins
_SHOWN = 3


def is_flat(pixels: np.ndarray) -> bool:
    """Return whether all pixels, uint8 `[H, W, 3]`, are equal."""
    return bool((pixels[0] == pixels[0, 0]).all() and (pixels == pixels[0, 0]).all())


def pixel_digest(pixels: np.ndarray) -> bytes:
    """Return 16 bytes, equal for equal pixels, uint8 `[H, W, 3]`.

    Flat images of one colour and any size have the same.
    """
    if is_flat(pixels):
        return _FLAT + bytes(pixels[0, 0])
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16)
    digest.update(str(pixels.shape).encode())
    return digest.digest()


def pixel_notes(
    digests: Sequence[bytes], name: Callable[[int], str], label: Callable[[int], str]
) -> list[str]:
    """Return a line on images of one flat colour, and one on images of several classes with the same pixels.

    Args:
        digests: of each image's pixels; empty if it was not decoded.
        name: returns an image's name, by index.
        label: returns an image's class names, as text; empty for none.
    """
    flat = [number for number, digest in enumerate(digests) if digest.startswith(_FLAT)]
    _, groups, sizes = np.unique(np.array(digests, "S16"), return_inverse=True, return_counts=True)
    pairs: list[tuple[int, int]] = []
    firsts: dict[int, int] = {}
    for number in np.flatnonzero(sizes[groups] > 1).tolist():
        if digests[number] and not digests[number].startswith(_FLAT) and label(number):
            first = firsts.setdefault(int(groups[number]), number)
            pairs += [(first, number)] if label(first) != label(number) else []
    notes = []
    if flat:
        shown = ", ".join(one_line(name(number)) for number in flat[:_SHOWN])
        notes.append(f"{count_text(len(flat), 'image')} of one flat colour, such as {shown}")
    if pairs:
        shown = " and ".join(f"{one_line(name(number))} ({one_line(label(number))})" for number in pairs[0])
        count = count_text(len(pairs), "image")
        notes.append(f"{count} with the same pixels as an image of another class, such as {shown}")
    return notes
