"""Prefetches remote shards into the cache, so that training does not wait at the start of a window."""

import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from zlib import crc32

import numpy as np

from vitctl.data.loader.lanes import LaneOrder
from vitctl.data.source.order import SampleOrder
from vitctl.data.source.views import Source, split_sources
from vitctl.errors import DataError

_CHUNKS, _PROBES = 4, 128  # a window is prefetched in chunks; in each chunk so many positions are checked
_RECENT_CHUNKS = 2 * _CHUNKS


def reads_whole_shards(source: Source) -> bool:
    """Whether reading a sample fetches its whole remote shard."""
    return any(split.index.is_remote and split.cache is not None for split in split_sources(source))


class Prefetcher:
    """A thread that prefetches the shards of the next window: it reads one sample of each, which fetches the
    shard into the cache.

    Errors are ignored here: the loader raises them when it reads the sample.

    Args:
        source: to read from; it is shared between threads.
        order: whose `window_size` is the prefetch distance.
        part: number of this worker; the workers share the shards.
        num_parts: number of workers.
        slots: with lanes, those of the global batch that this process serves; None: all slots read the same
            window.
    """

    def __init__(
        self, source: Source, order: SampleOrder, part: int, num_parts: int, slots: range | None = None
    ) -> None:
        self._source, self._order, self._part, self._num_parts = source, order, part, num_parts
        self._slots = slots
        self._chunk = max(1, order.window_size // _CHUNKS)
        self._requested = 0
        self._chunks: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def reach(self, position: int) -> None:
        """Report that the loader has reached this position of the order."""
        self._requested = max(self._requested, position)
        while self._requested < position + self._order.window_size:
            self._chunks.put(self._requested)
            self._requested += self._chunk

    def _work(self) -> None:
        recent: deque[set[str]] = deque(maxlen=_RECENT_CHUNKS)
        while True:
            begin = self._chunks.get()
            positions = self._probed(np.arange(begin, begin + self._chunk))
            ours = {self._source.location(sample): sample for sample in self._order.at(positions)[1].tolist()}
            ours = {
                shard: sample
                for shard, sample in ours.items()
                if crc32(shard.encode()) % self._num_parts == self._part
            }
            for shard, sample in ours.items():
                if not any(shard in shards for shards in recent):
                    with suppress(DataError):
                        self._source.read(sample)
            recent.append(set(ours))

    def _probed(self, positions: np.ndarray) -> np.ndarray:
        """The positions of a chunk at which shards are looked up: _PROBES of them in each window that is read
        at a time.
        """
        if self._slots is None or not isinstance(self._order, LaneOrder):
            return _spread(positions)
        own = positions[np.isin(positions % self._order.batch_size, self._slots)]
        lanes = self._order.lane(own)
        return np.concatenate([_spread(own[lanes == lane]) for lane in np.unique(lanes)] or [own])


def _spread(positions: np.ndarray) -> np.ndarray:
    return positions[:: max(1, len(positions) // _PROBES)]
