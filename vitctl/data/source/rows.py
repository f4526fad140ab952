"""Numbers of selected samples that are computed instead of stored: ranges, and random subsets.

A list of shards out of 303 million images, or a random part of them, takes at most a bit an image. Each class
here stands for an int64 array: it has a length, and is indexed by a number, a slice or an array of numbers.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from vitctl.data.source.order import Order

CHUNK = 2**16  # numbers computed at a time, which fit the cache of a core
_BLOCK = 16  # bytes of the bit field that are counted together


class Computed(ABC):
    """An array of numbers that is computed on indexing."""

    is_distinct = False  # True: no number occurs twice

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at some places, int64, in the shape of `places`."""

    @abstractmethod
    def _between(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers from place `start` to `stop`."""

    def __getitem__(self, key: Any) -> Any:
        """Index as an array of one dimension; slices have a step of 1."""
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            return self._between(start, max(start, stop))
        places = np.asarray(key)
        if places.size > 1 and (np.diff(places) == 1).all():
            return self._between(int(places[0]), int(places[-1]) + 1)  # consecutive places are faster
        return self._at(places)


Rows = np.ndarray | Computed


class Ranges(Computed):
    """The numbers of several ranges, one after the other.

    Args:
        begins, ends: int64 `[R]` each; adjacent ranges are joined.
    """

    def __init__(self, begins: np.ndarray, ends: np.ndarray) -> None:
        joins = ends[:-1] == begins[1:]
        self.begins, self.ends = begins[np.append(True, ~joins)], ends[np.append(~joins, True)]
        self._stops = np.cumsum(self.ends - self.begins)
        self._shifts = self.ends - self._stops  # from a place in the array to the number there
        order = np.argsort(self.begins)
        self.is_distinct = bool((self.ends[order][:-1] <= self.begins[order][1:]).all())

    def __len__(self) -> int:
        return int(self._stops[-1])

    def _at(self, places: np.ndarray) -> np.ndarray:
        return np.asarray(places + self._shifts[np.searchsorted(self._stops, places, side="right")])

    def _between(self, start: int, stop: int) -> np.ndarray:
        first = int(np.searchsorted(self._stops, start, side="right"))
        last = int(np.searchsorted(self._stops, stop))
        counts = np.diff(np.minimum(self._stops[first : last + 1], stop), prepend=start)
        return np.asarray(np.arange(start, stop) + np.repeat(self._shifts[first : last + 1], counts))

    @classmethod
    def whole(cls, size: int) -> "Ranges":
        return cls(np.array([0]), np.array([size]))

    def without(self, numbers: np.ndarray) -> "Ranges":
        """Return the ranges without some numbers, int64 `[n]`, ascending."""
        if not len(numbers):
            return self
        begins, ends = [], []
        for begin, end in zip(self.begins, self.ends, strict=True):
            inside = numbers[slice(*np.searchsorted(numbers, (begin, end)))]
            begins.append(np.append(begin, inside + 1))
            ends.append(np.append(inside, end))
        starts, stops = np.concatenate(begins), np.concatenate(ends)
        return Ranges(starts[starts < stops], stops[starts < stops])


class RandomPart(Computed):
    """The first `count` numbers of a shuffle of `range(size)`, in ascending order, as a bit field.

    Args:
        size: numbers to draw from.
        count: 1 to `size`.
        seed: of the shuffle, see `Order`.
    """

    is_distinct = True

    def __init__(self, size: int, count: int, seed: int) -> None:
        self._bits = np.zeros((-(-size // (8 * _BLOCK)), _BLOCK), np.uint8)
        order, field = Order(size, seed), self._bits.reshape(-1)
        left_out = 2 * count > size  # mark the smaller side
        for start in range(count if left_out else 0, size if left_out else count, CHUNK):
            stop = min(start + CHUNK, size if left_out else count)
            numbers = order.at(np.arange(start, stop))[1]
            np.add.at(field, numbers >> 3, (128 >> (numbers & 7)).astype(np.uint8))
        if left_out:
            np.invert(field, out=field)
            field[-(-size // 8) :] = 0
            field[-(-size // 8) - 1] &= 0xFF << (-size % 8) & 0xFF
        counts = np.bitwise_count(self._bits.view(np.uint64)).sum(axis=1, dtype=np.int64)
        self._before = np.concatenate(([0], np.cumsum(counts)))

    def __len__(self) -> int:
        return int(self._before[-1])

    def _at(self, places: np.ndarray) -> np.ndarray:
        blocks = np.searchsorted(self._before, places, side="right") - 1
        marked = np.cumsum(np.unpackbits(self._bits[blocks], axis=-1), axis=-1, dtype=np.uint8)
        inside = (marked > (places - self._before[blocks])[..., None]).argmax(axis=-1)
        return np.asarray(blocks * (8 * _BLOCK) + inside)

    def _between(self, start: int, stop: int) -> np.ndarray:
        first = int(np.searchsorted(self._before, start, side="right")) - 1
        last = int(np.searchsorted(self._before, stop))
        numbers = np.flatnonzero(np.unpackbits(self._bits[first:last])) + first * (8 * _BLOCK)
        return numbers[start - int(self._before[first]) :][: stop - start]
