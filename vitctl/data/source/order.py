"""The order of samples as a pure function, so that a run resumes anywhere by knowing one integer.

Two walks with one protocol: `Order` shuffles all samples exactly, for shards that lie near; `WindowedOrder` reads
storage in long runs and shuffles within a window, for shards that lie far away or on turning disks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

MAX_SAMPLES = 2**40
_ROUNDS = 6
_MIN_BITS = 6  # a smaller domain leaves too few round functions to tell its permutations apart
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


class SampleOrder(Protocol):
    """An endless walk over a data set: every epoch visits each sample once, in an order of its own."""

    @property
    def num_samples(self) -> int:
        """Samples in the data set."""
        ...

    @property
    def stretch(self) -> int:
        """Positions that share their storage, so that knowing it ahead is worth while; 0 where any sample may come next."""
        ...

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell which epoch and which sample stand at the given positions of the walk.

        Args:
            positions: int64 `[P]`, each at least 0; position p is the (p+1)-th sample ever drawn.

        Returns:
            epochs, int64 `[P]`, and samples, int64 `[P]` in `range(num_samples)`.
        """
        ...


@dataclass(frozen=True)
class Order:
    """The exact shuffle: any order of the samples is as likely as any other.

    The walk is a keyed Feistel network over the sample numbers, walked along its cycle until it lands inside
    `range(num_samples)`. It is a bijection by construction, needs no table, and costs the same at position 0 and
    at position 10**12.

    Args:
        num_samples: samples in the data set, 1 to 2**40.
        seed: any integer; two seeds give unrelated orders.
        shuffle: False visits the samples in storage order.

    Raises:
        ValueError: `num_samples` is out of range.
    """

    num_samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        _check_num_samples(self.num_samples)

    @property
    def stretch(self) -> int:
        """None: any sample may come next."""
        return 0

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell which epoch and which sample stand at the given positions; see `SampleOrder`."""
        epochs, samples = np.divmod(np.asarray(positions, np.int64), self.num_samples)
        if self.shuffle:
            samples = _shuffle(samples, _keys(self.seed, epochs), self.num_samples)
        return epochs, samples


@dataclass(frozen=True)
class WindowedOrder:
    """A shuffle that reads storage in long runs.

    Storage is cut into blocks of neighbouring samples. Every epoch shuffles the blocks, takes them by the window, and
    shuffles the samples of a window exactly. So any stretch of one window needs no more than its blocks at hand, each a
    single run of bytes or two, and reading is sequential within them. The last block may be shorter; its turn comes at
    a random place. No table is kept: a position is found in constant time, whatever the number of shards.

    A sample can only meet those of its window in a batch; shards that hold shuffled samples make up for it.

    Args:
        num_samples: samples in the data set, 1 to 2**40.
        seed: any integer; two seeds give unrelated orders.
        block_size: neighbouring samples that are read together, at least 1; best the samples of one shard.
        window_blocks: blocks that are shuffled together, at least 1.

    Raises:
        ValueError: a number is out of range.
    """

    num_samples: int
    seed: int
    block_size: int
    window_blocks: int

    def __post_init__(self) -> None:
        _check_num_samples(self.num_samples)
        for name, value in (("block_size", self.block_size), ("window_blocks", self.window_blocks)):
            if value < 1:
                raise ValueError(f"{name} is {value}, should be at least 1")

    @property
    def stretch(self) -> int:
        """A window."""
        return self.block_size * self.window_blocks

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell which epoch and which sample stand at the given positions; see `SampleOrder`."""
        epochs, places = np.divmod(np.asarray(positions, np.int64), self.num_samples)
        return epochs, self._stored(epochs, self._shuffled_in_windows(epochs, places))

    def _shuffled_in_windows(self, epochs: np.ndarray, places: np.ndarray) -> np.ndarray:
        window_size = self.stretch
        last_window, last_size = divmod(self.num_samples, window_size)
        windows, inside = np.divmod(places, window_size)
        keys = _keys(self.seed, epochs, windows + 1)
        is_last = windows == last_window
        for chosen, size in ((~is_last, window_size), (is_last, last_size)):
            if chosen.any():
                inside[chosen] = _shuffle(inside[chosen], keys[chosen], size)
        return windows * window_size + inside

    def _stored(self, epochs: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Lay out the shuffled blocks one after the other, and tell which sample lies at each place."""
        num_blocks, short = divmod(self.num_samples, self.block_size)
        if not num_blocks:
            return places
        keys = _keys(self.seed, epochs)
        short_begins = (_mix(keys) % np.uint64(num_blocks + 1)).astype(np.int64) * self.block_size
        in_short = (places >= short_begins) & (places < short_begins + short)
        before = np.where(places >= short_begins + short, places - short, places)
        blocks, inside = np.divmod(np.where(in_short, 0, before), self.block_size)
        samples = _shuffle(blocks, keys, num_blocks) * self.block_size + inside
        return np.where(in_short, num_blocks * self.block_size + places - short_begins, samples)


def shuffle_blocks(seed: int, blocks: np.ndarray, places: np.ndarray, block_size: int) -> np.ndarray:
    """Permute the places of each block of a walk, unrelated to the orders of the same seed.

    Args:
        seed: any integer.
        blocks: int64 `[P]`, numbers of the blocks.
        places: int64 `[P]` in `range(block_size)`.
        block_size: places of a block.

    Returns:
        int64 `[P]` in `range(block_size)`, a permutation within each block.
    """
    return _shuffle(places, _keys(seed, blocks, np.full_like(blocks, -1)), block_size)


def _check_num_samples(num_samples: int) -> None:
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise ValueError(f"num_samples is {num_samples}, should be 1 to 2**40")


def _keys(seed: int, epochs: np.ndarray, windows: np.ndarray | None = None) -> np.ndarray:
    """A key of 64 bits for the shuffle of each epoch, or of each window of it."""
    keys = _mix(epochs.astype(np.uint64) * np.uint64(_GOLDEN) ^ _mix(np.array([seed & _WORD], np.uint64)))
    return keys if windows is None else _mix(keys ^ windows.astype(np.uint64) * np.uint64(_GOLDEN))


def _shuffle(values: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    """Permute `range(size)`, for each value by its own key."""
    bits = max(_MIN_BITS, (size - 1).bit_length())
    walkers = _permute(values.astype(np.uint64), keys, bits)
    outside = np.flatnonzero(walkers >= size)
    while outside.size:
        walkers[outside] = _permute(walkers[outside], keys[outside], bits)
        outside = outside[walkers[outside] >= size]
    return walkers.astype(np.int64)


def _permute(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Permute `range(2**bits)`: an unbalanced Feistel network whose halves take turns at masking each other."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    for turn in range(_ROUNDS):
        key = keys + np.uint64((turn + 1) * _GOLDEN & _WORD)
        if turn % 2:
            low = low ^ (_mix(high ^ key) & low_mask)
        else:
            high = high ^ (_mix(low ^ key) & high_mask)
    return high << np.uint64(low_bits) | low


def _mix(words: np.ndarray) -> np.ndarray:
    """Scatter every input bit over all 64 output bits (the finaliser of SplitMix64, a bijection of 64-bit words)."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ words >> np.uint64(31)
    return mixed
