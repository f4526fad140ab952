"""After an error or a lost process: save the state if it is that of a finished step; never half an update.

Only rank 0 saves, and it uses no collective.
"""

import threading
from typing import TYPE_CHECKING

from vitctl.engine.distributed.sharding import is_sharded
from vitctl.errors import CheckpointError, is_lost_peer

if TYPE_CHECKING:
    from vitctl.engine.training import Run


def rescue(run: "Run", step: int, error: Exception) -> None:
    """Save the state of `step` if it is consistent, and log what the run can resume from. It raises nothing.

    It saves only after an error of this process: when another process was lost, it cannot know what that
    process had logged.

    Args:
        run: in the state that the error left.
        step: finished steps.
        error: that ends the run; an error of saving itself is left alone.
    """
    if run.trainer.stop.given_up:
        threading.Event().wait()  # the thread that gave up saves, and ends this process
    if not (step and run.runtime.is_main) or isinstance(error, CheckpointError):
        return
    what = f"ended by an error ({type(error).__name__}) after step {step}"
    newest = "the run can resume from its newest checkpoint"
    lost = run.runtime.num_processes > 1 and is_lost_peer(str(error))
    reason = _why_not(run, step) or ("another process was lost" if lost else "") or _save(run, step)
    if reason:
        run.journal.write("warning", step=step, text=f"{what}, not saved: {reason}; {newest}")
    else:
        run.journal.write("warning", step=step, text=f"{what}, which is saved: {newest}")


def save_alone(run: "Run") -> str:
    """Save the last finished step while the main thread waits for a process that does not answer.

    Called by another thread, which ends the process afterwards: the main thread can change nothing any more.

    Returns:
        why it was not saved; "" when it is complete on disk.
    """
    step = run.trainer.finished_step
    if step < 1:
        return "no step was finished"
    if not run.runtime.is_main:
        return "only process 0 saves"
    if not run.changing.acquire(blocking=False):
        return "it came in the middle of an update, an evaluation of averaged weights, or a save"
    if run.runtime.num_processes > 1 and run.runtime.device.type == "cuda":
        return "the GPU waits for the other process"
    # The others have logged a step before they take part in its record, which a process waits for.
    if run.runtime.num_processes > 1 and run.recorder is None and step != run.saved_step:
        return "what the other processes logged is not known"
    return _why_not(run, step) or _save(run, step)


def _why_not(run: "Run", step: int) -> str:
    """Why the state cannot be saved: inside an update, or spread over other processes; "" where it can."""
    average = run.trainer.average
    if run.trainer.is_updating:
        return "it came in the middle of an update"
    if average is not None and average.is_swapped:
        return "it came while weights and their average were swapped"
    if step not in (run.logged_step, run.saved_step):
        return "the log of this step is not written"
    return "each process holds a part of the weights" if is_sharded(run.trainer.unwrapped) else ""


def _save(run: "Run", step: int) -> str:
    """Why the checkpoint could not be written; "" when it is complete on disk."""
    try:
        if run.saver.finish() or run.saved_step != step:
            run.start_saving(step)
        return run.saver.finish()
    except Exception as error:  # out of memory, a failed device: the first error is the one to report
        return f"{type(error).__name__}: {error}"
