"""A process that a test harms from within: `python -m tests.harmed HARM RUN`, on a prepared folder.

Harms are done where nothing from outside could hit the moment: between two writes of one save, on one of two processes.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from vitctl.engine import checkpoint, loop, losses
from vitctl.engine.preemption import leave_on_signals
from vitctl.errors import VitctlError
from vitctl.worker import be_quiet, leave_group, work

NAN_SAMPLE = 4  # with two processes the first has it in step 3, the second in step 6


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def stuck_save(run_dir: Path) -> dict[str, Any]:
    """The save of step 4 never ends, once the weights are written; says so."""
    write = checkpoint.save_file

    def stuck(tensors: Any, path: Path) -> None:
        if "step_00000004" in str(path):
            say("saving")
            time.sleep(600)
        write(tensors, path)

    checkpoint.save_file = stuck
    return work(run_dir)


def compiling(run_dir: Path) -> dict[str, Any]:
    """No harm; says when all is about to be compiled."""
    warm_up = loop.Trainer.warm_up

    def told(trainer: loop.Trainer, micro_batches: Any) -> None:
        say("compiling")
        warm_up(trainer, micro_batches)

    loop.Trainer.warm_up = told
    return work(run_dir)


def forbidden_save(run_dir: Path) -> dict[str, Any]:
    """After step 5 nothing may be written into the folder of the checkpoints."""

    def report(record: dict[str, Any]) -> None:
        if (record["kind"], record["step"]) == ("train", 5):
            (run_dir / "checkpoints").chmod(0o555)

    return work(run_dir, report)


def nan_on_one_rank(run_dir: Path) -> dict[str, Any]:
    """The loss of one image is not a number whenever it comes, on whatever process."""
    from vitctl.jobs import setup

    setup.classify = poisoned
    return work(run_dir)


def poisoned(model: Any, batch: Any, step: int, **named: Any) -> Any:
    """The loss of a classifier, not a number where a certain image is in the batch."""
    loss = losses.classify(model, batch, step, **named)
    return loss * float("nan") if (batch.samples == NAN_SAMPLE).any() else loss


HARMS = {harm.__name__: harm for harm in (stuck_save, compiling, forbidden_save, nan_on_one_rank)}


def main() -> None:
    """Do the harm; exit codes and the last line are those of the command."""
    leave_on_signals()
    harm, run_dir = HARMS[sys.argv[1]], Path(sys.argv[2])
    if "RANK" in os.environ:
        be_quiet(run_dir)
    try:
        result = harm(run_dir)
    except VitctlError as error:
        print(f"vitctl: {error}", file=sys.stderr)
        sys.exit(2)
    leave_group()
    sys.exit(3 if result["status"] == "stopped" else 0)


if __name__ == "__main__":
    main()
