"""`vitctl runs clean`: which checkpoints of runs are needed no more, and their removal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitctl.engine.checkpoint.files import is_set_aside, newest_checkpoint, read_checkpoint, remove_folders
from vitctl.engine.run_files import CHECKPOINTS, RECIPE, step_folder, step_folders, step_of
from vitctl.errors import CheckpointError, LaunchError, explaining
from vitctl.jobs.record.result import read_result
from vitctl.jobs.record.runs import logged_scores
from vitctl.launch.listing import size_on_disk
from vitctl.launch.run_folder import is_running, locked


@dataclass(frozen=True)
class Removal:
    """The checkpoints of a run that may go.

    Args:
        run: its folder.
        folders: of the checkpoints.
        kept: steps that stay, of all trainings in the run.
        num_bytes: of `folders`.
        reason: why nothing of this run may go; "" for none.
    """

    run: Path
    folders: tuple[Path, ...] = ()
    kept: tuple[int, ...] = ()
    num_bytes: int = 0
    reason: str = ""


def plan_removal(run: Path) -> Removal:
    """What may go of a run: all whole checkpoints but the last, the best, and the one that its result
    describes.

    A run whose lock is held is not touched, and neither is one without any whole checkpoint. Checkpoints that
    are newer than the last whole one, and those that a resume set aside, stay too: they may be all that is
    left of some steps.

    Raises:
        CheckpointError: it is no run folder.
    """
    if not (run / RECIPE).is_file():
        raise CheckpointError(f"{run}: not a run folder; give folders as `vitctl runs` lists them")
    if is_running(run):
        return Removal(run, reason=f"{run} is running")
    folders: list[Path] = []
    kept: set[int] = set()
    for root in _roots(run):
        own, stay = _of_training(root)
        folders += own
        kept |= stay
    return Removal(run, tuple(folders), tuple(sorted(kept)), sum(map(size_on_disk, folders)))


def remove(removal: Removal) -> int:
    """Remove what was planned, with the run's lock held, so that no run starts meanwhile; returns the bytes
    that this frees.

    Raises:
        LaunchError: a process holds the lock of the run now.
    """
    with locked(removal.run), explaining(removal.run):
        now = {
            folder for root in _roots(removal.run) for folder in _of_training(root)[0]
        }  # it may have gone on since
        folders = [folder for folder in removal.folders if folder in now]
        freed = sum(map(size_on_disk, folders))
        remove_folders(folders)
    return freed


def _roots(run: Path) -> list[Path]:
    """The folders of checkpoints of all trainings in a run; not of other runs that lie in its folder."""
    found = (
        path for path in sorted(run.glob(f"**/{CHECKPOINTS}")) if path.is_dir() and not path.is_symlink()
    )
    return [path for path in found if not any((one / RECIPE).is_file() for one in _between(path, run))]


def _between(path: Path, run: Path) -> list[Path]:
    """The folders above `path` that lie in `run`."""
    return [one for one in path.parents if one.is_relative_to(run) and one != run]


def _of_training(root: Path) -> tuple[list[Path], set[int]]:
    """Of one training: the checkpoints that may go, and the steps that stay."""
    training = root.parent
    last, _ = newest_checkpoint(root)
    if last is None:
        return [], set()
    steps = {
        step
        for folder in step_folders(root)
        if (step := step_of(folder)) is not None and not is_set_aside(folder)
    }
    stay = {last.step, *(step for step in steps if step > last.step)} | _described(training)
    scores = {step: score.accuracy for step, score in logged_scores(training).items() if step in steps}
    for step in sorted(scores, key=lambda step: (scores[step], step), reverse=True):
        if _is_whole(step_folder(root, step)):
            stay.add(step)
            break
    return [step_folder(root, step) for step in sorted(steps - stay)], stay & steps


def _described(training: Path) -> set[int]:
    """The step of the weights that the result of a training is about."""
    try:
        result = read_result(training)
    except CheckpointError:
        return set()
    step = result.provenance.get("weights_step") if result is not None else None
    return {step} if isinstance(step, int) else set()


def _is_whole(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except (CheckpointError, OSError):
        return False
    return True


def all_removals(runs: Sequence[Path]) -> list[Removal]:
    """The plans of several runs; a run that cannot be read stays as it is, with the reason."""
    plans = []
    for run in runs:
        try:
            plans.append(plan_removal(run))
        except (CheckpointError, LaunchError, OSError) as error:
            plans.append(Removal(run, reason=str(error)))
    return plans
