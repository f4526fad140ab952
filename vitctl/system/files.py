"""Files: bounded reads, atomic writes, JSON, TOML and CSV."""

import csv
import errno
import fcntl
import glob
import io
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vitctl.errors import LaunchError, RecipeError, VitctlError, explained, refuse
from vitctl.system import limits
from vitctl.system.address import check_local, value_without_queries
from vitctl.system.text import csv_cell, escaped_json, has_control, one_line, printable

_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: opening a FIFO must not hang
_PERMISSIONS = 0o666  # minus the umask
# Errors of network mounts, FUSE and containers for unsupported operations: fsync of a folder, modes, locks.
_LACKING = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY}
_LACKING |= {errno.EPERM, errno.EACCES, errno.ENOLCK, errno.ENODEV, errno.EISDIR}
_NAME_BYTES = 240  # most file systems take 255; temporary files have a prefix and a suffix


def inside(folder: Path, *names: str, error: type[VitctlError], where: object = "") -> Path:
    """Return the path of a file or folder inside `folder`, from untrusted names.

    Each name must be one plain path component, so that the result cannot leave `folder`. `where` is the
    source of the names, for the message.

    Raises:
        error: a name is empty, `.` or `..`, has a separator, a control character or spaces at an end, or more
            than 240 bytes.
    """
    for name in names:
        is_part = name not in ("", ".", "..") and not set(name) & set("/\\") and name == name.strip()
        if not is_part or has_control(name) or len(name.encode()) > _NAME_BYTES:
            raise error(
                one_line(str(where or folder)), f"{name[:100]!r} is not a plain file name", "correct it there"
            )
    return folder.joinpath(*names)


def leads_out(name: str) -> bool:
    """Return whether a path, such as an archive member's name, is absolute or climbs by `..`."""
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/")


def can_write_into(folder: Path) -> bool:
    """Return whether a file can be created in a folder: it is tried, as permissions miss a read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_place(said: str, file: Path) -> None:
    """Raise RecipeError if a file, given by the flag or key `said`, cannot be written into its folder.

    A missing folder counts as writable if it can be created in its nearest existing parent.
    """
    folder = next(path for path in file.absolute().parents if path.exists())
    if not can_write_into(folder):
        raise RecipeError(f"{said} {file}", f"cannot write into the folder {folder}", "choose another path")


def check_free(flag: str, file: Path, taken: Iterable[Path], mark: bytes = b"") -> None:
    """Check the place of an output given by a flag, before the work.

    Args:
        taken: files and folders that the command itself reads or writes; the output may not be inside them.
        mark: bytes near the start of every such output: no other file is replaced; b"": any may be.

    Raises:
        RecipeError: the output would be lost or would replace something else, such as a file of a checkpoint.
    """
    check_place(flag, file)
    path = file.resolve()
    is_taken = bool({path, *path.parents} & {one.resolve() for one in taken})
    in_checkpoint = any((folder / "state.json").exists() for folder in (path, path.parent))
    is_other = False
    if mark and path.is_file():
        with path.open("rb") as old:
            is_other = mark not in old.read(1024)
    given, fix = f"{flag} {file}", "give another name"
    refuse(
        RecipeError,
        (is_taken, given, "the command itself reads or writes this file", fix),
        (in_checkpoint, given, "is in a checkpoint of a run", fix),
        ((path / "recipe.toml").exists(), given, "is the folder of a run", fix),
        (is_other, given, "exists, and is of another kind", fix),
    )


@contextmanager
def if_offered() -> Iterator[None]:
    """Leave the block early if the disk does not support an operation; a disk failure is still raised."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LACKING:
            raise


def restore_mode(path: Path, mode: int) -> None:
    """Set a file's permissions, if the disk supports them."""
    with if_offered():
        os.chmod(path, mode)


def free_bytes(folder: Path | str) -> float:
    """Return the free space of a disk in bytes; infinity if the disk does not report it (0 of 0)."""
    with if_offered():
        if (usage := shutil.disk_usage(folder)).total:
            return usage.free
    return math.inf


_TEMPORARY = re.compile(r"\..+\.([0-9]+)\.partial")
ABANDONED_SECONDS = 3600.0  # another machine may be writing a younger file


def sweep(folder: Path, name: str = "*", seconds: float = ABANDONED_SECONDS) -> None:
    """Remove temporary files of `atomic_write` that killed processes left in a folder.

    Args:
        name: glob pattern for the names of the final files.
        seconds: minimum age; 0 if only this machine writes into the folder.
    """
    from psutil import pid_exists

    for left in folder.glob(f".{name}.*.partial"):
        written_by = _TEMPORARY.fullmatch(left.name)
        with suppress(OSError):
            is_old = time.time() - left.lstat().st_mtime >= seconds
            if written_by and is_old and not pid_exists(int(written_by[1])):
                left.unlink()


@contextmanager
def atomic_write(path: Path, *, flushed: bool = True) -> Iterator[Path]:
    """Yield a temporary file in the same folder; after the block it is flushed and renamed to `path`.

    A reader sees the complete old file or the complete new one; after an error the old one stays. The
    permissions of the new file follow the umask, whichever library wrote it. Symbolic links are not followed.

    Args:
        flushed: whether the file must survive a power failure.

    Raises:
        OSError: writing failed; the error names `path`, and the temporary file is removed.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # such as /dev/null, which root could replace
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    aside = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    if flushed:
        sweep(path.parent, glob.escape(path.name[:200]))
    try:
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, _CREATE, _PERMISSIONS)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        yield aside
        restore_mode(aside, mode)
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
    with atomic_write(path) as aside:
        aside.write_bytes(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically, in UTF-8; surrogates, as in undecodable file names, become escapes."""
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    return path


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> Path:
    """Write a value as indented JSON, atomically. Raises ValueError if it holds NaN or an infinity."""
    text = json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
    return write_text(path, escaped_json(text) + "\n")


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> Path:
    """Write a table atomically, in UTF-8 with Unix line ends; the first row is the header.

    Text that a spreadsheet would read as a formula gets a leading quote; control characters become escapes.
    """
    return write_text(path, csv_text(rows))


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([csv_cell(printable(cell)) if isinstance(cell, str) else cell for cell in row])
    return text.getvalue()


def flush(path: Path) -> None:
    """Make a file's or folder's content survive a power failure (fsync), if the disk can."""
    with if_offered():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_state(path: Path | str) -> tuple[int, ...]:
    """Return inode, change times in ns and size, which change with a file's content; () if it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def open_regular(path: Path, *, error: type[VitctlError]) -> io.BufferedReader:
    """Open a regular file for reading; raises `error` if it is missing, unreadable, or of another type."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as problem:
        raise error(path, f"cannot be read ({problem.strerror})") from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise error(path, f"is {_in_words(kind)}, should be a file")
    return open(descriptor, "rb")


def read_bytes(path: Path, max_bytes: int, *, error: type[VitctlError]) -> bytes:
    """Return the content of a file of at most `max_bytes`. Raises `error` as `open_regular`, or if larger."""
    with open_regular(path, error=error) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as problem:
            raise error(path, f"cannot be read ({problem.strerror})") from None
    if len(content) > max_bytes:
        raise error(path, f"larger than {max_bytes:,}, the limit of this file in bytes")
    return content


def read_json(path: Path, max_bytes: int, *, error: type[VitctlError]) -> Any:
    """Return a JSON file's value. Raises `error` as `read_bytes`, or for invalid JSON, NaN or infinity."""
    return parse_json(read_bytes(path, max_bytes, error=error), path, error=error)


def parse_json(content: bytes, name: Path | str, *, error: type[VitctlError]) -> Any:
    """Parse JSON like `read_json`; `name` is the file to name in the error message."""
    try:
        return json.loads(
            content.decode("utf-8-sig"), parse_constant=_not_a_number, parse_float=_finite, parse_int=_int
        )
    except (ValueError, RecursionError) as problem:
        raise error(name, f"not JSON ({error_text(problem)})") from None


def no_links(path: str, flags: int) -> int:
    """Open a file without following symbolic links: an opener for files that are written in place."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _PERMISSIONS)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Line length is limited, because parsing time grows with its square.

    Raises ValueError: not TOML, a line too long, nested too deeply, or numbers of thousands of digits.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > limits.RECIPE_LINE:
            raise ValueError(f"line {number} is longer than {limits.RECIPE_LINE:,} characters")
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    level: list[Any] = [values]
    for _ in range(limits.DEPTH):
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [one for several in inner for one in several if isinstance(one, dict | list)]
        if not level:
            return values
    raise ValueError(f"more than {limits.DEPTH} tables and lists inside each other")


def read_toml(path: Path, *, error: type[VitctlError]) -> tuple[dict[str, Any], str]:
    """Return the values in a TOML file, with queries removed from addresses, and its text.

    Raises `error` as `read_bytes` and `parse_toml`, or if it is not UTF-8.
    """
    content = read_bytes(path, limits.RECIPE, error=error)
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        return value_without_queries(parse_toml(text), over=False), text
    except UnicodeDecodeError:
        raise error(path, "not UTF-8 text", "save it as UTF-8, or give a .toml file") from None
    except ValueError as problem:
        raise error(path, f"not valid TOML: {problem}") from None
    except VitctlError as problem:
        raise error(path, problem) from None


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, created if missing, without following links; raises LaunchError for other types."""
    descriptor = os.open(path, _LOCK | os.O_NONBLOCK, _PERMISSIONS)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise LaunchError(path, f"is {_in_words(kind)}, should be a file", "remove it")
    return open(descriptor, "r+b")


def lock(descriptor: int, *, waits: bool = False, inherited: bool = True) -> bool | None:
    """Lock an open file or folder until it is closed.

    Args:
        waits: wait for another process that holds the lock.
        inherited: whether child processes hold it too.

    Returns:
        True if locked now; False if another process holds the lock; None if the disk has no locks.
    """
    call = fcntl.flock if inherited else fcntl.lockf
    try:
        call(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        with if_offered():
            raise
        return None
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock against other processes; the kernel releases it when the process dies.

    The lock file is not deleted: two processes could then hold the lock.
    """
    with open_lock(path) as file:
        lock(file.fileno(), waits=True)
        yield


_LOCK_SECONDS = 5


def lock_alone(
    descriptor: int, place: Path, *, error: type[VitctlError], seconds: float | None = None
) -> None:
    """Lock a file or folder, or raise `error`; does nothing on a disk without locks.

    Args:
        descriptor: of the file or folder, locked until it is closed.
        seconds: how long to wait; None: 5, because processes of a killed run hold their lock until they
            notice.
    """
    until = time.monotonic() + (_LOCK_SECONDS if seconds is None else seconds)
    while lock(descriptor) is False:
        if time.monotonic() > until:
            raise error(place, "is being written by another process", "wait for it or stop it")
        time.sleep(0.1)


@contextmanager
def opened_folder(folder: Path | str) -> Iterator[int]:
    """Open a folder that is not a link, for locks. Raises OSError, EOPNOTSUPP if the disk opens none."""
    try:
        descriptor = no_links(str(folder), os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        code = errno.EOPNOTSUPP if error.errno in (errno.EINVAL, errno.EISDIR) else error.errno
        raise OSError(code, os.strerror(code or 0), str(folder)) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


_MOST_DIGITS = 400  # floating-point numbers have fewer


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_a_number(text)


def _int(text: str) -> int:
    return (
        int(text)
        if len(text) < _MOST_DIGITS
        else int(_not_a_number(f"{text[:9]}... of {len(text):,} digits"))
    )


def _in_words(kind: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(kind), "a device")


def cache_folder() -> Path:
    """Return the folder of downloads: $VITCTL_CACHE, or ~/.cache/vitctl."""
    given = check_local("VITCTL_CACHE", os.environ.get("VITCTL_CACHE", ""), error=LaunchError)
    return Path(given or Path.home() / ".cache" / "vitctl")


_MAX_LETTERS = 200


@contextmanager
def parsing(
    name: Path | str, error: type[VitctlError], what: str = "damaged, or not what its name says"
) -> Iterator[None]:
    """Convert what a parser raises: for archives, arrays, tables and images some thirty exception types.

    Raises:
        VitctlError: unchanged.
        OSError, MemoryError: unchanged, if the operating system refused something: disk full, out of memory.
        error: for everything else, in one line, with the original as its cause.
    """
    try:
        yield
    except VitctlError:
        raise
    except Exception as problem:
        if explained(problem) is not None:
            raise
        raise error(one_line(str(name)), f"{what} ({error_text(problem)})") from problem


def error_text(problem: BaseException) -> str:
    """Return type and message of a library's exception, in one short line."""
    text = " ".join(str(problem).split())[:_MAX_LETTERS]
    return one_line(f"{type(problem).__name__}: {text}" if text else type(problem).__name__)
