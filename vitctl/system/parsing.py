"""Untrusted bytes while a library parses them: any exception becomes an error of one line that names the
file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitctl.errors import VitctlError, explained
from vitctl.system.text import one_line

_MAX_LETTERS = 200


@contextmanager
def parsing(
    name: Path | str, error: type[VitctlError], what: str = "damaged, or not what its name says"
) -> Iterator[None]:
    """Convert what a parser raises. Parsers of archives, arrays, tables and images raise some thirty types
    for malformed input.

    Args:
        name: the file or folder that is read, for the message.
        error: type to raise instead.
        what: what the message says about the file.

    Raises:
        VitctlError: unchanged.
        OSError, MemoryError: unchanged, where the operating system refused something: disk full, out of
            memory.
        error: for everything else, in one line, with the original as its cause.
    """
    try:
        yield
    except VitctlError:
        raise
    except Exception as problem:
        if explained(problem) is not None:
            raise
        raise error(f"{one_line(str(name))}: {what} ({error_text(problem)})") from problem


def error_text(problem: BaseException) -> str:
    """Type and message of an exception of a library, in one short line."""
    text = " ".join(str(problem).split())[:_MAX_LETTERS]
    return one_line(f"{type(problem).__name__}: {text}" if text else type(problem).__name__)
