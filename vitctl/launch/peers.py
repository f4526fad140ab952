"""Communication of a run's processes through files in RUN/logs.

A process that fails leaves a note; the one that reports to the user reads which failed first, and why. Each
process also has a thread that notices when its main thread stands still: it then writes a mark every second.
A process without a fresh mark is stopped, lost or unreachable. If all have one and none computes, they wait
for each other in a collective operation that does not end. The lowest rank that answers reports it, and ends
the run if it should stop, if the network is cut, or after machine.group_timeout.
"""

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vitctl.engine.journal import CHECKPOINTS, Journal, step_folders, step_of, write_run_json
from vitctl.engine.preemption import StopFlag
from vitctl.errors import LaunchError, LostProcess, VitctlError, is_lost_peer
from vitctl.launch.run_folder import FLIGHT, LOGS
from vitctl.system.files import atomic_write, no_links, read_json
from vitctl.system.process import HERE, told
from vitctl.system.text import printable, typed

_MOST_NOTE_BYTES = 16 * 2**20
_NOTE = {"rank": int, "time": float, "mendable": bool}  # in every note of a failed process


def log_of(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank_{rank:02d}.txt"


def note_error(run_dir: Path, error: Exception) -> None:
    """Record what ended this process: the message for all to read, the traceback in its log only."""
    rank, fixable = int(os.environ.get("RANK", "0")), isinstance(error, VitctlError)
    log = log_of(run_dir, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", errors="backslashreplace", opener=no_links) as file:
        file.write(printable("".join(traceback.format_exception(error))))
    text = str(error) if fixable else f"{type(error).__name__}: {error}"
    is_own_error = fixable and not isinstance(error, LaunchError)
    lost_peer = not is_own_error and is_lost_peer(text)
    passes = isinstance(error, VitctlError) and error.passes
    _write_note(run_dir, rank, mendable=fixable, lost_peer=lost_peer, passes=passes, text=text, log=str(log))


def note_killed(run_dir: Path, rank: int, signal_name: str) -> None:
    """Write the note for a process that was killed and could not write one."""
    _write_note(run_dir, rank, mendable=True, lost_peer=False, killed=signal_name)


def _write_note(run_dir: Path, rank: int, **values: Any) -> None:
    write_run_json(run_dir / LOGS / f"error_{rank:02d}.json", {"rank": rank, "time": time.time(), **values})


def forget_errors(run_dir: Path) -> None:
    """Remove the notes and marks of processes of an earlier launch."""
    for pattern in ("error_*.json", "mark_*.json", f"{FLIGHT}*"):
        for old in (run_dir / LOGS).glob(pattern):
            old.unlink(missing_ok=True)


def first_error(run_dir: Path) -> dict[str, Any] | None:
    """Return the note of the process that failed first in the last launch; None if none failed.

    A process that only lost its connection to another one comes last, whatever the clocks of the nodes say.
    """
    notes = []
    for path in (run_dir / LOGS).glob("error_*.json"):
        with suppress(LaunchError):  # a new launch may be removing them
            note = read_json(path, _MOST_NOTE_BYTES, error=LaunchError)
            if isinstance(note, dict) and all(type(note.get(name)) is kind for name, kind in _NOTE.items()):
                notes.append(note)
    return min(notes, key=lambda note: (note.get("lost_peer", False), note["time"]), default=None)


def is_cause(error: Mapping[str, Any] | None) -> bool:
    """Return whether a note gives the cause of a failure, not only a lost connection to another process."""
    return error is not None and not error.get("lost_peer", False)


def is_final(error: Mapping[str, Any] | None) -> bool:
    """Return whether a restart would fail in the same way: only the user can fix it."""
    if error is None or error.get("passes") or "killed" in error:
        return False
    return is_cause(error) and bool(error["mendable"])


def raise_first_error(run_dir: Path, num_processes: int) -> None:
    """Raise the error of the process that failed first: RuntimeError for a bug, else VitctlError."""
    error = first_error(run_dir)
    if error is None:
        return
    rank, resume = error["rank"], f"resume with: vitctl resume {typed(run_dir)}"
    log = log_of(run_dir, rank)
    log = log if log.exists() else log.parent  # the process ended before it could open one
    flights = ", ".join(str(path) for path in sorted((run_dir / LOGS).glob(f"{FLIGHT}*")))
    recorded = f"; flight recorder (read it with torchfrtrace): {flights}" if flights else ""
    if "killed" in error:
        guess = ", most often because it ran out of memory" if error["killed"] == "SIGKILL" else ""
        raise LostProcess(
            f"process {rank} of {num_processes} was killed ({error['killed']}){guess}; {log} has "
            f"its output{recorded}",
            fix=resume,
        )
    if error["mendable"]:
        text = f"{error['text']} (process {rank}; {log})"
        raise VitctlError(text).passing(bool(error.get("passes")))
    if not is_cause(error):
        late = "timed out" in error["text"].lower() or "timeout" in error["text"].lower()
        what = "waited longer than machine.group_timeout for" if late else "lost the connection to"
        raise LostProcess(
            f"process {rank} {what} another process, which left no error message "
            f"({error['text'].splitlines()[0]}); {log} has more{recorded}",
            fix=resume,
        )
    raise RuntimeError(f"process {rank} failed: {error['text']}; {log} has the traceback")


def write_failed_result(run_dir: Path, job: str, text: str) -> None:
    """Write RUN/result.json of a failed run. If that fails, too, the first error is the one to report."""
    from vitctl.jobs.record.result import RunResult, write_result

    with suppress(OSError):
        write_result(run_dir, RunResult(job, "failed", error=text))


NOTICE_SECONDS = 10.0  # without an answer, before a line says which process is missing
GIVE_UP_SECONDS = 15.0  # after a signal, before the run ends without those that do not answer
STUCK_SECONDS = 40.0  # nobody moves and a process cannot reach the first one, before the run ends
_TICK_SECONDS, _QUIET_SECONDS, _FRESH_SECONDS = 1.0, 3.0, 5.0
_PROBE_SECONDS, _IDLE_SHARE = 2.0, 0.1  # for a connection; of the time, computing
_MOST_BYTES = 10_000

End = Callable[[str], None]  # ends this process; its argument says why the run stops


@contextmanager
def roll_call(
    run_dir: Path, journal: Journal, stop: StopFlag, end: End, group_timeout: float
) -> Iterator[None]:
    """Report processes that do not answer, and a network that is cut; call `end` from a thread if the run
    cannot go on: `GIVE_UP_SECONDS` after a signal, after `STUCK_SECONDS`, or after `group_timeout`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    one = (
        _Rank(run_dir, journal, stop, end, int(os.environ["RANK"]), size, group_timeout)
        if size > 1
        else _Alone(journal, stop)
    )
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(one.look, ended), daemon=True)
    HERE.told = ""
    thread.start()
    try:
        yield
    finally:
        HERE.told = None
        ended.set()
        thread.join()


def _watch(look: Callable[[], None], ended: threading.Event) -> None:
    while not ended.wait(_TICK_SECONDS):
        with suppress(OSError):
            look()


# Job that does not train -> what a stop keeps of it.
KEPT = {
    **dict.fromkeys(
        ("fewshot", "probe"), "features of finished passes over the data are kept if the cache holds them"
    ),
    "evaluate": "scoring starts again",
}


def resume_text(run_dir: Path, job: str = "") -> str:
    """Return where a resume of the run starts; `job` may be unknown."""
    steps = [step_of(path) or 0 for path in step_folders(run_dir / CHECKPOINTS)]
    return (
        f"a resume starts at step {max(steps)}"
        if steps
        else KEPT.get(job, "there is no checkpoint, only finished parts are kept")
    )


def _missing_images() -> str:
    """Return why the main thread has waited too long for images, if it has; else ""."""
    since, stopped = HERE.images_since, []
    if since is None or time.monotonic() - since < NOTICE_SECONDS:
        return ""
    for number in HERE.loaders:
        with suppress(psutil.Error):
            stopped += [str(number)] if psutil.Process(number).status() == psutil.STATUS_STOPPED else []
    why = f"loader process {', '.join(stopped)} is stopped" if stopped else told()
    return f"waits for images: {why}" if why else "waits for images"


@dataclass
class _Alone:
    """Watches a single process: its main thread gives up itself."""

    journal: Journal
    stop: StopFlag
    reported: float | None = None  # the wait that was last reported
    outage: str = ""  # the outage that was last reported

    def look(self) -> None:
        """Check for waits and outages; called every second."""
        since, images = HERE.images_since, _missing_images()
        if (outage := told()) != self.outage and outage:
            self.journal.write("warning", step=HERE.step, text=f"step {HERE.step}: {outage}")
        self.outage = outage
        for number in HERE.loaders if self.stop.reason and since is None else ():
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)  # it would not end otherwise
        if images and since != self.reported and not outage:
            self.reported = since
            self.journal.write("warning", step=HERE.step, text=f"step {HERE.step}: {images}")
        if images and self.stop.seconds >= GIVE_UP_SECONDS:
            self.stop.give_up(images)


def _why_unreachable(host: str, port: int) -> str:
    """Return why no connection to the first process can be opened; "" if one can."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        return f"process 0 at {host}:{port} ({error.strerror or error})"
    return ""


@dataclass
class _Rank:
    """Watches one of several processes. A mark's age is measured by the clock of this process."""

    run_dir: Path
    journal: Journal
    stop: StopFlag
    end: End
    rank: int
    size: int
    group_timeout: float
    beat: int = 0
    place: tuple[int, float | None] = (-1, None)
    since: float = field(default_factory=time.monotonic)
    busy: tuple[float, float] = (0.0, 0.0)  # when it last computed, and its CPU seconds at the last look
    cut: str = ""  # why the first process cannot be reached
    has_ended: bool = False
    marks: dict[int, tuple[dict[str, Any], float]] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    stopping_since: float | None = None

    def file(self, rank: int) -> Path:
        return self.run_dir / LOGS / f"mark_{rank:02d}.json"

    def write(self) -> None:
        self.beat += 1
        mark = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "beat": self.beat,
            "arrivals": HERE.arrivals,
            "images": _missing_images(),
            "stop": self.stop.signal is not None,
            "idle": time.monotonic() - self.busy[0] if HERE.images_since is None else 0.0,
            "cut": self.cut,
            "ended": self.has_ended,
        }
        with suppress(OSError), atomic_write(self.file(self.rank), flushed=False) as aside:
            aside.write_text(json.dumps(mark), encoding="utf-8")

    def look(self) -> None:
        """Write and read marks, and report processes that stand still; called every second."""
        now, place = time.monotonic(), (HERE.arrivals, HERE.images_since)
        if place != self.place:
            self.place, self.since, self.cut = place, now, ""
            self.marks.clear()
            self.reported.clear()
        still = now - self.since
        used, computed = self.busy[1], time.process_time()
        computes = computed - used > _IDLE_SHARE * _TICK_SECONDS and not HERE.waits_for_device
        self.busy = now if computes else max(self.busy[0], self.since), computed
        if self.rank and still >= NOTICE_SECONDS and self.beat % 5 == 0:
            self.cut = _why_unreachable(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if still >= _QUIET_SECONDS or not self.beat:
            self.write()
        if still < _QUIET_SECONDS:
            return
        leads = not any(self._answers(rank) for rank in range(self.rank))
        if any(mark.get("ended") for mark, _ in self.marks.values()):
            self.end("")
        if not leads:
            return
        answering = {rank: self.marks[rank][0] for rank in range(self.size) if self._answers(rank)}
        furthest = max((int(mark["arrivals"]) for mark in answering.values()), default=0)
        silent = [rank for rank in range(self.size) if rank not in answering and rank != self.rank]
        starved = [rank for rank, mark in answering.items() if mark["arrivals"] < furthest and mark["images"]]
        if still < NOTICE_SECONDS:
            return
        self._report(silent, "does not answer")
        self._report(starved, answering[starved[0]]["images"] if starved else "")
        stuck = "" if starved else self._stuck(answering, silent)
        if any(mark["stop"] for mark in answering.values()):
            self.stopping_since = self.stopping_since or now - self.stop.seconds
            if (silent or starved or stuck) and now - self.stopping_since >= GIVE_UP_SECONDS:
                self._give_up(stuck or f"{self._who([*silent, *starved])} did not answer")
        elif stuck and still >= (STUCK_SECONDS if self._cut(answering) else self.group_timeout):
            self._give_up(stuck)

    def _answers(self, rank: int) -> bool:
        self._read(rank)
        mark, since = self.marks[rank]
        return bool(mark) and time.monotonic() - since < _FRESH_SECONDS

    def _read(self, rank: int) -> None:
        before, since = self.marks.get(rank, ({}, time.monotonic()))
        mark = before
        with suppress(LaunchError):
            read = read_json(self.file(rank), _MOST_BYTES, error=LaunchError)
            mark = (
                read
                if isinstance(read, dict) and {"beat", "arrivals", "images", "stop", "idle", "cut"} <= {*read}
                else before
            )
        self.marks[rank] = (mark, time.monotonic() if mark != before else since)

    def _who(self, ranks: Sequence[int]) -> str:
        marks = [(rank, self.marks[rank][0]) for rank in ranks]
        return ", ".join(
            f"process {rank} on {mark.get('host', '?')} (pid {mark.get('pid', '?')})" for rank, mark in marks
        )

    def _report(self, ranks: Sequence[int], what: str) -> None:
        """Report each kind of wait once while the run stands still, on the screen and in the log."""
        if ranks and what not in self.reported:
            self.reported.add(what)
            text = f"step {HERE.step}: waiting for {self._who(ranks)}, which {what}"
            self.journal.write("warning", step=HERE.step, text=text)

    def _stuck(self, answering: Mapping[int, Mapping[str, Any]], silent: Sequence[int]) -> str:
        """Return what the processes wait in for each other, if none of them computes or reads images."""
        idle = min((mark["idle"] for mark in answering.values()), default=0.0)
        if idle < NOTICE_SECONDS:
            return ""
        if silent:
            return f"{self._who(silent)} did not answer"
        cut = self._cut(answering)
        what = f"{HERE.operation} of {self.size} processes does not end, and none of them computes"
        text = f"{what}{': ' if cut else ''}{cut}"
        if idle >= STUCK_SECONDS / 2 and text not in self.reported:
            self.reported.add(text)
            self.journal.write("warning", step=HERE.step, text=f"step {HERE.step}: {text}")
        return text

    def _cut(self, answering: Mapping[int, Mapping[str, Any]]) -> str:
        ranks = [rank for rank, mark in answering.items() if mark["cut"]]
        return f"{self._who(ranks)} cannot reach {answering[ranks[0]]['cut']}" if ranks else ""

    def _give_up(self, why: str) -> None:
        """Save what this process can save without the others, and end the run."""
        self.stop.given_up = True
        save = self.stop.save_alone
        why_not = save() if save is not None else "no training was in progress"
        saved = f"step {HERE.step} not saved: {why_not}" if why_not else f"step {HERE.step} saved without it"
        text = f"stopped; {why}; {saved}; {resume_text(self.run_dir)}"
        self.journal.write("stopped", step=HERE.step, text=text)  # not shown: the result says the same
        self.has_ended = True
        self.write()  # the others end now, too
        self.end(text)
