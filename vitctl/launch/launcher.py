"""Start the processes of a run, follow them, and end them together."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from vitctl.engine.journal import (
    LOG,
    RECIPE,
    RESULT,
    Record,
    Report,
    never_raising,
    parse_records,
    read_run_json,
    write_run_json,
)
from vitctl.engine.preemption import AT_ONCE, say
from vitctl.errors import LaunchError, VitctlError, first_line
from vitctl.launch.command import (
    UNUSED_SIGNAL,
    WORKER,
    LaunchConfig,
    accelerate_arguments,
    accelerate_environment,
    find_member,
    own_address,
    without_settings,
)
from vitctl.launch.errors import (
    LOGS,
    first_error,
    forget_errors,
    is_cause,
    is_final,
    note_killed,
    raise_first_error,
    write_failed_result,
)
from vitctl.launch.prepare import Prepared
from vitctl.launch.roll_call import resume_text
from vitctl.launch.run_folder import keeping_result, locked_for_run, read_status
from vitctl.launch.worker import LOCKED, NOW, work, work_as_member
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Recipe
from vitctl.system.files import no_links
from vitctl.system.process import SIGNALS, STOP_SIGNALS, handles_signal, is_repeated, signal_handler


class Follower:
    """Passes the records that other processes append to a log to `report`, each once, and their current
    state.
    """

    def __init__(self, path: Path, report: Report, now: Path | None = None) -> None:
        self.path, self.report, self.now_file = path, report, now
        self.last_now: Record = {}
        self.offset = 0
        self.inode = -1
        self.seen = set[
            int
            # hashes of lines that were there before, or are reported; time stamps do not help, since clocks can
            # be set back
        ]()
        with suppress(OSError):
            self._new_lines()

    def poll(self) -> None:
        """Report what is new since the last poll.

        A file that cannot be read, or a line that is no record, is ignored.
        """
        with suppress(OSError, AttributeError):
            self._follow_log()
        if self.now_file is None:
            return
        with suppress(OSError, ValueError, RecursionError, VitctlError):
            record = read_run_json(self.now_file)
            if isinstance(record, dict) and record != self.last_now and record.get("kind") == "now":
                self.last_now = record
                self.report(record)

    def _follow_log(self) -> None:
        for record in parse_records("\n".join(line.decode(errors="replace") for line in self._new_lines())):
            self.report(record)

    def _new_lines(self) -> list[bytes]:
        """Whole lines that are new since the last poll.

        A log that was truncated is a new file with old lines.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.inode, self.offset = status.st_ino, 0
                file.seek(self.offset)
                lines = file.read()
        except FileNotFoundError:
            return []
        whole = lines[: lines.rfind(b"\n") + 1]
        self.offset += len(whole)
        new = [line for line in whole.split(b"\n") if line and hash(line) not in self.seen]
        self.seen.update(map(hash, new))
        return new


POLL_SECONDS = 0.2
GRACE_SECONDS = 15.0  # for the other processes, once one has failed for good: they notice the loss and exit
LEFT_SECONDS = (
    5.0  # for a process of this machine, once the result is written: one that does not answer is killed
)
LINGER_SECONDS = 20.0  # for the other machines, once the processes of this one have finished
WAIT_SECONDS = 5.0  # without processes, before a message says so
SILENT_SECONDS = 20.0  # for the processes of this machine after a signal, if all of them are stopped
NOTES_SECONDS = 5.0  # until the note of a process on another machine is visible here


def launch(
    run_dir: Path, report: Report, config: LaunchConfig = LaunchConfig(), prepared: Prepared | None = None
) -> dict[str, Any]:
    """Run the recipe of a prepared folder to its end: in this process where it is the only one or one of
    several, else in new ones.

    Args:
        run_dir: prepared.
        report: called with every log record.
        config: the machines and the restarts.
        prepared: what `prepare_run` gave in this process; None: the recipe is read from the folder.

    Returns:
        the content of RUN/result.json.

    Raises:
        VitctlError: as the job raises; of several processes, the one that failed first, or one that was
            killed.
        RuntimeError: a process failed with a bug.
    """
    if find_member() is not None:
        return work_as_member(run_dir, report, prepared)
    recipe = prepared.recipe if prepared else load_recipe(str(run_dir / RECIPE)).recipe
    if not config.starts(recipe):
        work(run_dir, report, prepared or Prepared(recipe))
    else:
        # With several machines the process of rank 0 locks the folder, on whichever machine it runs.
        with locked_for_run(run_dir) if config.nodes == 1 else keeping_result(run_dir):
            _launch_processes(run_dir, recipe, report, config)
    return dict(read_run_json(run_dir / RESULT))


def _launch_processes(run_dir: Path, recipe: Recipe, report: Report, config: LaunchConfig) -> None:
    logs = run_dir / LOGS
    logs.mkdir(exist_ok=True)
    # The processes of this run start only when all machines have reached this point: none of their notes is
    # removed here.
    forget_errors(run_dir)
    (logs / NOW).unlink(missing_ok=True)
    follower = Follower(run_dir / LOG, never_raising(report, run_dir / LOG), logs / NOW)
    log = logs / f"launcher_{socket.gethostname()}.txt"
    machine = _MachineWatcher(run_dir, follower)
    ended: BaseException | None = None
    with _errors_into(log) as machine.screen, _settings(run_dir, config), machine.watched():
        try:
            _accelerate(run_dir, recipe.machine.processes, config)
        except (Exception, SystemExit) as error:  # SystemExit is how argparse reports an error
            ended = error
            logging.getLogger(__name__).error("%s", error)
    try:
        _check_outcome(run_dir, recipe, config, machine, ended, log)
    except Exception as error:
        write_failed_result(run_dir, recipe.job, str(error))
        raise


def _accelerate(run_dir: Path, processes: int, config: LaunchConfig) -> None:
    """`accelerate launch`, as its command does it."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    words = accelerate_arguments(run_dir, processes, config)
    words += [LOCKED] if config.nodes == 1 else []
    launch_command(launch_command_parser().parse_args(words))


@contextmanager
def _settings(run_dir: Path, config: LaunchConfig) -> Iterator[None]:
    """Within the block the environment holds the settings of this launch, and no others of accelerate or
    torchrun.
    """
    before = dict(os.environ)
    own = {
        "PET_LOCAL_ADDR": own_address(config),
        # The agent would kill everything at a signal. The real signals are handled here.
        "PET_SIGNALS_TO_HANDLE": UNUSED_SIGNAL,
    }
    _replace_environment({**without_settings(before), **accelerate_environment(run_dir, config), **own})
    try:
        yield
    finally:
        _replace_environment(before)


def _replace_environment(values: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


@contextmanager
def _errors_into(log: Path) -> Iterator[int]:
    """Within the block standard error of this process and its children goes to a log; yields the original
    descriptor.
    """
    root, screen = logging.getLogger(), os.dup(2)
    sys.stderr.flush()
    file = open(log, "a", encoding="utf-8", errors="backslashreplace", opener=no_links)  # noqa: SIM115
    os.dup2(file.fileno(), 2)
    handler = logging.StreamHandler(file)
    root.addHandler(handler)  # accelerate adds one that writes to the screen where there is none
    try:
        yield screen
    finally:
        root.removeHandler(handler)
        for stream in (sys.stderr, file):
            with suppress(OSError):  # of a full disk: how the run ended matters more
                stream.flush()
        os.dup2(screen, 2)
        os.close(screen)
        with suppress(OSError):
            file.close()


class _Abort(BaseException):
    """Ends `accelerate launch`: the agent waits in vain, or a second signal came.

    Not an Exception, so that torch does not catch it.
    """


class _MachineWatcher:
    """The processes of this machine, watched by a thread while the main thread is in `accelerate launch`."""

    def __init__(self, run_dir: Path, follower: Follower) -> None:
        self.run_dir, self.follower, self.screen = run_dir, follower, 2
        self.signals: list[int] = []
        self.signalled: set[int] = set()
        self.had_workers = self.announced = self.aborting = self.at_once = self.are_silent = False
        self.clocks: dict[str, float] = {}
        self.ended = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether this machine received a signal to stop."""
        return bool(self.signals)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block signals are forwarded; at its end no process is left. `_Abort` is caught here."""
        watcher = threading.Thread(target=self._watch, daemon=True)
        with signal_handler(self._on_signal):
            try:
                with suppress(_Abort):
                    try:
                        watcher.start()
                        yield
                    finally:
                        self.ended.set()
            finally:
                watcher.join()
                remaining = _workers()
                for worker in remaining:
                    worker.kill()
                psutil.wait_procs(remaining, timeout=GRACE_SECONDS)
        self.follower.poll()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler. The first signal lets all processes save; a second one kills them at once."""
        if self.ended.is_set():
            return
        if self.aborting:
            self._kill_and_abort()
        second = is_repeated(number, self.signals)
        self.signals.append(number)
        if second:
            self.at_once = True
            self._kill_and_abort()
        if len(self.signals) == 1:
            name = signal.Signals(number).name
            say(
                f"{name}: stopping as soon as the work so far is safe; a second signal stops at once",
                self.screen,
            )

    def _kill_and_abort(self) -> None:
        for worker in _workers():
            worker.kill()
        raise _Abort

    def _watch(self) -> None:
        while not self.ended.wait(POLL_SECONDS):
            self.follower.poll()
            with suppress(OSError, psutil.Error):  # a disk that fails for a moment must not end the run
                if self._should_abort():
                    self.aborting = True
                    signal.pthread_kill(threading.main_thread().ident or 0, STOP_SIGNALS[0])
                    return

    def _should_abort(self) -> bool:
        """Forward signals; whether the agent waits for processes that will not come.

        What it does wait for is printed once.
        """
        workers = _workers()
        self.had_workers |= bool(workers)
        self._forward_signal(workers)
        has_result = read_status(self.run_dir) in ("done", "stopped")
        finished = not workers and (self.stopping or has_result)
        silent = (
            self.stopping and bool(workers) and all(one.status() == psutil.STATUS_STOPPED for one in workers)
        )
        self.are_silent = self._holds_for("silent", silent, SILENT_SECONDS)
        failed = is_final(first_error(self.run_dir))
        waiting = self.had_workers and not (workers or finished or failed or self.announced)
        if self._holds_for("waiting", waiting, WAIT_SECONDS):
            self.announced = True
            say(
                "a process was lost; all processes restart when every machine has joined again; if a machine "
                "is missing, run "
                "the same command there, or on another machine",
                self.screen,
            )
        return (
            (self.stopping and not self.had_workers)
            or self._holds_for("finished", finished, LINGER_SECONDS)
            or self._holds_for("left", bool(workers) and has_result, LEFT_SECONDS)
            or self.are_silent
            or self._holds_for("failed", failed, GRACE_SECONDS)
        )

    def _forward_signal(self, workers: list[psutil.Process]) -> None:
        """Signal each process once: a second signal would end it before it has saved."""
        for worker in workers if self.stopping else ():
            if worker.pid not in self.signalled and handles_signal(worker.pid, signal.SIGUSR1):
                self.signalled.add(worker.pid)
                worker.send_signal(signal.SIGUSR1)

    def _holds_for(self, name: str, holds: bool, seconds: float) -> bool:
        """Whether a condition has held for that long."""
        if not holds:
            self.clocks.pop(name, None)
            return False
        return time.monotonic() - self.clocks.setdefault(name, time.monotonic()) > seconds


def _workers() -> list[psutil.Process]:
    """The processes that the agent of this machine has started."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if WORKER in child.cmdline():
                found.append(child)
    return found


def _check_outcome(
    run_dir: Path,
    recipe: Recipe,
    config: LaunchConfig,
    machine: _MachineWatcher,
    ended: BaseException | None,
    log: Path,
) -> None:
    """Check that RUN/result.json is there; else raise the first error.

    The exit of the agent says less: another machine may have ended before its barrier.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    status, until = read_status(run_dir), time.monotonic() + NOTES_SECONDS
    error = first_error(run_dir)
    if not is_cause(error) and isinstance(ended, ChildFailedError):
        rank, first = ended.get_first_failure()
        if first.exitcode < 0 and -first.exitcode not in SIGNALS:
            note_killed(run_dir, rank, signal.Signals(-first.exitcode).name)
            error = first_error(run_dir)
    while config.nodes > 1 and not machine.stopping and _only_lost_peers(error) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        error = first_error(run_dir)
    # A process that the agent terminates, because another one failed, may record that it was stopped.
    if status == "done" or (status == "stopped" and (machine.stopping or not is_cause(error))):
        return
    if machine.stopping and not is_cause(error):
        said = {"error": AT_ONCE} if machine.at_once else {}
        if machine.are_silent:
            said = {
                "error": f"stopped; no process on {socket.gethostname()} answered; {resume_text(run_dir)}"
            }
        write_run_json(run_dir / RESULT, {"job": recipe.job, "status": "stopped", **said})
        return
    raise_first_error(run_dir, recipe.machine.processes)
    if config.nodes > 1:
        place = f"{config.host}:{config.port}"
        raise LaunchError(
            f"accelerate launch ended before all processes had met at {place}: every machine has to run this "
            f"command; {log} says "
            "why; resume with the same command"
        )
    raise RuntimeError(
        f"the processes ended ({_end_of(ended)}) without an error message; {run_dir / LOGS} has their output"
    )


def _end_of(ended: BaseException | None) -> str:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not isinstance(ended, ChildFailedError):
        return first_line(ended)
    rank, first = ended.get_first_failure()
    return f"process {rank} with exit code {first.exitcode}"


def _only_lost_peers(error: Mapping[str, Any] | None) -> bool:
    return error is not None and not is_cause(error)
