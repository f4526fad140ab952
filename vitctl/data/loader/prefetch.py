"""Remote shards fetched before they are needed, so that a new window does not begin with waiting."""

import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from zlib import crc32

import numpy as np

from vitctl.data.source.order import SampleOrder
from vitctl.data.source.provenance import split_sources
from vitctl.data.source.read import Source
from vitctl.errors import DataError

_PIECES, _PROBES = 4, 128  # a stretch is looked at in so many pieces, a piece at so many of its positions
_RECENT_PIECES = 2 * _PIECES


def reads_whole_shards(source: Source) -> bool:
    """Whether reading a sample brings its whole shard from afar."""
    return any(split.index.is_remote and split.cache is not None for split in split_sources(source))


class ReadAhead:
    """A thread that reads one sample of every shard that an order will soon come to, which brings it into the cache.

    It only ever makes the cache warm: what it cannot fetch is met again, and told, by who needs it.

    Args:
        source: of which samples are read; it may be shared between threads.
        order: whose `stretch` is how far ahead it looks.
        part: number of this thread among those, in other processes, that share the work.
        num_parts: how many there are.
    """

    def __init__(self, source: Source, order: SampleOrder, part: int, num_parts: int) -> None:
        self._source, self._order, self._part, self._num_parts = source, order, part, num_parts
        self._piece = max(1, order.stretch // _PIECES)
        self._asked = 0
        self._pieces: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._work, name="read ahead", daemon=True).start()

    def reach(self, position: int) -> None:
        """Tell that this position of the order is being read."""
        self._asked = max(self._asked, position)
        while self._asked < position + self._order.stretch:
            self._pieces.put(self._asked)
            self._asked += self._piece

    def _work(self) -> None:
        recent: deque[set[str]] = deque(maxlen=_RECENT_PIECES)
        while True:
            begin = self._pieces.get()
            positions = np.arange(begin, begin + self._piece, max(1, self._piece // _PROBES))
            ours = {self._source.location(sample): sample for sample in self._order.at(positions)[1].tolist()}
            ours = {
                place: sample for place, sample in ours.items() if crc32(place.encode()) % self._num_parts == self._part
            }
            for place, sample in ours.items():
                if not any(place in places for places in recent):
                    with suppress(DataError):
                        self._source.read(sample)
            recent.append(set(ours))
