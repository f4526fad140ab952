"""Evaluation: integer sums over every image exactly once, and representations with a cache on disk."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.metrics import (
    MEANS,
    METRICS,
    TOP_K,
    correct_predictions,
    count_by_class,
    count_hits,
    label_sets,
)
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Computation, Runtime, Transfer, given, sent, stop_together
from vitctl.engine.sharding import is_sharded
from vitctl.errors import DataError
from vitctl.models.build import Model
from vitctl.models.kernels import packed
from vitctl.models.weights.containers import save_tensors
from vitctl.system.files import atomic_write
from vitctl.system.remote import GaveUpError

_WINDOW = 2**15  # images over all processes in one gather
NOT_FINITE = "the model's logits are NaN or infinite, so that its predictions mean nothing"


@dataclass(frozen=True)
class Score:
    """Top-1 accuracy as integers, so that it is the same for any number of processes.

    `means` are those of `MEANS` that were counted, and the loss. `metric` names the number that decides.
    """

    correct: int
    total: int
    means: Mapping[str, float] = field(default_factory=dict, compare=False)
    metric: str = field(default="accuracy", compare=False)

    @staticmethod
    def of(numbers: Mapping[str, Any]) -> "Score":
        """Restore a score from the fields that `numbers` returns."""
        return Score(
            int(numbers["correct"]),
            int(numbers["total"]),
            {name: numbers[name] for name in (*MEANS, "loss") if numbers.get(name) is not None},
            str(numbers.get("metric", "accuracy")),
        )

    @staticmethod
    def by_step(records: Iterable[Mapping[str, Any]]) -> "dict[int, Score]":
        """Return step -> score of all evaluations among the records of a log."""
        scores = {}
        for record in records:
            if record.get("kind") == "evaluate":
                with suppress(KeyError, TypeError, ValueError, OverflowError):
                    score = Score.of(record)
                    if (
                        0 <= score.correct <= score.total > 0
                        and score.metric in METRICS
                        and score.number >= 0
                    ):
                        scores[int(record["step"])] = score
        metric = scores[max(scores)].metric if scores else ""  # a resume may have changed it
        return {step: replace(score, metric=metric) for step, score in scores.items()}

    @staticmethod
    def since_best(scores: "Mapping[int, Score]") -> int:
        """Return how many scores (by step) were computed since the deciding number last improved."""
        numbers = [scores[step].deciding for step in sorted(scores)]
        return len(numbers) - 1 - numbers.index(max(numbers)) if numbers else 0

    @property
    def numbers(self) -> dict[str, Any]:
        own = {"accuracy": self.accuracy, "correct": self.correct, "total": self.total, **self.means}
        return own | ({} if self.metric == "accuracy" else {"metric": self.metric})

    @property
    def number(self) -> float:
        """The number that evaluation.metric chooses, 0..1 or the loss; 0 where an earlier release did not
        count it.
        """
        return self.accuracy if self.metric == "accuracy" else float(self.means.get(self.metric, 0.0))

    @property
    def deciding(self) -> float:
        """`number` so that more is better: the loss with a minus."""
        return -float(self.means.get("loss", math.inf)) if self.metric == "loss" else self.number

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


def evaluate_model(
    runtime: Runtime,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_images: int,
    normalise: Callable[[Tensor], Tensor],
    stop: StopFlag,
    loss: str = "",
) -> Score:
    """Compute top-1 accuracy over a split.

    If images may have several labels, a prediction is right if it is one of them, and unlabelled images are
    not counted (Section 4.2, ImageNet ReaL).

    Args:
        model: maps [B, 3, S, S] to logits [B, K].
        batches: of this process; padded rows have weight 0.
        num_images: size of the split, which the count over all processes must equal.
        normalise: uint8 images to the model's input on its device.
        stop: checked between batches.
        loss: also compute the mean of this loss, without label smoothing and class weights, see
            `classification_loss`; the order of the images does not change its sum.

    Raises:
        Stopped: a signal came to any process.
        DataError: not every image was counted once, an image lacks a label that it must have, or a loss is
            not finite.
    """
    model.eval()
    answers: list[Tensor] = []  # on the device, synchronised once at the end
    labels: list[Tensor] = []
    is_image: list[Tensor] = []
    losses: list[Tensor] = []
    num_classes = 0
    with (
        torch.no_grad(),
        runtime.autocast(),
        _packed(runtime, model),
    ):  # sharded weights gathered in inference mode could not be trained
        for batch in _sent(runtime, batches, stop):
            logits = model(normalise(given(batch).images))
            answers.append(logits.argmax(dim=-1, keepdim=True))
            labels.append(batch.labels)
            is_image.append(batch.weights > 0)
            num_classes = logits.shape[-1]
            if loss:
                from vitctl.engine.losses import classification_loss  # other jobs need none

                known = sent(batch.labels, logits.device)
                known = known.clamp(min=0) if known.ndim == 1 else known  # of padded rows, left out below
                losses.append(classification_loss(logits.double(), known, None, name=loss))
    counted = torch.cat(is_image).numpy()
    best, of_images = torch.cat(answers).cpu().numpy()[counted], torch.cat(labels).numpy()[counted]
    hits, may_lack_labels = count_hits(best, of_images), of_images.ndim == 2
    correct, total, seen = (int(v) for v in runtime.sum([hits.correct, hits.total, len(best)]))
    by_class = _by_class(best, of_images, num_classes)
    by_class = np.array(runtime.sum(by_class.reshape(-1).astype(float).tolist()), np.int64).reshape(-1, 3)
    if seen != num_images:
        raise DataError(f"evaluation counted {seen} images, the split has {num_images}; no score is given")
    if total < seen and not may_lack_labels:
        raise DataError(f"{seen - total} of the {num_images} images have no label; no score is given")
    if not total:
        raise DataError(f"none of the {num_images} images has a label; there is nothing to score")
    means = {
        name: mean.of(by_class)
        for name, mean in MEANS.items()
        if not (mean.single_labels and may_lack_labels)
    }
    if loss:
        means["loss"] = _exact_mean(runtime, torch.cat(losses).cpu().numpy()[counted], num_images)
    return Score(correct, total, means)


def _exact_mean(runtime: Runtime, values: np.ndarray, count: int) -> float:
    """Return the mean over all processes, of numbers rounded to 2^-24: integers add up in any order."""
    finite = np.isfinite(values)
    whole = np.rint(values[finite] * 2**24).astype(np.int64)
    parts = (whole >> 30).sum(), (whole & (2**30 - 1)).sum(), np.count_nonzero(~finite)
    high, low, odd = runtime.sum([float(part) for part in parts])
    if odd:
        raise DataError(NOT_FINITE, fix="train with a lower optimizer.lr, or another evaluation.metric")
    return (int(high) * 2**30 + int(low)) / 2**24 / count


def _packed(runtime: Runtime, model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext() if is_sharded(model) else packed(model, runtime.product_dtype)


def _sent(runtime: Runtime, batches: Iterable[Batch], stop: StopFlag) -> Iterator[Batch]:
    """Yield the batches, sent to the device ahead of use; raise Stopped if any process should stop."""
    with Transfer(runtime.device).ahead(batches) as ahead:
        coming = iter(ahead)
        while True:
            batch = None
            try:
                batch = next(coming, None)
            except GaveUpError as error:
                stop.miss_images(str(error))
            if batch is None and not stop.outage:
                return
            stop_together(runtime, stop)
            assert batch is not None
            yield batch


def _by_class(best: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return images, correct predictions and predictions per class [K, 3]; only first labels count."""
    classes = label_sets(labels)[:, 0]
    counted = classes >= 0
    by_class = count_by_class(correct_predictions(best, labels)[counted], classes[counted], num_classes)
    by_class[:, 2] = np.bincount(best[counted, 0], minlength=num_classes)
    return by_class


@torch.inference_mode()
def top_predictions(
    runtime: Runtime,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_images: int,
    normalise: Callable[[Tensor], Tensor],
    stop: StopFlag,
    to_scores: Callable[[Tensor], Tensor] = lambda logits: logits,
    flip_average: bool = False,
    to_columns: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the five most likely classes of every image of a split, in the split's order.

    Args:
        as for `evaluate_model`.
        to_scores: logits [B, K] to the scores of the classes that may be predicted [B, A].
        flip_average: see `class_logits`.
        to_columns: those scores, the answers [B, min(5, A)] and the samples [B], -1 where padded, to columns
            [B, C] that are appended; the result is then float64.

    Returns:
        int64 [num_images, min(5, A)] on the CPU, the same on every process; ties go to the lower class.

    Raises:
        Stopped: any process received a signal.
        DataError: an image is missing or counted twice, or the logits are NaN or infinite.
    """
    model.eval()
    finite: list[Tensor] = []

    def best(batch: Batch) -> Tensor:
        images = normalise(given(batch).images)
        logits = class_logits(runtime, model, images, flip_average=flip_average)
        finite.append(logits.isfinite().all())
        scores = to_scores(logits)
        answers = most_likely(scores, TOP_K)
        if to_columns is None:
            return answers
        return torch.cat([answers.double(), to_columns(scores, answers, batch.samples)], dim=1)

    with _packed(runtime, model):
        found = _table(runtime, batches, best, num_images, stop, everywhere=True)
    if runtime.sum([float(len(finite) - torch.stack(finite).sum())])[0]:
        raise DataError(NOT_FINITE, fix="use other weights")
    return found


def class_logits(
    computation: Computation, model: nn.Module, images: Tensor, *, flip_average: bool = False
) -> Tensor:
    """Return logits `[B, K]` of normalised images `[B, 3, S, S]`; with `flip_average` see `flip_averaged`."""
    with computation.autocast():
        logits: Tensor = flip_averaged(model, images) if flip_average else model(images)
    return logits


def flip_averaged(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return the mean logits `[B, K]` of images `[B, 3, S, S]` and their mirror images.

    The mean of logits, not of probabilities: softmax gives the normalised geometric mean of both answers.

    Paper: not in it; Simonyan and Zisserman 2015, Section 3.2, average the soft-max posteriors of both
    """
    logits, mirrored = model(images), model(images.flip(-1))
    wide = torch.promote_types(logits.dtype, torch.float32)  # bf16 would round the mean once more
    return (logits.to(wide) + mirrored.to(wide)) / 2


def image_features(computation: Computation, model: Model, images: Tensor) -> Tensor:
    """Return the classification layer's input, `[B, R]`, for normalised images `[B, 3, S, S]`."""
    with computation.autocast():
        return model.features(images)


def most_likely(scores: Tensor, count: int) -> Tensor:
    """Return the classes of the highest scores `[B, K]`, int64 `[B, min(count, K)]`; ties: lower first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


@torch.no_grad()
def representations(
    runtime: Runtime,
    model: Model,
    batches: Iterable[Batch],
    *,
    num_images: int,
    normalise: Callable[[Tensor], Tensor],
    stop: StopFlag,
    everywhere: bool = False,
) -> Tensor:
    """Return the classification layer's input for every image of a split, in the split's order.

    Arguments as for `evaluate_model`, with `model.features` giving [B, R]. The result is float32
    [num_images, R] on the main process's CPU, or on each if `everywhere`; a meta tensor elsewhere.

    Raises:
        Stopped: any process received a signal.
        DataError: an image is missing or counted twice.
    """
    model.eval()

    def features(batch: Batch) -> Tensor:
        return image_features(runtime, model, normalise(given(batch).images)).float()

    with _packed(runtime, model):
        return _table(runtime, batches, features, num_images, stop, everywhere=everywhere)


def _table(
    runtime: Runtime,
    batches: Iterable[Batch],
    row: Callable[[Batch], Tensor],
    num_images: int,
    stop: StopFlag,
    *,
    everywhere: bool,
) -> Tensor:
    """Apply `row` to each batch of a split and collect the rows in sample order; others get a meta tensor.

    Raises DataError unless each image occurs once.
    """
    table: Tensor | None = None
    device = "cpu" if everywhere or runtime.is_main else "meta"
    seen = np.zeros(num_images, np.uint64)
    pairs = ((row(batch), batch.samples) for batch in _sent(runtime, batches, stop))
    for rows, samples in _windows(pairs, _WINDOW // runtime.num_processes):
        if table is None:
            table = torch.empty((num_images, rows.shape[1]), dtype=rows.dtype, device=device)
        np.add.at(seen, samples[samples >= 0].numpy(), np.uint64(1))
        every = (runtime.gather(part, everywhere=everywhere) for part in (rows, samples))
        for found, at in zip(*every, strict=True):
            table[at[at >= 0]] = found.cpu()[at >= 0]
    seen = runtime.sum_words(seen)
    if table is None or not (seen == 1).all():
        raise DataError(f"{np.count_nonzero(seen)} different images were read, the split has {num_images}")
    return table


def _windows(pairs: Iterable[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, ...]]:
    left = iter(pairs)
    for first in left:
        held, count = [first], len(first[1])
        while count < size and (more := next(left, None)):
            held.append(more)
            count += len(more[1])
        yield tuple(torch.cat(parts) for parts in zip(*held, strict=True))


def window_bytes(width: int) -> int:
    """Return the memory for joining or ordering a window of float32 rows."""
    return 2 * _WINDOW * width * 4


SUFFIX = ".safetensors"


def cached_features(
    runtime: Runtime,
    folder: Path | None,
    key: Mapping[str, Any],
    compute: Callable[[], Tensor],
    *,
    num_images: int,
    limit_bytes: int,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[Tensor | None, bool]:
    """Return a split's representations from the cache, or compute and store them.

    The main process alone gets them and uses the cache; the second result is whether they were cached.

    Args:
        folder: of the cache; None stores nothing.
        key: everything that the numbers depend on, as JSON: digests of weights and data, pre-processing,
            precision.
        compute: the pass over the images, [num_images, R] float32 on the main process; raises unless they are
            those that the key names.
        num_images: cached files of another length are not used.
        limit_bytes: the least recently used files are deleted until the folder is no larger.
        note: called with a message if the cache cannot be written or a cached file is damaged.
    """
    text = json.dumps(key, sort_keys=True)
    file = None if folder is None else folder / f"{hashlib.sha256(text.encode()).hexdigest()}{SUFFIX}"
    found = _read(file, text, num_images, note) if file is not None and runtime.is_main else None
    if runtime.sum([float(found is not None)])[0]:
        return found, True
    features = compute()
    if file is not None and runtime.is_main:
        try:
            _write(file, text, features)
            _keep_below(file.parent, limit_bytes)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            note(
                f"{folder}: representations could not be cached for later runs ({reason}); choose another "
                f"folder with fewshot.cache"
            )
    return features, False


def _read(file: Path, text: str, num_images: int, note: Callable[[str], None]) -> Tensor | None:
    """Return a file's features; None if it is missing, damaged, or has another key."""
    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            fits = metadata.get("key") == text
            features: Tensor | None = stored.get_tensor("features") if fits else None
        with suppress(OSError):  # another user's file may be read-only
            os.utime(file)
    except (OSError, SafetensorError):
        return None
    if features is None or features.ndim != 2 or len(features) != num_images:
        return None
    if _sha256(features) != (noted := metadata.get("sha256")):  # files of early releases lack it
        if noted:
            note(f"{file}: the cached representations are damaged; they are computed again")
        return None
    return features


def _sha256(features: Tensor) -> str:
    return hashlib.sha256(features.contiguous().numpy().data.cast("B")).hexdigest()


def _write(file: Path, text: str, features: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    features = features.contiguous()
    with atomic_write(file) as aside:
        save_tensors({"features": features}, aside, metadata={"key": text, "sha256": _sha256(features)})


def _keep_below(folder: Path, limit_bytes: int) -> None:
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > limit_bytes:
            file.unlink(missing_ok=True)
