"""What the classifier of a run says of its test images, where its weights and its data are still there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitctl.data.source.read import Source, Subset
from vitctl.engine.distributed.runtime import start
from vitctl.engine.evaluation import top_predictions
from vitctl.engine.journal import Journal
from vitctl.engine.preemption import StopFlag
from vitctl.errors import DataError
from vitctl.jobs.evaluate import stored_eval_transform
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.labels import check_head_classes
from vitctl.jobs.inputs.sampling import open_recipe_split
from vitctl.jobs.inputs.weights import loaded_model, scored_weights
from vitctl.jobs.training import on_device
from vitctl.models.flops import training_flops
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Evaluate
from vitctl.recipe.write import toml_value
from vitctl.report.page.found import FoundRun

MOST_IMAGES = 1000
_FLOPS = {"cpu": 1e13, "cuda": 1e15}  # spent on the predictions of a run where nobody says how many images
_FEWEST = 64
_PLACE = ("dataset", "path", "root", "classes", "cache_gib", "eval_split", "exif_orientation", "truncated")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Answers of a classifier.

    Args:
        source: the images that were shown to it.
        labels: int64 `[N]`, their classes; of several the first.
        best: int64 `[N, 5]`, the answers, the most likely first.
        shares: float32 `[N, 5]`, probability of each answer.
        split: that the images are of.
        num_images: of that split.
        remark: for the reader; "" for none.
    """

    source: Source
    labels: np.ndarray
    best: np.ndarray
    shares: np.ndarray
    split: str
    num_images: int
    remark: str = ""


def predict_split(run: FoundRun, most: int | None) -> Predictions:
    """Show the images of the split that a run was scored on to its classifier: all of them, or evenly spaced ones.

    Args:
        run: a pre-training, a fine-tuning or an evaluation, finished.
        most: images; None: as many as take little time, at most 1,000.

    Raises:
        VitctlError: the weights or the data cannot be opened, or are others than those of the result.
    """
    recipe = _scoring(run)
    found = scored_weights(recipe)
    scratch = run.folder / "data"  # where the run has generated a set that comes with vitctl
    source = open_recipe_split(recipe.data, recipe.data.eval_split, scratch if scratch.is_dir() else None)
    recorded = run.provenance.get("data_sha256")
    if recorded not in (None, source.digest):
        raise _other_data(run, source, str(recorded))
    check_head_classes(found, source.class_names)
    runtime = start(precision=str(run.provenance.get("precision", "auto")), device="auto", processes=1)
    transform = stored_eval_transform(recipe, found.weights.meta)
    model, _ = loaded_model(found, transform.image_size, runtime.dtype)
    flops = training_flops(model.config, 1) / 3
    whole = len(source)
    shown = _evenly(source, most or _affordable(flops, runtime.device.type))
    mean, std = (tuple(found.weights.meta[name]) for name in ("mean", "std"))
    one = ImagePass(runtime, Journal(None), transform, mean, std, min(64, len(shown)), 0, StopFlag())
    shares: list[Tensor] = []

    def keep(logits: Tensor) -> Tensor:
        shares.append(logits.float().softmax(dim=1).sort(dim=1, descending=True, stable=True).values[:, :5].cpu())
        return logits

    best = one.through(top_predictions, "answers", on_device(model, runtime), shown, to_scores=keep).numpy()
    labels = np.asarray(shown.labels()).reshape(len(shown), -1)[:, 0]
    probabilities = torch.cat(shares)[: len(shown)].numpy()
    counted = int((best[:, 0] == labels).sum())
    remark = _remark(run, counted, len(shown), whole)
    return Predictions(shown, labels, best, probabilities, recipe.data.eval_split, whole, remark)


def _scoring(run: FoundRun) -> Evaluate:
    """The evaluation of a run's own weights on the split that its result is about."""
    assert run.recipe is not None
    recipe: Any = run.recipe.recipe
    if isinstance(recipe, Evaluate):
        return recipe
    data = recipe.data
    values: Mapping[str, Any] = {name: getattr(data, name) for name in _PLACE}
    if not (data.path or data.dataset) and data.mixture:
        values = {**values, "path": data.mixture[0].path}
    overrides = [Override(f"data.{key}", value, "report") for key, value in values.items()]
    loaded = load_recipe("evaluate", [*overrides, Override("weights.source", str(run.folder), "report")]).recipe
    assert isinstance(loaded, Evaluate)
    return loaded


def _other_data(run: FoundRun, source: Source, recorded: str) -> DataError:
    return DataError(
        f"the images found for {toml_value(run.provenance.get('split', ''))} are not those of the result "
        f"(digest {source.digest[:12]}, recorded {recorded[:12]})"
    )


def _affordable(flops_per_image: float, device: str) -> int:
    return max(_FEWEST, min(MOST_IMAGES, int(_FLOPS.get(device, _FLOPS["cpu"]) / flops_per_image)))


def _evenly(source: Source, most: int) -> Source:
    """At most this many samples, spread evenly over the split."""
    if len(source) <= most:
        return source
    return Subset(source, np.arange(most, dtype=np.int64) * len(source) // most)


def _remark(run: FoundRun, correct: int, shown: int, whole: int) -> str:
    if shown < whole:
        return f"{shown:,} of the {whole:,} images, evenly spaced, {correct / shown:.2%} of them correct"
    recorded = run.metrics.get("correct")
    if isinstance(recorded, int) and recorded != correct and run.provenance.get("labels", "original") == "original":
        return f"computed anew for this page: {correct:,} of {shown:,} correct, while the result records {recorded:,}"
    return f"all {shown:,} images, computed anew for this page: {correct:,} correct, as in the result"
