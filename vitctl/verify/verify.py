"""`vitctl verify`: whether a run is what its records say, and whether its steps and its score come out the
same again.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitctl.engine.identity import run_of
from vitctl.engine.run_files import CHECKPOINTS, RECIPE, RESULT, STEP_RECORDS, step_folders, step_of
from vitctl.engine.trace.steps import StartLine, Steps, read_steps
from vitctl.errors import CheckpointError, RecipeError, VitctlError
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.recipe.load import Loaded, Override, load_recipe
from vitctl.recipe.schema import Finetune, Pretrain, Recipe, Vtab
from vitctl.system.text import typed
from vitctl.verify.finding import (
    FAILS,
    REST,
    Finding,
    Progress,
    differs,
    no_progress,
    ok,
    unchecked,
    unproven,
)
from vitctl.verify.inputs import check_data, check_recipe_file, tells_of_a_change
from vitctl.verify.marks import check_marks
from vitctl.verify.provenance import check_provenance, missing_weights, unused_files
from vitctl.verify.ranges import check_steps_text, chosen_ranges
from vitctl.verify.records import check_parts, check_records, odd_field, published_digest

Found = tuple[Path, Finding]  # folder of a training, and what was found of it


def verify(
    folder: Path,
    *,
    steps: str = "",
    scores: bool = False,
    reads_bytes: bool = False,
    data: str = "",
    weights: str = "",
    progress: Progress = no_progress,
) -> Iterator[Found]:
    """Check a run, or one training inside it, against its records; the run is only read.

    Args:
        folder: a run, or the folder of one of its trainings.
        steps: to replay, see `chosen_ranges`; "" for none.
        scores: score the weights that represent a training again.
        reads_bytes: read every shard.
        data: where the shards lie on this machine; "" for where recipe.toml says.
        weights: the start weights, likewise.
        progress: called while steps are replayed.

    Returns:
        one after the other, the folder of a training and what was found of it.

    Raises:
        CheckpointError: the folder is no run and no training inside one.
        RecipeError: there are no such steps.
    """
    check_steps_text(steps)
    run_dir = run_of(folder)
    _check_inside(folder, run_dir)
    if not (run_dir / RECIPE).is_file():
        raise CheckpointError(
            f"{folder}: not a run, it has no {RECIPE}; give a run folder, such as runs/NAME"
        )
    loaded = _loaded(run_dir, data, weights)
    trainings = _trainings(folder)
    early = bool(getattr(getattr(loaded.recipe, "evaluation", None), "select_best", False))
    is_traced = isinstance(loaded.recipe, Pretrain | Finetune | Vtab) and loaded.recipe.log.trace
    failed = False
    planned = _planned(folder, trainings, steps)
    with tempfile.TemporaryDirectory(prefix="vitctl-verify-") as scratch:
        for training in trainings:
            recipe = loaded.recipe if training == run_dir else None
            for finding in check_records(training, recipe, select_best=early, is_traced=is_traced):
                failed |= finding.state in FAILS
                yield training, finding
            for finding in _check_rest(training, loaded.recipe, is_asked=training == folder):
                yield training, finding
        if folder == run_dir:
            for finding in _check_inputs(run_dir, loaded, Path(scratch), reads_bytes):
                failed |= finding.state in FAILS
                yield folder, finding
        if (result := _result(folder)) is not None and result.status == "done" and not failed:
            yield (
                folder,
                ok("digest", f"{published_digest(result)} of the result and all records; publish this one"),
            )
        yield from _replays(folder, loaded, planned, Path(scratch) / "steps", progress)
        yield from _scores(folder, loaded, trainings, scores, Path(scratch) / "scores")


def _check_inside(folder: Path, run_dir: Path) -> None:
    """Refuse a path inside a run that is no training. Raises CheckpointError."""
    if folder != run_dir and (run_dir / RECIPE).is_file() and not _has_training(folder):
        training = next(path for path in folder.parents if path == run_dir or _has_own_records(path))
        what = "a part of a run" if folder.exists() else "there is none"
        raise CheckpointError(f"{folder}: {what}; give the run: vitctl verify {typed(training)}")


def _has_own_records(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RESULT, STEP_RECORDS))


def _has_training(folder: Path) -> bool:
    return any(True for name in (RESULT, STEP_RECORDS) for _ in folder.rglob(name))


def _loaded(run_dir: Path, data: str, weights: str) -> Loaded:
    """RUN/recipe.toml, with other places of the data and the start weights."""
    places = {"data.path": data, "weights.source": weights}
    if weights and not hasattr(load_recipe(str(run_dir / RECIPE)).recipe, "weights"):
        raise RecipeError(f"{run_dir}: a pre-training starts from no weights; leave out --from")
    return load_recipe(
        str(run_dir / RECIPE), [Override(key, value) for key, value in places.items() if value]
    )


def _trainings(folder: Path) -> list[Path]:
    """The folder, and those of the trainings in it: of each learning rate, seed or task."""
    found = {path.parent for name in (RESULT, STEP_RECORDS) for path in folder.rglob(name)}
    return sorted({folder, *found})


def _result(folder: Path) -> RunResult | None:
    """The result of a folder; None also where it is not valid, which is found before."""
    try:
        result = read_result(folder)
    except CheckpointError:
        return None
    return None if result is not None and odd_field(result) else result


def _check_rest(training: Path, recipe: Recipe, *, is_asked: bool) -> Iterator[Finding]:
    """The marks, and the provenance of the result, of one training."""
    record, result = _record(training), _result(training)
    if record is not None and record.by_step:
        yield check_marks(training, record)
    if result is None or result.status != "done" or odd_field(result):
        return
    if (
        is_asked and (gone := missing_weights(training, result)) is not None
    ):  # those of other seeds are not kept
        yield gone
    start = record.starts[-1] if record is not None and record.starts else None
    for finding in check_provenance(training, result, start, recipe, unused_files(training)):
        if is_asked or finding.what != REST:
            yield finding


def _check_inputs(run_dir: Path, loaded: Loaded, scratch: Path, reads_bytes: bool) -> Iterator[Finding]:
    result, start = _result(run_dir), _last_start(run_dir)
    if result is not None:
        try:
            yield from check_parts(run_dir, result)
        except VitctlError as error:
            yield differs("parts", str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield differs("parts", f"{run_dir / RESULT}: numbers are missing in it, or are none ({error!r})")
    records = [record for training in _trainings(run_dir) if (record := _record(training)) is not None]
    yield check_recipe_file(loaded, result, records, tells_of_a_change(run_dir))
    yield from check_data(loaded.recipe, run_dir, scratch / "inputs", result, start, reads_bytes=reads_bytes)


def _last_start(folder: Path) -> StartLine | None:
    record = _record(folder)
    return record.starts[-1] if record is not None and record.starts else None


def _record(folder: Path) -> Steps | None:
    """The record of steps; None also where it cannot be read, which is found before."""
    try:
        return read_steps(folder)
    except VitctlError:
        return None


def _chosen(folder: Path, trainings: Sequence[Path], steps: str) -> list[Path]:
    """The trainings that --replay is about."""
    recorded = [path for path in trainings if (path / STEP_RECORDS).is_file()]
    if steps and not recorded:
        raise RecipeError(f"{folder}: has no record of its steps, so that none can be replayed")
    if not steps or steps == "all":
        return recorded
    if steps == "any":
        return [random.SystemRandom().choice(recorded)]
    if folder not in recorded and len(recorded) > 1:
        raise RecipeError(
            f"{folder}: holds {len(recorded)} trainings; name one: vitctl verify {recorded[0]} "
            f"--replay {steps}"
        )
    return [folder if folder in recorded else recorded[0]]


def _planned(folder: Path, trainings: Sequence[Path], text: str) -> list[tuple[Path, list[tuple[int, int]]]]:
    """The trainings that --replay is about, with (first, last) of their steps; none for one whose record
    cannot be read.
    """
    planned = []
    for training in _chosen(folder, trainings, text) if text else ():
        record = _record(training)
        planned.append((training, chosen_ranges(text, record, training) if record is not None else []))
    return planned


def _replays(
    folder: Path,
    loaded: Loaded,
    planned: Sequence[tuple[Path, list[tuple[int, int]]]],
    scratch: Path,
    progress: Progress,
) -> Iterator[Found]:
    run_dir = run_of(folder)
    if not planned:
        yield folder, unchecked("replay", "no step was computed again: --replay any, A, A:B or all")
        return
    from vitctl.verify.again import Again, by_start
    from vitctl.verify.elsewhere import replay_here

    for number, (training, ranges) in enumerate(planned):
        record = _record(training)
        if record is not None and (text := _beyond(training, record, ranges)):
            yield training, unproven("replay", text)
        if record is None:
            yield training, unproven("replay", f"{training / STEP_RECORDS} cannot be read")
            continue
        for part, (start, pieces, problem) in enumerate(by_start(record, ranges, training)):
            if problem:
                yield training, unproven("replay", problem)
                continue
            again = Again(run_dir, training, loaded, start, scratch / f"{number}_{part}")
            for finding in replay_here(again, record, pieces, progress):
                yield training, finding


def _beyond(training: Path, record: Steps, ranges: Sequence[tuple[int, int]]) -> str:
    """The checkpoints and the result behind the last step that has a record, where that step is replayed; ""
    where there are none.
    """
    result, last = _result(training), record.last
    named = {step_of(path) or 0 for path in step_folders(training / CHECKPOINTS)}
    named |= (
        {result.provenance.get("weights_step") or 0}
        if result is not None and result.status == "done"
        else set()
    )
    later = sorted(step for step in named if step > last)
    if not later or ranges[-1][1] < last:
        return ""
    return f"step {later[-1]} has a checkpoint or a result, and no record behind step {last}; its weights were not compared"


def _scores(
    folder: Path, loaded: Loaded, trainings: Sequence[Path], wanted: bool, scratch: Path
) -> Iterator[Found]:
    run_dir = run_of(folder)
    if not wanted:
        yield folder, unchecked("score", "no image was scored again: --result")
        return
    from vitctl.verify.again import Again
    from vitctl.verify.elsewhere import rescore_here

    inside = [path for path in trainings if path != run_dir and (path / CHECKPOINTS).is_dir()]
    for number, training in enumerate(trainings):
        # The weights of a sweep and of other seeds are not kept; a table of VTAB has none of its own.
        if training in inside or (training == folder and ((training / CHECKPOINTS).is_dir() or not inside)):
            again = Again(run_dir, training, loaded, _last_start(training), scratch / f"{number}")
            yield training, rescore_here(again, _result(training))
