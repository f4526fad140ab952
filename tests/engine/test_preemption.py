"""Signals are remembered, the second one leaves at once, and the handlers of others come back."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.matrix import slow, spread
from vitctl.engine.preemption import stop_on_signals
from vitctl.system.process import SIGNALS, handles_signal

# The main thread is in C and gives no Python a chance to run there.
BLOCKED = """
import ctypes, os, signal, sys
from vitctl.engine.preemption import stop_on_signals
with stop_on_signals(float(sys.argv[1])):
    print("ready", flush=True)
    libc = ctypes.CDLL(None)
    for _ in range(600):
        libc.usleep(100_000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGINT)])
def test_main__a_signal_at_the_very_end_keeps_the_exit_code(number: signal.Signals) -> None:
    code = (
        "import os, sys\nclass Late:\n    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
        f"        kill(pid, {number:d})\n"
        "late, sys.argv = Late(), ['vitctl', '--version']\nfrom vitctl.__main__ import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_on_signals__raises_the_flag_and_restores_handlers(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with stop_on_signals() as flag:
        assert not flag.raised
        os.kill(os.getpid(), number)
        assert flag.raised
        assert flag.signal == number
    assert {n: signal.getsignal(n) for n in SIGNALS} == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not any("_watch_signals" in thread.name for thread in threading.enumerate())


def test_stop_on_signals__a_late_signal_is_no_failure() -> None:
    code = (
        "import os, signal\nfrom vitctl.engine.preemption import SIGNALS, exit_on_signals, stop_on_signals\n"
        "exit_on_signals(while_waiting=True)\nwith stop_on_signals(ignore_afterwards=True):\n    pass\n"
        "[os.kill(os.getpid(), number) for number in SIGNALS]\nprint('through')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "through\n", "")


@pytest.mark.parametrize("number", spread(2, SIGNALS))
def test_exit_on_signals__also_out_of_a_library_that_lets_no_python_run(number: signal.Signals) -> None:
    """As one does that waits for the other processes."""
    code = (
        "import ctypes\nfrom vitctl.engine.preemption import "
        "exit_on_signals\nexit_on_signals(while_waiting=True)\n"
        "print('ready', flush=True)\nfor _ in range(3): ctypes.CDLL(None).sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (3, "vitctl: stopped\n")


def test_stop_on_signals__restores_handlers_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), stop_on_signals():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "pair",
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGUSR1, signal.SIGTERM),
        *slow(((signal.SIGTERM, signal.SIGTERM),), ((signal.SIGTERM, signal.SIGINT),)),
    ],
)
def test_second_signal__leaves_at_once(pair: tuple[signal.Signals, signal.Signals]) -> None:
    said, seconds = send(0.0, *pair)
    assert said == 3
    assert seconds < 30  # it would sleep for a minute


@pytest.mark.slow
def test_second_signal__of_a_launcher_is_an_echo_at_first() -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKED, "2"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        time.sleep(0.1)
        assert process.poll() is None
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3


def send(echo_seconds: float, *numbers: signal.Signals) -> tuple[int, float]:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(echo_seconds)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        return process.wait(60), time.monotonic() - began


def test_stop_on_signals__ends_while_a_child_holds_its_pipe() -> None:
    """As the loader processes of a run that failed do: they are ended after this block."""
    code = (
        "import os, time\nfrom vitctl.engine.preemption import stop_on_signals\n"
        "with stop_on_signals():\n    child = os.fork()\n    if not child:\n        time.sleep(600)\n"
        "os.kill(child, 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_hears__a_process_that_has_only_begun_does_not() -> None:
    code = "import signal\ninput()\nsignal.signal(10, lambda *_: None)\nprint('ready', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert [handles_signal(process.pid, number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == [
            False,
            False,
        ]
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        assert [handles_signal(process.pid, number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == [
            True,
            False,
        ]
        process.communicate("\n")
    assert not handles_signal(process.pid, signal.SIGUSR1)
