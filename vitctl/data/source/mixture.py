"""A mixture of sources with fixed weights, as a pure function of the position: no state, resumed from one
integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitctl.data.source.order import SampleOrder, shuffle_blocks
from vitctl.errors import DataError

BLOCK_SIZE = 4096


def quotas(weights: Sequence[float], block_size: int = BLOCK_SIZE) -> tuple[int, ...]:
    """Samples of each source in a block: the weights scaled to the block size, rounded by the largest
    remainder method.

    Args:
        weights: one per source, each above 0; only their ratios count.
        block_size: their sum.

    Raises:
        DataError: a source is too rare to occur in a block.
    """
    exact = np.array(weights, np.float64) / sum(weights) * block_size
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: block_size - counts.sum()]] += 1
    if (counts < 1).any():
        rare = int(np.argmin(counts))
        raise DataError(
            f"weight {weights[rare]:g} is {weights[rare] / sum(weights):.2e} of the mixture, should be "
            f"at least "
            f"1/{block_size}: a rarer source would never be sampled"
        )
    return tuple(counts.tolist())


@dataclass(frozen=True)
class MixtureOrder:
    """An infinite sequence of samples of several sources, numbered as in `Concat`.

    The sequence is divided into blocks. Each block holds a fixed number of samples of each source, its quota,
    in an order shuffled for that block; the samples of a source come in its own order. So the mixture is
    exact in every block, each source has its own epochs, and any position is computed in constant time.

    Args:
        orders: the order of each source.
        counts: samples of each source in a block, see `quotas`.
        seed: of the order within blocks.

    Raises:
        ValueError: the number of counts differs from the number of orders, or a count is below 1.
    """

    orders: tuple[SampleOrder, ...]
    counts: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        if len(self.orders) != len(self.counts) or min(self.counts, default=0) < 1:
            raise ValueError(
                f"counts {self.counts} for {len(self.orders)} orders, should be one of at least 1 for each"
            )

    @property
    def num_samples(self) -> int:
        """Samples in all sources."""
        return sum(order.num_samples for order in self.orders)

    @property
    def window_size(self) -> int:
        """The smallest window of the sources, in positions of the mixture; 0 where no source has windows."""
        block = sum(self.counts)
        own = [
            order.window_size * block // count
            for order, count in zip(self.orders, self.counts, strict=True)
            if order.window_size
        ]
        return min(own, default=0)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch (of its source) and sample at the given positions; see `SampleOrder`."""
        blocks, offsets = np.divmod(np.asarray(positions, np.int64), int(self._ends[-1]))
        slots = shuffle_blocks(self.seed, blocks, offsets, int(self._ends[-1]))
        numbers = np.searchsorted(self._ends, slots, side="right")
        epochs, samples = np.empty_like(slots), np.empty_like(slots)
        begin = 0
        for number, (order, count) in enumerate(zip(self.orders, self.counts, strict=True)):
            chosen = numbers == number
            own = blocks[chosen] * count + slots[chosen] - (self._ends[number] - count)
            epochs[chosen], found = order.at(own)
            samples[chosen] = found + begin
            begin += order.num_samples
        return epochs, samples
