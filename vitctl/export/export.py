"""Files for other programs, verified against the model before they are kept."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from vitctl.engine.computation import versions
from vitctl.engine.journal import LOG, Journal, Report, silent
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.errors import CheckpointError, RecipeError, refuse
from vitctl.export.graph import Raw
from vitctl.export.preprocess import IN_GRAPHS
from vitctl.export.proof import (
    TOLERANCE,
    GivenImages,
    Opened,
    Score,
    agree,
    answering,
    check_answers,
    compare,
    run_model,
    score,
)
from vitctl.export.push import push
from vitctl.export.resizing import Resizing, ResizingCheck, stored_transform
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model, weights_of
from vitctl.jobs.record.result import RunResult, data_used
from vitctl.jobs.training import weights_scored
from vitctl.models.kernels import attention_of
from vitctl.models.weights.meta import distinct
from vitctl.recipe.export_formats import FORMATS, ExportFormat
from vitctl.recipe.schema import ExportRecipe
from vitctl.recipe.sections import Export
from vitctl.system.files import atomic_write, flush
from vitctl.system.text import one_line

_RESIZING = {"image_size", "eval_method", "eval_resize", "resample"}


@dataclass(frozen=True)
class ExportRequest:
    """Everything that a writer of a format needs: `row` is the format, `found` the weights.

    `resizing` is the reader's pre-processing, if it differs; `images` are the user's, and `model_score`
    scores the float32 model on them, once. `name` is that of single files, without suffix.
    """

    row: ExportFormat
    found: FoundWeights
    model: Raw
    run_dir: Path
    name: str
    options: Export
    resizing: Resizing | None
    images: GivenImages | None
    model_score: Callable[[], Score]

    @property
    def precision(self) -> str:
        return self.options.precision if self.options.precision in self.row.precisions else "float32"

    @property
    def resizing_note(self) -> tuple[str, ...]:
        return (self.resizing.note,) if self.resizing else ()


class Written(NamedTuple):
    """A file that is not verified yet, with notes for its users."""

    path: Path
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """A verified file, with the files that belong to it and notes for its users.

    `difference` is the largest to the model, in standard deviations of the logits; `scores` are accuracies
    on the user's images.
    """

    path: Path
    beside: list[Path]
    difference: float
    notes: list[str]
    scores: dict[str, Any]


def export(
    recipe: ExportRecipe, run_dir: Path, report: Report = silent, stop: StopFlag | None = None
) -> RunResult:
    """Write weights.source as export.to and verify each file by reading it back; keep all files or none.

    An ONNX file or a `torch.export` program takes uint8 images [B, 3, S, S] (RGB, 0..255), already resized,
    or with export.include_preprocess photographs [B, H, W, 3]; the value range is inside the graph, and class
    names and pre-processing are in its metadata.

    Args:
        run_dir: gets single files such as model.onnx, and a folder for each format of another program.
        stop: checked before each file and while images are scored.

    Returns:
        the files and, for each, the largest difference to the model's logits in units of their standard
        deviation, and with images its accuracy next to the model's.

    Raises:
        CheckpointError: a written file disagrees with the model, or loses accuracy; it is not kept.
        Stopped: a signal came; the files of earlier formats are complete and verified.
    """
    stop = StopFlag() if stop is None else stop
    options = recipe.export
    found = weights_of(recipe)
    if names := distinct(found.weights.meta.get("class_names") or ()):
        found.weights.meta["class_names"] = list(names)  # other programs distinguish classes by name alone
    config = found.weights.config
    refuse(
        RecipeError,
        (
            options.flip_average and not config.num_classes,
            "export.flip_average",
            f"{found.path} has no head, whose logits it would average",
            "leave it out",
        ),
    )
    model, _ = loaded_model(found, 0, torch.float32)
    temperature = found.weights.meta.get("temperature") or 1.0
    own = Raw(model.eval(), found.weights.meta)  # without the temperature, and with it
    plain = Raw(model, found.weights.meta, temperature=temperature)
    scored = Raw(model, found.weights.meta, flip_average=options.flip_average, temperature=temperature).eval()
    images = GivenImages(recipe, found, run_dir, stop) if recipe.data.path or recipe.data.dataset else None
    journal = Journal(run_dir / LOG, report)
    found.log(journal, f"to {', '.join(options.to)}")

    @cache
    def model_score() -> Score:
        assert images is not None
        squares = images.inputs(images.source, photographs=False)
        watched = journal.watch(squares, "scoring", len(images.source), 1)
        return score(found.path, run_model(scored), watched, images)

    check = ResizingCheck(
        found, scored, options.check_images, (images.source, images.where) if images else None
    )
    name = Path(options.file).stem if options.file else "model"
    files: dict[str, str] = {}
    metrics: dict[str, dict[str, Any]] = {"max_difference": {}, "answers_changed": {}, "scores": {}}

    def request(row: ExportFormat) -> ExportRequest:
        stop.check()
        graph = _graph(found, plain, options, row) if row.is_graph else plain if row.in_folder else own
        resizing = check(row) if graph.preprocess is None else None
        return ExportRequest(row, found, graph, run_dir, name, options, resizing, images, model_score)

    written: list[tuple[ExportRequest, Path, Exported]] = []
    with ExitStack() as asides:
        try:
            for to in dict.fromkeys(options.to):
                written.append(asides.enter_context(_verified(request(FORMATS[to]))))
        except Stopped:
            for _, aside, done in written:
                _keep(aside, done)
            raise
        for one, aside, done in written:
            _keep(aside, done)
            to, resizing = one.row.name, one.resizing
            place, left = _copied(done, Path(options.file), one.row) if options.file else (done.path, [])
            files[to], metrics["max_difference"][to] = str(place), done.difference
            if options.web and to == "onnx":
                files["web"] = str(place.with_suffix(".html"))
            if resizing is not None:
                metrics["answers_changed"][to] = {"changed": resizing.changed, "total": resizing.total}
            if done.scores:
                metrics["scores"][to] = done.scores
            if options.precision not in one.row.precisions:
                left.append(f"float32: {to} takes no {options.precision}")
            journal.write(
                "export",
                step=0,
                path=files[to],
                difference=done.difference,
                batch_sizes=list(options.batch_sizes),
                notes=[*done.notes, *left],
            )
    pushed = {}
    for one, _, done in written:
        if options.push and one.row.library:
            files_of_folder = [*done.beside, done.path]
            pushed = {"pushed_to": push(files_of_folder, options.push, options.public, journal)}
    return RunResult(
        "export",
        "done",
        metrics={key: value for key, value in metrics.items() if value},
        provenance={
            **weights_scored(found),
            "precision": options.precision,
            **({"flip_average": True} if options.flip_average else {}),
            **pushed,
            "classes": config.num_classes,
            "device": "cpu",
            "attention": attention_of(model),
            "versions": versions(),
            "batch_sizes": list(options.batch_sizes),
            **(data_used(images.source, recipe.data.eval_split) if images else {}),
        },
        files=files,
    )


def _graph(found: FoundWeights, plain: Raw, options: Export, row: ExportFormat) -> Raw:
    """Return the model as a graph computes it; RecipeError if pre-processing is wanted but unknown."""
    meta = found.weights.meta
    inside = options.include_preprocess and row.takes_photographs
    if inside and not meta.keys() >= _RESIZING:
        raise RecipeError(
            "--include-preprocess",
            f"{found.path} does not record how images are resized",
            "leave the flag out, and resize images yourself",
        )
    transform = stored_transform(meta) if inside else None
    if transform is not None and transform.resample not in IN_GRAPHS:
        raise RecipeError(
            "--include-preprocess",
            f"graphs resize by {', '.join(IN_GRAPHS)}, not by {transform.resample}",
            "leave the flag out, or choose one with data.eval_resample",
        )
    return Raw(
        plain.model,
        meta,
        transform,
        features=options.features,
        flip_average=options.flip_average,
        temperature=meta.get("temperature") or 1.0,
    ).eval()


@contextmanager
def _verified(request: ExportRequest) -> Iterator[tuple[ExportRequest, Path, Exported]]:
    """Write a file to a temporary folder and verify it. Yield the folder, for `_keep`, and the result."""
    row, options, images = request.row, request.options, request.images
    home = request.run_dir / row.name if row.in_folder else request.run_dir
    with partial_folder(request.run_dir, row.name, home) as aside:
        file, notes = resolve_name(row.writer)(request, aside)
        opened = _opened(request, file)
        tolerance = TOLERANCE if request.precision == "float32" else inf
        differences = [_proven(name, one, request, tolerance) for name, one in opened.items()]
        scores, lines = dict[str, Any](), list[str]()
        if images is not None and row.is_graph:
            inputs = images.inputs(images.source, photographs=request.model.preprocess is not None)
            scored = score(file, opened[str(file)].run, inputs, images)
            scores, text = compare(file, scored, request.model_score(), images, options.max_accuracy_loss)
            lines.append(text)
        yield (
            request,
            aside,
            Exported(
                home / file.name,
                sorted(home / path.name for path in aside.iterdir() if path != file),
                max(differences),
                [*notes[:1], *lines, *notes[1:], *request.resizing_note],
                scores,
            ),
        )


def _keep(aside: Path, done: Exported) -> None:
    paths = (*done.beside, done.path)  # the file comes last, because it refers to the others
    for path in paths:
        flush(aside / path.name)
    done.path.parent.mkdir(exist_ok=True)
    for path in paths:
        (aside / path.name).replace(path)
    flush(done.path.parent)


def _opened(request: ExportRequest, file: Path) -> dict[str, Opened]:
    """Return reader -> the file as opened by vitctl and every installed reader. Raises CheckpointError."""
    opened = {str(file): resolve_name(request.row.prover)(request, file)}
    for package, reader in request.row.readers:
        if find_spec(package) is None:
            continue
        try:
            if found := resolve_name(reader)(request, file):
                opened[f"{file}, opened by {package}"] = found
        except Exception as error:  # readers raise anything for what they do not know
            raise CheckpointError(
                file,
                f"{package} {version(package)} cannot open it ({one_line(str(error))}), so it was not kept",
                f"pip install --upgrade {package}, or export where it is not installed",
            ) from error
    return opened


def _proven(name: str, opened: Opened, request: ExportRequest, tolerance: float) -> float:
    """Return the largest difference of a file, as a program opens it. Raises CheckpointError."""
    weights, model = request.found.weights, request.model
    largest = agree(name, model, request.options.batch_sizes, opened.run, tolerance)
    if weights.config.num_classes:
        left = (weights.meta.get("temperature") or 1.0) / model.network.temperature
        check_answers(name, opened, model, answering(weights.meta, left), tolerance)
    return largest


@contextmanager
def partial_folder(run_dir: Path, name: str, shown: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder for writing and verifying; errors name `shown`, the final place, instead."""
    aside = run_dir / f".{name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(aside), str(shown or run_dir))) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _copied(done: Exported, to: Path, row: ExportFormat) -> tuple[Path, list[str]]:
    """Copy a file, and files that belong to a graph, all or none. Return the new path and notes."""
    target = to / done.path.name if to.is_dir() else to
    beside = done.beside if row.is_graph else []
    pairs = [(done.path, target), *((file, target.parent / file.name) for file in beside)]
    # An existing program of this name may be written or edited by the user.
    left = [path for _, path in pairs if path.suffix == ".py" and os.path.lexists(path)]
    is_again = os.path.lexists(target)
    for source, path in pairs[1:]:  # not of an earlier export
        if path not in left and os.path.lexists(path) and not is_again:
            raise RecipeError(f"--out {to}", f"{path} exists, and would be replaced", "give another name")
        if path in left and is_again and path.read_bytes() != source.read_bytes():
            text = f"{path} is the program of another network, or was edited"
            raise RecipeError(f"--out {to}", text, "remove it, or give another name")
    left = [path for path in left if not is_again]
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # all are complete before the first replaces an older one
        for source, path in pairs:
            if path not in left:
                shutil.copyfile(source, stack.enter_context(atomic_write(path)))
    return target, [
        f"{path} exists and was not replaced; the program of this file is {done.path.parent / path.name}"
        for path in left
    ]
