"""Files: written atomically, read within limits, locked without following symbolic links."""

import fcntl
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
from vitctl.system.address import value_without_queries
from vitctl.system.bounds import DEPTH, RECIPE, RECIPE_LINE
from vitctl.system.parsing import error_text
from vitctl.system.text import escaped_json, has_control, one_line

_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: opening a FIFO must not hang
_PERMISSIONS = 0o666  # minus the umask
_NAME_BYTES = 240  # most file systems take 255; temporary files have a prefix and a suffix


def inside(folder: Path, *names: str, error: type[VitctlError], where: object = "") -> Path:
    """Return the path of a file or folder in `folder`, or deeper, by names from data or records.

    Every name is one plain part of a path, so that the result is always inside of `folder`. `where` is the
    source of the names, for the message.

    Raises:
        error: a name is empty, `.` or `..`, has a separator, a control character or spaces at an end, or more
            than 240 bytes.
    """
    for name in names:
        is_part = name not in ("", ".", "..") and not set(name) & set("/\\") and name == name.strip()
        if not is_part or has_control(name) or len(name.encode()) > _NAME_BYTES:
            raise error(
                f"{one_line(str(where or folder))}: {one_line(name[:100])!r} cannot be used as a file name; "
                f"rename it"
            )
    return folder.joinpath(*names)


def leads_out(name: str) -> bool:
    """Whether a relative path, such as the name of an archive's member, is absolute or climbs by `..`."""
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/")


@contextmanager
def atomic_write(path: Path, *, flushed: bool = True) -> Iterator[Path]:
    """Atomic write: yields a temporary file in the same folder. At the end of the block it is flushed and
    renamed to `path`.

    A reader sees the complete old file or the complete new one; after an error the old one stays. The
    permissions of the new file follow the umask, whichever library wrote it. Symbolic links are not followed.

    Args:
        path: the file to write; its folder exists.
        flushed: whether the file must survive a power failure.

    Raises:
        OSError: writing failed; the error names `path`, and the temporary file is removed.
    """
    aside = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, _CREATE, _PERMISSIONS)
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
            and (error.filename in (None, str(aside), aside) or error.filename2 in (str(aside), aside))
        ):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file atomically."""
    with atomic_write(path) as aside:
        aside.write_bytes(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically, in UTF-8; surrogates, as in undecodable file names, are written as
    escapes.
    """
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write a value as indented JSON, atomically.

    Raises:
        ValueError: the value holds NaN or an infinity, which are not JSON.
    """
    return write_text(
        path, escaped_json(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"
    )


def flush(path: Path) -> None:
    """Make what was written to a file or a folder survive a power failure (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, *, error: type[VitctlError]) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises:
        error: it is missing or not readable, or is a folder, a FIFO, a device or a socket; one line.
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


def read_bytes(path: Path, max_bytes: int, *, error: type[VitctlError]) -> bytes:
    """The content of a file of at most `max_bytes`.

    Raises:
        error: as `open_regular`; or the file is larger, or cannot be read to its end.
    """
    with open_regular(path, error=error) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as problem:
            raise error(f"{path}: cannot be read ({problem.strerror})") from None
    if len(content) > max_bytes:
        raise error(f"{path}: larger than {max_bytes:,} bytes, the limit for this file")
    return content


def read_json(path: Path, max_bytes: int, *, error: type[VitctlError]) -> Any:
    """The value in a JSON file; NaN and infinities, which are not JSON, are refused.

    Raises:
        error: as `read_bytes`; or it is not JSON in UTF-8, is nested too deep, or holds NaN or an infinity.
    """
    return parse_json(read_bytes(path, max_bytes, error=error), path, error=error)


def parse_json(content: bytes, name: Path | str, *, error: type[VitctlError]) -> Any:
    """The value of JSON text, as `read_json`; `name` is the file to name in the error message."""
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_not_a_number, parse_float=_finite)
    except (ValueError, RecursionError) as problem:
        raise error(f"{name}: not JSON ({error_text(problem)})") from None


def no_links(path: str, flags: int) -> int:
    """Opener for `open` that does not follow symbolic links: for files that are written in place."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _PERMISSIONS)


def parse_toml(text: str) -> dict[str, Any]:
    """The values of TOML text. The length of a line is limited, because parsing time grows with its square.

    Raises:
        ValueError: it is not TOML, has a line that is too long, is nested too deep, or holds numbers of
            thousands of digits.
    """
    if long := next((n for n, line in enumerate(text.split("\n"), 1) if len(line) > RECIPE_LINE.limit), None):
        raise ValueError(f"line {long} is longer than {RECIPE_LINE} characters")
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    nested: list[Any] = [values]
    for _ in range(DEPTH.limit):
        nested = [
            value for parent in nested if isinstance(parent, dict | list) for value in _children(parent)
        ]
    if any(isinstance(value, dict | list) for value in nested):
        raise ValueError(f"more than {DEPTH.limit} tables and lists inside each other")
    return values


def read_toml(path: Path, *, error: type[VitctlError]) -> tuple[dict[str, Any], str]:
    """The values in a TOML file, without queries of addresses, and its text.

    Raises:
        error: as `read_bytes`; or it is not TOML in UTF-8, as in `parse_toml`.
    """
    content = read_bytes(path, RECIPE.limit, error=error)
    try:
        text = content.decode().replace("\r\n", "\n")
        return value_without_queries(parse_toml(text), over=False), text
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; save it as UTF-8, or give a .toml file") from None
    except ValueError as problem:
        raise error(f"{path}: not valid TOML: {problem}") from None
    except VitctlError as problem:
        raise error(f"{path}: {problem}") from None


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, created when missing. Symbolic links are not followed, the content is never touched.

    Raises:
        LaunchError: the path is not a regular file.
    """
    descriptor = os.open(path, _LOCK | os.O_NONBLOCK, _PERMISSIONS)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise LaunchError(f"{path}: is {_in_words(kind)}, should be a file; remove it")
    return open(descriptor, "r+b")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock against other processes; the kernel releases it when the process dies.

    The lock file is not deleted: two processes could then hold the lock.
    """
    with open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_a_number(text)


def _children(parent: dict[str, Any] | list[Any]) -> list[Any]:
    return list(parent.values()) if isinstance(parent, dict) else parent


def _in_words(kind: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(kind), "a device")


def cache_folder() -> Path:
    """Where downloads are kept: $VITCTL_CACHE, or ~/.cache/vitctl."""
    return Path(os.environ.get("VITCTL_CACHE") or Path.home() / ".cache" / "vitctl")
