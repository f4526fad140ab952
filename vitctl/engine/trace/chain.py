"""Chained lines: each line of log.jsonl and steps.jsonl ends with a SHA-256 over itself and the digest of the
line before.

The file itself is the only state, so that threads and processes may append to it, and a crash leaves nothing
to mend. A line that a crash cut short belongs to no chain; the next line follows the last whole one.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitctl.errors import LaunchError
from vitctl.system.bounds import LOG_LINE
from vitctl.system.files import open_regular

_LINK = re.compile(rb', "sha256": "([0-9a-f]{64})"\}$')
# Kinds of records that carry no number of a training: a start writes them, so that one may follow what a
# crash or a result ended.
QUIET = frozenset(("start", "resume", "warning", "data", "weights", "node"))
_MOST_TORN = 1000  # incomplete lines in a row
_WINDOW = 2**14  # bytes from the end of a file where the last whole line is looked for first


class Line(NamedTuple):
    """A whole line: its text without the link, as bytes, the digest of its link, "" where it has none, and
    its number from 1.
    """

    body: bytes
    sha256: str
    number: int = 0

    def follows(self, before: str) -> bool:
        """Whether its link is that of a line after one with the digest `before`."""
        return self.sha256 == link(self.body, before)


def link(body: bytes, before: str) -> str:
    """The digest of a line after one with the digest `before`; "" before the first."""
    return hashlib.sha256(before.encode() + body).hexdigest()


def linked(body: bytes, before: str) -> bytes:
    """A line, a JSON object as bytes, with its link."""
    comma = b", " if body != b"{}" else b""
    return body[:-1] + comma + f'"sha256": "{link(body, before)}"}}'.encode()


def split(line: bytes) -> Line:
    """A line without its newline, and its link."""
    found = _LINK.search(line)
    return Line(line[: found.start()] + b"}", found[1].decode()) if found else Line(line, "")


def last_line(descriptor: int) -> Line:
    """The last linked line of an open file; an empty one where there is none."""
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
    """The last linked line of a file; an empty one where there is none."""
    if not os.path.lexists(path):
        return Line(b"{}", "")
    with open_regular(path, error=LaunchError) as file:
        return last_line(file.fileno())


def head(path: Path) -> str:
    """The digest of the last line of a file of chained lines; "" where there is none."""
    return end_of(path).sha256


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their newlines; a line that is too long is left out."""
    most, inside = LOG_LINE.limit, False
    with open_regular(path, error=LaunchError) as file:
        while line := file.readline(most):
            ends = line.endswith(b"\n")
            if not inside and (ends or len(line) < most):
                yield line.removesuffix(b"\n")
            inside = not ends


@dataclass(frozen=True)
class Chain:
    """What a file of chained lines proves.

    Args:
        links: digests of the linked lines, in order.
        kinds: of their records.
        num_torn: incomplete lines, as a crash leaves them.
        broken_at: number of the first line of the file, from 1, that does not follow the one before; 0 where
            all do.
        torn_at: of the first line that is no record, and stands where no crash leaves one; 0 where there is
            none.
    """

    links: Sequence[str]
    kinds: Sequence[str]
    num_torn: int
    broken_at: int
    torn_at: int

    def numbers_after(self, digest: str) -> list[str]:
        """Kinds of the records behind the line with a digest that carry numbers."""
        return [kind for kind in self.kinds[self.links.index(digest) + 1 :] if kind not in QUIET]


def read_chain(
    path: Path, kind_of: Callable[[bytes], str | None], take: Callable[[Line], None] = lambda _: None
) -> Chain:
    """Follow the links of a file.

    A crash leaves an incomplete line at the end. A start follows it; or, where the disk was full, the same
    line, whole.

    Args:
        path: of the file.
        kind_of: the kind of the record in the text of a line; None where it is no record.
        take: called with each record.
    """
    links: list[str] = []
    kinds: list[str] = []
    torn: list[bytes] = []
    num_torn = broken_at = torn_at = 0
    for number, text in enumerate(whole_lines(path), 1):
        line = split(text)._replace(number=number)
        kind = kind_of(line.body)
        if kind is None:
            num_torn += bool(text)
            torn += [text] * bool(text)
            torn_at = torn_at or (number if len(torn) > _MOST_TORN else 0)
            torn = torn[:_MOST_TORN]
            continue
        if torn and kind not in QUIET and not all(text.startswith(one) for one in torn):
            torn_at = torn_at or number - 1
        torn = []
        if not broken_at and not line.follows(links[-1] if links else ""):
            broken_at = number
        links.append(line.sha256)
        kinds.append(sys.intern(kind))
        take(line)
    return Chain(links, kinds, num_torn, broken_at, torn_at)


def without(lines: Sequence[bytes], is_kept: Callable[[bytes], bool]) -> list[bytes]:
    """Drop lines and link those behind them anew.

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
