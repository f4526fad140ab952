"""The orientation of a photograph, from Exif or XMP metadata, applied to pixels and to boxes.

Cameras store the pixels as the sensor delivers them; the metadata say how to rotate and mirror them for
display.
"""

import re
from typing import NamedTuple

import numpy as np

_TAG, _SHORT, _LONG = 0x0112, 3, 4
_MAX_FIELDS = 4096
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


class Turn(NamedTuple):
    """How stored pixels are converted for display: transpose first, then flip rows, then flip columns."""

    transpose: bool
    flip_rows: bool
    flip_columns: bool


# Exif 2.32, 4.6.4 A: the visual position of the 0th row and the 0th column of the stored pixels.
_TURNS = {
    1: Turn(False, False, False),
    2: Turn(False, False, True),
    3: Turn(False, True, True),
    4: Turn(False, True, False),
    5: Turn(True, False, False),
    6: Turn(True, False, True),
    7: Turn(True, True, True),
    8: Turn(True, True, False),
}


def turn_of(orientation: int) -> Turn:
    """The conversion for an Exif orientation from 1 to 8; for any other number the identity."""
    return _TURNS.get(orientation, _TURNS[1])


def exif_orientation(exif: bytes) -> int | None:
    """The orientation in Exif data (a TIFF header with its fields); None when it is missing or damaged."""
    order = {b"II": "little", b"MM": "big"}.get(exif[:2])
    if order is None or len(exif) < 8:
        return None

    def number(at: int, size: int) -> int:
        return int.from_bytes(exif[at : at + size], "little" if order == "little" else "big")

    start = number(4, 4)
    for at in range(start + 2, start + 2 + 12 * min(number(start, 2), _MAX_FIELDS), 12):
        if at + 12 > len(exif):
            return None
        if number(at, 2) == _TAG and number(at + 2, 2) in (_SHORT, _LONG):
            return number(at + 8, 2 if number(at + 2, 2) == _SHORT else 4)
    return None


def xmp_orientation(xmp: bytes) -> int:
    """The orientation in XMP data; 1 when it is missing."""
    found = _XMP.search(xmp)
    return int(found[1]) if found else 1


def stored_box(
    turn: Turn, box: tuple[int, int, int, int], height: int, width: int
) -> tuple[int, int, int, int]:
    """Convert a box from the displayed image to the stored pixels.

    Args:
        turn: from stored pixels to the displayed image.
        box: top, left, height and width in the displayed image.
        height: of the displayed image.
        width: of the displayed image.
    """
    top, left, rows, columns = box
    top = height - top - rows if turn.flip_rows else top
    left = width - left - columns if turn.flip_columns else left
    return (left, top, columns, rows) if turn.transpose else (top, left, rows, columns)


def turned(pixels: np.ndarray, turn: Turn) -> np.ndarray:
    """Convert stored pixels `[H, W, 3]`, or a region of them, for display; a copy unless nothing changes."""
    if not any(turn):
        return pixels
    pixels = pixels.transpose(1, 0, 2) if turn.transpose else pixels
    pixels = pixels[:: -1 if turn.flip_rows else 1, :: -1 if turn.flip_columns else 1]
    return np.ascontiguousarray(pixels)
