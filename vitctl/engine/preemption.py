"""Signal handlers set a flag; the loop checks it together with the other processes, saves, and exits."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType

from vitctl.system.process import HERE, SIGNALS, STOP_SIGNALS, handled_signals, is_repeated, signal_handler
from vitctl.system.screen import above_view
from vitctl.system.text import one_line

RESUMABLE = 3
# Launchers forward signals that the processes have already received.
ECHO_SECONDS = 1.0
AT_ONCE = "stopped at once; what was saved is complete"
_END = b"\0"  # no signal has this number
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides the cursor


class Stopped(Exception):  # noqa: N818 - not a failure
    """All processes agreed to stop; the work in progress is saved or can be repeated."""


class StopFlag:
    """Remembers the first signal.

    `save_alone` saves a training in another thread without the other processes, and returns the problem or
    "". `given_up` says that this is happening, because another process does not answer. `give_up` ends the
    main thread's wait for images; `reason` is what it waited for. `outage` stops the run like a signal:
    why images could not be fetched in time.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._calls = count()  # the signal handler and the thread that watches the signals both call `raise_`
        self.since = 0.0
        self.save_alone: Callable[[], str] | None = None
        self.given_up = False
        self.reason = self.outage = ""

    @property
    def seconds(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return time.monotonic() - self.since if self.signal else 0.0

    @property
    def raised(self) -> bool:
        """Whether this process should stop: a signal was received, or images cannot be fetched."""
        return self.signal is not None or bool(self.outage)

    def check(self) -> None:
        if self.raised:
            raise Stopped

    def miss_images(self, reason: str) -> None:
        self.outage = reason

    @contextmanager
    def rescued_by(self, save_alone: Callable[[], str]) -> Iterator[None]:
        """Within the block another thread may save the training with `save_alone`."""
        self.save_alone = save_alone
        try:
            yield
        finally:
            self.save_alone = None

    def raise_(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal. Print a message at once, since the current step may take a while."""
        if self.reason:
            if HERE.images_since is not None:
                raise Stopped
            self.reason = ""  # the images have arrived
        elif next(self._calls) == 0:
            self.since, self.signal = time.monotonic(), signal.Signals(number)
            HERE.is_stopping = True
            say(
                f"{self.signal.name}: stopping as soon as the work so far is safe; a second signal "
                f"stops at once"
            )

    def give_up(self, reason: str) -> None:
        """Raise Stopped in the main thread while any library waits for images; called by another thread."""
        self.reason = reason
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)


@contextmanager
def stop_on_signals(echo_seconds: float = 0.0, *, ignore_afterwards: bool = False) -> Iterator[StopFlag]:
    """Within the block the signals that would end the process set the flag instead.

    A second signal, later than `echo_seconds` after the first, ends the process at once with code 3, even
    while a library blocks the main thread: the files on disk are always consistent. `ignore_afterwards`
    ignores signals after the block, so that a late one cannot turn a clean exit into a failure.
    """
    flag, HERE.is_stopping = StopFlag(), False
    read, write = os.pipe()
    os.set_blocking(write, False)
    watcher = threading.Thread(target=_watch_signals, args=(flag, read, echo_seconds), daemon=True)
    waker = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watcher.start()
    try:
        with signal_handler(flag.raise_, signal.SIG_IGN if ignore_afterwards else None):
            yield flag
    finally:
        signal.set_wakeup_fd(waker)
        os.write(write, _END)  # closing is not enough: a loader process may still hold the pipe open
        os.close(write)
        watcher.join()


def _watch_signals(flag: StopFlag, read: int, echo_seconds: float) -> None:
    """Set the flag even while a library blocks the main thread, and exit on a second signal."""
    first = 0.0
    while (number := os.read(read, 1)) not in (_END, b""):
        if number[0] == signal.SIGUSR2 and flag.reason:
            continue  # sent by `give_up`
        if number[0] in SIGNALS:
            flag.raise_(number[0])
        if number[0] not in STOP_SIGNALS:
            continue
        if first and time.monotonic() - first >= echo_seconds:
            _exit_with_message(AT_ONCE)
        first = first or time.monotonic()
    os.close(read)


def exit_on_signals(*, while_waiting: bool = False) -> None:
    """Exit with code 3 on any signal from here on: during start-up there is nothing to save.

    With `while_waiting` also while a library blocks the main thread, for example in the rendezvous.
    """
    if while_waiting:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=_exit_on_first_signal, args=(read,), daemon=True).start()
    for number in handled_signals():
        signal.signal(number, _ignore if while_waiting else _exit)


def ignore_signals() -> None:
    """Ignore all handled signals from here on: the exit code is decided."""
    for number in handled_signals():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Within the block the first signal raises KeyboardInterrupt, as Ctrl-C does; a second one exits."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_repeated(number, came):
            _exit(number, frame)
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    with signal_handler(interrupt):
        yield


def say(text: str, file: int = 2) -> None:
    """Print a line to descriptor `file` from a signal handler, where Python's streams must not be used."""
    with suppress(OSError):
        line = f"vitctl: {one_line(text)}"
        os.write(file, (above_view(line) if os.isatty(file) else f"{line}\n").encode())


def _exit_on_first_signal(read: int) -> None:
    while number := os.read(read, 1):
        if number[0] in SIGNALS:
            _exit_with_message("stopped")


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Replace the signal's default action, which would end the process."""


def _exit(_number: int, _frame: FrameType | None) -> None:
    _exit_with_message("stopped")


def _exit_with_message(text: str) -> None:
    say(text)
    if os.isatty(2):
        with suppress(OSError):
            os.write(2, _SHOW_CURSOR)
    os._exit(RESUMABLE)
