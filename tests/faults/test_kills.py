"""One run that is hit again and again in every way there is, and comes out bit for bit as the one that never
was.
"""

import fcntl
import os
import random
import signal
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import assert_same, command, fill, make_room, records, status
from vitctl.__main__ import main
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.jobs import pretrain  # noqa: F401 - imported once, for all attempts
from vitctl.system.process import SIGNALS as SIGNALS_OF_THE_HOUSE

SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGKILL")
KINDS = (
    *SIGNALS,
    "head",
    "closed terminal",
    "nohup and closed terminal",
    "full disk",
    "full disk and SIGKILL",
)
CODES = {"SIGKILL": {-signal.SIGKILL}, "full disk": {2, 3}, "full disk and SIGKILL": {-signal.SIGKILL}}
LIMIT_SECONDS = 300.0


@pytest.mark.slow
def test_thirty_kills__bit_for_bit(tiny_data: Path, tmp_path: Path, small_disk: Path) -> None:
    steps, kills = 400, 30
    values = {"schedule.total_steps": steps, "checkpoint.every_steps": 5, "evaluation.every_steps": 40}
    straight = tmp_path / "straight"
    assert Forked(command(straight, tiny_data, **values)[3:], os.open(os.devnull, os.O_WRONLY)).wait() == 0
    folder, draws, tally = small_disk / "run", random.Random(11), Counter[str]()
    line = command(folder, tiny_data, **values)
    kinds = [KINDS[n % len(KINDS)] for n in range(kills)]
    draws.shuffle(kinds)
    began = time.monotonic()
    for kind in kinds:
        code = hit(kind, line, folder, small_disk, draws)
        tally[f"{kind}: {code}"] += 1
        assert code in CODES.get(kind, {3}) | {0}, (kind, code)
        assert code or status(folder) == "done"
        assert newest_checkpoint(folder / "checkpoints")[1] == []
    assert Forked(line[3:], os.open(os.devnull, os.O_WRONLY)).wait() == 0
    print("\n" + ", ".join(f"{name} {number}" for name, number in sorted(tally.items())))
    print(f"{kills} kills, {time.monotonic() - began:.0f} s")
    print(f"steps at which it went on: {sorted(record['step'] for record in records(folder, 'resume'))}")
    assert list((folder / "checkpoints").glob(".*")) == []
    assert_same(folder, straight, steps)


def hit(kind: str, line: list[str], folder: Path, disk: Path, draws: random.Random) -> int | None:
    """Start the run or go on with it, do that to it some steps on; its exit code."""
    first = last_step(folder)

    def wait(more: int) -> None:
        until = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and last_step(folder) < first + more and time.monotonic() < until:
            time.sleep(0.005)

    at, process, close = draws.randrange(1, 12), *start(kind, line)
    wait(at)
    if "full" in kind:
        fill(disk, draws.choice([0, 4096, 100_000]))
        time.sleep(draws.uniform(0.0, 0.3))
    if kind == "head" or "terminal" in kind:
        close()
    if kind in ("head", "nohup and closed terminal"):
        wait(at + 5)  # it goes on
    number = {"full disk": "SIGTERM", "full disk and SIGKILL": "SIGKILL", "closed terminal": "SIGHUP"}.get(
        kind, kind
    )
    if kind != "closed terminal" and process.poll() is None:
        os.kill(process.pid, getattr(signal, number, signal.SIGTERM))
    code = process.wait()
    if "full" in kind:
        make_room(disk)
    return code


class Forked:
    """`vitctl` as it is typed, in a process that has imported it: 30 attempts cost what they do, not what
    torch's import does.

    Args:
        arguments: of the command.
        stdout: the descriptor that it prints to; a terminal becomes its own.
        ignoring: SIGHUP is ignored, as by nohup.
    """

    def __init__(self, arguments: list[str], stdout: int, *, ignoring: bool = False) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            if os.isatty(stdout):
                fcntl.ioctl(stdout, termios.TIOCSCTTY, 0)
            for number in SIGNALS_OF_THE_HOUSE:
                signal.signal(
                    number, signal.SIG_IGN if ignoring and number == signal.SIGHUP else signal.SIG_DFL
                )
            for stream in (1, 2):
                os.dup2(stdout, stream)
            os.closerange(3, 256)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            sys.argv = ["vitctl", *arguments]
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        """Its exit code, once it has one."""
        return self._look(0)

    def _look(self, how: int) -> int | None:
        if self.code is None and (ended := os.waitpid(self.pid, how))[0]:
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code


def start(kind: str, line: list[str]) -> tuple[Forked, Callable[[], None]]:
    """The process, and what closes the eyes of whoever reads it."""
    ours, theirs = os.openpty() if "terminal" in kind else os.pipe()
    if "terminal" not in kind and kind != "head":
        os.close(theirs)
        theirs = os.open(os.devnull, os.O_WRONLY)
    process = Forked(line[3:], theirs, ignoring="nohup" in kind)
    os.close(theirs)
    return process, lambda: os.close(ours)


def last_step(folder: Path) -> int:
    """The last step that the log tells of."""
    return max((record["step"] for record in records(folder, "train")), default=0)
