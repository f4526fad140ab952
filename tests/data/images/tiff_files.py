"""TIFF files written tag by tag: of any number of bits, either byte order, compressed or not."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np


def packed(values: np.ndarray, bits: int, order: str) -> bytes:
    """Rows of unsigned integers in `bits` bits each, most significant first; each row ends a byte."""
    if bits >= 8 and bits & (bits - 1) == 0:
        return values.astype(f"{order}i{bits // 8}").tobytes()
    ones = (values[..., None].astype(np.int64) >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(ones.reshape(len(values), -1).astype(np.uint8), axis=1).tobytes()


def tiff(
    planes: Sequence[np.ndarray],
    bits: int,
    *,
    photometric: int = 1,
    sample_format: int = 1,
    order: str = "<",
    deflate: bool = False,
    big: bool = False,
    data: bytes = b"",
    colours: Sequence[int] = (),
    compression: int = 0,
) -> bytes:
    """Write one image, each channel as a plane of its own; with `data` these bytes are the pixels, and with
    `colours` a palette's map is written, with `compression` another number than that of the pixels.
    """
    height, width = planes[0].shape
    pixels = [data] if data else [packed(plane, bits, order) for plane in planes]
    pixels = [zlib.compress(plane) for plane in pixels] if deflate else pixels
    number, size, entry = ("Q", 8, 20) if big else ("I", 4, 12)
    tags: list[tuple[int, list[int]]] = [
        (256, [width]), (257, [height]), (258, [bits] * len(planes)),
        (259, [compression or (8 if deflate else 1)]),
        (262, [photometric]), (273, []), (277, [len(planes)]), (278, [height]),
        (279, [len(plane) for plane in pixels]), (284, [2 if len(planes) > 1 else 1]),
        *([(320, list(colours))] if colours else []), (339, [sample_format] * len(planes)),
    ]  # fmt: skip
    start = (16 if big else 8) + (8 if big else 2) + entry * len(tags) + size
    offsets = [start + sum(map(len, pixels[:n])) for n in range(len(pixels))]
    after = start + sum(map(len, pixels))
    table, tail = b"", b""
    for tag, values in tags:
        values = values or offsets
        kind, letter = (16 if big else 4, number) if tag in (273, 279) else (3, "H")
        value = struct.pack(order + letter * len(values), *values)
        table += struct.pack(f"{order}HH{number}", tag, kind, len(values))
        if len(value) > size:
            table += struct.pack(order + number, after + len(tail))
            tail += value
        else:
            table += value.ljust(size, b"\0")
    mark = b"II" if order == "<" else b"MM"
    head = (
        struct.pack(f"{order}HHHQQ", 43, 8, 0, 16, len(tags))
        if big
        else struct.pack(f"{order}HIH", 42, 8, len(tags))
    )
    return mark + head + table + bytes(size) + b"".join(pixels) + tail
