"""`vitctl verify`: check a run against its records, and recompute steps and its score."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

from vitctl.data.datasets.catalog import is_photographs
from vitctl.data.datasets.converted import find_shards, fingerprint
from vitctl.engine.journal import CHECKPOINTS, RECIPE, RESULT, STEP_RECORDS, run_of, step_folders, step_of
from vitctl.errors import CheckpointError, DataError, RecipeError, refuse
from vitctl.jobs.record.result import published_digest
from vitctl.recipe.load import Loaded, Override, load_recipe
from vitctl.recipe.schema import Finetune, Pretrain, Vtab
from vitctl.system.text import typed
from vitctl.verify.finding import FAILS, Finding, Progress, ok, unchecked, unproven
from vitctl.verify.record_checks import Training, check_data, check_recipe, check_records, read_training

FolderFinding = tuple[Path, Finding]  # folder of a training, and a finding about it
Range = tuple[int, int]  # first and last step

_IN_DIGEST = ("log", "weights")
_PLACES = 3  # places that `--replay any` replays
_STEPS = 5  # steps at each of them


def verify(
    folder: Path,
    *,
    steps: str = "",
    scores: bool = False,
    reads_bytes: bool = False,
    data: str = "",
    weights: str = "",
    progress: Progress = lambda _first, _last, _step: None,
) -> Iterator[FolderFinding]:
    """Check a run, or one training inside it, against its records; the run is only read.

    Args:
        steps: to replay: "A:B", both included; "A"; "all"; "any", a few after random checkpoints; "" for
            none.
        scores: score the weights that represent each training again.
        reads_bytes: read every shard.
        data: path to the shards on this machine; "": the path in recipe.toml.
        weights: path to the start weights, likewise.

    Returns:
        pairs of the folder of a training and a finding about it.

    Raises:
        CheckpointError: the folder is neither a run nor a training inside one.
        RecipeError: there are no such steps.
    """
    if steps not in ("", "any", "all"):
        _first_and_last(steps)
    run_dir = run_of(folder)
    if not (run_dir / RECIPE).is_file():
        raise CheckpointError(
            folder, f"not a run, it has no {RECIPE}", "give a run folder, such as runs/NAME"
        )
    loaded = _loaded(run_dir, data, weights)
    trainings = [read_training(path) for path in _training_folders(folder, run_dir)]
    chosen = _chosen_trainings(trainings, steps) if steps else []
    planned = [(training, _chosen_steps(training, steps)) for training in chosen]
    is_traced = isinstance(loaded.recipe, Pretrain | Finetune | Vtab) and loaded.recipe.log.trace
    failed, is_whole = False, True
    with tempfile.TemporaryDirectory(prefix="vitctl-verify-") as name:
        scratch = Path(name)
        for training in trainings:
            for finding in check_records(training, is_traced=is_traced):
                failed |= finding.state in FAILS
                if training is trainings[0] and finding.what in _IN_DIGEST:
                    is_whole &= finding.state == "ok"
                yield training.folder, finding
        run = trainings[0]
        if folder == run_dir:
            data_findings = check_data(loaded.recipe, run, scratch / "inputs", reads_bytes=reads_bytes)
            for finding in chain([check_recipe(loaded, trainings)], data_findings):
                failed |= finding.state in FAILS
                yield folder, finding
        if run.finished is not None and not failed:
            text = f"{published_digest(run.finished)} of the result and all records"
            yield folder, ok("digest", f"{text}; publish this one" if is_whole else text)
        if not planned:
            yield folder, unchecked("replay", "no step was computed again: --replay any, A, A:B or all")
        for number, (training, ranges) in enumerate(planned):
            for finding in _replayed(training, loaded, ranges, scratch / f"steps_{number}", progress):
                yield training.folder, finding
        if not scores:
            yield folder, unchecked("score", "no image was scored again: --result")
        else:
            yield from _rescored(folder, loaded, trainings, scratch)


def _loaded(run_dir: Path, data: str, weights: str) -> Loaded:
    """Load RUN/recipe.toml with the paths of data and start weights on this machine."""
    name = str(run_dir / RECIPE)
    if is_photographs(data):
        trained_on = str(getattr(getattr(load_recipe(name).recipe, "data", None), "path", ""))
        made = find_shards(fingerprint(data, ""), Path(trained_on).parent.parent)
        if made is None:
            raise DataError(
                data, "not what the run read", f"it read shards made of photographs: {trained_on}"
            )
        data = str(made)
    places = {"data.path": data, "weights.source": weights}
    if weights and not hasattr(load_recipe(name).recipe, "weights"):
        raise RecipeError(run_dir, "pre-training does not start from weights", "leave out --from")
    return load_recipe(name, [Override(key, value) for key, value in places.items() if value])


def _training_folders(folder: Path, run_dir: Path) -> list[Path]:
    """Return the folder and those of the trainings inside it. Raises CheckpointError if there are none."""
    inside = {path.parent for name in (RESULT, STEP_RECORDS) for path in folder.rglob(name)} - {folder}
    has_records = any((folder / name).is_file() for name in (RESULT, STEP_RECORDS))
    if folder != run_dir and not has_records and not inside:
        training = next(
            path
            for path in folder.parents
            if path == run_dir or any((path / name).is_file() for name in (RESULT, STEP_RECORDS))
        )
        what = "a part of a run" if folder.exists() else "does not exist"
        raise CheckpointError(folder, what, f"give the run: vitctl verify {typed(training)}")
    return [folder, *sorted(inside)]


def _chosen_trainings(trainings: Sequence[Training], steps: str) -> list[Training]:
    folder = trainings[0].folder
    recorded = [training for training in trainings if (training.folder / STEP_RECORDS).is_file()]
    if not recorded:
        raise RecipeError(folder, "has no record of its steps, so none can be replayed")
    if steps == "all":
        return recorded
    if steps == "any":
        return [random.SystemRandom().choice(recorded)]
    if folder != recorded[0].folder and len(recorded) > 1:
        raise RecipeError(
            folder,
            f"holds {len(recorded)} trainings",
            f"name one: vitctl verify {recorded[0].folder} --replay {steps}",
        )
    return [recorded[0]]


def _chosen_steps(training: Training, text: str) -> list[Range]:
    """Return the steps that --replay names, in ascending order and without overlap. Raises RecipeError."""
    if training.steps is None:
        return []
    folder, last = training.folder, training.steps.last
    if not last:
        raise RecipeError(folder, "no step is recorded, so none can be replayed")
    if text == "all":
        return [(1, last)]
    if text == "any":
        kept = [step_of(path) or 0 for path in step_folders(folder / CHECKPOINTS)]
        places = [step for step in {0, *kept} if step < last]
        drawn = sorted(random.SystemRandom().sample(places, min(_PLACES, len(places))))
        return [(step + 1, min(step + _STEPS, following)) for step, following in pairwise([*drawn, last])]
    first, final = _first_and_last(text)
    if final > last:
        raise RecipeError(f"--replay {text}", f"{folder} has records of steps 1 to {last}")
    return [(first, final)]


def _first_and_last(text: str) -> Range:
    begin, colon, end = text.partition(":")
    try:
        first, final = int(begin), int(end if colon else begin)
    except ValueError:
        raise RecipeError(
            f"--replay {text}", "should be a step such as 30, a range such as 1200:1210, any or all"
        ) from None
    refuse(
        RecipeError,
        (first < 1, f"--replay {text}", "steps count from 1"),
        (
            final < first,
            f"--replay {text}",
            "the first step comes after the last",
            f"did you mean {final}:{first}?",
        ),
    )
    return first, final


def _replayed(
    training: Training, loaded: Loaded, ranges: Sequence[Range], scratch: Path, progress: Progress
) -> Iterator[Finding]:
    from vitctl.verify.replay import eras, replay
    from vitctl.verify.rerun import Rerun

    steps, folder = training.steps, training.folder
    if steps is None:
        yield unproven("replay", f"{folder / STEP_RECORDS} cannot be read")
        return
    remaining = sum(last - first + 1 for first, last in ranges)
    for number, era in enumerate(eras(steps)):
        pieces = [(max(first, era.first), min(last, era.last)) for first, last in ranges]
        pieces = [(first, last) for first, last in pieces if first <= last]
        remaining -= sum(last - first + 1 for first, last in pieces)
        if pieces:
            rerun = Rerun(run_of(folder), folder, loaded, era.start, scratch / str(number))
            yield from replay(rerun, steps, era, pieces, progress)
    if remaining:
        yield unproven("replay", f"{remaining:,} of the steps have no recorded start before them")


def _rescored(
    folder: Path, loaded: Loaded, trainings: Sequence[Training], scratch: Path
) -> Iterator[FolderFinding]:
    from vitctl.verify.rerun import Rerun, rescore

    run_dir = run_of(folder)
    inside = [one for one in trainings if one.folder != run_dir and (one.folder / CHECKPOINTS).is_dir()]
    for number, training in enumerate(trainings):
        # Weights of a sweep and of further seeds are not kept; a VTAB table has no weights.
        is_whole = training.folder == folder and ((folder / CHECKPOINTS).is_dir() or not inside)
        if is_whole or training in inside:
            rerun = Rerun(run_dir, training.folder, loaded, training.last_start, scratch / f"score_{number}")
            yield training.folder, rescore(rerun, training.result)
