"""Scoring: integer sums, every image once, the count held against the data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitctl.data.loader import Batch
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.engine.runtime import Runtime
from vitctl.errors import DataError


@dataclass(frozen=True)
class Score:
    """Top-1 as integers, so that it is the same for any number of processes."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of correct images, 0..1."""
        return self.correct / self.total


def evaluate(
    runtime: Runtime,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_images: int,
    normalise: Callable[[Tensor], Tensor],
    stop: StopFlag,
) -> Score:
    """Top-1 accuracy over a whole split.

    Args:
        model: maps [B, 3, S, S] to logits [B, K].
        batches: of this process; padded rows have weight 0.
        num_images: how many images the split has; the count over all processes must be this.
        normalise: uint8 images to the model's input on its device.
        stop: looked at between batches.

    Raises:
        Stopped: a signal came to any process.
        DataError: not every image was counted once.
    """
    correct = total = 0
    model.eval()
    with torch.inference_mode(), runtime.autocast():
        for batch in batches:
            agree(runtime, stop)
            predicted = model(normalise(batch.images)).argmax(dim=-1).cpu()
            counts = batch.weights > 0
            correct += int(((predicted == batch.labels) & counts).sum())
            total += int(counts.sum())
    correct, total = (int(v) for v in runtime.sum([correct, total]))
    if total != num_images:
        raise DataError(f"evaluation counted {total} images, the split has {num_images}; no score is given")
    return Score(correct, total)


@torch.inference_mode()
def representations(
    runtime: Runtime,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_images: int,
    normalise: Callable[[Tensor], Tensor],
    stop: StopFlag,
) -> Tensor:
    """What the classification layer sees, for every image of a split, in the split's order.

    Args:
        as for `evaluate`; `model.features` gives [B, R].

    Returns:
        [num_images, R] float32 on the CPU, the same on every process.

    Raises:
        Stopped: a signal came to any process.
        DataError: an image is missing or counted twice.
    """
    model.eval()
    rows: list[Tensor] = []
    samples: list[Tensor] = []
    for batch in batches:
        agree(runtime, stop)
        with runtime.autocast():
            features = model.features(normalise(batch.images))  # type: ignore[operator]
        rows.append(features.float())
        samples.append(batch.samples.to(runtime.device))
    own_rows, own_samples = torch.cat(rows), torch.cat(samples)
    if runtime.num_processes > 1:
        own_rows, own_samples = runtime.accelerator.gather((own_rows, own_samples))
    counted = own_samples >= 0
    order = own_samples[counted].cpu()
    if order.numel() != num_images or order.unique().numel() != num_images:
        raise DataError(f"{order.unique().numel()} different images came through, the split has {num_images}")
    table = torch.empty(num_images, own_rows.shape[1])
    table[order] = own_rows[counted].cpu()
    return table


def agree(runtime: Runtime, stop: StopFlag) -> None:
    """Stop here together when a signal came to any process."""
    if runtime.sum([float(stop.raised)])[0]:
        raise Stopped
