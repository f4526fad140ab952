"""Batches. Which samples make up which batch follows from the order alone, never from processes or workers."""

import atexit
import multiprocessing
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitctl.data.decode import BadSample, open_picture
from vitctl.data.order import SampleOrder
from vitctl.data.read import Source
from vitctl.data.transforms import EvalTransform, TrainTransform, augmentation_rng
from vitctl.errors import DataError

PADDING = -1
_PREFETCH = 2
_WORKERS: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Batch:
    """Images and their labels.

    Args:
        images: uint8 `[B, 3, S, S]`, a pixel's colours side by side in memory; zeros where the weight is 0.
        labels: int64 `[B]`, 0 where the weight is 0 and nothing is known.
        weights: float32 `[B]`, 0 for a bad sample or padding, else 1.
        samples: int64 `[B]`, numbers in the source, -1 for padding.
        bad: sample, key and reason of each bad sample.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor
    samples: Tensor
    bad: tuple[tuple[int, str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; called by the DataLoader."""
        return Batch(
            self.images.pin_memory(),
            self.labels.pin_memory(),
            self.weights.pin_memory(),
            self.samples.pin_memory(),
            self.bad,
        )


def share(batch_size: int, num_processes: int, rank: int) -> range:
    """The contiguous part of a global batch that one process works on; sizes differ by at most one."""
    return range(batch_size * rank // num_processes, batch_size * (rank + 1) // num_processes)


def train_batches(
    source: Source,
    order: SampleOrder,
    transform: TrainTransform,
    *,
    seed: int,
    batch_size: int,
    micro_batch: int,
    rank: int,
    num_processes: int,
    first_step: int,
    num_workers: int,
) -> Iterator[Batch]:
    """Micro-batches of one process, without end, from any step on.

    Step s trains on positions `s * batch_size` to `(s + 1) * batch_size` of the order; a process takes its `share`
    of them, cut into micro-batches. A sample that cannot be used becomes zeros with weight 0 and is listed in `bad`.

    Args:
        source: the training split.
        order: over as many samples as the source has.
        transform: draws from a generator seeded by (seed, epoch, sample).
        seed: of the augmentation.
        batch_size: samples of a global batch, at least `num_processes`.
        micro_batch: samples of a batch given out, at most.
        rank: of this process.
        num_processes: that share the global batch.
        first_step: finished steps; starting late costs nothing.
        num_workers: loader processes, 0 to work in this one.

    Raises:
        DataError: the numbers do not fit, or a loader process was killed.
    """
    if batch_size < num_processes or micro_batch < 1:
        raise DataError(
            f"batch_size {batch_size}, micro-batch {micro_batch}, {num_processes} processes: "
            "every process needs a sample of each batch, and a micro-batch at least one"
        )
    if order.num_samples != len(source):
        raise DataError(f"the order covers {order.num_samples} samples, the source has {len(source)}")
    own = share(batch_size, num_processes, rank)

    def positions() -> Iterator[list[int]]:
        step = first_step
        while True:
            for begin in range(own.start, own.stop, micro_batch):
                end = min(begin + micro_batch, own.stop)
                yield list(range(step * batch_size + begin, step * batch_size + end))
            step += 1

    return _batches(_TrainSamples(source, order, transform, seed), positions(), num_workers)


def eval_batches(
    source: Source,
    transform: EvalTransform,
    *,
    batch_size: int,
    rank: int,
    num_processes: int,
    num_workers: int,
) -> Iterator[Batch]:
    """Batches of one process in which, over all processes, every sample comes exactly once.

    Every process gets the same number of batches of the same size; the last are padded with samples -1 of weight 0.

    Args:
        source: the split to evaluate on.
        transform: the same for every sample.
        batch_size: samples of a batch, at most; of one process.
        rank: of this process.
        num_processes: that share the split.
        num_workers: loader processes, 0 to work in this one.

    Raises:
        DataError: a sample cannot be used, named by key and shard; or a loader process was killed.
    """
    own = share(len(source), num_processes, rank)
    longest = -(-len(source) // num_processes)
    size = min(batch_size, longest)

    def positions() -> Iterator[list[int]]:
        for begin in range(own.start, own.start + longest, size):
            yield [sample if sample < own.stop else PADDING for sample in range(begin, begin + size)]

    for batch in _batches(_EvalSamples(source, transform), positions(), num_workers):
        for sample, key, reason in batch.bad:
            raise DataError(
                f"{source.place(sample)}: sample {key} cannot be evaluated ({reason}); "
                "a score needs every image, so mend it or write the split without it"
            )
        yield batch


@dataclass(frozen=True)
class _TrainSamples(Dataset[Batch]):
    """Positions of the order to a batch."""

    source: Source
    order: SampleOrder
    transform: TrainTransform
    seed: int

    def __getitems__(self, positions: list[int]) -> Batch:
        epochs, samples = self.order.at(np.array(positions, np.int64))
        labels = self.source.labels(samples)

        def image(row: int, sample: int) -> Tensor:
            if labels[row] < 0:
                raise BadSample("no label")
            rng = augmentation_rng(self.seed, int(epochs[row]), sample)
            return self.transform(open_picture(self.source.read(sample)), rng)

        return _batch(self.source, samples, labels, self.transform.image_size, image)


@dataclass(frozen=True)
class _EvalSamples(Dataset[Batch]):
    """Samples, or padding, to a batch."""

    source: Source
    transform: EvalTransform

    def __getitems__(self, positions: list[int]) -> Batch:
        samples = np.array(positions, np.int64)
        labels = np.where(samples == PADDING, 0, self.source.labels(np.maximum(samples, 0)))

        def image(_: int, sample: int) -> Tensor:
            return self.transform(open_picture(self.source.read(sample)))

        return _batch(self.source, samples, labels, self.transform.image_size, image)


def _batch(
    source: Source, samples: np.ndarray, labels: np.ndarray, image_size: int, image: Callable[[int, int], Tensor]
) -> Batch:
    shape = (len(samples), 3, image_size, image_size)
    images = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last).zero_()  # as they are decoded
    weights = torch.zeros(len(samples))
    bad = []
    for row, sample in enumerate(samples.tolist()):
        if sample == PADDING:
            continue
        try:
            images[row] = image(row, sample)
            weights[row] = 1
        except BadSample as error:
            bad.append((sample, _key(source, sample), error.reason))
            labels[row] = max(labels[row], 0)
    return Batch(images, torch.from_numpy(labels), weights, torch.from_numpy(samples), tuple(bad))


def _key(source: Source, sample: int) -> str:
    try:
        return source.key(sample)
    except BadSample:
        return f"number {sample}"


def _batches(samples: Dataset[Batch], positions: Iterator[list[int]], num_workers: int) -> Iterator[Batch]:
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=positions,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_start_worker,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=_PREFETCH if num_workers else None,
        generator=torch.Generator(),  # its draw for worker seeds must not move the global generator
    )
    batches = _iterate(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not _tells_of_death(error):
                raise
            raise DataError(
                f"a loader process was killed, most often for want of memory; use fewer loader workers ({error})"
            ) from error
        yield batch


def _iterate(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Start the loader, remember its workers, and take back the SIGCHLD handler that torch installs.

    Left in place it raises out of whatever line the training loop has reached; without it a dead worker is noticed
    here, where its batch is waited for.
    """
    handler, others = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children())
    batches = iter(loader)
    _WORKERS.update(set(multiprocessing.active_children()) - others)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return batches


@atexit.register
def _kill_workers() -> None:
    """At exit Python asks its daemons to leave by SIGTERM, which ours ignore, and would wait for them forever."""
    for worker in _WORKERS:
        worker.kill()


def _tells_of_death(error: Exception) -> bool:
    """Whether a worker is gone: torch says so, or its connection broke while it handed over a batch."""
    text = str(error)
    return text.startswith("DataLoader worker") if isinstance(error, RuntimeError) else not text.startswith("Caught")


def _start_worker(_: int) -> None:
    for number in _IGNORED_SIGNALS:  # the parent decides when to stop, and stops its workers itself
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _as_it_is(batch: Any) -> Any:
    return batch
