"""The signals that end a process: which of them a job handles, and which of them ask it to stop at once when
sent twice.

SIGXFSZ and SIGPIPE are not among them: Python ignores both, so that a file size limit or a broken pipe is an
error of the write.
"""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

# Sent by a person, a batch system or a launcher to stop a job; a second one means "stop at once".
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2, signal.SIGQUIT)
# Sent by the system: a closed terminal (which sends it twice, once through the shell), a limit on CPU time
# (which sends it every second), a timer. The job saves a checkpoint and stops; a second one does not
# interrupt that.
_SYSTEM_SIGNALS = (signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM)
SIGNALS = (*STOP_SIGNALS, *_SYSTEM_SIGNALS)
# Handled even if ignored at start: a shell script ignores SIGINT for what it starts in the background.
_ALWAYS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Handler = Callable[[int, FrameType | None], Any]


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals that this process handles.

    Signals that were ignored at start, as nohup does with SIGHUP, stay ignored.
    """
    return tuple(one for one in SIGNALS if one in _ALWAYS or signal.getsignal(one) != signal.SIG_IGN)


@contextmanager
def signal_handler(handler: Handler, afterwards: signal.Handlers | None = None) -> Iterator[None]:
    """Install `handler` for all handled signals within the block.

    Args:
        handler: called with the number of the signal and the frame.
        afterwards: the handler to set after the block; None: the earlier one.
    """
    before = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if afterwards is None else afterwards)


def is_repeated(number: int, before: Iterable[int]) -> bool:
    """Whether a stop signal follows an earlier one: the job should stop at once, without saving.

    Args:
        number: of the signal.
        before: numbers of the signals that came earlier.
    """
    return number in STOP_SIGNALS and any(other in STOP_SIGNALS for other in before)


def handles_signal(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal. One that is starting or ending may have none: the signal
    would kill it.

    Args:
        process: id of the process.
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


def ignore_signals(numbers: Sequence[int] = SIGNALS) -> None:
    """Called in a worker that was forked with these signals blocked: it ignores them from now on, because the
    parent stops it.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def blocked_signals(numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Block signals within the block, so that a worker forked there does not receive them before it ignores
    them.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
