"""What vitctl raises when the user can mend it.

VitctlError
  RecipeError       a recipe, an override or a flag is wrong
  DataError         shards, an index, an image or a data set is wrong or missing
  CheckpointError   weights or a checkpoint are wrong or missing
  LaunchError       processes, devices or the environment are wrong

`explained` turns what the operating system refused into one of these, for the command line and for every process of a run.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class VitctlError(Exception):
    """Something the user can fix. The message says where, what, and how to mend it.

    The command line prints the message without a traceback and leaves with exit code 2.

    Example:
        from vitctl import VitctlError, load_recipe

        try:
            load_recipe("jft_b61")
        except VitctlError as error:
            print(error)  # no recipe is called 'jft_b61'; did you mean ...
    """


class RecipeError(VitctlError):
    """A recipe, an override or a flag is wrong."""


class DataError(VitctlError):
    """Shards, an index, an image or a data set is wrong or missing."""


class CheckpointError(VitctlError):
    """Weights or a checkpoint are wrong or missing."""


class LaunchError(VitctlError):
    """Processes, devices or the environment are wrong."""


_FULL = "make room there, or choose another place"
_FORBIDDEN = "mend its rights, or choose another place"
_LESS = "close other programs, or ask for less: fewer workers, smaller batches or images"
_FAILING = "the disk or its connection fails; mend it, or choose another place"
# What the machine has run out of or does not allow, and how to mend it. Any other code is a bug of ours.
_HOW_TO_MEND = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.ENOENT: "check its spelling; it is not there, or was removed",
    errno.ENOTDIR: "a file stands where a folder should be; choose another place",
    errno.EEXIST: "something else stands there; choose another place",
    errno.EISDIR: "a folder stands where a file should be; choose another place",
    errno.ENOTEMPTY: "something else was put there; remove it, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its links point at each other; mend them",
    errno.EXDEV: "choose a place on one disk",
    errno.EBUSY: "something else uses it; wait for it, or choose another place",
    errno.EIO: _FAILING,
    errno.ESTALE: _FAILING,
    errno.ENXIO: _FAILING,
    errno.ENODEV: _FAILING,
    errno.EMFILE: "raise the limit of open files (ulimit -n), or lower machine.workers",
    errno.ENFILE: "the machine has too many open files; close other programs",
    errno.ENOMEM: _LESS,
    errno.EAGAIN: "the machine starts no more processes; raise the limit (ulimit -u), or lower machine.workers",
    errno.ECONNREFUSED: "nobody answers there; check the address",
    errno.ECONNRESET: "the connection broke; type the command again",
    errno.ETIMEDOUT: "nobody answers there; check the address and the network",
    errno.EHOSTUNREACH: "there is no way to it; check the address and the network",
    errno.ENETUNREACH: "there is no way to it; check the network",
    errno.EADDRINUSE: "another program listens there; choose another port",
}


# How PyTorch says that there is no memory: the class of its error on a GPU, and words on a CPU.
_NO_MEMORY = ("OutOfMemoryError", "can't allocate memory")


def explained(error: BaseException, where: Path | str = "", then: str = "") -> VitctlError | None:
    """An error in words for the user; None where it is a bug of vitctl.

    Args:
        error: what was raised.
        where: what the operating system was asked about, where the error itself does not name it.
        then: what to type when it is mended; "" for nothing.

    Returns:
        a VitctlError as it is; one line with where, what and how to mend it for what the operating system refused.
    """
    if isinstance(error, VitctlError):
        return error
    place = str(where) or "this command"
    if isinstance(error, MemoryError) or any(sign in f"{type(error).__name__}: {error}" for sign in _NO_MEMORY):
        return LaunchError(f"{place}: not enough memory ({first_line(error)}); {_LESS}{_after(then)}")
    number = os_code(error)
    if number not in _HOW_TO_MEND:
        return None
    if isinstance(error, OSError):
        place = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None) or place
    return LaunchError(f"{place}: {os.strerror(number).lower()}; {_HOW_TO_MEND[number]}{_after(then)}")


def os_code(error: BaseException) -> int:
    """The errno of what the operating system said; -1 for nothing. Libraries written in Rust say it in their text alone."""
    if isinstance(error, OSError):
        return error.errno or -1
    said = re.search(r"\(os error (\d+)\)", str(error))
    return int(said[1]) if said else -1


_LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout", "nccl")


def is_lost_peer(text: str) -> bool:
    """Whether an error, in its own words, is that another process went away."""
    return any(sign in text.lower() for sign in _LOST_PEER)


def first_line(error: BaseException | None) -> str:
    """Of what an error says, or the name of its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _after(then: str) -> str:
    return f", then {then}" if then else ""


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """Whatever the operating system refuses inside without saying where is about `place`: a full disk never says."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None and not isinstance(error, BrokenPipeError):
            error.filename = str(place)
        raise
