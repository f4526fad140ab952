"""Partial decoding of common JPEGs: pixels outside the crop are not decoded if the file allows it.

The compressed data of a JPEG can only be decoded from the start, but decoding can stop early: with a smaller
height written into the header, the decoder stops below the crop. With restart markers it can also start at
each of them: `cut_out` makes a smaller JPEG of the restart intervals that cover the crop. The decoded pixels
are the same, bit for bit. All other JPEGs are decoded with Pillow, in `decode.py`; the pixels are equal.
"""

import re
import threading
from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

_END_OF_IMAGE = b"\xff\xd9"
_BASELINE, _PROGRESSIVE = (0xC0, 0xC1), 0xC2
_START_OF_SCAN, _RESTART_INTERVAL = 0xDA, 0xDD
# Frames of codings that Pillow does not decode, or that cannot be checked for damage here: T.81, table B.1
_UNREAD = {0xC3: "lossless JPEG", 0xCB: "lossless JPEG", 0xF7: "JPEG-LS"}
_UNREAD |= dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical JPEG")
_FRAMES = (*_BASELINE, _PROGRESSIVE, 0xC9, 0xCA, *_UNREAD)
_ESCAPE = 0xFF  # begins a marker
_RESTARTS = bytes(range(0xD0, 0xD8))  # second bytes of restart markers, used cyclically
_BLOCK = 8  # height and width of a coded block, in pixels
_COEFFICIENTS = 64
_COLOURS = {"Gray": 1, "CMYK": 4, "YCCK": 4}  # others have 3
_APPLICATION_1 = 0xE1  # Exif and XMP
_SKIPPED = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)  # tables, restart interval, applications, comments
_HEIGHT_IN_FRAME = 5  # bytes from the frame's marker to its height
_MAX_SEGMENTS = 500
_EXTRANEOUS = "extraneous bytes before marker"
_CORRUPT = "Corrupt JPEG data"  # begins the decoder's messages about compressed data, but not about headers
_HOLE = bytes(64)  # in compressed data: a block that was never written, or an image of one colour
_FEW_ZEROS = bytes(16)  # more than the decoder reads ahead
_MAX_SCRATCH = 1 << 25  # bytes of the reused buffer of a thread; larger images get a new buffer
_MARGIN = 2  # extra rows, from which the chroma of the last row is interpolated
_MIN_INTERVAL = 4  # MCUs between two restart markers, at least: more markers save little more
_SURROUNDINGS = 4  # extra pixels on all sides, which surround the chroma samples that a crop needs

Fault = tuple[str, str]  # a defect in the compressed data: category to count by, and message
LACKS_SCANS: Fault = ("truncated", "the JPEG lacks its last scans")


@dataclass(frozen=True)
class Jpeg:
    """A common JPEG with a parsed header.

    Args:
        height, width: in pixels, as stored.
        frame: byte offset of the frame marker (SOF).
        has_one_scan: whether one scan holds all components, from top to bottom; the decoder refuses others
            after it.
        can_stop_early: whether this scan also has no hole, so that decoding can stop early.
        num_components: 1 (grey) or 3 (colour).
        scan: byte offset of the first scan's marker (SOS).
        unit: height and width of a minimum coded unit (MCU), in pixels.
        restart: byte offset of the restart interval's marker (DRI), 0 if it is missing.
    """

    data: bytes
    height: int
    width: int
    frame: int
    has_one_scan: bool
    can_stop_early: bool
    num_components: int
    has_metadata: bool
    scan: int
    unit: tuple[int, ...]
    restart: int


def with_end_marker(data: bytes) -> bytes:
    """Return a JPEG cut after its end marker (EOI), which is appended if it is missing.

    Bytes after the marker are not part of the image, and an image with all rows is complete without it.
    """
    if data.endswith(_END_OF_IMAGE):
        return data
    end = data.find(_END_OF_IMAGE, _first(data))
    return data + _END_OF_IMAGE if end < 0 else data[: end + len(_END_OF_IMAGE)]


def read_header(data: bytes) -> Jpeg | None:
    """Parse the header of a grey or RGB JPEG of 8 bits with an end marker; None for every other JPEG."""
    if not data.endswith(_END_OF_IMAGE):
        return None
    position, frame, kind, restart, has_metadata = 2, 0, 0, 0, False
    for _ in range(_MAX_SEGMENTS):
        if position + 10 > len(data) or data[position] != 0xFF:
            return None
        marker, size = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        if marker == _START_OF_SCAN:
            break
        if marker in (*_BASELINE, _PROGRESSIVE):
            frame, kind = position, marker
        elif marker not in _SKIPPED:
            return None  # lossless, hierarchical or arithmetic coding, or an illegal marker
        elif marker == _APPLICATION_1:
            has_metadata = True
        elif marker == _RESTART_INTERVAL:
            restart = position
        position += 2 + size
    else:
        return None
    num_bits, num_components = data[frame + 4], data[frame + 9]
    at = frame + _HEIGHT_IN_FRAME
    height, width = int.from_bytes(data[at : at + 2]), int.from_bytes(data[at + 2 : at + 4])
    factors = data[frame + 11 : frame + 18 : 3] if num_components == 3 else b"\x11"
    unit = tuple(_BLOCK * max((both >> bits & 15 for both in factors), default=0) for bits in (0, 4))
    if not frame or num_bits != 8 or num_components not in (1, 3) or not all((height, width, *unit)):
        return None
    one_scan = kind in _BASELINE and data[position + 4] == num_components
    can_stop_early = one_scan and data.find(_HOLE, position) < 0
    known = num_components, has_metadata, position, unit, restart
    return Jpeg(data, height, width, frame, one_scan, can_stop_early, *known)


def cut_out(
    jpeg: Jpeg, top: int, left: int, bottom: int, right: int, reduce: int = 1
) -> tuple[Jpeg, int, int]:
    """Cut the part of an image that a box needs out of its compressed data.

    Args:
        top, left, bottom, right: the box, in pixels; the last two exclusive.

    Returns:
        The smallest JPEG of restart intervals whose pixels equal those of the image throughout the box, and
        the row and column at which it begins; or the image itself, 0 and 0, if it has no restart markers, or
        intervals that are neither parts of a row of MCUs nor complete rows.

    Source: ITU-T T.81, sections B.2.1, E.1.4 and F.2.2.4
    """
    data, (height, width) = jpeg.data, jpeg.unit
    size = int.from_bytes(data[jpeg.restart + 4 : jpeg.restart + 6]) if jpeg.restart else 0
    units = -(-jpeg.width // width)  # per row
    if not jpeg.can_stop_early or not size or (size % units and units % size):
        return jpeg, 0, 0
    height, width, per_row = height * max(1, size // units), width * min(size, units), max(1, units // size)
    begin = jpeg.scan + 2 + int.from_bytes(data[jpeg.scan + 2 : jpeg.scan + 4])
    num_rows, coded = -(-jpeg.height // height), np.frombuffer(data, np.uint8)
    is_marker = coded[begin:-1] == _ESCAPE
    is_marker &= coded[begin + 1 :] != 0  # a zero marks the byte before it as data
    stops = begin + 2 + is_marker.nonzero()[0]
    num = num_rows * per_row
    numbers = (_RESTARTS * (num // len(_RESTARTS) + 1))[:num]
    if coded[stops[:-1] - 1].tobytes() != numbers[:-1]:
        return jpeg, 0, 0
    above, beside = (_SURROUNDINGS * reduce if side > _BLOCK else 0 for side in jpeg.unit)
    rows = slice(max(0, top - above) // height, -(-min(jpeg.height, bottom + above) // height))
    columns = slice(max(0, left - beside) // width, -(-min(jpeg.width, right + beside) // width))
    edges = np.empty(len(stops) + 1, np.int64)
    edges[0], edges[1:] = begin, stops
    grid = edges[1:].reshape(num_rows, per_row)[rows, columns]
    starts = edges[:-1].reshape(num_rows, per_row)[rows, columns]
    spans = map(slice, starts[:, 0].tolist(), grid[:, -1].tolist())
    part = bytearray().join([data[:begin], *map(data.__getitem__, spans)])
    ends = begin + np.cumsum(grid - starts)
    np.frombuffer(part, np.uint8)[ends - 1] = np.frombuffer(numbers, np.uint8)[: len(ends)]
    part[-1] = _END_OF_IMAGE[1]
    y, x = rows.start * height, columns.start * width
    sides = min(jpeg.height, rows.stop * height) - y, min(jpeg.width, columns.stop * width) - x
    at = jpeg.frame + _HEIGHT_IN_FRAME
    part[at : at + 4] = b"".join(side.to_bytes(2) for side in sides)
    return replace(jpeg, data=bytes(part), height=sides[0], width=sides[1], restart=0), y, x


def restart_interval(width: int, unit: int) -> int:
    """Return the MCUs between restart markers: the least divisor of a row from four on, else a row."""
    units = -(-width // unit)
    return next((size for size in range(_MIN_INTERVAL, units) if units % size == 0), units)


def decode_rows(
    jpeg: Jpeg, num_rows: int, reduce: int = 1, *, reuse_buffer: bool = False
) -> np.ndarray | None:
    """Decode the top rows of an image.

    Args:
        reduce: 1, 2, 4 or 8: decode to 1/reduce of the size, which is faster and changes the pixels slightly.
        reuse_buffer: decode into the buffer of this thread, which the next call with `reuse_buffer`
            overwrites; faster.

    Returns:
        uint8 `[H, W, 3]`, of `num_rows / reduce` rows or more; None if the data do not match the header.
    """
    import simplejpeg

    data, height = jpeg.data, num_rows + _MARGIN * reduce
    stop = jpeg.can_stop_early and height < jpeg.height
    if stop:
        at = jpeg.frame + _HEIGHT_IN_FRAME
        data = b"".join((memoryview(data)[:at], height.to_bytes(2), memoryview(data)[at + 2 :]))
    rows, columns = -(-(height if stop else jpeg.height) // reduce), -(-jpeg.width // reduce)
    smallest = {"min_height": rows, "min_width": columns, "min_factor": reduce} if reduce > 1 else {}
    pixels = _SCRATCH.pixels(rows, columns) if reuse_buffer else np.empty((rows, columns, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(data, "RGB", buffer=pixels, **smallest)
    except ValueError as error:
        # This message is expected: the data below the crop are extraneous, and the decoder wrote all rows
        # before it. After any other message rows may be missing.
        return pixels if stop and _EXTRANEOUS in str(error) else None
    return pixels


class _Scratch(threading.local):
    """A per-thread decoding buffer: new pages would take a twelfth of the decoding time."""

    memory = np.empty(0, np.uint8)

    def pixels(self, rows: int, columns: int) -> np.ndarray:
        size = rows * columns * 3
        if size > _MAX_SCRATCH:
            return np.empty((rows, columns, 3), np.uint8)
        if len(self.memory) < size:
            self.memory = np.empty(size, np.uint8)
        return self.memory[:size].reshape(rows, columns, 3)


_SCRATCH = _Scratch()


def find_fault(data: bytes) -> Fault | None:
    """Decode a complete JPEG with an end marker, and describe any damage of its compressed data.

    A few extraneous bytes after the last row are harmless and common, except if zeros stand in place of
    compressed data. None also for a header that this decoder does not support, but Pillow may.
    """
    import simplejpeg

    try:
        colours = simplejpeg.decode_jpeg_header(data)[2]
    except ValueError:
        return None
    try:
        simplejpeg.decode_jpeg(data, "CMYK" if colours in ("CMYK", "YCCK") else "RGB")
    except ValueError as error:
        message = str(error)
        if "premature end" in message:
            return "truncated", "the compressed data of the JPEG end before its last row"
        if _EXTRANEOUS in message:
            extraneous = re.search(rf"(\d+) {_EXTRANEOUS}", message)
            decoded = len(data) - len(_END_OF_IMAGE) - (int(extraneous[1]) if extraneous else 0)
            starts_in_data = data.endswith(_FEW_ZEROS, 0, decoded)  # padding would start after the last row
            if starts_in_data or data.find(_HOLE, _first(data), decoded) >= 0:
                return "damaged", "the compressed data of the JPEG contain zeros in place of rows"
        elif _CORRUPT in message:
            return "damaged", " ".join(message.split())
    return LACKS_SCANS if lacks_scans(data, _COLOURS.get(colours, 3)) else None


def lacks_scans(data: bytes, num_components: int) -> bool:
    """Return whether a progressive JPEG ends before its scans hold every coefficient to the last bit.

    Source: ITU-T T.81, sections B.2.3 and G.1.1.1
    """
    precise: dict[int, set[int]] = {}  # component -> coefficients known to the last bit
    position = _first(data)
    while 0 <= position < len(data):
        num = data[position + 4] if position + 4 < len(data) else 0
        header = data[position + 5 : position + 2 * num + 8]
        if data[position + 2 : position + 4] == (6 + 2 * num).to_bytes(2) and len(header) == 2 * num + 3:
            first, last, bits = header[2 * num :]
            for component in header[: 2 * num : 2]:
                precise.setdefault(component, set()).update(range(first, last + 1) if bits & 15 == 0 else ())
        position = data.find(b"\xff%c" % _START_OF_SCAN, position + 2)
    if not precise:  # no scan: left to the decoder
        return False
    return len(precise) < num_components or any(len(known) < _COEFFICIENTS for known in precise.values())


def num_scans(data: bytes) -> int:
    """Count the scans of a JPEG; those of a thumbnail in its metadata count too."""
    return data.count(b"\xff%c" % _START_OF_SCAN)


def unread_coding(data: bytes) -> str:
    """Return the name of a JPEG's coding if vitctl does not decode it, else ""."""
    at = _first(data, _FRAMES)
    marker, bits = data[at + 1 : at + 2], data[at + 4 : at + 5]
    return _UNREAD.get(ord(marker or b"\0"), f"JPEG of {bits[0]} bits" if bits > b"\x08" else "")


def _first(data: bytes, markers: Container[int] = (_START_OF_SCAN,)) -> int:
    """Return the byte offset of the first of some markers; the length of the data if there is none."""
    position = 2
    for _ in range(_MAX_SEGMENTS):
        if position + 4 > len(data) or data[position] != 0xFF:
            break
        if data[position + 1] in markers:
            return position
        is_fill_byte = data[position + 1] == 0xFF
        position += 1 if is_fill_byte else 2 + int.from_bytes(data[position + 2 : position + 4])
    return len(data)
