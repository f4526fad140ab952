"""The console for all output: control characters in names and messages are escaped, never executed."""

import errno
import os
from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from vitctl.system.text import PlainStream, printable

_FILE: Any = Console.file  # a property


class PlainConsole(Console):
    """Rich's console that escapes control characters in text; its own codes, for colours and the cursor, are
    not escaped.
    """

    @property
    def file(self) -> IO[str]:
        """The underlying stream, without the wrapper that escapes text, also while a live view replaces
        standard output.
        """
        found: Any = _FILE.fget(self)
        while isinstance(found, PlainStream):
            found = found.stream
        return cast("IO[str]", found)

    @file.setter
    def file(self, new: IO[str]) -> None:
        """Set the stream."""
        _FILE.fset(self, new)

    def on_broken_pipe(self) -> None:
        """Who reads has had enough: `main` ends the command with code 0, where Rich would end it with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render_str(self, text: str, **options: Any) -> Text:
        """Text with markup, before its width is measured, so that columns stay aligned."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All output; a carriage return ends a line that will be overwritten."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\r":
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
