"""What may stand in a folder before a run begins there, and what a refused command leaves of it: nothing."""

import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vitctl.engine.journal import LOG
from vitctl.errors import CheckpointError, LaunchError, explained, writing
from vitctl.system.files import open_lock, read_json, write_bytes

LOCK = ".lock"
LOCK_POLL_SECONDS = 0.2
_MOST_BYTES = 256 * 2**20
_OWN = (LOCK, "logs", "data")  # what may stand in a run folder before its recipe does


def new_run_dir(name: str, runs: Path = Path("runs")) -> Path:
    """A folder for a run of this recipe that does not exist yet: runs/NAME_DATE-TIME."""
    stem = f"{Path(name).stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (runs / (stem if n == 0 else f"{stem}_{n}") for n in range(1000))
    return next(path for path in tries if not path.exists())


def read_status(run_dir: Path) -> str | None:
    """The status in RUN/result.json; None before there is one, or where it is not one of ours."""
    try:
        return str(read_json(run_dir / "result.json", _MOST_BYTES, error=CheckpointError)["status"])
    except (CheckpointError, KeyError, TypeError):
        return None


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """A command that is refused inside takes away what it put into `folder`, and the folders that it made.

    Raises:
        VitctlError: the operating system refused something, or what was raised inside.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    there = _entries(folder)
    with _explaining(folder):
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
def _explaining(folder: Path) -> Iterator[None]:
    """What the operating system refuses inside, in the user's words."""
    try:
        with writing(folder):
            yield
    except Exception as error:
        fixable = explained(error)
        if fixable is not None and fixable is not error:
            raise fixable from error
        raise


@contextmanager
def prepared_folder(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """The folder of a run, made and locked before anything else is done in it; inside as `leaving_nothing`.

    Args:
        folder: of a run, or to become one.
        seconds: to wait for another process that has it.

    Raises:
        LaunchError: another process has it; nothing was changed.
        VitctlError: as `leaving_nothing`.
    """
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
    """One run per folder. The lock is the kernel's, ends with this process however that ends, and is not inherited by workers.

    Args:
        folder: of a run.
        seconds: to wait for another process that has it.

    Raises:
        LaunchError: another process has it.
    """
    until = time.monotonic() + seconds
    while True:
        with _lock_file(folder) as file:
            try:
                _lock(file, folder)
            except LaunchError:
                if time.monotonic() > until:
                    raise
                time.sleep(LOCK_POLL_SECONDS)
                continue
            if not _is_at(file, folder / LOCK):
                continue
            yield
            return


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one of this name: a refused command takes its lock file away."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _lock_file(folder: Path) -> IO[bytes]:
    with _explaining(folder):
        folder.mkdir(parents=True, exist_ok=True)  # a refused command may have taken it away, while this one waited
        return open_lock(folder / LOCK)


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise LaunchError(
            f"{folder}: another vitctl is running in this folder; wait for it, or choose another --out"
        ) from None


@contextmanager
def locked_for_run(folder: Path) -> Iterator[None]:
    """The folder is locked for a run; what that was allowed to go on with counts for this once, whoever prepared it.

    Raises:
        LaunchError: another process has it.
    """
    from vitctl.jobs.record.identity import allow

    with locked(folder), keeping_result(folder):
        try:
            yield
        finally:
            allow(folder, ())


@contextmanager
def keeping_result(folder: Path) -> Iterator[None]:
    """RUN/result.json goes when a run begins; that of a finished training comes back where going on was refused."""
    path, steps, done = folder / "result.json", _checkpoints(folder), None
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
    return {path.name for path in folder.glob("checkpoints/step_*")}


def check_not_foreign(folder: Path, own: Collection[str] = (), *, what: str = "a run") -> None:
    """Refuse a folder that holds what no run put there.

    Args:
        folder: of a run, or to become one.
        own: names that belong to it beside those of every run.
        what: the folder should hold, in words.

    Raises:
        LaunchError: it is a file, or holds something else.
    """
    if (folder / "recipe.toml").is_file():
        return
    if os.path.lexists(folder) and not folder.is_dir():
        raise LaunchError(f"{folder}: is a file, should be a folder for {what}; choose another name with --out")
    odd = sorted(name for name in _entries(folder) - {*own, *_OWN} if not name.startswith(".recipe."))
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise LaunchError(f"{folder}: holds {odd[0]}{more}, but not {what}; choose a new or empty folder with --out")


def _entries(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def failed_without_output(run_dir: Path) -> bool:
    """Whether the run in a folder failed before it had anything to keep: the corrected command may have the folder."""
    if read_status(run_dir) != "failed":
        return False
    kept = (path for name in ("step_*", "result.json") for path in run_dir.rglob(name))
    return all(path == run_dir / "result.json" for path in kept)


def clear(run_dir: Path) -> None:
    """Take away what a run that failed at once has measured for itself; its words stay."""
    for name in _entries(run_dir) - {*_OWN, LOG}:
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
