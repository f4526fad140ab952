"""Signals are remembered, and the handlers of others come back."""

import os
import signal
import subprocess
import sys

import pytest

from vitctl.engine.preemption import SIGNALS, StopFlag, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_on_signals__raises_the_flag_and_restores_handlers(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with stop_on_signals() as flag:
        assert not flag.raised
        os.kill(os.getpid(), number)
        assert flag.raised
        assert flag.signal == number
        os.kill(os.getpid(), signal.SIGTERM)
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_stop_on_signals__restores_handlers_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), stop_on_signals():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before


def test_flag__a_second_interrupt_leaves_at_once() -> None:
    code = (
        "import os, signal, time\nfrom vitctl.engine.preemption import stop_on_signals\n"
        "with stop_on_signals():\n    os.kill(os.getpid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 3


def test_flag__is_down_at_first() -> None:
    assert not StopFlag().raised
