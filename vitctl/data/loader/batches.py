"""Batches, whose samples depend on the order only, not on the number of processes or workers."""

import hashlib
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vitctl.data.images.decode import BadSample
from vitctl.data.images.transforms import EvalTransform, TrainTransform, augmentation_rng, open_for
from vitctl.data.loader.workers import (
    Prefetcher,
    SharedMemory,
    SmallImages,
    cause_of_death,
    is_worker_death,
    new_images,
    original_message,
    reads_whole_shards,
    start_workers,
    worker_init,
)
from vitctl.data.source.order import Lanes, SampleOrder, micro_batches, own_slots, share
from vitctl.data.source.views import Source, is_remote, label_shape, read_together, sample_key
from vitctl.errors import DataError, refuse
from vitctl.system import limits
from vitctl.system.process import HERE, release_lock
from vitctl.system.remote import GaveUpError

PADDING = -1
_PREFETCH = 2
_OPEN_IMAGES = 16  # images opened, with their files in memory, before any is transformed
_TENSORS = ("images", "labels", "weights", "samples", "positions")
# An opened image: the function that transforms it, and the memory that it holds until then, in bytes.
Opened = tuple[Callable[[], Tensor], int]


@dataclass(frozen=True)
class Batch:
    """Images and their labels.

    Args:
        images: uint8 `[B, 3, S, S]`, channels last in memory; zeros where the weight is 0.
        labels: int64 `[B]`, 0 where the weight is 0 and the label is unknown; or `[B, L]` if images may have
            several, padded with -1.
        weights: float32 `[B]`, 0 for a bad sample or padding, else 1.
        samples: int64 `[B]`, numbers in the source, -1 for padding.
        bad: sample, key and reason of each bad sample.
        neighbour: the sample at the position before the first, as the first's mixup partner. It is counted,
            and listed in `bad`, in the batch that it belongs to.
        memory: in a worker, the shared memory of the images.
        digests: hexadecimal SHA-256 of each encoded image, on request; "" for padding and unreadable images.
        checksums: int64 `[B, 2]`, on request: CRC-32 of each encoded image, 0 if unreadable, and of its
            pixels in `images`.
        positions: int64 `[B]`, in the sample order, for later random draws per image; in evaluation equal to
            `samples`.
        outage: why its images could not be fetched; all weights are then 0, and no update may use it.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor
    samples: Tensor
    bad: tuple[tuple[int, str, str], ...] = ()
    neighbour: "Batch | None" = None
    memory: SharedMemory | None = None
    digests: tuple[str, ...] = ()
    checksums: np.ndarray | None = None
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    outage: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with only the images in shared memory: each shared tensor needs a connection."""
        small = {name: getattr(self, name).numpy() for name in _TENSORS[1:]}
        values = {**vars(self), **small, "images": None, "memory": None}
        return _received, (self.memory or self.images, tuple(self.images.shape), values)

    def pin_memory(self) -> "Batch":
        """Return the same batch in page-locked memory; called by the DataLoader."""
        return replace(self, memory=None, **{name: getattr(self, name).pin_memory() for name in _TENSORS})


def _received(images: SharedMemory | Tensor, shape: tuple[int, ...], values: dict[str, Any]) -> Batch:
    if isinstance(images, SharedMemory):
        num_images, colours, height, width = shape
        images = images.tensor()[:-1].view(num_images, height, width, colours).permute(0, 3, 1, 2)
    small = {name: torch.from_numpy(values[name]) for name in _TENSORS[1:]}
    return Batch(**{**values, **small, "images": images})


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
    lanes: Lanes | None = None,
    neighbours: bool = False,
    needs_labels: bool = True,
    checksums: bool = False,
    pinned: bool = False,
    outages: bool = False,
) -> Generator[Batch, None, None]:
    """Iterate without end over the micro-batches of one process, from any step on.

    Step s trains on positions `s * batch_size` to `(s + 1) * batch_size` of the order; a process takes its
    `share` of them, cut into micro-batches. An unusable sample becomes zeros with weight 0 and is listed in
    `bad`.

    Args:
        order: over as many samples as the source has.
        transform: draws from a generator seeded by (seed, epoch, sample).
        batch_size: samples of a global batch, at least `num_processes`.
        micro_batch: samples of a yielded batch, at most.
        first_step: finished steps; starting late costs nothing.
        num_workers: loader processes; 0: this process.
        lanes: of `batch_size`; a process then takes its leaves instead of micro-batches of its `share`.
        neighbours: add to each micro-batch the sample at the position before it in the global batch, or in
            its lane; the first is preceded by the last.
        needs_labels: treat an image without a label as unusable.
        pinned: yield batches in page-locked memory, for a GPU.
        outages: if the server of remote images does not come back, yield batches with `outage` set.

    Raises:
        GaveUpError: the server of remote images does not come back; not with `outages`.
        DataError: the numbers do not fit, or a loader process was killed.
    """
    refuse(
        DataError,
        (
            batch_size < num_processes or micro_batch < 1,
            f"batch_size {batch_size}, micro-batch {micro_batch}, {num_processes} processes: "
            "every process needs a sample of each batch, and a micro-batch at least one",
        ),
        (
            order.num_samples != len(source),
            f"the order covers {order.num_samples} samples, the source has {len(source)}",
        ),
    )
    parts = (
        lanes.parts(rank, num_processes)
        if lanes
        else micro_batches(batch_size, num_processes, rank, micro_batch, getattr(order, "num_lanes", 1))
    )

    def positions() -> Iterator[list[int]]:
        for first in count(first_step * batch_size, batch_size):
            for part in parts:
                slots = (part.before, *part.slots) if neighbours else part.slots
                yield [first + slot for slot in slots]

    own = own_slots(batch_size, lanes, rank, num_processes)
    samples = _TrainSamples(
        source, order, transform, seed, needs_labels, checksums, is_remote(source), own, outages,
        SmallImages.of(source, transform),
    )  # fmt: skip
    batches = _batches(samples, positions(), num_workers, pinned)
    return (_with_neighbour(batch) for batch in batches) if neighbours else batches


def take(batches: Iterator[Batch], share: int, missed: Callable[[str], None] | None = None) -> list[Batch]:
    """Take the micro-batches of this process's share of one global batch, `share` images.

    An outage raises GaveUpError, or is passed to `missed`.
    """
    taken: list[Batch] = []
    while sum(map(len, taken)) < share:
        taken.append(next(batches))
        if outage := taken[-1].outage:
            if missed is None:
                raise GaveUpError(outage)
            missed(outage)
    return taken


def _with_neighbour(batch: Batch) -> Batch:
    """Make the first row the neighbour of the others."""
    first, others = (
        {name: getattr(batch, name)[rows] for name in _TENSORS} for rows in (slice(1), slice(1, None))
    )
    num_bad = int(first["weights"].item() == 0)
    checksums = None if batch.checksums is None else batch.checksums[1:]
    return Batch(
        **others, bad=batch.bad[num_bad:], neighbour=Batch(**first), checksums=checksums, outage=batch.outage
    )


def eval_batches(
    source: Source,
    transform: EvalTransform,
    *,
    batch_size: int,
    rank: int,
    num_processes: int,
    num_workers: int,
    whole_batches: bool = False,
    unchecked: bool = False,
    digests: bool = False,
    pinned: bool = False,
) -> Iterator[Batch]:
    """Yield the batches of one process for evaluation; over all processes, every sample occurs exactly once.

    Every process gets the same number of batches of the same size; the last are padded with samples -1 of
    weight 0.

    Args:
        batch_size: samples of a batch of one process, at most.
        whole_batches: divide batches among the processes, not samples, so that a batch holds the same images
            for any number of processes.
        unchecked: the images were not checked when their shards were written: an unusable sample stays zeros
            of weight 0, listed in `bad`.

    Raises:
        DataError: without `unchecked`, a sample is unusable, named by key and shard; or a loader process was
            killed.
    """
    longest = len(source) if whole_batches else -(-len(source) // num_processes)
    size = min(batch_size, longest)
    chosen = share(len(source), num_processes, rank)
    if whole_batches:
        num_batches = -(-len(source) // size)
        mine = share(num_batches, num_processes, rank)
        chosen = range(mine.start * size, min(mine.stop * size, len(source)))
        longest = -(-num_batches // num_processes) * size

    def positions() -> Iterator[list[int]]:
        for begin in range(chosen.start, chosen.start + longest, size):
            yield [sample if sample < chosen.stop else PADDING for sample in range(begin, begin + size)]

    samples = _EvalSamples(source, transform, digests, is_remote(source))
    for batch in _batches(samples, positions(), num_workers, pinned):
        for sample, key, reason in () if unchecked else batch.bad:
            can_pad = reason in ("truncated", "damaged") and transform.truncated == "refuse"
            pad = "; of a JPEG data.truncated = 'pad' scores what is there" if can_pad else ""
            raise DataError(
                source.location(sample),
                f"sample {key} cannot be evaluated ({reason}); a score needs every image, so fix "
                f"it or write the split without it{pad}",
            )
        yield batch


@dataclass(frozen=True)
class _TrainSamples(Dataset[Batch]):
    """A data set from positions of the order to a batch."""

    source: Source
    order: SampleOrder
    transform: TrainTransform
    seed: int
    needs_labels: bool
    checksums: bool
    is_remote: bool
    slots: range | None = None  # with lanes, those of this process
    outages: bool = False
    small: SmallImages | None = None
    known: dict[str, str] = field(default_factory=dict)  # the "outage" of this process, once a batch was read

    @cached_property
    def _ahead(self) -> Prefetcher | None:
        """The prefetcher, in a worker only: in the main process a thread would make the next fork unsafe."""
        if get_worker_info() is None or not self.order.window_size or not reads_whole_shards(self.source):
            return None
        return Prefetcher(self.source, self.order, self.slots)

    def __getitems__(self, positions: list[int]) -> Batch:
        try:
            if not self.known.get("outage"):
                return self._read(positions)
        except GaveUpError as error:
            if not self.outages:
                raise
            self.known["outage"] = str(error)
        return self._empty(positions, self.known["outage"])

    def _empty(self, positions: list[int], outage: str) -> Batch:
        """Return a batch of the same shapes without images."""
        size = len(positions)
        images, memory = new_images(size, self.transform.image_size)
        return Batch(
            images.zero_(),
            torch.zeros(size, *label_shape(self.source), dtype=torch.int64),
            torch.zeros(size),
            torch.full((size,), PADDING),
            memory=memory,
            checksums=np.zeros((size, 2), np.int64) if self.checksums else None,
            positions=torch.tensor(positions, dtype=torch.int64),
            outage=outage,
        )

    def _read(self, positions: list[int]) -> Batch:
        if self._ahead is not None:
            self._ahead.reach(positions[0])
        epochs, samples = self.order.at(np.array(positions, np.int64))
        together = read_together(self.source, samples, at_once=not self.known) if self.is_remote else {}
        self.known["outage"] = ""
        labels = self.source.labels(samples)
        num_classes = len(self.source.class_names)
        if (small := self._read_small(positions, epochs, samples, labels)) is not None:
            return small
        encoded = np.zeros(len(positions), np.int64)

        def open_sample(row: int, sample: int) -> Opened:
            highest = labels[row].max()
            if self.needs_labels and highest < 0:
                raise BadSample("no label")
            if self.needs_labels and highest >= num_classes:
                raise BadSample("no such class", f"label {highest} of {num_classes} classes")
            data = together.get(sample) or self.source.read(sample)
            if self.checksums:
                encoded[row] = zlib.crc32(data)
            picture = open_for(self.transform, data)
            rng = augmentation_rng(self.seed, int(epochs[row]), sample)
            drawn = self.transform.draw(picture.height, picture.width, rng)
            return partial(self.transform.apply, picture, drawn), picture.num_bytes

        batch = _batch(self.source, samples, labels, self.transform.image_size, open_sample)
        batch = replace(batch, positions=torch.tensor(positions, dtype=torch.int64))
        if not self.checksums:
            return batch
        pixels = [zlib.crc32(image.permute(1, 2, 0).numpy()) for image in batch.images]
        return replace(batch, checksums=np.stack((encoded, np.array(pixels, np.int64)), axis=1))

    def _read_small(
        self, positions: list[int], epochs: np.ndarray, samples: np.ndarray, labels: np.ndarray
    ) -> Batch | None:
        """Return the same batch from decoded images; None if they are not kept, or one is unusable."""
        if self.small is None or self.small.is_off:
            return None
        highest, num_classes = labels.reshape(len(labels), -1).max(1), len(self.source.class_names)
        if self.needs_labels and not 0 <= highest.min() <= highest.max() < num_classes:
            return None
        if (found := self.small.read(self.source, self.transform, samples)) is None:
            return None
        kept, files = found
        images, memory = new_images(len(samples), self.transform.image_size)
        written: list[int] = []
        rows = zip(kept, images.permute(0, 2, 3, 1).numpy(), epochs.tolist(), samples.tolist(), strict=True)
        for pixels, out, epoch, sample in rows:
            self.transform.write(pixels, augmentation_rng(self.seed, epoch, sample), out)
            written.append(zlib.crc32(out) if self.checksums else 0)
        return Batch(
            images,
            torch.from_numpy(labels),
            torch.ones(len(samples)),
            torch.from_numpy(samples),
            memory=memory,
            checksums=np.stack((files, np.array(written, np.int64)), axis=1) if self.checksums else None,
            positions=torch.tensor(positions, dtype=torch.int64),
        )


@dataclass(frozen=True)
class _EvalSamples(Dataset[Batch]):
    """A data set from samples, or padding, to a batch."""

    source: Source
    transform: EvalTransform
    digests: bool
    is_remote: bool

    def __getitems__(self, positions: list[int]) -> Batch:
        samples = np.array(positions, np.int64)
        labels = self.source.labels(np.maximum(samples, 0))
        labels[samples == PADDING] = 0
        digests = [""] * len(positions) if self.digests else []
        together = read_together(self.source, samples[samples != PADDING]) if self.is_remote else {}

        def open_sample(row: int, sample: int) -> Opened:
            data = together.get(sample) or self.source.read(sample)
            if self.digests:
                digests[row] = hashlib.sha256(data).hexdigest()
            picture = open_for(self.transform, data)
            return partial(self.transform, picture), picture.num_bytes

        batch = _batch(self.source, samples, labels, self.transform.image_size, open_sample)
        return replace(batch, digests=tuple(digests))


def _batch(
    source: Source,
    samples: np.ndarray,
    labels: np.ndarray,
    image_size: int,
    open_sample: Callable[[int, int], Opened],
) -> Batch:
    """Assemble a batch.

    Images are opened in groups and then transformed, because alternating per image loses CPU cache locality.
    """
    images, memory = new_images(len(samples), image_size)
    weights = np.zeros(len(samples), np.float32)
    bad: dict[int, str] = {}
    opened: dict[int, Callable[[], Tensor]] = {}
    num_bytes = 0  # held by the opened images

    def transform_opened() -> None:
        for row in list(opened):
            try:
                images[row] = opened.pop(row)()  # nothing refers to the picture after this line
                weights[row] = 1
            except BadSample as error:
                bad[row] = error.reason
        release_lock()

    for row in np.flatnonzero(samples != PADDING).tolist():
        try:
            opened[row], held = open_sample(row, int(samples[row]))
            num_bytes += held
        except BadSample as error:
            bad[row] = error.reason
        if len(opened) == _OPEN_IMAGES or num_bytes > limits.HELD:
            transform_opened()
            num_bytes = 0
    transform_opened()
    images[weights == 0] = 0
    for row in bad:
        labels[row] = np.clip(labels[row], 0, len(source.class_names) - 1)
    numbers = {row: int(samples[row]) for row in sorted(bad)}
    return Batch(
        images,
        torch.from_numpy(labels),
        torch.from_numpy(weights),
        torch.from_numpy(samples),
        tuple((sample, sample_key(source, sample), bad[row]) for row, sample in numbers.items()),
        memory=memory,
        positions=torch.from_numpy(samples),
    )


def _batches(
    samples: Dataset[Batch], positions: Iterator[list[int]], num_workers: int, pinned: bool
) -> Generator[Batch, None, None]:
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=positions,
        num_workers=num_workers,
        collate_fn=_identity,
        worker_init_fn=worker_init() if num_workers else None,
        pin_memory=pinned,
        prefetch_factor=_PREFETCH if num_workers else None,
        generator=torch.Generator(),  # drawing the worker seeds must not advance the global generator
    )
    batches, workers = start_workers(loader)
    loaders = [process.pid or 0 for process in workers]
    while True:
        try:
            with HERE.waiting_for_images(loaders):
                batch = next(batches)
        except StopIteration:
            return
        except DataError as error:
            message, kind = original_message(str(error)), type(error)
            error.with_traceback(None)  # the traceback refers to the loader, and would keep its workers alive
            break
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not is_worker_death(error):
                raise
            cause = cause_of_death(workers)
            raise DataError(
                f"a loader process was {cause}", fix=f"use fewer loader workers ({error})"
            ) from error
        yield batch
    del batches, loader
    raise kind(message)


def _identity(batch: Any) -> Any:
    return batch
