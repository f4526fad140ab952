"""The runs under a folder: list them, and free their disk space."""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from vitctl.data.datasets.converted import SHARDS, Converted, is_current
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
from vitctl.jobs.record.result import RunResult, check_own, logged_scores, read_result, selects_best
from vitctl.jobs.record.start_folder import at_start
from vitctl.launch.run_folder import LOGS, NOW, is_running, locked
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Finetune, Vtab
from vitctl.recipe.write import written_name
from vitctl.report.result_tables import number_of
from vitctl.report.run_records import run_folders
from vitctl.system.files import open_regular, read_toml
from vitctl.system.text import typed

T = TypeVar("T")
_DAY = 86_400  # seconds
_TAIL_BYTES = 2**16  # read from the end of steps.jsonl for its last line


@dataclass(frozen=True)
class RunLine:
    """A run in a list.

    Args:
        recipe, job: "" if unknown.
        state: running, done, stopped, failed; "interrupted" if its process was killed, "prepared" before the
            first start, "invalid" if its result.json is unusable.
        step, total_steps: of its training; 0 for other jobs.
        number, what: its main accuracy, from 0 to 1, and its name; None if there is none. That of the test
            images, if they were scored once.
        chose: name and text of the accuracy on the images that chose, or were scored beside the test images.
        loss: of its last step; None for other jobs.
        when: last update, in seconds since 1970.
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
    chose: Mapping[str, str]


def list_runs(root: Path) -> list[RunLine]:
    """Return every run in a folder, and in the folders of sweeps there, the newest first."""
    return sorted(
        map(read_line, run_folders(root)), key=lambda line: (line.when, str(line.folder)), reverse=True
    )


def read_line(folder: Path) -> RunLine:
    """Return the line of one run; unreadable parts stay empty."""
    records = _unless_damaged(read_records, folder / LOG) or []
    result = _unless_damaged(read_result, folder)
    recipe = _unless_damaged(_read_recipe, folder) or {}
    step, loss = _last_step(folder, records)
    job = result.job if result else str(recipe.get("job", ""))
    state = _state(folder, result, records)
    metrics = result.metrics if result and result.status == "done" else {}
    (what, number), test = number_of(job, metrics), metrics.get("test")
    chooses = bool(_unless_damaged(selects_best, folder))
    images = f"'{result.provenance.get('split')}'{', which chose the checkpoint' * chooses}" if result else ""
    chose = {what: f"{number:.2%} on {images}"} if number is not None and (chooses or test) else {}
    if isinstance(test, Mapping):
        what, number = f"test {what}", number_of(job, test)[1]
    if number is None and state != "invalid":
        scores = [r["accuracy"] for r in records if r.get("kind") == "evaluate" and "accuracy" in r]
        what, number = ("accuracy so far", scores[-1]) if scores else ("", None)
    return RunLine(
        folder,
        Path(_unless_damaged(written_name, folder / RECIPE) or "").name,
        job,
        state,
        step,
        _total_steps(records, recipe) if step else 0,
        number,
        what,
        loss,
        _when(folder, records, state),
        size_on_disk(folder),
        chose,
    )


def size_on_disk(folder: Path) -> int:
    """Return the bytes of all files in a folder, without following links. Files may vanish meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _state(folder: Path, result: RunResult | None, records: Sequence[Record]) -> str:
    if is_running(folder):
        return "running"
    if result is not None:
        return result.status
    if (folder / RESULT).exists():
        return "invalid"
    return "interrupted" if records else "prepared"


def _unless_damaged(read: Callable[[Path], T], path: Path) -> T | None:
    try:
        return read(path)
    except (VitctlError, OSError, ValueError):
        return None


def _read_recipe(folder: Path) -> dict[str, Any]:
    return dict(read_toml(folder / RECIPE, error=RecipeError)[0])


def _last_step(folder: Path, records: Sequence[Record]) -> tuple[int, float | None]:
    """Return the last finished step and its loss, from log.jsonl (some steps) or steps.jsonl (all)."""
    logged = next((r for r in reversed(records) if r.get("kind") == "train"), {})
    step, loss = int(logged.get("step", 0)), logged.get("loss")
    with suppress(LaunchError, OSError, ValueError, TypeError, KeyError, AttributeError):
        with open_regular(folder / STEP_RECORDS, error=LaunchError) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace")
        newest = next((r for r in reversed(list(parse_records(lines))) if "bits" in r), None)
        if newest and int(newest["step"]) > step:
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
    """The checkpoints of a run that may be deleted.

    Args:
        folders: of these checkpoints.
        kept: steps that stay, in all trainings of the run.
        num_bytes: of `folders`.
        reason: why nothing may be deleted, or "".
    """

    run: Path
    folders: tuple[Path, ...] = ()
    kept: tuple[int, ...] = ()
    num_bytes: int = 0
    reason: str = ""


def plan_removal(run: Path) -> Removal:
    """Return what may be deleted: complete checkpoints but the last, the best, and the result's.

    A run whose lock is held is not touched, nor is a run without a complete checkpoint. Checkpoints that are
    newer than the last complete one, and those that a resume set aside, stay, too: they may be all that is
    left of some steps.

    Raises CheckpointError if the folder is not a run folder.
    """
    if not (run / RECIPE).is_file():
        raise CheckpointError(run, "not a run folder", "give folders as `vitctl runs` lists them")
    if is_running(run):
        return Removal(run, reason=f"{run} is running")
    folders: list[Path] = []
    kept: set[int] = set()
    for root in _roots(run):
        may_go, stay = _of_training(root)
        folders += may_go
        kept |= stay
    return Removal(run, tuple(folders), tuple(sorted(kept)), sum(map(size_on_disk, folders)))


def remove(removal: Removal) -> int:
    """Delete what was planned, under the run's lock; return the freed bytes. Raises LaunchError."""
    from vitctl.engine.checkpoint import remove_folders

    with locked(removal.run), explaining(removal.run):
        now = {
            folder for root in _roots(removal.run) for folder in _of_training(root)[0]
        }  # the run may have resumed since the plan
        folders = [folder for folder in removal.folders if folder in now]
        freed = sum(map(size_on_disk, folders))
        remove_folders(folders)
    return freed


def _roots(run: Path) -> list[Path]:
    """Return the checkpoint folders of all trainings in a run, not of other runs inside it."""
    roots = []
    for path in sorted(run.glob(f"**/{CHECKPOINTS}")):
        above = [folder for folder in path.parents if folder.is_relative_to(run) and folder != run]
        is_of_other_run = any((folder / RECIPE).is_file() for folder in above)
        if path.is_dir() and not path.is_symlink() and not is_of_other_run:
            roots.append(path)
    return roots


def _of_training(root: Path) -> tuple[list[Path], set[int]]:
    """Return the checkpoints of one training that may be deleted, and the steps that stay."""
    from vitctl.engine.checkpoint import has_started_a_run, is_set_aside, newest_checkpoint, read_checkpoint

    training = root.parent
    last, _ = newest_checkpoint(root)
    if last is None:
        return [], set()
    for folder in step_folders(root):
        if (saved := _unless_damaged(partial(read_checkpoint, by_size=True), folder)) is not None:
            # with a foreign one among them, the last and the best are unknown
            check_own(saved, read_result(training, weights=False))
    steps = {
        step
        for folder in step_folders(root)
        if (step := step_of(folder)) is not None and not is_set_aside(folder)
    }
    stay = {last.step, *(step for step in steps if step > last.step)}
    stay |= {step for step in steps if has_started_a_run(step_folder(root, step))}
    result = _unless_damaged(read_result, training)
    weights_step = result.provenance.get("weights_step") if result is not None else None
    if isinstance(weights_step, int):
        stay.add(weights_step)  # the weights that the result is about
    scores = {step: score.deciding for step, score in logged_scores(training).items() if step in steps}
    for step in sorted(scores, key=lambda step: (scores[step], step), reverse=True):
        if _unless_damaged(read_checkpoint, step_folder(root, step)) is not None:
            stay.add(step)
            break
    return [step_folder(root, step) for step in sorted(steps - stay)], stay & steps


def all_removals(runs: Sequence[Path]) -> list[Removal]:
    """Return the plans of several runs. An unreadable run is kept; its plan says why."""
    plans = []
    for run in runs:
        try:
            plans.append(plan_removal(run))
        except (CheckpointError, LaunchError, OSError) as error:
            plans.append(Removal(run, reason=str(error)))
    return plans


def remove_run(run: Path) -> int:
    """Delete a run, and return the bytes that are freed.

    Raises:
        CheckpointError: it is no run, or a training beside it, or under ./runs, started from it.
        LaunchError: it is running.
    """
    if not (run / RECIPE).is_file():
        raise CheckpointError(run, "not a run folder", "`vitctl runs` lists those under ./runs")
    if run.is_symlink():
        fix = f"name its folder: vitctl runs rm {typed(run.resolve())}"
        raise CheckpointError(run, "a link to a run", fix)
    beside = chain.from_iterable(map(run_folders, (run.parent, run.parent / "runs", Path("runs"))))
    others = {other.resolve(): other for other in beside if other.resolve() != run.resolve()}.values()
    if users := [other for other in others if _starts_from(other, run)]:
        fix = f"to remove them first: vitctl runs rm {' '.join(map(typed, users))}"
        what = f"{', '.join(map(str, users))} started from it, and cannot be resumed without it"
        raise CheckpointError(run, what, fix)
    with locked(run), explaining(run):
        freed = size_on_disk(run)
        aside = run.rename(run.with_name(f".{run.name}.removed"))  # half of a run never looks whole
        shutil.rmtree(aside)
    return freed


def _starts_from(other: Path, run: Path) -> bool:
    recipe = _unless_damaged(lambda folder: at_start(load_recipe(str(folder / RECIPE)).recipe, folder), other)
    if not isinstance(recipe, Finetune | Vtab):
        return False
    places = [recipe.weights.source, recipe.distillation.teacher if isinstance(recipe, Finetune) else ""]
    return any(Path(one).resolve().is_relative_to(run.resolve()) for one in places if one)


def unused(converted: Sequence[Converted], runs: Sequence[Path]) -> list[Converted]:
    """Return the shards that no recipe of the runs names and that can be made again, for runs elsewhere that
    name them; and what was in the cache, which other folders share, for a day without use.
    """
    recipes = [_unless_damaged(Path.read_text, run / RECIPE) or "" for run in runs]
    return [
        one
        for one in converted
        if not any(one.folder.name in recipe for recipe in recipes)
        if (is_current(one) if one.folder.parent.name == SHARDS else one.when < time.time() - _DAY)
    ]
