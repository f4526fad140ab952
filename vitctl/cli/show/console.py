"""The console that every table, line and bar goes through: what names and messages hold is shown, never obeyed."""

from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from vitctl.system.text import PlainStream, printable

_FILE: Any = Console.file  # a property


class PlainConsole(Console):
    """Rich's console with control characters in texts as escapes; its own, for colours and the cursor, pass."""

    @property
    def file(self) -> IO[str]:
        """Where it writes: beneath what escapes the texts of others, also while a live view stands before standard output."""
        found: Any = _FILE.fget(self)
        while isinstance(found, PlainStream):
            found = found.stream
        return cast("IO[str]", found)

    @file.setter
    def file(self, new: IO[str]) -> None:
        """Where it shall write instead."""
        _FILE.fset(self, new)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text with markup, before its width is measured, so that columns stay aligned."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is written; the carriage return is the end of a line that will be overwritten."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\r":
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
