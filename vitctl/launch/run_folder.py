"""Run folders: locks, what they may hold before a run starts, and clean-up after a refused command."""

import fcntl
import os
import shutil
import struct
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from vitctl.engine.journal import CHECKPOINTS, LOG, RECIPE, RESULT, STEPS, allow, put_back
from vitctl.errors import CheckpointError, LaunchError, explaining
from vitctl.system.files import lock, open_lock, open_regular, read_json, sweep, write_bytes
from vitctl.system.process import tell

LOCK = ".lock"
LOGS = "logs"
FLIGHT = "nccl_rank_"  # in logs, followed by the rank: a dump of NCCL's flight recorder
NOW = "now.json"  # in logs: the current state of a run with several processes
LOCK_POLL_SECONDS = 2.0
_FLOCK = "hhqqi0q"  # Linux: type, whence, start, length, process
_MOST_BYTES = 256 * 2**20
_OWN = (LOCK, LOGS, "data")  # what a run folder may hold before its recipe is written


def new_run_dir(name: str, runs: Path = Path("runs")) -> Path:
    """Return a new folder for a run of this recipe: runs/NAME_DATE-TIME."""
    stem = f"{Path(name).stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (runs / (stem if n == 0 else f"{stem}_{n}") for n in range(1000))
    return next(path for path in tries if not path.exists())


def read_status(run_dir: Path) -> str | None:
    """Return the status in RUN/result.json; None if there is no such file, or vitctl did not write it."""
    try:
        return str(read_json(run_dir / RESULT, _MOST_BYTES, error=CheckpointError)["status"])
    except (CheckpointError, KeyError, TypeError):
        return None


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """On an error in the block, remove what it wrote into `folder`, and the folders that it made."""
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    there = _entries(folder)
    with explaining(folder):
        try:
            yield
        except Exception:
            for name in _entries(folder) - there:
                path = folder / name
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            _remove_empty(made)
            raise


def _remove_empty(folders: Iterable[Path]) -> None:
    with suppress(OSError):
        for path in folders:
            path.rmdir()


@contextmanager
def prepared_folder(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Make and lock a run folder first of all; on an error clean up as `leaving_nothing` does.

    Raises LaunchError, and changes nothing, if it is a file or still locked after `seconds`.
    """
    _check_not_file(folder)
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    is_new = not (folder / LOCK).exists()
    with locked(folder, seconds):
        try:
            with leaving_nothing(folder):
                yield
        except BaseException:
            if is_new:
                (folder / LOCK).unlink(missing_ok=True)
                _remove_empty(made)
            raise


@contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Lock a run folder, waiting `seconds` for another holder. Raises LaunchError if it stays locked.

    The kernel releases the lock when this process ends, however it ends; workers do not inherit it.
    """
    until = time.monotonic() + seconds
    while True:
        with explaining(folder):
            folder.mkdir(parents=True, exist_ok=True)  # a refused command may have removed it meanwhile
            file = open_lock(folder / LOCK)
        with file:
            with explaining(folder / LOCK):
                held = lock(file.fileno(), inherited=False)
            if held is False:
                if time.monotonic() <= until:
                    time.sleep(LOCK_POLL_SECONDS)
                    continue
                raise LaunchError(
                    folder, "another vitctl is running in this folder", "wait for it, or choose another --out"
                )
            if held is None:
                _say_unlocked(folder.resolve())
            if _is_at(file, folder / LOCK):
                for place in {path.parent for path in folder.rglob(".*.partial")}:
                    sweep(place, seconds=0)
                yield
                return


@cache
def _say_unlocked(folder: Path) -> None:
    tell(f"{folder}: this disk has no locks; start no second vitctl in this folder")


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file still has this path: a refused command removes its lock file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def is_running(folder: Path) -> bool:
    """Return whether another process holds the lock of a run folder, without taking the lock.

    The process that holds the lock must not call this: POSIX releases the lock when this closes the file.
    """
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open_regular(folder / LOCK, error=LaunchError) as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except (LaunchError, OSError):  # no lock file, or not readable
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


@contextmanager
def locked_for_run(folder: Path, *, starts_again: bool = False) -> Iterator[None]:
    """Lock the folder for a run, or raise LaunchError if another process holds the lock.

    What --allow permitted holds for this launch only, and a refused launch changes nothing that describes the
    run. With `starts_again` an error is not the end of the launch: its processes are restarted.
    """
    with locked(folder), keeping_result(folder):
        try:
            yield
        except Exception:
            if not starts_again:
                put_back(folder)
            raise
        finally:
            allow(folder, ())


@contextmanager
def keeping_result(folder: Path) -> Iterator[None]:
    """Remove RUN/result.json when a run starts; restore a finished one if the resume is refused."""
    path, steps, done = folder / RESULT, _checkpoints(folder), None
    with suppress(FileNotFoundError):  # another machine may do the same
        done = path.read_bytes() if steps and read_status(folder) == "done" else None
        path.unlink()
    try:
        yield
    except Exception:
        if done is not None and _checkpoints(folder) == steps:
            write_bytes(path, done)
        raise


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(f"{CHECKPOINTS}/{STEPS}")}


def check_not_foreign(folder: Path, own: Collection[str] = (), *, what: str = "a run") -> None:
    """Refuse a file, or a folder with files that no run wrote, other than `own`. Raises LaunchError."""
    if (folder / RECIPE).is_file():
        return
    _check_not_file(folder, what)
    odd = sorted(name for name in _entries(folder) - {*own, *_OWN} if not name.startswith(".recipe."))
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise LaunchError(
            folder, f"holds {odd[0]}{more}, but not {what}", "choose a new or empty folder with --out"
        )


def _check_not_file(folder: Path, what: str = "a run") -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise LaunchError(
            folder, f"is a file, should be a folder for {what}", "choose another name with --out"
        )


def _entries(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def failed_without_output(run_dir: Path) -> bool:
    """Return whether a run failed before it saved anything: the corrected command may reuse the folder."""
    if read_status(run_dir) != "failed":
        return False
    kept = (path for name in (STEPS, RESULT) for path in run_dir.rglob(name))
    return all(path == run_dir / RESULT for path in kept)


def clear(run_dir: Path) -> None:
    """Remove what a run that failed at once has written; its log stays."""
    for name in _entries(run_dir) - {*_OWN, LOG}:
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
