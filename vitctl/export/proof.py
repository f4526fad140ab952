"""Whether a written file does what its model does: on noise in batches of several sizes, and on images that
the user gives.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.engine.metrics import Hits, count_hits
from vitctl.errors import CheckpointError
from vitctl.export.given_images import GivenImages
from vitctl.export.graph import Raw

TOLERANCE = 1e-4
_TOP = 5
# The outputs of a file, in their order, for a batch of its input.
Run = Callable[[Tensor], Sequence[np.ndarray]]


def run_model(model: nn.Module) -> Run:
    """A model as `agree` and `score` take it."""

    @torch.inference_mode()
    def run(images: Tensor) -> list[np.ndarray]:
        outputs = model(images)
        return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]

    return run


def agree(
    path: Path, model: Raw, batch_sizes: Sequence[int], run: Run, tolerance: float = TOLERANCE
) -> float:
    """The largest difference between a file and its model, on noise.

    Args:
        path: to be named.
        model: what the file was made of.
        batch_sizes: each is run.
        run: the written file.
        tolerance: in standard deviations of the logits; infinite where only shapes and finite values are
            asked for.

    Returns:
        the difference, in standard deviations of the logits.

    Raises:
        CheckpointError: it is larger than `tolerance`, not a number, or an output has another shape.
    """
    largest = 0.0
    for number, batch in enumerate(batch_sizes):
        images = model.example(batch, number)
        found, wanted = run(images), run_model(model)(images)
        if [output.shape for output in found] != [output.shape for output in wanted]:
            shapes = [", ".join(str(list(output.shape)) for output in outputs) for outputs in (found, wanted)]
            raise CheckpointError(
                f"{path}: the exported file differs from the model by shape: {shapes[0]}, should be "
                f"{shapes[1]}; it was not kept"
            )
        for got, expected in zip(found, wanted, strict=True):
            spread = float(expected.std()) or 1.0
            difference = float(np.abs(expected - got).max()) / spread
            largest = largest if difference <= largest else difference  # NaN too
    if not largest <= tolerance:
        raise CheckpointError(
            f"{path}: the exported file differs from the model by {largest:.1e} standard deviations of "
            f"the logits "
            f"(allowed {tolerance:g}); it was not kept"
        )
    return largest


class Score(NamedTuple):
    """Answers of a classifier on the images given: the five best classes of each, int64 [N, 5], and how many
    are correct.
    """

    best: np.ndarray
    hits: Hits

    @property
    def accuracy(self) -> float:
        """Top-1, 0 to 1."""
        return self.hits.accuracy

    @property
    def numbers(self) -> dict[str, Any]:
        """For result.json."""
        hits = self.hits
        return {
            "accuracy": hits.accuracy,
            "correct": hits.correct,
            "top5_correct": hits.correct_top5,
            "total": hits.total,
        }


def score(path: Path | str, run: Run, feeds: Iterable[Tensor], given: GivenImages) -> Score:
    """The accuracy of a file, or of its model.

    Args:
        path: to be named.
        run: file or model.
        feeds: the images given, as it takes them.
        given: their labels.

    Raises:
        CheckpointError: the logits are NaN or infinite.
        DataError: a shard does not match its index.
    """
    best = np.concatenate(list(_answers(path, run, feeds)))
    given.check_whole()
    return Score(best, count_hits(best, given.labels))


def _answers(path: Path | str, run: Run, feeds: Iterable[Tensor]) -> Iterator[np.ndarray]:
    for images in feeds:
        logits = run(images)[0]
        if not np.isfinite(logits).all():
            raise CheckpointError(
                f"{path}: its logits are NaN or infinite on the images given; it was not kept"
            )
        yield np.argsort(-logits, axis=1, kind="stable")[:, :_TOP]


class Compared(NamedTuple):
    """A file beside its float32 model on the images given, and the same in words; empty without images."""

    numbers: dict[str, Any]
    lines: tuple[str, ...]


def compare(path: Path, own: Score, model: Score, given: GivenImages, allowed: float) -> Compared:
    """Compare the accuracy of a file with that of its float32 model.

    Args:
        path: to be named.
        own, model: of the file, and of the model with vitctl's own pre-processing.
        given: the images.
        allowed: the largest loss of accuracy, 0 to 1.

    Raises:
        CheckpointError: the file loses more.
    """
    same = int((own.best[:, 0] == model.best[:, 0]).sum())
    text = (
        f"accuracy {own.accuracy:.2%}, of the float32 model {model.accuracy:.2%}; the same answer on "
        f"{same:,} of "
        f"{len(own.best):,} images ({given.where})"
    )
    lost = model.hits.correct - own.hits.correct
    if lost > allowed * own.hits.total * (1 + 1e-9):
        raise CheckpointError(
            f"{path}: {text}; a loss of {allowed:.2%} is allowed (export.max_accuracy_loss); it was not kept"
        )
    return Compared(
        {**own.numbers, "model": model.numbers, "same_answers": same, "num_images": len(own.best)}, (text,)
    )
