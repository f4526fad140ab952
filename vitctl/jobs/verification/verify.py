"""`vitctl verify`: whether a run is what its records say, and whether its steps and its score come out the same again."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitctl.engine.run_files import RECIPE, RESULT, STEP_RECORDS
from vitctl.engine.trace.steps import StartLine, Steps, read_steps
from vitctl.errors import CheckpointError, RecipeError, VitctlError
from vitctl.jobs.record.identity import run_of
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.jobs.verification.finding import Finding, differs, ok, unchecked
from vitctl.jobs.verification.inputs import check_data, check_recipe_file
from vitctl.jobs.verification.records import check_parts, check_records, odd_field, published_digest
from vitctl.recipe.load import Loaded, Override, load_recipe

Found = tuple[Path, Finding]  # folder of a training, and what was found of it


def verify(
    folder: Path, *, steps: str = "", scores: bool = False, reads_bytes: bool = False, data: str = "", weights: str = ""
) -> Iterator[Found]:
    """Hold a run, or one training inside it, against its records; the run is only read.

    Args:
        folder: a run, or the folder of one of its trainings.
        steps: to replay, see `chosen_ranges`; "" for none.
        scores: score the weights that represent a training again.
        reads_bytes: read every shard.
        data: where the shards lie on this machine; "" for where recipe.toml says.
        weights: the start weights, likewise.

    Returns:
        one after the other, the folder of a training and what was found of it.

    Raises:
        CheckpointError: the folder is no run.
        RecipeError: there are no such steps.
    """
    run_dir = run_of(folder)
    if not (run_dir / RECIPE).is_file():
        raise CheckpointError(f"{folder}: not a run, it has no {RECIPE}; give a run folder, such as runs/NAME")
    loaded = _loaded(run_dir, data, weights)
    trainings = _trainings(folder)
    early = bool(getattr(getattr(loaded.recipe, "evaluation", None), "early_stopping", False))
    failed = False
    with tempfile.TemporaryDirectory(prefix="vitctl-verify-") as scratch:
        for training in trainings:
            recipe = loaded.recipe if training == run_dir else None
            for finding in check_records(training, recipe, early_stopping=early):
                failed |= finding.state == "differs"
                yield training, finding
        if folder == run_dir:
            for finding in _check_inputs(run_dir, loaded, Path(scratch), reads_bytes):
                failed |= finding.state == "differs"
                yield folder, finding
        if (result := _result(folder)) is not None and result.status == "done" and not failed:
            yield folder, ok("digest", f"{published_digest(result)} of the result and all records; publish this one")
        yield from _replays(folder, loaded, _chosen(folder, trainings, steps), steps, Path(scratch) / "steps")
        yield from _scores(folder, loaded, trainings, scores, Path(scratch) / "scores")


def _loaded(run_dir: Path, data: str, weights: str) -> Loaded:
    """RUN/recipe.toml, with other places of the data and the start weights."""
    places = {"data.path": data, "weights.source": weights}
    if weights and not hasattr(load_recipe(str(run_dir / RECIPE)).recipe, "weights"):
        raise RecipeError(f"{run_dir}: a pre-training starts from no weights; leave out --from")
    return load_recipe(str(run_dir / RECIPE), [Override(key, value) for key, value in places.items() if value])


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


def _check_inputs(run_dir: Path, loaded: Loaded, scratch: Path, reads_bytes: bool) -> Iterator[Finding]:
    result, start = _result(run_dir), _last_start(run_dir)
    if result is not None:
        try:
            yield from check_parts(run_dir, result)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield differs("parts", f"{run_dir / RESULT}: numbers are missing in it, or are none ({error!r})")
    yield check_recipe_file(loaded, result, start)
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
            f"{folder}: holds {len(recorded)} trainings; name one: vitctl verify {recorded[0]} --replay {steps}"
        )
    return [folder if folder in recorded else recorded[0]]


def _replays(folder: Path, loaded: Loaded, chosen: Sequence[Path], text: str, scratch: Path) -> Iterator[Found]:
    run_dir = run_of(folder)
    if not text:
        yield folder, unchecked("replay", "no step was computed again: --replay any, A:B or all")
        return
    from vitctl.jobs.verification.again import Again, by_start, chosen_ranges, replay

    for number, training in enumerate(chosen):
        record = _record(training)
        if record is None:
            continue
        ranges = chosen_ranges(text, record, training)
        for part, (start, pieces, problem) in enumerate(by_start(record, ranges, training)):
            if problem:
                yield training, unchecked("replay", problem)
                continue
            again = Again(run_dir, training, loaded, start, scratch / f"{number}_{part}")
            for finding in replay(again, record, pieces):
                yield training, finding


def _scores(folder: Path, loaded: Loaded, trainings: Sequence[Path], wanted: bool, scratch: Path) -> Iterator[Found]:
    run_dir = run_of(folder)
    if not wanted:
        yield folder, unchecked("score", "no image was scored again: --result")
        return
    from vitctl.jobs.verification.again import Again, rescore

    for number, training in enumerate(trainings):
        if (training / STEP_RECORDS).is_file() or training == run_dir:
            again = Again(run_dir, training, loaded, _last_start(training), scratch / f"{number}")
            yield training, rescore(again, _result(training))
