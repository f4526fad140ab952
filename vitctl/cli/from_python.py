"""`vitctl.finetune` and `vitctl.predict`: the commands, called from Python."""

import io
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from vitctl.cli.flags import flags_of, image_recipe, overrides_of
from vitctl.cli.run_job import (
    beside_given,
    fetch_weights_of,
    finetune_recipe,
    fitted,
    with_shards,
)
from vitctl.engine.journal import Report
from vitctl.errors import LaunchError, RecipeError, explaining
from vitctl.jobs.inputs.given_images import find_images, place_of
from vitctl.jobs.predict import Prediction, check_counts
from vitctl.jobs.predict import predict as predictions
from vitctl.jobs.record.result import read_result
from vitctl.launch.prepare_run import check_machine, prepare_run
from vitctl.launch.run_folder import new_run_dir
from vitctl.launch.worker import launch
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Evaluate
from vitctl.system.address import check_local


@dataclass(frozen=True)
class Run:
    """The outcome of a run, as in its result.json.

    Args:
        folder: for `vitctl resume`, `report` and `load_classifier`.
        status: "done", or "stopped" by a signal: saved; the same call with this folder resumes it.
        metrics: its numbers, such as `accuracy`, 0 to 1; empty if it was stopped.
        provenance: what they depend on.
        files: of its weights.
    """

    folder: Path
    status: Literal["done", "stopped", "failed"]
    metrics: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        accuracy = self.metrics.get("accuracy")
        scored = f", accuracy {accuracy:.2%}" if isinstance(accuracy, float) else ""
        return f"<Run {self.folder}: {self.status}{scored}>"


class _Flags(TypedDict, total=False):
    from_: str | Path
    weights: str | int
    preprocess: str
    model: str
    res: int
    precision: str


class FinetuneFlags(_Flags, total=False):
    """The flags of `vitctl finetune`."""

    data: str | Path
    columns: str
    group_by: str
    dataset: str
    freeze: str
    teacher: str | Path
    lr: float | Sequence[float]
    steps: int
    epochs: float
    batch_size: int
    seed: int
    processes: int
    profile: str


class PredictFlags(_Flags, total=False):
    """The flags of `vitctl predict`."""

    columns: str
    flip_average: bool
    batch: int
    device: str


@explaining()
def finetune(
    recipe: str | Path = "",
    *,
    out: str | Path = "",
    overrides: Mapping[str, Any] | None = None,
    report: Report = lambda _: None,
    progress: bool = False,
    **flags: Unpack[FinetuneFlags],
) -> Run:
    """Fine-tune a model on a data set, as `vitctl finetune` does.

    It runs in this process, or in new ones if there are several.

    Example:
        from vitctl import finetune

        run = finetune(
            data="data/mine", from_="runs/mine", steps=4, overrides={"finetune.head": "fewshot"}
        )
        print(run.folder, run.metrics["accuracy"])

    Args:
        recipe: a shipped recipe's name or the path of a .toml file; "" is the command's default.
        out: run folder; resumes an existing run; "" makes a new one under runs/.
        overrides: values of recipe keys, by the dotted names that --set takes.
        report: called with each log record, a dictionary; no longer called once it raises.
        progress: show one bar of the steps, in a notebook or a terminal.
        flags: of the command, without the dashes: data, dataset, from_, weights, model, res, lr, steps,
            epochs, batch_size, seed, processes, precision. `overrides` may not contradict them.

    Returns:
        `folder`, `status`, `metrics`, `provenance` and `files`. A signal such as Ctrl-C saves and stops the
        run: `status` is then "stopped".

    Raises:
        VitctlError: for the same reasons as the command.

    Paper: Section 3.2, Appendix B.1.1
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("finetune", "handles signals, so it runs in the main thread only", "call it there")
    given = flags_of("finetune", flags)
    _check_paths("out", out or "")
    check_local("out", out)
    place = Path(out) if out else None
    runs = place.parent if place else Path("runs")
    values = overrides_of(given, _parsed(overrides))
    name = str(recipe) or finetune_recipe(values, downloads=True)[0]
    loaded = load_recipe(name, [*values, *beside_given(name, values)], job="finetune")
    begin = partial(check_machine, loaded.recipe)
    loaded = fitted(with_shards(loaded, runs, begin, is_alone=True, out=place), with_timeout=False)
    folder = place or new_run_dir(loaded.name)
    fetch_weights_of(loaded)
    with _bar(report) if progress else nullcontext(report) as told:
        launch(folder, told, prepared=prepare_run(loaded, folder))
    result = read_result(folder)
    assert result is not None
    return Run(folder, result.status, result.metrics, result.provenance, result.files)


@contextmanager
def _bar(report: Report) -> Iterator[Report]:
    """Show a bar that follows the records of a run, each of which goes on to `report`."""
    from tqdm.auto import tqdm

    with tqdm(unit="step") as bar:

        def told(record: dict[str, Any]) -> None:
            if "total_steps" in record and "loss" in record:
                bar.total, bar.n = record["total_steps"], record["step"]
                bar.set_postfix(loss=f"{record['loss']:.4f}")
            elif "accuracy" in record:
                bar.set_description(f"accuracy {record['accuracy']:.2%}")
            report(record)

        yield told


@explaining()
def predict(
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    threshold: float = 0.0,
    split: str = "",
    overrides: Mapping[str, Any] | None = None,
    **flags: Unpack[PredictFlags],
) -> list[Prediction]:
    """Predict the classes of images, as `vitctl predict`. `load_classifier` keeps the model for many calls.

    Example:
        from vitctl import predict

        for image in predict(["photo.jpg", "data/mine:test"], from_="runs/mine", top=3):
            print(image.name, image.error or image.classes)

    Args:
        images: files, folders, patterns, addresses or shards (FOLDER:SPLIT), one or several.
        top: maximum number of classes per image.
        threshold: lowest probability to include, 0 to 1.
        split: for shards given without one.
        overrides: values of recipe keys, by the dotted names that --set takes.
        flags: of the command, without the dashes: from_, weights, model, res, batch, device, precision.

    Returns:
        for each image `name`; `classes`, a list of (class name, probability), the most likely first; and
        `error`, why it cannot be used, "" if it can.

    Raises:
        VitctlError: for the same reasons as the command.

    Paper: Section 3.1
    """
    given = list(images) if isinstance(images, Iterable) and not isinstance(images, str | bytes) else [images]
    _check_paths("images", *given)
    check_counts(top=top)
    if not (isinstance(threshold, Real) and 0 <= threshold <= 1):
        raise RecipeError(f"threshold = {threshold!r}", "should be a probability, 0 to 1")
    loaded = image_recipe("predict", flags_of("predict", flags), _parsed(overrides))
    assert isinstance(loaded.recipe, Evaluate)
    names = [str(each) for each in given]
    sources = find_images(
        names,
        place_of(loaded.recipe, names),
        split=split,
        stdin=io.BytesIO(),
        note=lambda _: None,
    )
    fetch_weights_of(loaded)
    batches = predictions(loaded.recipe, sources, top=top, threshold=threshold)
    return [prediction for batch in batches for prediction in batch]


def _parsed(overrides: Mapping[str, Any] | None) -> list[Override]:
    if not isinstance(overrides or {}, Mapping):
        raise RecipeError("overrides", "should be a dictionary, from the dotted names of keys to values")
    return [Override(key, value, "overrides") for key, value in (overrides or {}).items()]


def _check_paths(name: str, *values: Any) -> None:
    """Raise RecipeError for the first value that is not a path or an address."""
    for value in values:
        if not isinstance(value, str | Path):
            hint = "; load_classifier takes images and arrays" if name == "images" else ""
            raise RecipeError(name, f"should be a path, not {type(value).__name__}{hint}")
