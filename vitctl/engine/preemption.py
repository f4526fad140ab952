"""Signals raise a flag; the loop looks at it, agrees on it with the other processes, saves, and leaves."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
RESUMABLE = 3


class Stopped(Exception):  # noqa: N818 - it names what happened, which is no failure
    """All processes agreed to stop; what was under way is saved or can be done again."""


class StopFlag:
    """Remembers the first signal. A second one ends the process at once: everything on disk is whole at any moment."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def raised(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def raise_(self, number: int, _frame: FrameType | None = None) -> None:
        """The signal handler."""
        if self.signal is not None and number == signal.SIGINT:
            os._exit(RESUMABLE)
        self.signal = signal.Signals(number)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Within the block SIGTERM, SIGUSR1 and SIGINT raise the flag instead of ending the process."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag.raise_) for number in SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
