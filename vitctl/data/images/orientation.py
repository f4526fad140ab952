"""Which side of a picture is up, as the camera has noted it: read from Exif or XMP, and done to pixels and to boxes.

The pixels of a photograph taken with the camera on its side are stored on their side; a note says how to turn them.
"""

import re
from typing import NamedTuple

import numpy as np

_TAG, _SHORT, _LONG = 0x0112, 3, 4
_MAX_FIELDS = 4096
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


class Turn(NamedTuple):
    """How stored pixels become the picture: rows and columns change places, then rows, then columns run backwards."""

    transpose: bool
    flip_rows: bool
    flip_columns: bool


# Exif 2.32, 4.6.4 A: where the 0th row and the 0th column of the stored pixels are seen.
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
    """What an orientation from 1 to 8 asks for; any other number asks for nothing."""
    return _TURNS.get(orientation, _TURNS[1])


def exif_orientation(exif: bytes) -> int | None:
    """The orientation in Exif data, a TIFF header with its fields; None when there is none, or they are damaged."""
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
    """The orientation in XMP data; 1 when there is none."""
    found = _XMP.search(xmp)
    return int(found[1]) if found else 1


def stored_box(turn: Turn, box: tuple[int, int, int, int], height: int, width: int) -> tuple[int, int, int, int]:
    """Where a part of the picture lies in the stored pixels.

    Args:
        turn: from stored pixels to the picture.
        box: top, left, height and width in the picture.
        height: of the picture.
        width: of the picture.
    """
    top, left, rows, columns = box
    top = height - top - rows if turn.flip_rows else top
    left = width - left - columns if turn.flip_columns else left
    return (left, top, columns, rows) if turn.transpose else (top, left, rows, columns)


def turned(pixels: np.ndarray, turn: Turn) -> np.ndarray:
    """Stored pixels `[H, W, 3]`, or a part of them, as the picture shows them; a copy where anything moves."""
    if not any(turn):
        return pixels
    pixels = pixels.transpose(1, 0, 2) if turn.transpose else pixels
    pixels = pixels[:: -1 if turn.flip_rows else 1, :: -1 if turn.flip_columns else 1]
    return np.ascontiguousarray(pixels)
