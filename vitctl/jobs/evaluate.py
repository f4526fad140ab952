"""Scoring a classifier on a split, every image once."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.source.views import Source
from vitctl.engine.computation import choose_kernels, computed, use_kernels
from vitctl.engine.evaluation import top_predictions
from vitctl.engine.journal import RECIPE, Report, run_of, silent
from vitctl.engine.metrics import baselines, count_hits, mean_per_class
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import num_workers
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.labels import OF_OBJECTNET, choose_label_rule, write_counts
from vitctl.jobs.inputs.network import unseen_pixels
from vitctl.jobs.inputs.opened import Inputs, open_inputs
from vitctl.jobs.inputs.weights import FoundWeights, check_found, loaded_model, scored_weights
from vitctl.jobs.provenance import shown, weights_scored
from vitctl.jobs.record.data_verified import WHOLE, verify
from vitctl.jobs.record.result import RunResult, data_used, read_result
from vitctl.jobs.training import on_device, open_journal, start_runtime
from vitctl.recipe.schema import Evaluate

# BiT's pre-processing of ObjectNet: the shorter side, and the square in its centre.
OBJECTNET_RESIZE, OBJECTNET_SIZE = 512, 480


def evaluate(
    recipe: Evaluate,
    run_dir: Path,
    report: Report = silent,
    stop: StopFlag | None = None,
    inputs: Inputs | None = None,
) -> RunResult:
    """Top-1 and top-5 of weights.source on data.eval_split, with the pre-processing that is stored with the
    weights.

    Args:
        recipe: checked.
        run_dir: gets log.jsonl, per_class.csv, confusion.csv and, by the caller, result.json.
        report: called with every log record of the main process.
        stop: set by signals.
        inputs: the images, if they are open already.

    Returns:
        the accuracies with their integers, under the data's labels and under those that evaluation.labels
        names.

    Raises:
        CheckpointError: the head has other classes than the data, or is all zeros.
        DataError: an image was not counted exactly once, or the images are not those that evaluation.labels
            is for.
        Stopped: a signal came.

    Paper: Section 4.1; Appendix D.9 (ObjectNet)
    """
    stop = StopFlag() if stop is None else stop
    found = scored_weights(recipe)
    source = (inputs or open_inputs(recipe, run_dir)).scored
    assert source is not None
    if not found.weights.has_head:
        raise CheckpointError(
            f"{found.path}: its head is all zeros, as in the released ImageNet-21k files; fine-tune it first"
        )
    _check_held_out(recipe.data.eval_split, found, source)
    rule = choose_label_rule(recipe.evaluation.labels, source, found, Path(recipe.data.root))
    runtime = start_runtime(recipe.machine, run_dir)
    journal = open_journal(runtime, run_dir, report)
    check_found(runtime, found, [source])
    bytes_read = verify(runtime, run_dir, source)
    meta = found.weights.meta
    transform = stored_eval_transform(recipe, meta)
    model, _ = loaded_model(found, transform.image_size, runtime.dtype)
    if not meta.get("class_names"):
        found = replace(found, assumed={**found.assumed, "classes": "in the order of the data"})
    found.log(journal, str(transform))
    for text in unseen_pixels(model.config):
        journal.write("warning", step=0, text=text)
    mean, std, workers = tuple(meta["mean"]), tuple(meta["std"]), num_workers(recipe.machine, runtime)
    look = ImagePass(
        runtime, journal, transform, mean, std, recipe.evaluation.batch_size, workers, stop, bytes_read
    )
    model = on_device(model, runtime)
    use_kernels(choose_kernels(recipe.machine, model.config, runtime))
    best = look.through(top_predictions, "scoring", model, source, to_scores=rule.to_scores).numpy()
    metrics: dict[str, dict[str, Any]] = {}
    for name, labels in rule.labels.items():
        hits = count_hits(best, labels)
        numbers = {"accuracy": hits.accuracy, "correct": hits.correct, "total": hits.total}
        numbers |= {"top5_accuracy": hits.top5, "top5_correct": hits.correct_top5}
        metrics[name] = numbers | baselines(labels, len(rule.prediction_names))
        if len(metrics) == 1:
            metrics[name]["mean_per_class"] = mean_per_class(rule.count_by_class(best))
        journal.write("evaluate", step=0, labels=name, **metrics[name])
    first, *others = metrics
    return RunResult(
        "evaluate",
        "done",
        metrics=metrics[first] | {name: metrics[name] for name in others},
        provenance={
            **weights_scored(found),
            **computed(runtime),
            **data_used(source, recipe.data.eval_split),
            **WHOLE,
            "labels": first,
            **shown(transform),
            "mean": list(meta["mean"]),
            "std": list(meta["std"]),
        },
        files=write_counts(run_dir, rule, best) if runtime.is_main else {},
    )


def _check_held_out(split: str, found: FoundWeights, source: Source) -> None:
    """Refuse a part of a data set that the run of the weights scored too, but with other images: some may be
    trained on.
    """
    run = run_of(Path(found.path))
    trained = read_result(run) if (run / RECIPE).is_file() else None
    used = trained.provenance if trained is not None else {}
    if "[" in split and used.get("split") == split and used.get("data_sha256") != source.digest:
        whole = split.partition("[")[0]
        raise DataError(
            f"data.eval_split = '{split}': {run} held out other images under this name, and may have been "
            f"trained on some of these; "
            f"give the data that it was trained on, or score all of another set with --split {whole}"
        )


def stored_eval_transform(recipe: Evaluate, meta: Mapping[str, Any]) -> EvalTransform:
    """The pre-processing of [data]; unset values are those stored with the weights, and for ObjectNet's
    labels those of BiT.

    At another image size the centre crop keeps its share: 224 out of 256 becomes 336 out of 384.

    Args:
        recipe: [data] and evaluation.labels.
        meta: of the weights.

    Raises:
        RecipeError: there is no room for the crop.

    Paper: BiT, Appendix B (ObjectNet)
    """
    data = recipe.data
    size, method, resize = meta["image_size"], meta["eval_method"], meta["eval_resize"]
    if recipe.evaluation.labels in OF_OBJECTNET:
        size, method, resize = OBJECTNET_SIZE, "shorter_side", OBJECTNET_RESIZE
    image_size = data.image_size or size
    resize = data.eval_resize or round(resize * image_size / size)
    if 0 < resize < image_size:
        raise RecipeError(
            f"data.eval_resize = {resize} is smaller than the images of {image_size} pixels that are cut out "
            f"of it; set it to at "
            f"least {image_size}, or to 0"
        )
    upright = (
        meta.get("exif_orientation", data.turns_upright)
        if data.exif_orientation == "auto"
        else data.turns_upright
    )
    return EvalTransform(
        image_size,
        method=data.eval_method or method,
        resize=resize,
        resample=data.eval_resample or meta["resample"],
        exif_orientation=upright,
        truncated=data.truncated,
    )
