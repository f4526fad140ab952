"""What the drivers share with the tests of data."""

import tarfile

import pytest

from tests.data.conftest import make_split, tiny_png
from tests.fuzz.mutate import TALLY

__all__ = ["make_split", "tiny_png"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many inputs were made, and what came of them; of several processes (-n) nothing is known here."""
    for what, number in sorted(TALLY.items()):
        terminalreporter.write_line(f"{number:7,} {what}")
    if TALLY:
        terminalreporter.write_line(f"{TALLY.total():7,} fuzzed inputs")


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
