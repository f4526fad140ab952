"""The errors that vitctl raises when the user can fix the cause.

VitctlError
  RecipeError       a recipe, an override or a flag is wrong
  DataError         shards, an index, an image or a data set is wrong or missing
  CheckpointError   weights or a checkpoint are wrong or missing
  LaunchError       processes, devices or the environment are wrong
    LostProcess     a process was killed, or its machine was lost

`explained` turns operating system errors into one of these, for the command line and for every process of a
run.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Self


class VitctlError(Exception):
    """Something the user can fix: `where` it is, `what` is wrong, and how to `fix` it.

    The command line prints "where: what; fix" without a traceback and exits with code 2.

    Args:
        where: the file, address, key or option; "" for none. A lone `where` becomes `what`.
        fix: how to fix it; "" if `what` includes that.

    Example:
        from vitctl import VitctlError, load_recipe

        try:
            load_recipe("jft_b61")
        except VitctlError as error:
            print(error)  # no recipe is called 'jft_b61'; did you mean ...
            print(error.fix)  # did you mean ...
    """

    where: str
    what: str
    fix: str
    passes = False  # whether the same command may work later, unchanged: exit code 3, not 2

    def __init__(self, where: object, what: object = "", fix: object = "") -> None:
        if isinstance(what, VitctlError) and what.where == str(where):  # name a place only once
            fix = fix or what.fix
            what = what.what
        fields = (where, what, fix) if str(what) else ("", where, fix)
        self.where, self.what, self.fix = map(str, fields)
        super().__init__(self.where, self.what, self.fix)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}{'; ' if self.fix else ''}{self.fix}"

    def passing(self, passes: bool) -> Self:
        self.passes = passes
        return self


class RecipeError(VitctlError):
    """A recipe, an override or a flag is wrong."""


class DataError(VitctlError):
    """Shards, an index, an image or a data set is wrong or missing."""


class CheckpointError(VitctlError):
    """Weights or a checkpoint are wrong or missing."""


class LaunchError(VitctlError):
    """Processes, devices or the environment are wrong."""


class LostProcess(LaunchError):  # noqa: N818 - part of what it says
    """A process was killed, or its machine was lost: the same command resumes the run."""

    passes = True


_FULL = "free some space there, or choose another path"
_FORBIDDEN = "fix its permissions, or choose another path"
_LESS = "close other programs, or use less memory: fewer workers, smaller batches or images"
_FAILING = "the disk or its connection fails; repair it, or choose another path"
# Errors of the machine or of its settings, and how to fix them. Any other code is a bug of vitctl.
_HOW_TO_FIX = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "a file of that size is not allowed; raise the limit (ulimit -f), or choose another disk",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: "the disk is read-only; choose another path",
    errno.ENOENT: "it does not exist or was removed; check its spelling",
    errno.ENOTDIR: "there is a file where a folder should be; choose another path",
    errno.EEXIST: "something else is already there; choose another path",
    errno.EISDIR: "there is a folder where a file should be; choose another path",
    errno.ENOTEMPTY: "the folder is not empty; remove what is in it, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its symbolic links form a loop; correct them",
    errno.EXDEV: "choose paths on the same disk",
    errno.EBUSY: "another program uses it; wait for that, or choose another path",
    errno.EIO: _FAILING,
    errno.ESTALE: _FAILING,
    **dict.fromkeys(
        (errno.EREMOTEIO, errno.ENOTCONN, errno.ENOLINK, errno.EPROTO, errno.EUCLEAN, errno.ENODATA), _FAILING
    ),
    **dict.fromkeys(
        (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.ETXTBSY),
        "this file system cannot do that; choose a local disk",
    ),
    errno.ENXIO: _FAILING,
    errno.ENODEV: _FAILING,
    errno.EMFILE: "raise the limit of open files (ulimit -n), or lower machine.workers",
    errno.ENFILE: "the machine has too many open files; close other programs",
    errno.ENOMEM: _LESS,
    errno.EAGAIN: "the limit of processes is reached; raise it (ulimit -u), or lower machine.workers",
    errno.ECONNREFUSED: "no server answers there; check the address",
    errno.ECONNRESET: "the connection was lost; run the command again",
    errno.ETIMEDOUT: "no server answers there; check the address and the network",
    errno.EHOSTUNREACH: "it cannot be reached; check the address and the network",
    errno.ENETUNREACH: "the network cannot be reached; check the connection",
    errno.EADDRINUSE: "another program listens there; choose another port",
}


# PyTorch's signs of exhausted memory: the error's class on a GPU, the message on a CPU.
_NO_MEMORY = ("OutOfMemoryError", "can't allocate memory")


def refuse(error: Callable[..., Exception], *problems: tuple[object, ...]) -> None:
    """Raise `error` with the fields of the first problem whose condition is true, if any."""
    for is_there, *fields in problems:
        if is_there:
            raise error(*fields)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in Python or in PyTorch."""
    return isinstance(error, MemoryError) or any(
        sign in f"{type(error).__name__}: {error}" for sign in _NO_MEMORY
    )


def explained(error: BaseException, where: Path | str = "", then: str = "") -> VitctlError | None:
    """Return an error with a message for the user; None if it is a bug of vitctl.

    Args:
        where: path or address of the error, if the error does not name it.
        then: the command to run once it is fixed; "" for none.

    Returns:
        a VitctlError unchanged; for an operating system error one line with where, what and how to fix it.
    """
    if isinstance(error, VitctlError):
        return error
    place = str(where) or "this command"
    if is_out_of_memory(error):
        return LaunchError(place, f"not enough memory ({first_line(error)})", f"{_LESS}{_after(then)}")
    if "No available kernel" in str(error):
        what = "torch has no such kernel for this GPU, precision and size of heads"
        return LaunchError("machine.attention", what, f"set it to 'auto' or 'math'{_after(then)}")
    number = os_code(error)
    if number not in _HOW_TO_FIX:
        return None
    if isinstance(error, OSError):
        place = (
            " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None) or place
        )
    return LaunchError(place, os.strerror(number).lower(), f"{_HOW_TO_FIX[number]}{_after(then)}")


def os_code(error: BaseException) -> int:
    """Return the errno of an error; -1 if it has none.

    Libraries written in Rust, and loader workers, give it only in the message.
    """
    if isinstance(error, OSError) and error.errno:
        return error.errno
    match = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    return int(match[1] or match[2]) if match else -1


_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "nccl",
)


def is_lost_peer(text: str) -> bool:
    """Return whether an error message says that the connection to another process was lost."""
    return any(sign in text.lower() for sign in _LOST_PEER)


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _after(then: str) -> str:
    return f", then {then}" if then else ""


@contextmanager
def explaining(place: Path | str = "") -> Iterator[None]:
    """Convert operating system errors in the block, or the decorated function; see `explained`."""
    try:
        with writing(place) if place else nullcontext():
            yield
    except Exception as error:
        fixable = explained(error, place)
        if fixable is not None and fixable is not error:
            raise fixable from error
        raise


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """Add `place` to operating system errors that name no file, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None and not isinstance(error, BrokenPipeError):
            error.filename = str(place)
        raise
