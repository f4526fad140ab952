"""Files for other programs, verified against the model before they are kept."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import torch

from vitctl.engine.computation import Kernels, use_kernels, versions
from vitctl.engine.journal import LOG, Journal, Report, silent
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.errors import RecipeError
from vitctl.export.given_images import GivenImages
from vitctl.export.graph import Raw
from vitctl.export.proof import Score, run_model, score
from vitctl.export.weights_file import write_weights_file
from vitctl.export.written import Exported, Order
from vitctl.jobs.inputs.weights import FoundWeights, loaded_model, weights_of
from vitctl.jobs.provenance import weights_scored
from vitctl.jobs.record.result import RunResult, data_used
from vitctl.jobs.resizing import ResizingCheck, own_transform
from vitctl.recipe.schema import ExportRecipe
from vitctl.recipe.sections import Export
from vitctl.system.files import atomic_write


def _write_onnx(order: Order) -> Exported:
    """Imported when it is needed: every process of a run imports this module, and onnxruntime starts threads."""
    from vitctl.export.onnx_file import write_onnx

    return write_onnx(order)


def _write_program(order: Order) -> Exported:
    from vitctl.export.program import write_program

    return write_program(order)


WRITERS: dict[str, Callable[[Order], Exported]] = {
    "onnx": _write_onnx,
    "safetensors": partial(write_weights_file, "safetensors"),
    "google": partial(write_weights_file, "google"),
    "timm": partial(write_weights_file, "timm"),
    "hf": partial(write_weights_file, "hf"),
    "torchvision": partial(write_weights_file, "torchvision"),
    "pt2": _write_program,
}
_GRAPHS = ("onnx", "pt2")
_KERNELS = Kernels(attention="fused", linear="torch")  # what exporters know


def export(
    recipe: ExportRecipe, run_dir: Path, report: Report = silent, stop: StopFlag | None = None
) -> RunResult:
    """Write weights.source as export.to, verify each file by reading it back, and delete it if it does not
    agree.

    An ONNX file or a `torch.export` program takes uint8 images [B, 3, S, S] (RGB, 0..255), already resized,
    or with export.include_preprocess photographs [B, H, W, 3]; the value range is inside the graph, and class
    names and pre-processing are in its metadata.

    Args:
        recipe: checked.
        run_dir: gets model.onnx, model.pt2, model.safetensors, and a folder for each format of another
            program.
        report: called with every log record.
        stop: set by signals, checked before each file and while images are scored.

    Returns:
        the files and, for each, the largest difference to the model's logits in units of their standard
        deviation, and with images its accuracy beside the model's.

    Raises:
        CheckpointError: a written file disagrees with the model, or loses accuracy; it is not kept.
        Stopped: a signal came; the files of earlier formats are complete and verified.
    """
    stop = StopFlag() if stop is None else stop
    options = recipe.export
    _check_formats(options)
    found = weights_of(recipe)
    model, _ = loaded_model(found, 0, torch.float32)
    use_kernels(_KERNELS)
    plain = Raw(model.eval(), found.weights.meta)
    images = GivenImages(recipe, found, run_dir, stop) if recipe.data.path or recipe.data.dataset else None
    journal = Journal(run_dir / LOG, report)
    found.log(journal, f"to {', '.join(options.to)}")

    @cache
    def own_score() -> Score:
        assert images is not None
        squares = journal.watch(images.squares(images.source), "scoring", len(images.source), 1)
        return score(found.path, run_model(plain), squares, images)

    files, differences, resized, scores = {}, {}, {}, {}
    check = ResizingCheck(
        found, plain, options.check_images, (images.source, images.where) if images else None
    )
    name = Path(options.file).stem if options.file else "model"
    for kind in options.to:
        if stop.raised:
            raise Stopped
        graph = _graph(found, plain, options) if kind in _GRAPHS else plain
        resizing = check(kind) if graph.preprocess is None else None
        done = WRITERS[kind](Order(found, graph, run_dir, name, options, resizing, images, own_score))
        if resizing is not None:
            resized[kind] = {"changed": resizing.changed, "total": resizing.total}
        if done.scores:
            scores[kind] = done.scores
        place, said = _copied(done, Path(options.file)) if options.file else (done.path, [])
        files[kind], differences[kind] = str(place), done.difference
        how = {
            "difference": done.difference,
            "batch_sizes": list(options.batch_sizes),
            "notes": [*done.notes, *said],
        }
        journal.write("export", step=0, path=files[kind], **how)
    metrics = {"max_difference": differences, "answers_changed": resized, "scores": scores}
    return RunResult(
        "export",
        "done",
        metrics={key: value for key, value in metrics.items() if value},
        provenance={
            **weights_scored(found),
            "precision": options.precision,
            "device": "cpu",
            **_KERNELS.model_dump(),
            "versions": versions(),
            "batch_sizes": list(options.batch_sizes),
            **(data_used(images.source, recipe.data.eval_split) if images else {}),
        },
        files=files,
    )


def _check_formats(options: Export) -> None:
    unknown = sorted(set(options.to) - set(WRITERS))
    if unknown or not options.to:
        raise RecipeError(
            f"export.to: {', '.join(unknown) or 'nothing'} cannot be written; choose from "
            f"{', '.join(WRITERS)}"
        )
    if options.file and len(options.to) > 1:
        raise RecipeError(f"export.file = '{options.file}' takes one format; choose it with --to")


def _graph(found: FoundWeights, plain: Raw, options: Export) -> Raw:
    """The model as an ONNX file or a program computes it.

    Raises RecipeError where the pre-processing is not known.
    """
    meta = found.weights.meta
    if options.include_preprocess and not {"image_size", "eval_method", "eval_resize", "resample"} <= set(
        meta
    ):
        raise RecipeError(
            f"--include-preprocess: {found.path} does not say how images are resized; leave it out, and "
            f"resize them yourself"
        )
    transform = own_transform(meta) if options.include_preprocess else None
    return Raw(plain.model, meta, transform, features=options.features).eval()


def _copied(done: Exported, to: Path) -> tuple[Path, list[str]]:
    """Copy a file, and what belongs to an ONNX file, to another path or into another folder: all completely,
    or none.

    Returns:
        where the file is now, and what its user should know.
    """
    target = to / done.path.name if to.is_dir() else to
    beside = done.beside if done.path.suffix == ".onnx" else ()
    pairs = [(done.path, target), *((file, target.parent / file.name) for file in beside)]
    # A program of this name may be the user's own, or one that the user has changed.
    left = [path for _, path in pairs if path.suffix == ".py" and os.path.lexists(path)]
    with ExitStack() as stack:  # all are whole before the first replaces an older one
        for source, path in pairs:
            if path not in left:
                shutil.copyfile(source, stack.enter_context(atomic_write(path)))
    return target, [
        f"{path} is there already and was left as it is; the program of this file is "
        f"{done.path.parent / path.name}"
        for path in left
    ]
