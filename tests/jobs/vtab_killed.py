"""A process that works on a table until it is killed in the seventh task: `python -m tests.jobs.vtab_killed
RUN WHERE`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.jobs.vtab_names import Catalog
from vitctl.data.datasets import vtab_images
from vitctl.engine import evaluation
from vitctl.launch.worker import work

SEVENTH = "tasks/svhn/"


def interrupted(folder: Path, where: str, number: int) -> None:
    """Do the job of a prepared folder, and get signal `number` in the training of task seven, in its
    evaluation, or after it.
    """
    armed, agree = [0], evaluation.stop_together

    def report(record: dict[str, Any]) -> None:
        if not str(record.get("task", "")).startswith(SEVENTH):
            return
        if (where, record["kind"], record.get("step")) in {
            ("training", "train", 3),
            ("scored", "evaluate", 4),
        }:
            os.kill(os.getpid(), number)
        if where == "evaluation" and record["kind"] == "checkpoint" and record["step"] == 4:
            armed[0] = 1

    def counted(*arguments: Any) -> None:
        if armed[0]:
            armed[0] += 1
        if armed[0] == 3:  # the second of the batches
            os.kill(os.getpid(), number)
        agree(*arguments)

    evaluation.stop_together = counted
    open_split, vtab_images.open_split = vtab_images.open_split, Catalog(whole_tests=False).open_split  # type: ignore[assignment]
    try:
        work(folder, report)
    finally:
        evaluation.stop_together, vtab_images.open_split = agree, open_split


if __name__ == "__main__":
    interrupted(Path(sys.argv[1]), sys.argv[2], signal.SIGKILL)
    sys.exit("was not killed")
