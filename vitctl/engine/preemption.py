"""Signals raise a flag; the loop looks at it, agrees on it with the other processes, saves, and leaves."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from vitctl.system.signals import ASKED, SIGNALS, handled, heard, is_second
from vitctl.system.text import one_line

RESUMABLE = 3
# Launchers of several processes pass a signal on that the processes have got already.
ECHO_SECONDS = 1.0
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_END = b"\0"  # no signal has this number
_NEW_LINE, _SHOW_CURSOR = "\n", "\x1b[?25h"  # a progress bar hides the cursor, and would draw over what follows it


class Stopped(Exception):  # noqa: N818 - it names what happened, which is no failure
    """All processes agreed to stop; what was under way is saved or can be done again."""


class StopFlag:
    """Remembers the first signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def raised(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def raise_(self, number: int, _frame: FrameType | None = None) -> None:
        """The signal handler. It says at once that it heard: what is under way may take a while."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            say(f"{self.signal.name}: stopping after what is under way; a second signal leaves at once")


@contextmanager
def stop_on_signals(echo_seconds: float = 0.0, *, ignore_afterwards: bool = False) -> Iterator[StopFlag]:
    """Within the block the signals that end a process raise the flag instead.

    A second one that somebody sends ends the process at once with code 3, also from within a library that lets no Python run
    in the main thread: everything on disk is whole at any moment.

    Args:
        echo_seconds: after the first signal, in which others are taken for its echo.
        ignore_afterwards: ignore signals after the block, where nothing is left but to end: one that is late must not make
            a failure of it.
    """
    flag = StopFlag()
    read, write = os.pipe()
    os.set_blocking(write, False)
    watcher = threading.Thread(target=_exit_on_second_signal, args=(read, echo_seconds), daemon=True)
    waker = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watcher.start()
    try:
        with handled(flag.raise_, signal.SIG_IGN if ignore_afterwards else None):
            yield flag
    finally:
        signal.set_wakeup_fd(waker)
        os.write(write, _END)  # the end of the pipe may never come: a loader process that is still there holds it open
        os.close(write)
        watcher.join()


def _exit_on_second_signal(read: int, echo_seconds: float) -> None:
    """Count the signals, whose numbers the interpreter writes into a pipe the moment they come."""
    first = 0.0
    while (number := os.read(read, 1)) not in (_END, b""):
        if number[0] not in ASKED:
            continue
        if first and time.monotonic() - first >= echo_seconds:
            _exit_with_message("left at once; what was saved before is whole")
        first = first or time.monotonic()
    os.close(read)


def exit_on_signals(*, while_waiting: bool = False) -> None:
    """From here on a signal ends the process with code 3: while it starts there is nothing to save.

    Args:
        while_waiting: also from within a library that lets no Python run in the main thread, as one does that waits for
            the other processes.
    """
    if while_waiting:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=_exit_on_first_signal, args=(read,), daemon=True).start()
    for number in heard():
        signal.signal(number, _ignore if while_waiting else _exit)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Within the block the first signal raises KeyboardInterrupt, as Ctrl-C does; a second one that is sent ends the process at once."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_second(number, came):
            _exit(number, frame)
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    with handled(interrupt):
        yield


def say(text: str, file: int = 2) -> None:
    """A line from within a signal handler, where no stream may be used; on a terminal below what stands there.

    Args:
        text: the line.
        file: its descriptor; standard error, or what stands for it.
    """
    with suppress(OSError):
        os.write(file, f"{_NEW_LINE if os.isatty(file) else ''}vitctl: {one_line(text)}\n".encode())


def _exit_on_first_signal(read: int) -> None:
    while number := os.read(read, 1):
        if number[0] in SIGNALS:
            _exit_with_message("stopped")


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Keeps the signal from ending the process in its own way."""


def _exit(_number: int, _frame: FrameType | None) -> None:
    _exit_with_message("stopped")


def _exit_with_message(text: str) -> None:
    say(text + (_SHOW_CURSOR if os.isatty(2) else ""))
    os._exit(RESUMABLE)


def die_with_parent() -> None:
    """End this process when its parent ends, however that ends: nobody else may go on with its run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
