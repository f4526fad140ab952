"""After an error in the training loop: save the state if the error came between two updates; never half an update."""

from typing import TYPE_CHECKING

from vitctl.engine.distributed.sharding import is_sharded
from vitctl.errors import CheckpointError, is_lost_peer

if TYPE_CHECKING:
    from vitctl.engine.training import Run


def rescue(run: "Run", step: int, error: Exception) -> None:
    """Save the state of `step` if it is consistent, and log what the run can resume from. It raises nothing, and uses no collective.

    Only rank 0 saves, and only after an error of its own: when another process was lost, it cannot know what that process had
    logged.

    Args:
        run: in the state that the error left.
        step: finished steps.
        error: that ends the run; an error of saving itself is left alone.
    """
    if not (step and run.runtime.is_main) or isinstance(error, CheckpointError):
        return
    what = f"ended by an error ({type(error).__name__}) after step {step}"
    newest = "the run can resume from its newest checkpoint"
    if reason := _why_not(run, step, error) or _save(run, step):
        run.journal.write("warning", step=step, text=f"{what}, not saved: {reason}; {newest}")
    else:
        run.journal.write("warning", step=step, text=f"{what}, which is saved: {newest}")


def _why_not(run: "Run", step: int, error: Exception) -> str:
    """Why the state cannot be saved: inside an update, or spread over other processes; "" where it can."""
    average = run.trainer.average
    if run.trainer.is_updating:
        return "it came in the middle of an update"
    if average is not None and average.is_swapped:
        return "it came while weights and their average were swapped"
    if step not in (run.logged_step, run.saved_step):
        return "the log of this step is not written"
    if is_sharded(run.trainer.unwrapped):
        return "each process holds a part of the weights"
    return "another process was lost" if run.runtime.num_processes > 1 and is_lost_peer(str(error)) else ""


def _save(run: "Run", step: int) -> str:
    """Why the checkpoint could not be written; "" when it is complete on disk."""
    try:
        if run.saver.finish() or run.saved_step != step:
            run.start_saving(step)
        return run.saver.finish()
    except Exception as error:  # out of memory, a failed device: the first error is the one to report
        return f"{type(error).__name__}: {error}"
