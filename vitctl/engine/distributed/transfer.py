"""Batches on their way to a GPU: the next one is copied while the one before is computed on, and the host
waits for neither.

Copies go by a stream of their own, from pinned memory into one of two buffers, so that at most two batches
are on the device. The copying stream waits until the computation is done with a buffer, the computing stream
waits until the copy into it is complete:

    host:     send 0 | send 1, use 0 | send 2, use 1 | ...
    copying:  into A   into B          after use 0: into A
    computing:         after copy 0: A  after copy 1: B
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitctl.data.loader.batches import Batch

_cuda: Any = torch.cuda  # not all of it has types


@dataclass(frozen=True)
class SentBatch(Batch):
    """A batch whose numbers are on the device as well, until the next one is asked for; what is on the host
    stays as it was.
    """

    on_device: Batch | None = None


def given(batch: Batch) -> Batch:
    """The batch as a network is given it: its images, labels and weights on the device, where a `Transfer`
    has sent them there.
    """
    return (isinstance(batch, SentBatch) and batch.on_device) or batch


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on the device, copied without waiting for the device."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(eq=False)
class _Buffer:
    """Memory of a batch on the device, and the events after which it may be read, and written again."""

    tensors: list[Tensor]
    free: Any
    ready: Any = None


class Transfer:
    """Sends batches to a device ahead of their use; kept by a loop, because its two buffers are.

    Args:
        device: that computes.
        copies: whether there is anything to copy; None: unless the CPU computes.
    """

    def __init__(self, device: torch.device, *, copies: bool | None = None) -> None:
        self._device = device
        self._copies = device.type == "cuda" if copies is None else copies
        self._stream: Any = None
        self._buffers: dict[tuple[Any, ...], deque[_Buffer]] = {}
        self._taken: list[_Buffer] = []  # sent, and not free again

    @contextmanager
    def ahead(self, batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
        """Within the block an iterator over the batches, each on the device when it comes; see `given`.

        One batch is taken from `batches` before it is asked for. The block may end before the last batch.
        """
        if not self._copies:
            yield iter(batches)
            return
        assert not self._taken, "one loop at a time uses the buffers"
        try:
            yield self._coming(batches)
        finally:
            for buffer in self._taken:
                _cuda.current_stream(self._device).wait_event(buffer.ready)
                self._free(buffer)
            self._taken.clear()

    def _coming(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        waiting: list[tuple[SentBatch, _Buffer]] = []
        for batch in batches:
            waiting.append(self._send(batch))
            if len(waiting) == 2:
                yield from self._used(*waiting.pop(0))
        for pair in waiting:
            yield from self._used(*pair)

    def _used(self, batch: SentBatch, buffer: _Buffer) -> Iterator[Batch]:
        _cuda.current_stream(self._device).wait_event(buffer.ready)
        yield batch
        self._free(buffer)
        self._taken.remove(buffer)

    def _free(self, buffer: _Buffer) -> None:
        buffer.free = _cuda.current_stream(self._device).record_event()

    def _send(self, batch: Batch) -> tuple[SentBatch, _Buffer]:
        parts = [batch] if batch.neighbour is None else [batch, batch.neighbour]
        tensors = [_pinned(tensor) for part in parts for tensor in (part.images, part.labels, part.weights)]
        buffer = self._buffer(tensors)
        self._stream.wait_event(buffer.free)
        with _cuda.stream(self._stream):
            for own, tensor in zip(buffer.tensors, tensors, strict=True):
                own.copy_(tensor, non_blocking=True)
        buffer.ready = self._stream.record_event()
        self._taken.append(buffer)
        on_device = _of(buffer.tensors[:3], batch.samples)
        if batch.neighbour is not None:
            on_device = replace(on_device, neighbour=_of(buffer.tensors[3:], batch.neighbour.samples))
        return SentBatch(**vars(batch), on_device=on_device), buffer

    def _buffer(self, tensors: list[Tensor]) -> _Buffer:
        """The one of two for batches of these shapes that was used longest ago.

        Its memory belongs to the computing stream.
        """
        if self._stream is None:
            self._stream = _cuda.Stream(self._device)
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        ring = self._buffers.setdefault(key, deque())
        if len(ring) < 2:
            made = [torch.empty_like(tensor, device=self._device) for tensor in tensors]
            ring.append(_Buffer(made, _cuda.current_stream(self._device).record_event()))
        else:
            ring.rotate(-1)
        return ring[-1]


def _of(tensors: list[Tensor], samples: Tensor) -> Batch:
    images, labels, weights = tensors
    return Batch(images, labels, weights, samples)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()
