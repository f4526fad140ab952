"""`python -m tests.launch.paced_worker RUN`: a worker whose steps take long enough that something comes
between them.
"""

import time
from typing import Any

from vitctl.engine.update import TrainStep

SECONDS = 0.05


def pace() -> None:
    """Slow down the function that makes a step."""
    step = TrainStep._apply

    def paced(trainer: Any, *given: Any) -> None:
        time.sleep(SECONDS)
        step(trainer, *given)

    TrainStep._apply = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    from vitctl.launch.worker import main

    pace()
    main()
