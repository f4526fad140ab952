"""Several sources in fixed shares, as a pure function of the position: no state, no drift, resumed by one integer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitctl.data.source.order import SampleOrder, shuffle_blocks
from vitctl.errors import DataError

BLOCK_SIZE = 4096


def quotas(weights: Sequence[float], block_size: int = BLOCK_SIZE) -> tuple[int, ...]:
    """Samples of each source in a block: the weights scaled to it, whole numbers by the largest remainder.

    Args:
        weights: one per source, each above 0; only their ratios count.
        block_size: their sum.

    Raises:
        DataError: a source is too rare to come once in a block.
    """
    exact = np.array(weights, np.float64) / sum(weights) * block_size
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: block_size - counts.sum()]] += 1
    if (counts < 1).any():
        rare = int(np.argmin(counts))
        raise DataError(
            f"weight {weights[rare]:g} is {weights[rare] / sum(weights):.2e} of the mixture, should be at least "
            f"1/{block_size}: a rarer source would never come"
        )
    return tuple(counts.tolist())


@dataclass(frozen=True)
class MixtureOrder:
    """An endless walk over several sources, numbered one after the other as by `Concat`.

    The walk is cut into blocks. Each block holds the same number of samples of a source, its quota, in an order drawn
    for that block; within its quota a source goes on along a walk of its own. So shares are exact in every block, each
    source keeps its own epochs, and any position is found in constant time.

    Args:
        walks: the order of each source.
        counts: samples of each source in a block, see `quotas`.
        seed: of the order within blocks.

    Raises:
        ValueError: there are not as many counts as walks, or a count is below 1.
    """

    walks: tuple[SampleOrder, ...]
    counts: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        if len(self.walks) != len(self.counts) or min(self.counts, default=0) < 1:
            raise ValueError(f"counts {self.counts} for {len(self.walks)} walks, should be one of at least 1 for each")

    @property
    def num_samples(self) -> int:
        """Samples in all sources together."""
        return sum(walk.num_samples for walk in self.walks)

    @property
    def stretch(self) -> int:
        """That of the source whose windows last shortest; 0 where no source has any."""
        block = sum(self.counts)
        own = [
            walk.stretch * block // count for walk, count in zip(self.walks, self.counts, strict=True) if walk.stretch
        ]
        return min(own, default=0)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell which epoch of its source, and which sample, stand at the given positions; see `SampleOrder`."""
        blocks, places = np.divmod(np.asarray(positions, np.int64), int(self._ends[-1]))
        slots = shuffle_blocks(self.seed, blocks, places, int(self._ends[-1]))
        numbers = np.searchsorted(self._ends, slots, side="right")
        epochs, samples = np.empty_like(slots), np.empty_like(slots)
        begin = 0
        for number, (walk, count) in enumerate(zip(self.walks, self.counts, strict=True)):
            chosen = numbers == number
            own = blocks[chosen] * count + slots[chosen] - (self._ends[number] - count)
            epochs[chosen], found = walk.at(own)
            samples[chosen] = found + begin
            begin += walk.num_samples
        return epochs, samples
