"""The command that was typed, in several processes: for measurements, which leave no run folder."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from vitctl.engine.preemption import die_with_parent
from vitctl.launch.command import (
    LaunchConfig,
    accelerate_arguments,
    accelerate_environment,
    write_accelerate_config,
)
from vitctl.launch.environment import UNUSED_SIGNAL
from vitctl.recipe.schema import Recipe
from vitctl.system.signals import handles_signal, is_repeated, signal_handler

STOPPED = 3


def run_in_processes(recipe: Recipe) -> int:
    """Start the typed command in as many processes as the recipe says, by `accelerate launch`; returns the
    exit code.

    A signal is forwarded to each of them, and the code is then 3; a second one, or the end of this process,
    kills them.
    """
    with tempfile.TemporaryDirectory(prefix="vitctl-bench-") as folder:
        config = LaunchConfig()
        write_accelerate_config(Path(folder), recipe, config)
        words = accelerate_arguments(Path(folder), recipe.machine.processes, config)
        words = words[: words.index("--module") + 1]  # after it come the module and its arguments
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            *words,
            "vitctl",
            *sys.argv[1:],
        ]
        # The agent would kill everything at a signal; in a session of its own it gets none.
        own = {"PET_SIGNALS_TO_HANDLE": UNUSED_SIGNAL}
        started = subprocess.Popen(
            command,
            env={**os.environ, **accelerate_environment(Path(folder), config), **own},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        signals: list[int] = []

        def forward(number: int, _frame: FrameType | None) -> None:
            again = is_repeated(number, signals)
            signals.append(number)
            if len(signals) == 1 or again:
                _stop(started.pid, again)

        with signal_handler(forward):
            code = started.wait()
        return STOPPED if signals else code


def _stop(agent: int, at_once: bool) -> None:
    """Tell the processes of an agent to stop; kill it, and them with it, where that is to be at once or none
    of them can be told.
    """
    told = False
    with suppress(psutil.Error):
        for process in psutil.Process(agent).children(recursive=True) if not at_once else ():
            if handles_signal(process.pid, signal.SIGUSR1):
                process.send_signal(signal.SIGUSR1)
                told = True
        if not told:
            psutil.Process(agent).kill()
