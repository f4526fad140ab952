"""Standard output and error of a command whose work counts for more than its words: what they refuse is dropped."""

import errno
import os
import sys
from contextlib import suppress
from typing import Any

from vitctl.system.text import PlainStream

# What comes of a pipe that nobody reads and of a terminal that was closed: they take nothing any more.
_FOR_GOOD = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)


class Lenient:
    """A text stream that never fails: what the one beneath does not take is dropped, and the first reason is kept.

    Args:
        stream: the one beneath; what is not about writing is asked of it.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.refused: OSError | None = None
        self.told = False

    def write(self, text: str) -> int:
        """Write it or drop it; how many characters were given."""
        try:
            self.stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._drop(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write or drop each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what is held back, or drop it."""
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drop(self, error: OSError | ValueError) -> None:
        if not isinstance(error, OSError):
            return
        self.refused = self.refused or error
        if error.errno in _FOR_GOOD:  # also for what libraries of other languages print, and to be empty at the end
            with suppress(OSError, ValueError):
                silence = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(silence, self.stream.fileno())
                os.close(silence)


_INSTALLED: dict[str, Lenient] = {}


def outlive_screen() -> None:
    """From here on nothing that is printed ends this process, whoever reads it, or no longer does; see `restore_screen`."""
    for name in {"stdout", "stderr"} - set(_INSTALLED):
        stream = getattr(sys, name)
        if stream is None:
            continue
        # Beneath what escapes control characters: rich asks that one for the stream to write to.
        _INSTALLED[name] = Lenient(stream.stream if isinstance(stream, PlainStream) else stream)
        _put(name, _INSTALLED[name])


def restore_screen() -> None:
    """The streams as they were before `outlive_screen`."""
    while _INSTALLED:
        name, lenient = _INSTALLED.popitem()
        stream = getattr(sys, name)
        if lenient in (stream, getattr(stream, "stream", None)):
            _put(name, lenient.stream)


def _put(name: str, beneath: Any) -> None:
    stream = getattr(sys, name)
    if isinstance(stream, PlainStream):
        stream.stream = beneath
    else:
        setattr(sys, name, beneath)


def is_outlived() -> bool:
    """Whether what the screen refuses is dropped."""
    return bool(_INSTALLED)


def check_screen() -> None:
    """Say once what the screen refused first.

    Raises:
        OSError: something was dropped since `outlive_screen`, and nobody was told.
    """
    for lenient in _INSTALLED.values():
        if lenient.refused is not None and not lenient.told:
            lenient.told = True
            raise lenient.refused
