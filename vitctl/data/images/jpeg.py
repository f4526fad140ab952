"""The common kind of JPEG, decoded no further down than a crop reaches.

A JPEG is one long code that can only be read from its beginning, but it can be left early: with a smaller height written
into its header, the decoder stops below the crop. The rows that it does give are the same, bit for bit.
Whatever is unusual about a file is left to Pillow, in `decode.py`, whose pixels these are.
"""

import re
import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitctl.data.images.orientation import exif_orientation, xmp_orientation

_START_OF_IMAGE, _END_OF_IMAGE = b"\xff\xd8\xff", b"\xff\xd9"
_BASELINE, _PROGRESSIVE = (0xC0, 0xC1), 0xC2
_START_OF_SCAN = 0xDA
_COEFFICIENTS = 64
_COLOURS = {"Gray": 1, "CMYK": 4, "YCCK": 4}  # others have 3
_APPLICATION_1 = 0xE1  # Exif and XMP
_SKIPPED = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)  # tables, restart interval, applications, comments
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_HEIGHT_IN_FRAME = 5  # bytes from the frame's marker to its height
_MAX_SEGMENTS = 500
_LEFT_OVER = "extraneous bytes before marker"
_CORRUPT = "Corrupt JPEG data"  # how the decoder's complaints about the code begin; others are about the header
_HOLE = bytes(64)  # in code: a block that was never written, or a picture of one colour
_FEW_ZEROS = bytes(16)  # more than the decoder reads ahead
_MAX_SCRATCH = 1 << 25  # bytes that a thread keeps to decode into; larger pictures get memory of their own
_MARGIN = 2  # rows below the last one wanted, from which its colour is interpolated


@dataclass(frozen=True)
class Jpeg:
    """What the header of a common JPEG says.

    Args:
        height: in pixels.
        width: in pixels.
        frame: byte at which the frame's marker stands.
        can_stop: whether all colours lie in one scan from top to bottom, and no hole in it, so that decoding can be left early.
        orientation: how the picture is to be turned, 1 to 8 as Exif counts; height and width are those before that.
        num_colours: 1 or 3.
    """

    height: int
    width: int
    frame: int
    can_stop: bool
    orientation: int = 1
    num_colours: int = 3


class Fault(NamedTuple):
    """What is wrong with a JPEG's code: a word to count it by, and what the decoder said."""

    reason: str
    said: str


LACKS_SCANS = Fault("truncated", "the JPEG lacks its last scans")


def ended(data: bytes) -> bytes:
    """A JPEG up to its end marker, which is put there where there is none; anything else as it is.

    What follows the marker is no part of the picture, and a picture all of whose rows are there lacks nothing without it.
    """
    if data.endswith(_END_OF_IMAGE) or not data.startswith(_START_OF_IMAGE):
        return data
    end = data.find(_END_OF_IMAGE, _code_begins(data))
    return data + _END_OF_IMAGE if end < 0 else data[: end + len(_END_OF_IMAGE)]


def find_fault(data: bytes) -> Fault | None:
    """Decode the whole of a JPEG that has an end, to hear whether rows are missing from its code or made of nothing.

    Some bytes left over behind the last row are harmless, and common; unless zeros stand where the code of rows should be.
    None for a picture that is whole, and for one that this decoder does not know, whose header others may understand.
    """
    import simplejpeg

    try:
        colours = simplejpeg.decode_jpeg_header(data)[2]
    except ValueError:
        return None
    try:
        simplejpeg.decode_jpeg(data, "CMYK" if colours in ("CMYK", "YCCK") else "RGB")
    except ValueError as error:
        said = str(error)
        if "premature end" in said:
            return Fault("truncated", "the code of the JPEG ends before its last row")
        if _LEFT_OVER in said:
            left_over = re.search(rf"(\d+) {_LEFT_OVER}", said)
            decoded = len(data) - len(_END_OF_IMAGE) - (int(left_over[1]) if left_over else 0)
            begins_before = data.endswith(
                _FEW_ZEROS, 0, decoded
            )  # and not where the last row ends, as filling up would
            is_hollow = begins_before or data.find(_HOLE, _code_begins(data), decoded) >= 0
            if is_hollow:
                return Fault("damaged", "zeros stand in the code of the JPEG, whose rows are missing")
            return (
                Fault("truncated", "the JPEG lacks its last scans")
                if lacks_scans(data, _COLOURS.get(colours, 3))
                else None
            )
        if _CORRUPT in said:
            return Fault("damaged", " ".join(said.split()))
    return LACKS_SCANS if lacks_scans(data, _COLOURS.get(colours, 3)) else None


def lacks_scans(data: bytes, num_colours: int) -> bool:
    """Whether a JPEG of several scans ends before they have told every coefficient of every colour to the last bit.

    Source: ITU-T T.81, sections B.2.3 and G.1.1.1
    """
    precise: dict[int, set[int]] = {}  # colour -> coefficients known to the last bit
    position = _code_begins(data)
    while 0 <= position < len(data):
        num = data[position + 4] if position + 4 < len(data) else 0
        header = data[position + 5 : position + 2 * num + 8]
        if data[position + 2 : position + 4] == (6 + 2 * num).to_bytes(2) and len(header) == 2 * num + 3:
            first, last, bits = header[2 * num :]
            for colour in header[: 2 * num : 2]:
                precise.setdefault(colour, set()).update(range(first, last + 1) if bits & 15 == 0 else ())
        position = data.find(b"\xff%c" % _START_OF_SCAN, position + 2)
    if not precise:  # no scan was found: whoever decodes it may know more
        return False
    return len(precise) < num_colours or any(len(known) < _COEFFICIENTS for known in precise.values())


def _code_begins(data: bytes) -> int:
    """The byte of the first scan's marker; the length of the data where there is none."""
    position = 2
    for _ in range(_MAX_SEGMENTS):
        if position + 4 > len(data) or data[position] != 0xFF:
            break
        if data[position + 1] == _START_OF_SCAN:
            return position
        if data[position + 1] == 0xFF:  # bytes that fill up
            position += 1
            continue
        position += 2 + int.from_bytes(data[position + 2 : position + 4])
    return len(data)


def read_header(data: bytes) -> Jpeg | None:
    """Read the header of a grey or RGB JPEG of 8 bits that has an end; None for everything else."""
    if not (data.startswith(_START_OF_IMAGE) and data.endswith(_END_OF_IMAGE)):
        return None
    position, frame, kind, said = 2, 0, 0, list[bytes]()
    for _ in range(_MAX_SEGMENTS):
        if position + 10 > len(data) or data[position] != 0xFF:
            return None
        marker, size = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        if marker in (*_BASELINE, _PROGRESSIVE):
            frame, kind = position, marker
        elif marker == _START_OF_SCAN:
            can_stop = kind in _BASELINE and data.find(_HOLE, position) < 0
            return _header(data, frame, data[position + 4], can_stop, _orientation(said))
        elif marker not in _SKIPPED:
            return None  # lossless, hierarchical or arithmetic, or no marker that may stand here
        elif marker == _APPLICATION_1:
            said.append(data[position + 4 : position + 2 + size])
        position += 2 + size
    return None


def num_scans(data: bytes) -> int:
    """Scans of a JPEG, or a few more: those of a thumbnail in its metadata are counted with them."""
    return data.count(b"\xff%c" % _START_OF_SCAN)


def _orientation(segments: list[bytes]) -> int:
    """Of the metadata of a JPEG, in which Exif goes before XMP."""
    if not segments:
        return 1
    exif = b"".join(one.removeprefix(_EXIF) for one in segments if one.startswith(_EXIF))
    found = exif_orientation(exif)
    xmp = next((one for one in segments if one.startswith(_XMP)), b"")
    return xmp_orientation(xmp) if found is None else found


def _header(data: bytes, frame: int, num_in_scan: int, can_stop: bool, orientation: int) -> Jpeg | None:
    height = int.from_bytes(data[frame + _HEIGHT_IN_FRAME : frame + _HEIGHT_IN_FRAME + 2])
    width = int.from_bytes(data[frame + _HEIGHT_IN_FRAME + 2 : frame + _HEIGHT_IN_FRAME + 4])
    num_bits, num_colours = data[frame + 4], data[frame + 9]
    if not frame or num_bits != 8 or num_colours not in (1, 3) or not height or not width:
        return None
    return Jpeg(height, width, frame, can_stop and num_in_scan == num_colours, orientation, num_colours)


class _Scratch(threading.local):
    """Memory to decode into again and again: fresh pages cost a twelfth of the decoding itself."""

    memory = np.empty(0, np.uint8)

    def zeros(self, rows: int, columns: int) -> np.ndarray:
        size = rows * columns * 3
        if size > _MAX_SCRATCH:
            return np.zeros((rows, columns, 3), np.uint8)
        if len(self.memory) < size:
            self.memory = np.empty(size, np.uint8)
        pixels = self.memory[:size].reshape(rows, columns, 3)
        pixels.fill(0)
        return pixels


_SCRATCH = _Scratch()


def decode_rows(
    data: bytes, jpeg: Jpeg, num_rows: int, reduce: int = 1, *, short_lived: bool = False
) -> np.ndarray | None:
    """Decode a picture from its top down to a row.

    Args:
        data: the whole file.
        jpeg: its header.
        num_rows: that are wanted, 1 to the height.
        reduce: 1, 2, 4 or 8: decode to this fraction of the size, which is quicker and changes the pixels slightly.
        short_lived: let the next short-lived result of this thread overwrite this one, which is quicker.

    Returns:
        uint8 `[H, W, 3]`, of `num_rows / reduce` rows or more; None when the file is not what its header says.
    """
    import simplejpeg

    height = num_rows + _MARGIN * reduce
    stop = jpeg.can_stop and height < jpeg.height
    if stop:
        at = jpeg.frame + _HEIGHT_IN_FRAME
        data = b"".join((memoryview(data)[:at], height.to_bytes(2), memoryview(data)[at + 2 :]))
    rows, columns = -(-(height if stop else jpeg.height) // reduce), -(-jpeg.width // reduce)
    smallest = {"min_height": rows, "min_width": columns, "min_factor": reduce} if reduce > 1 else {}
    pixels = _SCRATCH.zeros(rows, columns) if short_lived else np.zeros((rows, columns, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(data, "RGB", buffer=pixels, **smallest)
    except ValueError as error:
        # The one complaint to expect, of code left over, comes when all rows are there. After others they may not be.
        return pixels if stop and _LEFT_OVER in str(error) else None
    return pixels
