"""Chained lines: each line of log.jsonl and steps.jsonl ends with a SHA-256 over itself and the digest of the
line before.

The file itself is the only state, so that threads and processes may append to it, and a crash leaves nothing
to repair. A line that a crash cut short is not part of the chain; the next line follows the last complete
one.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitctl.errors import LaunchError
from vitctl.system.files import LOG_LINE, open_regular

_LINK = re.compile(rb', "sha256": "([0-9a-f]{64})"\}$')
_WINDOW = 2**14  # bytes from the end of a file that are searched first for the last complete line


class Line(NamedTuple):
    """A complete line: its text without the link, the digest in its link ("" without one), its number from 1."""

    body: bytes
    sha256: str
    number: int = 0

    def follows(self, before: str) -> bool:
        """Whether it is linked to a line with the digest `before`."""
        return self.sha256 == link(self.body, before)


def link(body: bytes, before: str) -> str:
    """The digest of a line after one with the digest `before`; "" before the first."""
    return hashlib.sha256(before.encode() + body).hexdigest()


def linked(body: bytes, before: str) -> bytes:
    """A line, a JSON object as bytes, with its link."""
    comma = b", " if body != b"{}" else b""
    return body[:-1] + comma + f'"sha256": "{link(body, before)}"}}'.encode()


def split(line: bytes) -> Line:
    """Separate a line without its newline from its link."""
    found = _LINK.search(line)
    return Line(line[: found.start()] + b"}", found[1].decode()) if found else Line(line, "")


def last_line(descriptor: int) -> Line:
    """The last linked line of an open file; an empty one if there is none."""
    size, window = os.fstat(descriptor).st_size, _WINDOW
    while True:
        first = max(0, size - window)
        lines = os.pread(descriptor, size - first, first).split(b"\n")
        for line in reversed(lines if first == 0 else lines[1:]):
            if (found := split(line)).sha256:
                return found
        if first == 0 or window > LOG_LINE.limit:
            return Line(b"{}", "")
        window *= 8


def end_of(path: Path) -> Line:
    """The last linked line of a file; an empty one if there is none."""
    if not os.path.lexists(path):
        return Line(b"{}", "")
    with open_regular(path, error=LaunchError) as file:
        return last_line(file.fileno())


def head(path: Path) -> str:
    """The digest of the last line of a file of chained lines; "" if there is none."""
    return end_of(path).sha256


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their newlines; lines that are too long are skipped."""
    most, inside = LOG_LINE.limit, False
    with open_regular(path, error=LaunchError) as file:
        while line := file.readline(most):
            ends = line.endswith(b"\n")
            if not inside and (ends or len(line) < most):
                yield line.removesuffix(b"\n")
            inside = not ends


@dataclass(frozen=True)
class Chain:
    """The chained lines of a file.

    Args:
        links: digests of the lines, in order.
        num_torn: incomplete lines, as a crash leaves them.
        broken_at: number of the first line, from 1, that does not follow the one before; 0 if all do.
    """

    links: Sequence[str] = ()
    num_torn: int = 0
    broken_at: int = 0


def read_chain(path: Path, take: Callable[[Line], None] = lambda _: None) -> Chain:
    """Follow the links of a file; `take` is called with each complete line."""
    links: list[str] = []
    num_torn = broken_at = 0
    for number, text in enumerate(whole_lines(path), 1):
        line = split(text)._replace(number=number)
        if not _is_record(line.body):
            num_torn += bool(text)
            continue
        if not broken_at and not line.follows(links[-1] if links else ""):
            broken_at = number
        links.append(line.sha256)
        take(line)
    return Chain(links, num_torn, broken_at)


def _is_record(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def without(lines: Sequence[bytes], is_kept: Callable[[bytes], bool]) -> list[bytes]:
    """Drop lines and link the lines after them anew.

    A line that did not follow the one before it stays as it is: dropping lines never hides that one was
    changed.

    Args:
        lines: without newlines.
        is_kept: whether a line stays; given its text without the link.
    """
    kept: list[bytes] = []
    old = new = ""
    for text in lines:
        line = split(text)
        was_whole = bool(line.sha256) and line.follows(old)
        old = line.sha256 or old
        if not is_kept(line.body):
            continue
        kept.append(linked(line.body, new) if was_whole else text)
        new = split(kept[-1]).sha256 or new
    return kept
