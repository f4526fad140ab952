"""Few-shot linear evaluation (Section 4.1): regularised least squares on frozen representations, in closed form."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.data.loader import eval_batches
from vitctl.data.read import Source
from vitctl.data.transforms import EvalTransform
from vitctl.engine.evaluation import representations
from vitctl.engine.journal import Report, silent
from vitctl.engine.preemption import StopFlag
from vitctl.engine.ridge import choose_shots, fit_and_score
from vitctl.engine.runtime import Runtime
from vitctl.errors import DataError
from vitctl.jobs.inputs import Found, find_weights, loaded_model, open_images
from vitctl.jobs.result import RunResult
from vitctl.jobs.setup import num_workers, on_device, open_journal, start_runtime, weights_used
from vitctl.models.build import build
from vitctl.recipe.schema import Fewshot


def fewshot(recipe: Fewshot, run_dir: Path, report: Report = silent, stop: StopFlag | None = None) -> RunResult:
    """Score frozen representations with a few images per class, for every fewshot.shots and fewshot.seeds.

    One pass over each split gives the representations for all shots and seeds.

    Args:
        recipe: checked.
        run_dir: gets log.jsonl and, by the caller, result.json.
        report: called with every log record of the main process.
        stop: raised by signals.

    Returns:
        accuracy per number of shots: mean over seeds, and each seed's.

    Raises:
        DataError: the splits have other classes, or a class has fewer images than shots.
        Stopped: a signal came.

    Paper: Section 4.1 (few-shot accuracies), Fig. 4
    """
    stop = StopFlag() if stop is None else stop
    found = find_weights(recipe.weights.source, model=recipe.weights.model)
    train = open_images(recipe.data, recipe.data.train_split, run_dir)
    test = open_images(recipe.data, recipe.data.eval_split, run_dir)
    if train.class_names != test.class_names:
        raise DataError(
            f"'{recipe.data.train_split}' and '{recipe.data.eval_split}' do not have the same classes in the same order"
        )
    for shots in recipe.fewshot.shots:
        choose_shots(train.labels(), shots, num_classes=len(train.class_names), seed=0)
    runtime = start_runtime(recipe.machine, run_dir)
    journal = open_journal(runtime, run_dir, report)

    model, transform = _frozen(found, recipe, runtime)
    journal.write("weights", step=0, path=found.path, text=f"frozen, images of {transform.image_size} pixels")
    features = [_features(runtime, model, source, transform, found, recipe, stop) for source in (train, test)]
    accuracies = {
        shots: [_accuracy(recipe, features, train, test, shots, seed) for seed in recipe.fewshot.seeds]
        for shots in recipe.fewshot.shots
    }
    for shots, values in accuracies.items():
        journal.write("fewshot", step=0, shots=shots, accuracy=float(np.mean(values)), seeds=values)
    return RunResult(
        "fewshot",
        "done",
        metrics={
            "accuracy": {str(shots): float(np.mean(values)) for shots, values in accuracies.items()},
            "by_seed": {str(shots): values for shots, values in accuracies.items()},
            "total": len(test),
        },
        provenance={
            **weights_used(found, recipe.weights),
            "train_split": recipe.data.train_split,
            "train_sha256": train.digest,
            "split": recipe.data.eval_split,
            "data_sha256": test.digest,
            "image_size": transform.image_size,
            "eval_resize": transform.resize,
            "l2": recipe.fewshot.l2,
            "seeds": list(recipe.fewshot.seeds),
        },
    )


def _frozen(found: Found, recipe: Fewshot, runtime: Runtime) -> tuple[nn.Module, EvalTransform]:
    model, image_size = loaded_model(found, recipe.data.image_size, runtime.dtype)
    if recipe.weights.initialise == "random":
        model = build(model.config, seed=recipe.seed, dtype=runtime.dtype)
    resize = recipe.data.eval_resize or round(image_size * 256 / 224)
    return on_device(model, runtime), EvalTransform(
        image_size, method="square", resize=resize, resample=recipe.data.resample
    )


def _features(
    runtime: Runtime,
    model: nn.Module,
    source: Source,
    transform: EvalTransform,
    found: Found,
    recipe: Fewshot,
    stop: StopFlag,
) -> Tensor:
    batches = eval_batches(
        source,
        transform,
        batch_size=recipe.evaluation.batch_size,
        rank=runtime.rank,
        num_processes=runtime.num_processes,
        num_workers=num_workers(recipe.machine, runtime),
    )
    normalise = partial(runtime.images, mean=tuple(found.weights.meta["mean"]), std=tuple(found.weights.meta["std"]))
    return representations(runtime, model, batches, num_images=len(source), normalise=normalise, stop=stop)


def _accuracy(recipe: Fewshot, features: list[Tensor], train: Source, test: Source, shots: int, seed: int) -> float:
    chosen = choose_shots(train.labels(), shots, num_classes=len(train.class_names), seed=seed)
    dtype = torch.float64 if recipe.fewshot.float64 else torch.float32
    scores = fit_and_score(
        features[0][chosen].to(dtype),
        torch.from_numpy(train.labels()[chosen]),
        features[1].to(dtype),
        num_classes=len(train.class_names),
        l2=recipe.fewshot.l2,
    )
    return float((scores.argmax(dim=1).numpy() == test.labels()).mean())
