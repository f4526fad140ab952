"""Parts of tar files, and fixtures of the tests of data."""

import tarfile

from tests.data.conftest import make_split, tiny_png

__all__ = ["make_split", "tiny_png"]


def header(name: str, size: int | bytes, kind: bytes = b"0") -> bytes:
    """A header block with any size: a number, or the twelve bytes themselves."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT)[:512])
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[148:156], block[156:157] = b" " * 8, kind
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, content: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(content), kind) + content + bytes(-len(content) % 512)


def record(key: bytes, value: bytes) -> bytes:
    """A record of a pax header, with its own length."""
    rest = b" " + key + b"=" + value + b"\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
    return str(length).encode() + rest
