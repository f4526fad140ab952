"""`python -m tests.launch.slow_worker RUN`: a worker that writes each file of a checkpoint for two seconds:
longer than a second signal counts as an echo of the first.
"""

import time
from pathlib import Path
from typing import Any

from vitctl.engine import checkpoint as files
from vitctl.engine.preemption import ECHO_SECONDS
from vitctl.launch.worker import main

SECONDS = 2 * ECHO_SECONDS


def slow_down() -> None:
    """Replace the function that writes a checkpoint's tensors."""
    write = files.save_tensors

    def slow(tensors: Any, path: Path, *more: Any, **given: Any) -> None:
        time.sleep(SECONDS)
        write(tensors, path, *more, **given)

    files.save_tensors = slow


if __name__ == "__main__":
    slow_down()
    main()
