"""`python -m tests.launch.hasty_worker RUN`: a paced worker that soon gives up on processes that do not
answer.

With `SUSPENDED=RANK` in the environment, that process suspends itself at the start of the update after step
7; with `SUSPENDED_IN=record` too, in the record of that update.
"""

import os
import signal
from typing import Any

from tests.launch.paced_worker import pace
from vitctl.engine.trace import Recorder
from vitctl.engine.update import TrainStep
from vitctl.launch import peers


def hasten() -> None:
    """Shorten the times after which a process is reported, and left behind."""
    peers.NOTICE_SECONDS, peers.GIVE_UP_SECONDS = 4.0, 5.0
    peers._QUIET_SECONDS, peers._FRESH_SECONDS = 1.0, 2.5


def suspend() -> None:
    """Suspend the process that `SUSPENDED` names where no other process has begun the next update."""
    in_record = os.environ.get("SUSPENDED_IN") == "record"
    place, name = (Recorder, "add") if in_record else (TrainStep, "update")
    call = getattr(place, name)

    def suspended(trainer: Any, step: int, *given: Any, **named: Any) -> Any:
        if step == 7 + in_record and os.environ.get("SUSPENDED") == os.environ.get("RANK"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(trainer, step, *given, **named)

    setattr(place, name, suspended)


if __name__ == "__main__":
    from vitctl.launch.worker import main

    hasten()
    suspend()
    pace()
    main()
