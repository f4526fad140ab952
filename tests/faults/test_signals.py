"""Every signal that would end a process saves the run; those of the system never cut a save short; nohup is
respected.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.conftest import paced
from tests.faults.conftest import ENVIRONMENT, assert_same, command, prepared, records, resume
from vitctl.data.source.hashing import IGNORED_SIGNALS
from vitctl.engine.step import TrainStep
from vitctl.launch.worker import work
from vitctl.system.process import SIGNALS, STOP_SIGNALS

NEW = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Whatever started the tests: a signal that was ignored there would be ignored here."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NEW}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NEW)
def test_signal__saves_and_the_run_goes_on_bit_for_bit(
    tiny_data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    folder = prepared(tmp_path / "run", tiny_data)
    step = TrainStep._step

    def hit(trainer: Any, *given: Any) -> None:
        if not records(folder, "resume") and len(records(folder, "train")) == 4:
            os.kill(os.getpid(), number)
        step(trainer, *given)

    monkeypatch.setattr(TrainStep, "_step", hit)
    assert work(folder)["status"] == "stopped"
    assert [r["step"] for r in records(folder, "train")] == [1, 2, 3, 4, 5, 6]  # the next update agrees on it
    assert work(folder)["status"] == "done"
    assert_same(folder, straight)


def said(code: str, **given: Any) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **given)
    return done.returncode, done.stdout


def test_signals__of_the_system_come_again_and_never_cut_a_save_short() -> None:
    """A shell sends SIGHUP a second time, the kernel SIGXCPU every second; a SIGTERM beside them is the first
    that asks.
    """
    code = (
        "import os, signal, time\nfrom vitctl.engine.preemption import stop_on_signals\n"
        "with stop_on_signals() as flag:\n"
        "    for number in (1, 1, 24, 24, 14, 15, 1):\n        os.kill(os.getpid(), number)\n        "
        "time.sleep(0.05)\n"
        "    print(flag.signal.name, flush=True)\n"
        "    os.kill(os.getpid(), 15)\n    time.sleep(60)\n"
    )
    assert said(code) == (3, "SIGHUP\n")


def test_nohup__what_was_ignored_stays_ignored() -> None:
    code = (
        "import os, signal\nfrom vitctl.engine.preemption import interrupt_on_signals, exit_on_signals, "
        "stop_on_signals\n"
        "exit_on_signals()\nos.kill(os.getpid(), 1)\n"
        "with interrupt_on_signals():\n    os.kill(os.getpid(), 1)\n"
        "with stop_on_signals() as flag:\n    os.kill(os.getpid(), 1)\n    print(flag.raised)\n"
    )

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    assert said(code, preexec_fn=ignore) == (0, "False\n")


def test_signal__to_the_whole_group_leaves_loader_workers_to_their_parent(
    tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    line = paced(command(folder, tiny_data, **{"machine.workers": 2}))
    with warm.Popen(
        line, stdout=subprocess.PIPE, text=True, start_new_session=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step 2/"):
            assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        for number in (signal.SIGQUIT, signal.SIGHUP):
            os.killpg(process.pid, number)
        process.communicate(timeout=60)
    assert process.returncode == 3
    assert psutil.wait_procs(family, timeout=60)[1] == []
    resume(folder)
    assert_same(folder, straight)


def test_hashing__ignores_what_the_job_hears() -> None:
    """It imports nothing of ours, so that it names them again."""
    assert set(IGNORED_SIGNALS) == set(SIGNALS) >= set(STOP_SIGNALS)
