"""The size of a WEBP file, read from its headers without decoding.

Source: RFC 9649, WebP Image Format, sections 2.3 to 2.7
"""

_MAX_CHUNKS = 64


def is_webp(data: bytes) -> bool:
    """Whether a file starts with the signature of WEBP."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def webp_size(data: bytes) -> tuple[int, int]:
    """The largest width and height in any of the first chunks; 0, 0 where there is none, which the decoder
    will refuse.
    """
    at, width, height = 12, 0, 0
    for _ in range(_MAX_CHUNKS):
        name, size, body = (
            data[at : at + 4],
            int.from_bytes(data[at + 4 : at + 8], "little"),
            data[at + 8 : at + 18],
        )
        if len(body) < 10:
            break
        own = _chunk_size(name, body)
        width, height = max(width, own[0]), max(height, own[1])
        at += 8 + size + size % 2
    return width, height


def _chunk_size(name: bytes, body: bytes) -> tuple[int, int]:
    if name == b"VP8X":  # the canvas
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if name == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if name == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return 0, 0
