"""Files: written whole or not at all, read within bounds, locked without following links of others."""

import io
import json
import math
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vitctl.errors import LaunchError, VitctlError
from vitctl.system.bounds import DEPTH, RECIPE, RECIPE_LINE
from vitctl.system.parsing import said_by
from vitctl.system.text import escaped_json

_MADE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not hang before it is known as one
_RIGHTS = 0o666  # less the umask


@contextmanager
def replacing(path: Path, *, flushed: bool = True) -> Iterator[Path]:
    """A file beside `path` to write into. At the end of the block it is flushed and takes the place of `path` in one move.

    A reader sees the old file or the new one, whole; after an error the old one stays. The new one has the umask's rights,
    whatever library wrote it, and a link that somebody put in its place is not followed.

    Args:
        path: of the file to write; its folder exists.
        flushed: whether it must survive a power cut.

    Raises:
        OSError: as the writing raises it, about `path`; nothing is left behind.
    """
    aside = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, _MADE, _RIGHTS)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        yield aside
        os.chmod(aside, mode)
        if flushed:
            flush(aside)
        os.replace(aside, path)
        if flushed:
            flush(path.parent)
    except OSError as error:
        if (
            error.errno is not None
            and not isinstance(error, BrokenPipeError)
            and error.filename in (None, str(aside), aside)
        ):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all."""
    with replacing(path) as aside:
        aside.write_bytes(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text file whole or not at all, in UTF-8; half characters of file names survive as escapes."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write a value as indented JSON, whole or not at all.

    Raises:
        ValueError: the value holds NaN or an infinity, which are not JSON.
    """
    return write_text(path, escaped_json(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)) + "\n")


def flush(path: Path) -> None:
    """Make what was written to a file or a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, *, error: type[VitctlError]) -> io.BufferedReader:
    """Open a file of others for reading.

    Raises:
        error: it is missing, may not be read, or is a folder, a FIFO, a device or a socket; one line.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise error(f"{path}: is {_in_words(kind)}, should be a file")
    return open(descriptor, "rb")


def read_bytes(path: Path, most_bytes: int, *, error: type[VitctlError]) -> bytes:
    """The content of a file of others, when it is no larger than `most_bytes`.

    Raises:
        error: as `open_regular`; or the file is larger, or cannot be read to its end.
    """
    with open_regular(path, error=error) as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as problem:
            raise error(f"{path}: cannot be read ({problem.strerror})") from None
    if len(content) > most_bytes:
        raise error(f"{path}: larger than {most_bytes:,} bytes, which is the most that is read here")
    return content


def read_json(path: Path, most_bytes: int, *, error: type[VitctlError]) -> Any:
    """The value in a JSON file of others; NaN and infinities, which are not JSON, are refused.

    Raises:
        error: as `read_bytes`; or it is not JSON in UTF-8, too deep, or holds a number that is none.
    """
    return parse_json(read_bytes(path, most_bytes, error=error), path, error=error)


def parse_json(content: bytes, place: Path | str, *, error: type[VitctlError]) -> Any:
    """The value that JSON text of others says, as `read_json`; `place` is named in the message."""
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as problem:
        raise error(f"{place}: not JSON ({said_by(problem)})") from None


def no_links(path: str, flags: int) -> int:
    """Opener, for `open`, of a file that is written where it stands: a link that somebody put there is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _RIGHTS)


def parse_toml(text: str) -> dict[str, Any]:
    """The values of TOML that others wrote: its lines are bounded, because reading takes the square of their length.

    Raises:
        ValueError: it is not TOML, has a line that is too long, tables too deep, or numbers of thousands of digits.
    """
    if long := next((n for n, line in enumerate(text.split("\n"), 1) if len(line) > RECIPE_LINE.most), None):
        raise ValueError(f"line {long} is longer than {RECIPE_LINE} characters")
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    inside: list[Any] = [values]
    for _ in range(DEPTH.most):
        inside = [value for holder in inside if isinstance(holder, dict | list) for value in _held(holder)]
    if any(isinstance(value, dict | list) for value in inside):
        raise ValueError(f"more than {DEPTH.most} tables and lists inside each other")
    return values


def read_toml(path: Path, *, error: type[VitctlError]) -> tuple[dict[str, Any], str]:
    """The values in a TOML file of others, and its text.

    Raises:
        error: as `read_bytes`; or it is not TOML in UTF-8, as `parse_toml` says.
    """
    content = read_bytes(path, RECIPE.most, error=error)
    try:
        text = content.decode().replace("\r\n", "\n")
        return parse_toml(text), text
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; save it as UTF-8, or give a .toml file") from None
    except ValueError as problem:
        raise error(f"{path}: not valid TOML: {problem}") from None


def open_lock(path: Path) -> IO[bytes]:
    """A lock file, made when missing. A link in its place is not followed, its content is never touched.

    Raises:
        LaunchError: something that is no file stands there.
    """
    descriptor = os.open(path, _LOCK | os.O_NONBLOCK, _RIGHTS)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise LaunchError(f"{path}: is {_in_words(kind)}, should be a file; remove it")
    return open(descriptor, "r+b")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _held(holder: dict[str, Any] | list[Any]) -> list[Any]:
    return list(holder.values()) if isinstance(holder, dict) else holder


def _in_words(kind: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(kind), "a device")


def cache_folder() -> Path:
    """Where downloads are kept: $VITCTL_CACHE, or ~/.cache/vitctl."""
    return Path(os.environ.get("VITCTL_CACHE") or Path.home() / ".cache" / "vitctl")
