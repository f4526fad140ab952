"""`python -m tests.launch.hasty_worker RUN`: a paced worker that soon gives up on processes that do not
answer.

With `SUSPENDED=RANK` in the environment, that process suspends itself at the start of the update after step
7.
"""

import os
import signal
from typing import Any

from tests.launch.paced_worker import pace
from vitctl.engine.step import TrainStep
from vitctl.launch import peers


def hasten() -> None:
    """Shorten the times after which a process is reported, and left behind."""
    peers.NOTICE_SECONDS, peers.GIVE_UP_SECONDS = 4.0, 5.0
    peers._QUIET_SECONDS, peers._FRESH_SECONDS = 1.0, 2.5


def suspend() -> None:
    """Suspend the process that `SUSPENDED` names where no other process has begun the next update."""
    update = TrainStep.update

    def suspended(trainer: Any, step: int, *given: Any) -> Any:
        if step == 7 and os.environ.get("SUSPENDED") == os.environ.get("RANK"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return update(trainer, step, *given)

    TrainStep.update = suspended  # type: ignore[method-assign]


if __name__ == "__main__":
    from vitctl.launch.worker import main

    hasten()
    suspend()
    pace()
    main()
