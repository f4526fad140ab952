"""The order of samples as a pure function, so that a run resumes anywhere by knowing one integer."""

from dataclasses import dataclass

import numpy as np

MAX_SAMPLES = 2**40
_ROUNDS = 6
_MIN_BITS = 6  # a smaller domain leaves too few round functions to tell its permutations apart
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Order:
    """An endless walk over a data set: every epoch visits each sample once, in an order of its own.

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
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise ValueError(f"num_samples is {self.num_samples}, should be 1 to 2**40")

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell which epoch and which sample stand at the given positions of the walk.

        Args:
            positions: int64 `[P]`, each at least 0; position p is the (p+1)-th sample ever drawn.

        Returns:
            epochs, int64 `[P]`, and samples, int64 `[P]` in `range(num_samples)`.
        """
        positions = np.asarray(positions, np.int64)
        epochs, samples = np.divmod(positions, self.num_samples)
        if self.shuffle:
            samples = self._shuffled(epochs, samples)
        return epochs, samples

    def _shuffled(self, epochs: np.ndarray, samples: np.ndarray) -> np.ndarray:
        bits = max(_MIN_BITS, (self.num_samples - 1).bit_length())
        seed_key = _mix(np.array([self.seed & _WORD], np.uint64))
        keys = _mix(epochs.astype(np.uint64) * np.uint64(_GOLDEN) ^ seed_key)
        walkers = _permute(samples.astype(np.uint64), keys, bits)
        outside = np.flatnonzero(walkers >= self.num_samples)
        while outside.size:
            walkers[outside] = _permute(walkers[outside], keys[outside], bits)
            outside = outside[walkers[outside] >= self.num_samples]
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
    return words ^ words >> np.uint64(31)
