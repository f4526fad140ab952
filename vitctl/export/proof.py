"""Verification of a written file against its model, on noise and by accuracy on the user's images."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.data.images.decode import open_picture
from vitctl.data.loader.batches import eval_batches
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source, numbered_as, random_subset
from vitctl.engine.metrics import Hits, count_hits
from vitctl.engine.preemption import StopFlag
from vitctl.errors import CheckpointError, DataError
from vitctl.export.graph import Raw
from vitctl.export.resizing import stored_transform
from vitctl.jobs.evaluate import check_found_classes
from vitctl.jobs.inputs.classifier import Ranking, probabilities
from vitctl.jobs.inputs.data import open_recipe_split, open_scored
from vitctl.jobs.inputs.weights import FoundWeights
from vitctl.jobs.training import not_whole
from vitctl.models.weights.meta import activation_of, distinct, no_head
from vitctl.recipe.schema import ExportRecipe

TOLERANCE = 1e-4
_BATCH, _TOP = 16, 5
# Runs a file or a model on a batch: its outputs, in order.
Run = Callable[[Tensor], Sequence[np.ndarray]]
# Names and probabilities of all classes for each row of logits; unnamed classes are "".
Answering = Callable[[Tensor], list[Ranking]]


class Opened(NamedTuple):
    """A written file, as a program opens it: its outputs, and its answers from logits."""

    run: Run
    answers: Answering


def answering(meta: Mapping[str, Any], temperature: float | None) -> Answering:
    """Return the function by which `vitctl predict` turns logits into answers.

    `meta` is of the weights or read from a file; logits are divided by `temperature`, unless it is None.
    """

    def answers(logits: Tensor) -> list[Ranking]:
        count = logits.shape[1]
        likely = probabilities(logits, activation_of(meta, count), temperature or 1.0)
        names = meta.get("class_names") or [""] * count
        return [list(zip(names, row, strict=True)) for row in likely.tolist()]

    return answers


def run_model(model: nn.Module) -> Run:
    @torch.inference_mode()
    def run(images: Tensor) -> list[np.ndarray]:
        outputs = model(images)
        return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]

    return run


def agree(path: Path | str, model: Raw, batch_sizes: Sequence[int], run: Run, tolerance: float) -> float:
    """Return the largest difference of a file to its model on noise, in standard deviations of the logits.

    An infinite `tolerance` checks only shapes and finite values.

    Raises:
        CheckpointError: the difference exceeds `tolerance` or is NaN, or an output has another shape.
    """
    largest = 0.0
    for number, batch in enumerate(batch_sizes):
        images = model.example(batch, number)
        found, wanted = run(images), run_model(model)(images)
        if [output.shape for output in found] != [output.shape for output in wanted]:
            shapes = [", ".join(str(list(output.shape)) for output in outputs) for outputs in (found, wanted)]
            raise CheckpointError(
                path,
                f"the exported file differs from the model by shape: {shapes[0]}, should be "
                f"{shapes[1]}; it was not kept",
            )
        for got, expected in zip(found, wanted, strict=True):
            spread = float(expected.std()) or 1.0
            difference = float(np.abs(expected - got).max()) / spread
            largest = largest if difference <= largest else difference  # NaN too
    if not largest <= tolerance:
        raise CheckpointError(
            path,
            f"the exported file differs from the model by {largest:.1e} standard deviations of "
            f"the logits (allowed {tolerance:g}); it was not kept",
        )
    return largest


def check_answers(path: str, opened: Opened, model: Raw, wanted: Answering, tolerance: float) -> None:
    """Compare the names and probabilities of a file's answers with those of its model on noise.

    `wanted` makes the answers from the model's logits; `tolerance` as for `agree`, since a probability
    differs by less than the logits do. Raises CheckpointError if names or probabilities differ.
    """
    images = model.example(3)
    logits, expected = (torch.from_numpy(run(images)[0]) for run in (opened.run, run_model(model)))
    allowed = tolerance * max(1.0, float(expected.std()))
    for found, right in zip(opened.answers(logits), wanted(expected), strict=True):
        for (name, p), (own, q) in zip(sorted(found), sorted(right), strict=True):
            if name != own or not abs(p - q) <= allowed:
                raise CheckpointError(
                    path,
                    f"answers {name!r} with probability {p:.4f}, and the model {own!r} with "
                    f"{q:.4f}; it was not kept",
                )


class GivenImages:
    """The images of data.path or data.dataset: some score a file, others calibrate int8.

    Raises:
        DataError: there are no such images.
        CheckpointError: the classifier has other classes.
    """

    def __init__(self, recipe: ExportRecipe, found: FoundWeights, run_dir: Path, stop: StopFlag) -> None:
        self._recipe, self._run_dir, self._stop = recipe, run_dir, stop
        data = recipe.data
        self.source = open_scored(data, data.eval_split, run_dir)
        self._shards = Verification([self.source], run_dir)
        if not found.weights.has_head:
            raise no_head(found.path)
        check_found_classes(found, self.source.class_names)
        self.source = numbered_as(self.source, distinct(found.weights.meta.get("class_names") or ()))
        self.calibration_split = data.calibration_split
        self.where = f"{data.eval_split} of {data.path or data.dataset}"
        self.transform = stored_transform(found.weights.meta)

    def check_whole(self) -> None:
        """Refuse a score of these images unless every byte behind it is verified; call it after decoding.

        Raises:
            DataError: a shard does not match its index, changed while it was read, or could not be verified.
        """
        self._shards.wait(self.source)
        self._shards.complete(self.source)
        if problem := not_whole(self._shards.found(self.source)):
            raise DataError(problem)

    @cached_property
    def calibration(self) -> Source:
        """Return int8's calibration images, none of which is scored. Raises DataError if there are none."""
        split = self.calibration_split
        try:
            source = open_recipe_split(self._recipe.data, split, self._run_dir / "data")
        except DataError as error:
            raise DataError(
                f"{error}; data.calibration_split = '{split}' should name images that are not scored, e.g. "
                "--split 'test[20%:]' --set data.calibration_split='test[:20%]'"
            ) from None
        return random_subset(source, min(self._recipe.export.calibration_images, len(source)), 0)

    def inputs(self, source: Source, *, photographs: bool) -> Iterator[Tensor]:
        """Yield prepared squares, uint8 [B, 3, S, S], or single upright photographs, [1, H, W, 3]."""
        if photographs:
            prepared = self._photographs(source)
        else:
            batches = eval_batches(
                source, self.transform, batch_size=_BATCH, rank=0, num_processes=1, num_workers=0
            )
            prepared = (batch.images[batch.weights > 0] for batch in batches)
        for images in prepared:
            self._stop.check()
            yield images

    def _photographs(self, source: Source) -> Iterator[Tensor]:
        exif, truncated = self.transform.exif_orientation, self.transform.truncated
        for number in range(len(source)):
            picture = open_picture(source.read(number), exif_orientation=exif, truncated=truncated)
            pixels = picture.region(0, 0, picture.height, picture.width)
            yield torch.from_numpy(np.ascontiguousarray(pixels))[None]


class Score(NamedTuple):
    """Predictions on the user's images: five best classes each, int64 [N, 5], and how many are correct."""

    best: np.ndarray
    hits: Hits

    @property
    def numbers(self) -> dict[str, Any]:
        hits = self.hits
        return {
            "accuracy": hits.accuracy,
            "correct": hits.correct,
            "top5_correct": hits.correct_top5,
            "total": hits.total,
        }


def score(path: Path | str, run: Run, inputs: Iterable[Tensor], given: GivenImages) -> Score:
    """Return the predictions and accuracy of a file, or of its model, on `inputs` as `run` takes them.

    Raises:
        CheckpointError: the logits are NaN or infinite.
        DataError: a shard does not match its index.
    """
    rows = []
    for images in inputs:
        logits = run(images)[0]
        if not np.isfinite(logits).all():
            raise CheckpointError(path, "its logits are NaN or infinite on the given images; it was not kept")
        rows.append(np.argsort(-logits, axis=1, kind="stable")[:, :_TOP])
    given.check_whole()
    best = np.concatenate(rows)
    return Score(best, count_hits(best, given.source.labels()))


def compare(
    path: Path, file: Score, model: Score, given: GivenImages, allowed: float
) -> tuple[dict[str, Any], str]:
    """Compare the accuracy of a file with that of its float32 model, scored with vitctl's pre-processing.

    Returns:
        both scores for result.json, and a line for the user.

    Raises:
        CheckpointError: the file loses more than `allowed`, 0 to 1.
    """
    same, total = int((file.best[:, 0] == model.best[:, 0]).sum()), len(file.best)
    text = (
        f"accuracy {file.hits.accuracy:.2%}, of the float32 model {model.hits.accuracy:.2%}; the same "
        f"answer on "
        f"{same:,} of {total:,} images ({given.where})"
    )
    if model.hits.correct - file.hits.correct > allowed * file.hits.total * (1 + 1e-9):
        raise CheckpointError(
            path, f"{text}; a loss of {allowed:.2%} is allowed (export.max_accuracy_loss); it was not kept"
        )
    return {**file.numbers, "model": model.numbers, "same_answers": same, "num_images": total}, text
