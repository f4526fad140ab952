"""The runs below a folder: list them, and free their disk space."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.engine.checkpoint import is_set_aside, newest_checkpoint, read_checkpoint, remove_folders
from vitctl.engine.journal import (
    CHECKPOINTS,
    LOG,
    RECIPE,
    RESULT,
    STEP_RECORDS,
    Record,
    parse_records,
    read_records,
    step_folder,
    step_folders,
    step_of,
)
from vitctl.errors import CheckpointError, LaunchError, RecipeError, VitctlError, explaining
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.jobs.record.runs import logged_scores
from vitctl.launch.errors import LOGS
from vitctl.launch.run_folder import is_running, locked
from vitctl.launch.worker import NOW
from vitctl.recipe.write import written_name
from vitctl.report.result_tables import number_of
from vitctl.system.files import open_regular, read_toml

_TAIL_BYTES = 2**16  # of steps.jsonl, read for its last line


@dataclass(frozen=True)
class RunLine:
    """A run in a list.

    Args:
        folder: of the run.
        recipe, job: "" where unknown.
        state: running, done, stopped, failed; "interrupted" where a process ended without a word, "prepared"
            before the first.
        step, total_steps: of its training; 0 for other jobs.
        number, what: the accuracy that stands for it, a share; None where there is none.
        loss: of its last step; None for other jobs.
        when: of the last update, in seconds since 1970.
        num_bytes: on disk.
    """

    folder: Path
    recipe: str
    job: str
    state: str
    step: int
    total_steps: int
    number: float | None
    what: str
    loss: float | None
    when: float
    num_bytes: int


def list_runs(root: Path) -> list[RunLine]:
    """Every run in a folder, and in the folders of sweeps there, the newest first."""
    return sorted(
        map(read_line, _folders(root)), key=lambda line: (line.when, str(line.folder)), reverse=True
    )


def read_line(folder: Path) -> RunLine:
    """The line of one run; what cannot be read of it is left empty."""
    records = _records(folder)
    result = _result(folder)
    recipe = _recipe(folder)
    step, loss = _last_step(folder, records)
    job = result.job if result else str(recipe.get("job", ""))
    state = _state(folder, result, records)
    what, number = number_of(job, result.metrics if result and result.status == "done" else {})
    if number is None:
        scores = [r["accuracy"] for r in records if r.get("kind") == "evaluate" and "accuracy" in r]
        what, number = ("accuracy so far", scores[-1]) if scores else ("", None)
    return RunLine(
        folder,
        _name(folder),
        job,
        state,
        step,
        _total_steps(records, recipe) if step else 0,
        number,
        what,
        loss,
        _when(folder, records, state),
        size_on_disk(folder),
    )


def size_on_disk(folder: Path) -> int:
    """Bytes of all files in a folder; links count as themselves, and files that vanish meanwhile as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total


def _folders(root: Path) -> Iterator[Path]:
    for path in root.iterdir() if root.is_dir() else ():
        if (path / RECIPE).is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from (inner.parent for inner in path.glob(f"*/{RECIPE}"))


def _state(folder: Path, result: RunResult | None, records: Sequence[Record]) -> str:
    if is_running(folder):
        return "running"
    if result is not None:
        return result.status
    return "interrupted" if records else "prepared"


def _records(folder: Path) -> list[Record]:
    try:
        return read_records(folder / LOG)
    except VitctlError:
        return []


def _result(folder: Path) -> RunResult | None:
    try:
        return read_result(folder)
    except (VitctlError, OSError):
        return None


def _name(folder: Path) -> str:
    try:
        return Path(written_name(folder / RECIPE)).name
    except (OSError, ValueError):
        return ""


def _recipe(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_toml(folder / RECIPE, error=RecipeError)[0])
    except VitctlError:
        return {}


def _last_step(folder: Path, records: Sequence[Record]) -> tuple[int, float | None]:
    """The last finished step and its loss: of log.jsonl, which has some of the steps, or of steps.jsonl,
    which has all.
    """
    logged = next((r for r in reversed(records) if r.get("kind") == "train"), {})
    step, loss = int(logged.get("step", 0)), logged.get("loss")
    with suppress(LaunchError, OSError, ValueError, TypeError, KeyError, AttributeError):
        with open_regular(folder / STEP_RECORDS, error=LaunchError) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace")
        newest = next(r for r in reversed(list(parse_records(lines))) if "bits" in r)
        if int(newest["step"]) > step:
            return int(newest["step"]), float.fromhex(newest["bits"]["loss"])
    return step, loss


def _total_steps(records: Sequence[Record], recipe: Mapping[str, Any]) -> int:
    schedule = recipe.get("schedule")
    planned = schedule.get("total_steps") if isinstance(schedule, Mapping) else 0
    logged = next((r["total_steps"] for r in reversed(records) if "total_steps" in r), planned)
    return int(logged) if isinstance(logged, int | float) else 0


def _when(folder: Path, records: Sequence[Record], state: str) -> float:
    times = [record["time"] for record in records[-1:] if "time" in record]
    fresh = (LOG, STEP_RECORDS, f"{LOGS}/{NOW}") if state == "running" else ()
    for name in (RESULT, RECIPE, *fresh):
        path = folder / name
        times += [path.stat().st_mtime] if path.exists() else []
    return max(times, default=0.0)


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
