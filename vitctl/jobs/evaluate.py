"""Scoring a classifier on a split, every image once."""

from functools import partial
from pathlib import Path

from vitctl.data.transforms import EvalTransform
from vitctl.engine.journal import Report, silent
from vitctl.engine.preemption import StopFlag
from vitctl.errors import CheckpointError
from vitctl.jobs.inputs import Found, find_weights, loaded_model, open_images
from vitctl.jobs.result import RunResult
from vitctl.jobs.setup import num_workers, on_device, open_journal, score_images, start_runtime
from vitctl.models.weights.load import weights_digest
from vitctl.recipe.schema import Evaluate


def evaluate(recipe: Evaluate, run_dir: Path, report: Report = silent, stop: StopFlag | None = None) -> RunResult:
    """Top-1 accuracy of weights.source on data.eval_split, with the pre-processing that is stored with the weights.

    Args:
        recipe: checked.
        run_dir: gets log.jsonl and, by the caller, result.json.
        report: called with every log record of the main process.
        stop: raised by signals.

    Returns:
        the accuracy with its integers.

    Raises:
        CheckpointError: the head has other classes than the data, or is still zero.
        Stopped: a signal came.
    """
    stop = StopFlag() if stop is None else stop
    found = find_weights(recipe.weights.source, model=recipe.weights.model)
    source = open_images(recipe.data, recipe.data.eval_split, run_dir)
    if not found.weights.has_head:
        raise CheckpointError(
            f"{found.path}: its head is all zeros, as in the released ImageNet-21k files; fine-tune it first"
        )
    meta = found.weights.meta
    _same_classes(found, source.class_names)
    runtime = start_runtime(recipe.machine, run_dir)
    journal = open_journal(runtime, run_dir, report)
    model, image_size = loaded_model(found, recipe.data.image_size, runtime.dtype)
    journal.write("weights", step=0, path=found.path, text=f"images of {image_size} pixels")
    resize = meta["eval_resize"] if image_size == meta["image_size"] else 0
    transform = EvalTransform(image_size, method=meta["eval_method"], resize=resize, resample=meta["resample"])
    normalise = partial(runtime.images, mean=tuple(meta["mean"]), std=tuple(meta["std"]))
    score = score_images(
        runtime,
        on_device(model, runtime),
        source,
        transform,
        normalise,
        recipe.evaluation.batch_size,
        num_workers(recipe.machine, runtime),
        stop,
    )
    journal.write("evaluate", step=0, accuracy=score.accuracy, correct=score.correct, total=score.total)
    return RunResult(
        "evaluate",
        "done",
        metrics={"accuracy": score.accuracy, "correct": score.correct, "total": score.total},
        provenance={
            "weights": found.path,
            "weights_sha256": weights_digest(found.weights.state),
            "data_sha256": source.digest,
            "split": recipe.data.eval_split,
            "image_size": image_size,
            "eval_method": meta["eval_method"],
            "eval_resize": resize,
        },
    )


def _same_classes(found: Found, names: tuple[str, ...]) -> None:
    """By name; by number where the file of another program carries no names."""
    stored = found.weights.meta.get("class_names") or []
    num_classes = len(stored) or found.weights.config.num_classes
    if stored != list(names) if stored else num_classes != len(names):
        said = f" ({', '.join(stored[:3])} ...)" if stored else ""
        raise CheckpointError(
            f"{found.path}: its head has {num_classes} classes{said}, the data has {len(names)} "
            f"({', '.join(names[:3])} ...): the scores would mean nothing; fine-tune on this data first"
        )
