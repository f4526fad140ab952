"""What an error in the training loop leaves: the state between two updates, saved; half an update, left out."""

from typing import TYPE_CHECKING

from vitctl.engine.distributed.sharding import is_sharded
from vitctl.errors import CheckpointError, is_lost_peer

if TYPE_CHECKING:
    from vitctl.engine.training import Run


def rescue(run: "Run", step: int, error: Exception) -> None:
    """Save the state of `step` where it is whole, and say what the run can go on from. It raises nothing, and asks no other process.

    Of several processes it is the first one that saves, after an error of its own: of one that another was lost to it cannot
    know what that had written down.

    Args:
        run: as the error left it.
        step: finished steps.
        error: that ends the run; an error of saving itself is left alone.
    """
    if not (step and run.runtime.is_main) or isinstance(error, CheckpointError):
        return
    what = f"ended by an error ({type(error).__name__}) after step {step}"
    newest = "the run can go on from its newest checkpoint"
    if reason := _why_not(run, step, error) or _save(run, step):
        run.journal.write("warning", step=step, text=f"{what}, not saved: {reason}; {newest}")
    else:
        run.journal.write("warning", step=step, text=f"{what}, which is saved: {newest}")


def _why_not(run: "Run", step: int, error: Exception) -> str:
    """Why the state belongs to no step, or not to this process alone; "" where it is whole."""
    average = run.trainer.average
    if run.trainer.is_updating:
        return "it came in the middle of an update"
    if average is not None and average.is_swapped:
        return "it came while weights and their average were exchanged"
    if step not in (run.logged_step, run.saved_step):
        return "what it had to log is not written"
    if is_sharded(run.trainer.unwrapped):
        return "each process holds a part of the weights"
    return "another process was lost" if run.runtime.num_processes > 1 and is_lost_peer(str(error)) else ""


def _save(run: "Run", step: int) -> str:
    """Why it could not be written, "" when it is whole on disk."""
    try:
        if run.saver.finish() or run.saved_step != step:
            run.start_saving(step)
        return run.saver.finish()
    except Exception as error:  # memory that is gone, a device that failed: the first error is the one to be heard
        return f"{type(error).__name__}: {error}"
