"""The console: text, tables, progress bars. Control characters in names and messages are escaped."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import Control
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from vitctl.system.text import PlainStream, printable

_FILE: Any = Console.file  # a property


class PlainConsole(Console):
    """Rich's console, with control characters in text escaped; colours and cursor codes still work."""

    @property
    def file(self) -> IO[str]:
        """Return the stream without the wrapper that escapes text, even during a live view."""
        stream: Any = _FILE.fget(self)
        while isinstance(stream, PlainStream):
            stream = stream.stream
        return cast("IO[str]", stream)

    @file.setter
    def file(self, new: IO[str]) -> None:
        """Set the stream."""
        _FILE.fset(self, new)

    def on_broken_pipe(self) -> None:
        """Let `main` end the command with code 0; Rich would exit with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape text with markup before its width is measured, so that columns stay aligned."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all output; a carriage return ends a line that will be overwritten."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\r":
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


CONSOLE = PlainConsole(highlight=False)
SHORT_NAME = 22  # longest name that a table never wraps


def say(text: str, style: str | None = None) -> None:
    """Print text verbatim, without markup or wrapping, so that lines can be copied."""
    CONSOLE.print(text, style=style, markup=False, soft_wrap=True)


def show_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: Sequence[str] | None = ()
) -> None:
    """Print a table; `left` are text columns besides the first (None: all), the others are numbers."""
    if title:
        say(title)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(header))
    for i, name in enumerate(header):
        is_text = i == 0 or left is None or name in left
        is_short = i == 0 and all(len(str(row[0])) <= SHORT_NAME for row in rows)
        table.add_column(
            escape(name),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=is_short or not is_text,  # so that it can be copied
        )
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    CONSOLE.print(table)


@contextmanager
def waiting(text: str, console: Console = CONSOLE, *, prints: bool = False) -> Iterator[None]:
    """Show a line on a terminal during work, even through an error; without one, `prints` prints it."""
    if not console.is_terminal:
        if prints:
            console.print(escape(f"{text} ..."), soft_wrap=True)
        yield
        return
    console.print(escape(f"{text} ..."), end="\r")
    try:
        yield
    finally:
        console.control(Control((ControlType.ERASE_IN_LINE, 2)))


@contextmanager
def progress_bar(title: str, console: Console = CONSOLE) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that moves a progress bar; without a terminal there is no bar."""
    with progress_of_steps(console, prints=False) as show:
        yield partial(show, title)


@contextmanager
def counting(title: str, total: int, console: Console = CONSOLE) -> Iterator[Callable[[int], None]]:
    """Yield a function that moves a progress bar by so many of `total`."""
    done = 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total)

    with progress_bar(title, console) as progress:
        yield add


@contextmanager
def progress_of_steps(
    console: Console = CONSOLE, *, prints: bool = True
) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function (step, done, total) that moves a progress bar.

    The bar starts with the first step, after worker processes were forked. Without a terminal there is no
    bar; with `prints`, each new step is printed instead.
    """
    progress = Progress(
        console=console, transient=True, disable=not console.is_terminal, redirect_stdout=console is CONSOLE
    )
    bar, current = progress.add_task("", total=None), ""

    def show(step: str, done: int, total: int) -> None:
        nonlocal current
        if prints and step != current and not console.is_terminal:
            say(step)
        current = step
        progress.start()
        progress.update(bar, description=step, completed=done, total=total or None)

    try:
        yield show
    finally:
        progress.stop()


def fetch_weights(source: str, *, on_stderr: bool = False) -> None:
    """Download weights from an address into the cache, unless they are there, with a progress bar.

    `on_stderr` keeps standard output for results.
    """
    from vitctl.models.weights.download import fetch, locate

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = PlainConsole(stderr=True, highlight=False) if on_stderr else CONSOLE
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(source, total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(bar, completed=done, total=total)

        path = locate(source, partial(fetch, progress=show))
    if progress.tasks[0].completed:
        console.print(f"{source}: {path}", markup=False, soft_wrap=True)
