"""Standard output and error of a job that must not fail because its terminal or pipe is gone."""

import errno
import os
import sys
from contextlib import suppress
from typing import Any

from vitctl.system.text import PlainStream, WrappedStream

# A broken pipe and a closed terminal: every later write would fail too.
_PERMANENT = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)


# Lines of a live view on the terminal; its cursor is at the end of the last one.
VIEW = {"lines": 0}


def above_view(text: str) -> str:
    """Return a line with the control codes that print it above a live view, or on a new line.

    For signal handlers and threads, which must not use Python's streams. The view redraws itself.
    """
    lines = VIEW["lines"]
    if not lines:
        return f"\n{text}\n"
    return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (lines - 1) + text + "\n" * lines


_ALOUD: list[int] = []  # standard error of a silent process, until the processes have met


def silence() -> None:
    """Silence this process, one of several; `speak` undoes it for an error before the processes have met."""
    _ALOUD.append(os.dup(2))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def aloud() -> int:
    """Return the descriptor of standard error, also for a silent process that has not met the others."""
    return _ALOUD[-1] if _ALOUD else 2


def speak() -> None:
    """Print errors again, unless the processes have met."""
    if _ALOUD:
        os.dup2(_ALOUD.pop(), 2)


def stay_silent() -> None:
    """Record that the processes have met: from here on one of them speaks for all."""
    while _ALOUD:
        os.close(_ALOUD.pop())


class TolerantStream(WrappedStream):
    """A text stream whose writes never fail: refused text is dropped, and the first error is recorded."""

    first_error: OSError | None = None
    is_reported = False

    def write(self, text: str) -> int:
        """Write the text, or drop it; returns its length."""
        try:
            self.stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: OSError | ValueError) -> None:
        if not isinstance(error, OSError):
            return
        self.first_error = self.first_error or error
        if (
            error.errno in _PERMANENT
        ):  # redirect the descriptor: C libraries write to it too, and Python flushes it at exit
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(null, self.stream.fileno())
                os.close(null)


_INSTALLED: dict[str, TolerantStream] = {}


def ignore_output_errors() -> None:
    """Survive failed writes to stdout or stderr from now on; `restore_output` undoes this."""
    for name in {"stdout", "stderr"} - set(_INSTALLED):
        stream = getattr(sys, name)
        if stream is None:
            continue
        # Inside the `PlainStream`, because rich asks that one for the stream to write to.
        _INSTALLED[name] = TolerantStream(stream.stream if isinstance(stream, PlainStream) else stream)
        _put(name, _INSTALLED[name])


def restore_output() -> None:
    while _INSTALLED:
        name, tolerant = _INSTALLED.popitem()
        stream = getattr(sys, name)
        if tolerant in (stream, getattr(stream, "stream", None)):
            _put(name, tolerant.stream)


def _put(name: str, wrapped: Any) -> None:
    stream = getattr(sys, name)
    if isinstance(stream, PlainStream):
        stream.stream = wrapped
    else:
        setattr(sys, name, wrapped)


def output_errors_ignored() -> bool:
    return bool(_INSTALLED)


def raise_output_error() -> None:
    """Raise the first OSError of a dropped write since `ignore_output_errors`, once."""
    for stream in _INSTALLED.values():
        if stream.first_error is not None and not stream.is_reported:
            stream.is_reported = True
            raise stream.first_error
