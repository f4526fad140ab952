"""Start the processes of a run, follow them, and end them together."""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from vitctl.engine.journal import (
    LOG,
    RESULT,
    Record,
    Report,
    never_raising,
    parse_records,
    read_run_json,
    write_run_json,
)
from vitctl.engine.preemption import AT_ONCE, say
from vitctl.errors import LostProcess, VitctlError
from vitctl.launch.agent import (
    POLL_SECONDS,
    Agent,
    accelerate_arguments,
    accelerate_environment,
    note_first_killed,
    own_address,
)
from vitctl.launch.cluster import LOCKED, LaunchConfig
from vitctl.launch.peers import (
    first_error,
    forget_errors,
    is_cause,
    is_final,
    raise_first_error,
    resume_text,
    write_failed_result,
)
from vitctl.launch.run_folder import LOGS, NOW, read_status
from vitctl.recipe.schema import Recipe
from vitctl.system.files import no_links
from vitctl.system.text import typed

LEFT_SECONDS = 5.0  # for a process of this machine to end, once the result is written
LINGER_SECONDS = 20.0  # for the other machines to finish, once the run is over
WAIT_SECONDS = 5.0  # without processes, before a message says so
NOTES_SECONDS = 5.0  # until the note of a process on another machine is visible here


class Follower:
    """Passes new records in a log to `report`, each once, and the processes' current state."""

    def __init__(self, path: Path, report: Report, now: Path | None = None) -> None:
        self.path, self.report, self.now_file = path, report, now
        self.last_now: Record = {}
        self.offset = 0
        self.inode = -1
        # Hashes of earlier and of reported lines: a restart cuts records out of the log. Time
        # stamps do not help: clocks can be set back.
        self.seen = set[int]()
        with suppress(OSError):
            self._new_lines()

    def poll(self) -> None:
        """Report what is new since the last poll; unreadable files and lines are ignored."""
        with suppress(OSError, AttributeError):
            lines = [line.decode(errors="replace") for line in self._new_lines()]
            for record in parse_records("\n".join(lines)):
                self.report(record)
        if self.now_file is None:
            return
        with suppress(OSError, ValueError, RecursionError, VitctlError):
            record = read_run_json(self.now_file)
            if isinstance(record, dict) and record != self.last_now and record.get("kind") == "now":
                self.last_now = record
                self.report(record)

    def _new_lines(self) -> list[bytes]:
        """Return complete lines since the last poll. A truncated log counts as a new file with old lines."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.offset:
                self.inode, self.offset = status.st_ino, 0
            file.seek(self.offset)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self.offset += len(whole)
        new = {hash(line): line for line in whole.split(b"\n") if line}
        new = {key: line for key, line in new.items() if key not in self.seen}
        self.seen.update(new)
        return list(new.values())


def launch_processes(run_dir: Path, recipe: Recipe, report: Report, config: LaunchConfig) -> None:
    """Run the recipe of a prepared folder in new processes; see `launch`."""
    logs = run_dir / LOGS
    logs.mkdir(exist_ok=True)
    # The processes of this run start only when all machines have reached this point, so no note of theirs is
    # removed here.
    forget_errors(run_dir)
    (logs / NOW).unlink(missing_ok=True)
    follower = Follower(run_dir / LOG, never_raising(report, run_dir / LOG), logs / NOW)
    log = logs / f"launcher_{socket.gethostname()}.txt"
    words = accelerate_arguments(run_dir, recipe.machine, config)
    words += [LOCKED] if config.nodes == 1 else []
    settings = {**accelerate_environment(run_dir, config), "PET_LOCAL_ADDR": own_address(config)}
    with open(log, "a", encoding="utf-8", opener=no_links) as file:
        before = file.tell()
        agent = Agent(words, settings, file)
    watcher = _Watcher(run_dir, agent, config)
    with agent.watched():
        while agent.runs():
            follower.poll()
            with suppress(OSError, psutil.Error):  # a short disk failure must not end the run
                if watcher.waits_in_vain():
                    break
    follower.poll()
    with suppress(OSError):  # if the disk fails, the outcome names no process
        note_first_killed(run_dir, log.read_bytes()[before:].decode(errors="replace"))
    try:
        _check_outcome(run_dir, recipe, config, agent, log)
    except Exception as error:
        write_failed_result(run_dir, recipe.job, str(error))
        raise


class _Watcher:
    """Forwards signals to the processes of this machine, and notices when the agent waits in vain."""

    def __init__(self, run_dir: Path, agent: Agent, config: LaunchConfig) -> None:
        self.run_dir, self.agent = run_dir, agent
        self.may_announce = config.restarts > 0
        self.clocks: dict[str, float] = {}

    def waits_in_vain(self) -> bool:
        """Return whether the agent waits for processes that will not come or end; announce a wait once."""
        agent = self.agent
        workers, is_stopping = agent.workers(), bool(agent.signals)
        agent.forward_signal()
        has_result = read_status(self.run_dir) in ("done", "stopped")
        is_over = has_result or is_final(first_error(self.run_dir)) or (is_stopping and not workers)
        waiting = self.may_announce and agent.had_workers and not (workers or is_over)
        if self._holds_for("waiting", waiting, WAIT_SECONDS):
            self.may_announce = False
            say(
                "a process was lost; all processes restart when every machine has joined again; if a machine "
                "is missing, run the same command there, or on another machine"
            )
        starts_nothing = is_stopping and not agent.had_workers
        seconds = LEFT_SECONDS if workers and has_result else LINGER_SECONDS
        return starts_nothing or self._holds_for("over", is_over, seconds)

    def _holds_for(self, name: str, holds: bool, seconds: float) -> bool:
        since = self.clocks.setdefault(name, time.monotonic())
        if not holds:
            del self.clocks[name]
        return holds and time.monotonic() - since > seconds


def _check_outcome(run_dir: Path, recipe: Recipe, config: LaunchConfig, agent: Agent, log: Path) -> None:
    """Raise the first error unless RUN/result.json exists; the agent's exit code says less."""
    status, until = read_status(run_dir), time.monotonic() + NOTES_SECONDS
    is_stopping = bool(agent.signals)
    error = first_error(run_dir)
    waits = config.nodes > 1 and not is_stopping and error is not None
    while waits and not is_cause(error) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        error = first_error(run_dir)
    # A process that the agent terminates, because another one failed, may record that it was stopped.
    if status == "done" or (status == "stopped" and (is_stopping or not is_cause(error))):
        return
    if is_stopping and not is_cause(error):
        result = {"job": recipe.job, "status": "stopped"}
        write_run_json(run_dir / RESULT, result | ({"error": AT_ONCE} if agent.is_killed else {}))
        return
    raise_first_error(run_dir, recipe.machine.processes)
    if config.nodes > 1:
        raise LostProcess(
            f"accelerate launch ended before all processes reached {config.host}:{config.port}, "
            f"which may take machine.start_timeout = {recipe.machine.start_timeout:g} s: run this "
            "command on every machine",
            fix=f"see {log}; resume with the same command",
        )
    code = agent.process.returncode
    if code is not None and code < 0:
        raise LostProcess(
            f"accelerate launch and its processes were killed by {signal.Signals(-code).name}; "
            f"{resume_text(run_dir, recipe.job)}",
            fix=f"resume with: vitctl resume {typed(run_dir)}",
        )
    raise RuntimeError(
        f"the processes ended without an error message; {run_dir / LOGS} has their output, and {log.name} "
        f"there "
        f"says how they ended"
    )
