"""The signals that end a process: which of them a job hears, and which of them somebody sends who does not want to wait.

SIGXFSZ and SIGPIPE are none of these: Python ignores both, so that a file limit or a closed pipe is an error of the write alone.
"""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

# Those by which a person, a batch system or a launcher asks a job to end; a second one means "at once".
ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2, signal.SIGQUIT)
# Those of the system alone: a closed terminal (which sends it twice, once by its shell), a limit of CPU time (which sends it
# every second), a timer. They let a job save, and never cut that short.
_OF_THE_SYSTEM = (signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM)
SIGNALS = (*ASKED, *_OF_THE_SYSTEM)
# Heard also where they are ignored: a shell script ignores SIGINT for what it starts in the background.
_ALWAYS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Handler = Callable[[int, FrameType | None], Any]


def heard() -> tuple[signal.Signals, ...]:
    """The signals that this process hears: those that were ignored when it was started, as nohup does, stay ignored."""
    return tuple(one for one in SIGNALS if one in _ALWAYS or signal.getsignal(one) != signal.SIG_IGN)


@contextmanager
def handled(handler: Handler, afterwards: signal.Handlers | None = None) -> Iterator[None]:
    """Within the block `handler` gets the signals that this process hears.

    Args:
        handler: called with the signal's number.
        afterwards: what becomes of them after the block; None: what was before.
    """
    before = {number: signal.signal(number, handler) for number in heard()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if afterwards is None else afterwards)


def is_second(number: int, before: Iterable[int]) -> bool:
    """Whether a signal asks for the second time, after those `before` it: who sends it does not want to wait."""
    return number in ASKED and any(other in ASKED for other in before)


def hears(process: int, number: int) -> bool:
    """Whether a process handles a signal by now: one that has only just begun, or is at its end, would be killed by it, or deaf.

    Args:
        process: its id.
        number: of the signal.
    """
    if sys.platform != "linux":
        return True
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def begin_child(numbers: Sequence[int] = SIGNALS) -> None:
    """In a process of ours that was forked with `numbers` blocked: what is sent to the whole group is its parent's business."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def blocked(numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Within the block signals wait: a process that is forked there is not hit before it ignores them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
