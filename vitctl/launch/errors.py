"""Which process failed first, and why: a process that fails writes a note into RUN/logs; the one that reports
to the user reads it.
"""

import os
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitctl.engine.journal import write_run_json
from vitctl.errors import LaunchError, VitctlError, is_lost_peer
from vitctl.system.files import no_links, read_json
from vitctl.system.text import printable, typed

LOGS = "logs"
_MOST_NOTE_BYTES = 16 * 2**20
_NOTE = {"rank": int, "time": float, "mendable": bool}  # what every note of a failed process holds


def log_of(run_dir: Path, rank: int) -> Path:
    """The log file that the output of a process goes to."""
    return run_dir / LOGS / f"rank_{rank:02d}.txt"


def note_error(run_dir: Path, error: Exception) -> None:
    """Record what ended this process: the message for all processes to read, the traceback in its own log
    only.
    """
    rank, fixable = int(os.environ.get("RANK", "0")), isinstance(error, VitctlError)
    log = log_of(run_dir, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", errors="backslashreplace", opener=no_links) as file:
        file.write(printable("".join(traceback.format_exception(error))))
    text = str(error) if fixable else f"{type(error).__name__}: {error}"
    is_own_error = fixable and not isinstance(error, LaunchError)
    lost_peer = not is_own_error and is_lost_peer(text)
    _write_note(run_dir, rank, mendable=fixable, lost_peer=lost_peer, text=text, log=str(log))


def note_killed(run_dir: Path, rank: int, signal_name: str) -> None:
    """Write the note for a process that was killed and could not write its own."""
    _write_note(run_dir, rank, mendable=True, lost_peer=False, killed=signal_name)


def _write_note(run_dir: Path, rank: int, **values: Any) -> None:
    write_run_json(run_dir / LOGS / f"error_{rank:02d}.json", {"rank": rank, "time": time.time(), **values})


def forget_errors(run_dir: Path) -> None:
    """Remove the notes of processes that failed in an earlier launch."""
    for old in (run_dir / LOGS).glob("error_*.json"):
        old.unlink(missing_ok=True)


def first_error(run_dir: Path) -> dict[str, Any] | None:
    """The note of the process that failed first in the last launch; None when none did.

    A process that only lost its connection to another one comes last, whatever the clocks of the nodes say.
    """
    notes = []
    for path in (run_dir / LOGS).glob("error_*.json"):
        with suppress(LaunchError):  # a new launch may be removing them
            note = read_json(path, _MOST_NOTE_BYTES, error=LaunchError)
            if (
                isinstance(note, dict)
                and _NOTE.items() <= {name: type(note.get(name)) for name in note}.items()
            ):
                notes.append(note)
    return min(notes, key=lambda note: (note.get("lost_peer", False), note["time"]), default=None)


def is_cause(error: Mapping[str, Any] | None) -> bool:
    """Whether a note says why the run failed, and not only that the connection to another process was lost."""
    return error is not None and not error.get("lost_peer", False)


def is_final(error: Mapping[str, Any] | None) -> bool:
    """Whether a restart would fail in the same way: only the user can fix it."""
    return error is not None and is_cause(error) and error["mendable"] and "killed" not in error


def raise_first_error(run_dir: Path, num_processes: int) -> None:
    """Raise the error of the process that failed first in the last launch; nothing when none failed.

    Raises:
        VitctlError: the user can fix it, or a process was killed or lost.
        RuntimeError: a bug.
    """
    error = first_error(run_dir)
    if error is None:
        return
    rank, resume = error["rank"], f"resume with: vitctl resume {typed(run_dir)}"
    log = log_of(run_dir, rank)
    if not log.exists():  # the process ended before it could open one
        log = log.parent
    if "killed" in error:
        raise LaunchError(
            f"process {rank} of {num_processes} was killed ({error['killed']}), most often because it ran "
            f"out of memory; "
            f"{log} has its output; {resume}"
        )
    if error["mendable"]:
        raise VitctlError(f"{error['text']} (process {rank}; {log})")
    if not is_cause(error):
        raise LaunchError(
            f"process {rank} lost the connection to another process, which left no error message "
            f"({error['text'].splitlines()[0]}); {log} "
            f"has more; {resume}"
        )
    raise RuntimeError(f"process {rank} failed: {error['text']}; {log} has the traceback")


def write_failed_result(run_dir: Path, job: str, text: str) -> None:
    """Write RUN/result.json of a failed run. If that fails too, the first error is the one to report."""
    from vitctl.jobs.record.result import RunResult, write_result

    with suppress(OSError):
        write_result(run_dir, RunResult(job, "failed", error=text))
