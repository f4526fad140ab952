"""The command that was typed, in several processes: for measurements, which leave no run folder."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vitctl.launch.command import LaunchConfig, accelerate_arguments, accelerate_environment, write_accelerate_config
from vitctl.recipe.schema import Recipe
from vitctl.system.signals import ignore_signals


def run_in_processes(recipe: Recipe) -> int:
    """Start the typed command in as many processes as the recipe says, by `accelerate launch`; returns the exit code."""
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
        started = subprocess.Popen(command, env={**os.environ, **accelerate_environment(Path(folder), config)})
        ignore_signals()  # the processes get them too, and end
        return started.wait()
