"""Sample orders as pure functions of the position, so that a run resumes anywhere from one integer.

`Order` shuffles all samples, for local shards. `WindowedOrder` reads sequentially and shuffles within
windows, for remote shards and hard disks. `MixtureOrder` mixes several orders with fixed weights.
`BalancedOrder` draws every class equally often. `RepeatedOrder` repeats each image within the global batch.
`Lanes` are fixed parts of the global batch, each with a separate stream of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from vitctl.errors import DataError

MAX_SAMPLES = 2**40
BLOCK_SIZE = 4096  # of a mixture
_ROUNDS = 6
_MIN_BITS = 6  # with fewer bits there are too few round functions to tell the permutations apart
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


class SampleOrder(Protocol):
    """An infinite sequence over a data set: every epoch visits each sample once, in a new order."""

    @property
    def num_samples(self) -> int:
        """Samples in the data set."""

    @property
    def window_size(self) -> int:
        """Positions that read the same few shards, which can be prefetched; 0 without windows."""

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch and sample at the given positions of the sequence.

        Args:
            positions: int64 `[P]`, each at least 0.

        Returns:
            epochs, int64 `[P]`, and samples, int64 `[P]` in `range(num_samples)`.
        """


@dataclass(frozen=True)
class Order:
    """A full shuffle: every order of the samples is equally likely.

    A keyed Feistel network permutes the sample numbers, with cycle walking until the result is inside
    `range(num_samples)`. It is a bijection by construction, needs no table, and takes the same time at
    position 0 and at position 10**12.

    Args:
        num_samples: 1 to 2**40.
        seed: any integer; two seeds give independent orders.
        shuffle: False visits the samples in storage order.

    Raises:
        ValueError: `num_samples` is out of range.
    """

    num_samples: int
    seed: int
    shuffle: bool = True
    window_size = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise ValueError(f"num_samples is {self.num_samples}, should be 1 to 2**40")

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, samples = np.divmod(np.asarray(positions, np.int64), self.num_samples)
        if self.shuffle:
            samples = _shuffle(samples, _keys(self.seed, epochs), self.num_samples)
        return epochs, samples


@dataclass(frozen=True)
class WindowedOrder:
    """A shuffle within windows, with sequential reads.

    The samples are divided into blocks of consecutive samples. Every epoch shuffles the blocks, groups them
    into windows, and fully shuffles the samples of each window. So a window needs only its own blocks, and
    each block is read sequentially. The last block may be shorter; its position in an epoch is random. A
    position is computed in constant time, without a table, for any number of shards.

    Only samples of the same window can share a batch; shards with shuffled samples compensate for that.

    Args:
        num_samples: 1 to 2**40.
        seed: any integer; two seeds give independent orders.
        block_size: consecutive samples in a block, at least 1; ideally the samples of one shard.
        window_blocks: blocks in a window, at least 1.
    """

    num_samples: int
    seed: int
    block_size: int
    window_blocks: int

    @property
    def window_size(self) -> int:
        return self.block_size * self.window_blocks

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, offsets = np.divmod(np.asarray(positions, np.int64), self.num_samples)
        return epochs, self._stored(epochs, self._shuffled_in_windows(epochs, offsets))

    def _shuffled_in_windows(self, epochs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        window_size = self.window_size
        last_window, last_size = divmod(self.num_samples, window_size)
        windows, inside = np.divmod(offsets, window_size)
        keys = _keys(self.seed, epochs, windows + 1)
        is_last = windows == last_window
        for chosen, size in ((~is_last, window_size), (is_last, last_size)):
            if chosen.any():
                inside[chosen] = _shuffle(inside[chosen], keys[chosen], size)
        return windows * window_size + inside

    def _stored(self, epochs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the sample at each offset in the concatenation of the shuffled blocks."""
        num_blocks, short = divmod(self.num_samples, self.block_size)
        if not num_blocks:
            return offsets
        keys = _keys(self.seed, epochs)
        short_begins = (mix_words(keys) % np.uint64(num_blocks + 1)).astype(np.int64) * self.block_size
        in_short = (offsets >= short_begins) & (offsets < short_begins + short)
        before = np.where(offsets >= short_begins + short, offsets - short, offsets)
        blocks, inside = np.divmod(np.where(in_short, 0, before), self.block_size)
        samples = _shuffle(blocks, keys, num_blocks) * self.block_size + inside
        return np.where(in_short, num_blocks * self.block_size + offsets - short_begins, samples)


def quotas(weights: Sequence[float], block_size: int = BLOCK_SIZE) -> tuple[int, ...]:
    """Return the samples of each source in a block, rounded by the largest remainder method.

    Args:
        weights: one per source, each above 0; only their ratios count.
        block_size: sum of the result.

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
            f"at least 1/{block_size}: a rarer source would never be sampled"
        )
    return tuple(counts.tolist())


@dataclass(frozen=True)
class MixtureOrder:
    """An infinite sequence of samples of several sources, numbered as in `views.concat`.

    The sequence is divided into blocks. Each block holds a fixed number of samples of each source, its quota,
    shuffled within the block; the samples of a source come in that source's order. So the mixture is exact in
    every block, each source has separate epochs, and any position is computed in constant time.

    Args:
        orders: one per source.
        counts: samples of each source in a block, see `quotas`.
    """

    orders: tuple[SampleOrder, ...]
    counts: tuple[int, ...]
    seed: int

    @property
    def num_samples(self) -> int:
        return sum(order.num_samples for order in self.orders)

    @property
    def window_size(self) -> int:
        """The smallest window of the sources, in positions of the mixture; 0 if no source has windows."""
        block = sum(self.counts)
        windows = [
            order.window_size * block // count
            for order, count in zip(self.orders, self.counts, strict=True)
            if order.window_size
        ]
        return min(windows, default=0)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch (of the sample's source) and sample at the given positions; see `SampleOrder`."""
        blocks, offsets = np.divmod(np.asarray(positions, np.int64), int(self._ends[-1]))
        slots = shuffle_blocks(self.seed, blocks, offsets, int(self._ends[-1]))
        numbers = np.searchsorted(self._ends, slots, side="right")
        epochs, samples = np.empty_like(slots), np.empty_like(slots)
        begin = 0
        for number, (order, count) in enumerate(zip(self.orders, self.counts, strict=True)):
            chosen = numbers == number
            positions_of_order = blocks[chosen] * count + slots[chosen] - (self._ends[number] - count)
            epochs[chosen], inside = order.at(positions_of_order)
            samples[chosen] = inside + begin
            begin += order.num_samples
        return epochs, samples


@dataclass(frozen=True, eq=False)
class BalancedOrder:
    """An infinite sequence in which every class is drawn equally often.

    The sequence is divided into blocks of K positions. Each block holds every class once, shuffled within the
    block. Each class has a separate order, which visits every sample of the class once before any again, and
    is reshuffled each time. So an epoch, n positions, draws n / K samples of each class. Any position is
    computed without the positions before it; the only table is of the samples by class.

    Args:
        samples: sorted by class, int64 `[n]`.
        counts: samples of each class, int64 `[K]`, each at least 1.
    """

    samples: np.ndarray
    counts: np.ndarray
    seed: int
    window_size = 0

    @staticmethod
    def of(labels: np.ndarray, num_classes: int, seed: int) -> "BalancedOrder":
        """Return the order over samples with the given labels, int64 `[n]`, 0 to K - 1."""
        by_class = np.argsort(labels, kind="stable")
        return BalancedOrder(by_class, np.bincount(labels, minlength=num_classes), seed)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch (of the sample's class) and sample at the given positions; see `SampleOrder`."""
        blocks, offsets = np.divmod(np.asarray(positions, np.int64), len(self.counts))
        classes = shuffle_blocks(self.seed, blocks, offsets, len(self.counts))
        epochs, samples = np.empty_like(classes), np.empty_like(classes)
        begins = np.cumsum(self.counts) - self.counts
        for label in np.unique(classes).tolist():
            chosen = np.flatnonzero(classes == label)
            order = Order(int(self.counts[label]), self.seed + (label + 1) * _GOLDEN)
            epochs[chosen], inside = order.at(blocks[chosen])
            samples[chosen] = self.samples[begins[label] + inside]
        return epochs, samples


@dataclass(frozen=True)
class RepeatedOrder:
    """Repeated augmentation of another order: every image occurs `repeats` times in a row.

    An epoch has as many images as before, so fewer different ones. Within each global batch the copies are
    dealt out: the first copy of every image, then the second, ... So MixUp mixes different images, and the
    copies of an image go to different processes.

    Args:
        order: over all samples; its next epoch draws other images.

    Source: DeiT's RASampler (arXiv 2012.12877), after Hoffer et al. 2020 (arXiv 1901.09335)
    """

    order: SampleOrder
    repeats: int
    batch_size: int
    window_size = 0

    @property
    def num_samples(self) -> int:
        return self.order.num_samples

    @cached_property
    def _dealt(self) -> np.ndarray:
        return np.argsort(np.arange(self.batch_size) % self.repeats, kind="stable")

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a number unique to each epoch and copy, and the sample; see `SampleOrder`."""
        steps, slots = np.divmod(np.asarray(positions, np.int64), self.batch_size)
        epochs, offsets = np.divmod(steps * self.batch_size + self._dealt[slots], self.num_samples)
        groups, copies = np.divmod(offsets, self.repeats)
        own, samples = self.order.at(epochs * self.num_samples + groups)
        return own * self.repeats + copies, samples


def shuffle_blocks(seed: int, blocks: np.ndarray, offsets: np.ndarray, block_size: int) -> np.ndarray:
    """Permute the offsets within each block of a sequence, independent of the orders with the same seed.

    Args:
        blocks: block numbers, int64 `[P]`.
        offsets: int64 `[P]` in `range(block_size)`.
    """
    return _shuffle(offsets, _keys(seed, blocks, np.full_like(blocks, -1)), block_size)


def _keys(seed: int, epochs: np.ndarray, windows: np.ndarray | None = None) -> np.ndarray:
    """Return a 64-bit shuffle key for each epoch, or for each window."""
    keys = mix_words(
        epochs.astype(np.uint64) * np.uint64(_GOLDEN) ^ mix_words(np.array([seed & _WORD], np.uint64))
    )
    return keys if windows is None else mix_words(keys ^ windows.astype(np.uint64) * np.uint64(_GOLDEN))


def _shuffle(values: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    """Permute `range(size)`, for each value by the key at the same index."""
    bits = max(_MIN_BITS, (size - 1).bit_length())
    walkers = _permute(values.astype(np.uint64), keys, bits)
    outside = np.flatnonzero(walkers >= size)
    while outside.size:
        walkers[outside] = _permute(walkers[outside], keys[outside], bits)
        outside = outside[walkers[outside] >= size]
    return walkers.astype(np.int64)


def _permute(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Permute `range(2**bits)` with an unbalanced Feistel network: its halves mask each other in turn."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    for round_ in range(_ROUNDS):
        key = keys + np.uint64((round_ + 1) * _GOLDEN & _WORD)
        if round_ % 2:
            low = low ^ (mix_words(high ^ key) & low_mask)
        else:
            high = high ^ (mix_words(low ^ key) & high_mask)
    return high << np.uint64(low_bits) | low


def mix_words(words: np.ndarray) -> np.ndarray:
    """Mix each uint64 word bijectively, every bit into all 64 (the finaliser of SplitMix64)."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ words >> np.uint64(31)
    return mixed


# Lanes, and leaves, the passes that a lane is cut into. A leaf's images, random draws and place in the sum of
# gradients follow from its number, whichever process computes it. So a run has the same bytes on any number
# of processes (see vitctl/engine/lanes.py), and a machine that owns whole lanes reads only their samples.


class Part(NamedTuple):
    """Consecutive slots of the global batch that go through the model together.

    `before` is the slot of the first image's mixing partner.
    """

    slots: range
    before: int


def share(batch_size: int, num_parts: int, part: int) -> range:
    """Return the slots of one of several contiguous parts of a batch; sizes differ by at most one."""
    return range(batch_size * part // num_parts, batch_size * (part + 1) // num_parts)


def micro_batches(
    batch_size: int, num_processes: int, rank: int, size: int, num_lanes: int = 1
) -> tuple[Part, ...]:
    """Cut a process's share of the global batch into parts of `size` images.

    The mixing partner of a lane's first image is the lane's last: another lane reads other shards.
    """
    own = share(batch_size, num_processes, rank)
    lanes = [share(batch_size, num_lanes, lane) for lane in range(num_lanes)]
    firsts = own[::size]
    return tuple(
        _part(own, first, size, lanes[((first + 1) * num_lanes - 1) // batch_size]) for first in firsts
    )


def _part(slots: range, first: int, size: int, lane: range) -> Part:
    """Return up to `size` slots from the first on, whose mixing partner is the slot before it in its lane."""
    return Part(range(first, min(first + size, slots.stop)), lane[(first - lane.start - 1) % len(lane)])


def lanes_read(num_lanes: int, num_nodes: int) -> list[int]:
    """Return how many lanes each node reads, some of them partially."""
    nodes = range(num_nodes)
    return [-(-(node + 1) * num_lanes // num_nodes) - node * num_lanes // num_nodes for node in nodes]


Tree = int | tuple["Tree", "Tree"]  # the number of a leaf, or two subtrees


def binary_tree(nodes: Sequence[Tree]) -> Tree:
    """Build a binary tree over at least one node, in order.

    The left half is the largest power of two that leaves something for the right.
    """
    if len(nodes) == 1:
        return nodes[0]
    middle = 1 << (len(nodes) - 1).bit_length() - 1
    return binary_tree(nodes[:middle]), binary_tree(nodes[middle:])


def leaves(tree: Tree) -> range:
    if isinstance(tree, int):
        return range(tree, tree + 1)
    return range(leaves(tree[0]).start, leaves(tree[1]).stop)


def subtrees(tree: Tree, own: range) -> list[Tree]:
    """Return the largest subtrees whose leaves are all in `own`, in order."""
    inside = leaves(tree)
    if inside.stop <= own.start or own.stop <= inside.start:
        return []
    if own.start <= inside.start and inside.stop <= own.stop:
        return [tree]
    assert not isinstance(tree, int)
    return subtrees(tree[0], own) + subtrees(tree[1], own)


@dataclass(frozen=True)
class Lanes:
    """The division of the global batch into lanes, and of each lane into leaves.

    Args:
        num_lanes: contiguous parts of the batch; their sizes differ by at most one.
        leaf_images: images of a leaf, at most; the last leaf of a lane may have fewer.

    Raises:
        DataError: there are more lanes than images, or none.
    """

    batch_size: int
    num_lanes: int
    leaf_images: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_lanes <= self.batch_size or self.leaf_images < 1:
            raise DataError(
                f"{self.num_lanes} lanes with leaves of {self.leaf_images} for a batch of {self.batch_size} "
                f"images: every lane "
                "needs an image of each batch, and a leaf at least one"
            )

    def lane(self, number: int) -> range:
        return share(self.batch_size, self.num_lanes, number)

    @cached_property
    def leaves(self) -> tuple[tuple[Part, ...], ...]:
        """The leaves of each lane. Mixing partners stay in the lane: its first image mixes with its last."""
        lanes = map(self.lane, range(self.num_lanes))
        size = self.leaf_images
        return tuple(tuple(_part(lane, first, size, lane) for first in lane[::size]) for lane in lanes)

    @cached_property
    def num_leaves(self) -> int:
        """Leaves of the global batch, which is also the largest number of processes."""
        return sum(map(len, self.leaves))

    @cached_property
    def tree(self) -> Tree:
        """The order of additions: one tree over the leaves of each lane, joined by a tree over the lanes."""
        numbers = iter(range(self.num_leaves))
        return binary_tree([binary_tree([next(numbers) for _ in lane]) for lane in self.leaves])

    def most_held(self, rank: int, num_processes: int) -> int:
        """Return how many sums of finished subtrees a process holds at most while it computes a leaf."""
        nodes = subtrees(self.tree, self.owned(rank, num_processes))
        return max(number + _held(node) for number, node in enumerate(nodes))

    @property
    def largest_leaf(self) -> int:
        return max(len(part.slots) for lane in self.leaves for part in lane)

    def owned(self, rank: int, num_processes: int) -> range:
        """Return the numbers of the leaves that a process computes.

        These are whole lanes, unless there are more processes than lanes.

        Raises:
            DataError: there are more processes than leaves.
        """
        if num_processes > self.num_leaves:
            raise DataError(
                f"{num_processes} processes for {self.num_leaves} leaves: every process needs one"
            )
        if num_processes > self.num_lanes:
            return share(self.num_leaves, num_processes, rank)
        lanes = share(self.num_lanes, num_processes, rank)
        firsts = np.cumsum([0, *map(len, self.leaves)]).tolist()
        return range(firsts[lanes.start], firsts[lanes.stop])

    def parts(self, rank: int, num_processes: int) -> tuple[Part, ...]:
        own = self.owned(rank, num_processes)
        return tuple(part for lane in self.leaves for part in lane)[own.start : own.stop]


def _held(tree: Tree) -> int:
    """Return how many sums of finished subtrees are held at most while a leaf of the tree is computed."""
    return 0 if isinstance(tree, int) else max(_held(tree[0]), 1 + _held(tree[1]))


def own_slots(batch_size: int, lanes: Lanes | None, rank: int, num_processes: int) -> range:
    """Return the slots of a global batch that a process serves, with or without lanes."""
    if lanes is None:
        return share(batch_size, num_processes, rank)
    parts = lanes.parts(rank, num_processes)
    return range(parts[0].slots.start, parts[-1].slots.stop)


@dataclass(frozen=True)
class LaneOrder:
    """Another order read by lanes: in every epoch each lane walks through a contiguous run of it.

    With `WindowedOrder` inside, each lane has separate shards and windows; only those at the two ends of its
    run are shared. Position p of the sequence is slot p % batch_size of step p // batch_size. An epoch has
    the same positions as in the inner order, so it visits each sample once, with any batch size. A lane's run
    is as long as its number of slots in that epoch.
    """

    order: SampleOrder
    batch_size: int
    num_lanes: int

    @property
    def num_samples(self) -> int:
        return self.order.num_samples

    @property
    def window_size(self) -> int:
        """Positions in which every lane reads about one window of the inner order."""
        return self.order.window_size * self.num_lanes

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = np.asarray(positions, np.int64)
        epochs, lanes = positions // self.num_samples, self.lane(positions)
        start, stop = (
            self.batch_size * lanes // self.num_lanes,
            self.batch_size * (lanes + 1) // self.num_lanes,
        )
        first, last = epochs * self.num_samples, (epochs + 1) * self.num_samples
        run = self._slots_before(start, last) - self._slots_before(start, first)
        done = self._of_lane(start, stop, positions) - self._of_lane(start, stop, first)
        return self.order.at(first + run + done)

    def lane(self, positions: np.ndarray) -> np.ndarray:
        """Return the lane that serves each position."""
        return np.asarray((positions % self.batch_size + 1) * self.num_lanes - 1) // self.batch_size

    def _slots_before(self, bound: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Count the positions before `position` whose slots are below `bound`."""
        batches, rest = np.divmod(position, self.batch_size)
        return np.asarray(batches * bound + np.minimum(rest, bound))

    def _of_lane(self, start: np.ndarray, stop: np.ndarray, position: np.ndarray) -> np.ndarray:
        return np.asarray(self._slots_before(stop, position) - self._slots_before(start, position))
