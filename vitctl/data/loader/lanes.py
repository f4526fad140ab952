"""Lanes: fixed parts of the global batch, each with a stream of samples of its own; and leaves, the passes
that a lane is cut into.

Who computes a leaf changes nothing: its images, its random draws and its place in the sum of gradients follow
from its number. So a run has the same bytes on any number of processes (see
vitctl/engine/step.py), and a machine that owns whole lanes reads their samples alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vitctl.data.source.order import SampleOrder
from vitctl.errors import DataError


class Part(NamedTuple):
    """A run of slots of the global batch that goes through the model together, and the slot of its first
    mixing partner.
    """

    slots: range
    before: int


def share(batch_size: int, num_parts: int, part: int) -> range:
    """The slots of one of several contiguous parts of a batch; sizes differ by at most one."""
    return range(batch_size * part // num_parts, batch_size * (part + 1) // num_parts)


def micro_batches(batch_size: int, num_processes: int, rank: int, size: int) -> tuple[Part, ...]:
    """A process's share of the global batch in parts of `size` images, without lanes; the partner of the
    first image is the last.
    """
    own = share(batch_size, num_processes, rank)
    parts = (range(first, min(first + size, own.stop)) for first in range(own.start, own.stop, size))
    return tuple(Part(slots, (slots.start - 1) % batch_size) for slots in parts)


Tree = int | tuple["Tree", "Tree"]  # the number of a leaf, or two subtrees


def binary_tree(nodes: Sequence[Tree]) -> Tree:
    """A binary tree over at least one node, in order; the left half is the largest power of two that leaves
    something.
    """
    if len(nodes) == 1:
        return nodes[0]
    middle = 1 << (len(nodes) - 1).bit_length() - 1
    return binary_tree(nodes[:middle]), binary_tree(nodes[middle:])


def leaves(tree: Tree) -> range:
    """Return the numbers of its leaves."""
    if isinstance(tree, int):
        return range(tree, tree + 1)
    return range(leaves(tree[0]).start, leaves(tree[1]).stop)


def subtrees(tree: Tree, own: range) -> list[Tree]:
    """The largest subtrees with leaves in `own` only, in order."""
    inside = leaves(tree)
    if inside.stop <= own.start or own.stop <= inside.start:
        return []
    if own.start <= inside.start and inside.stop <= own.stop:
        return [tree]
    assert not isinstance(tree, int)
    return subtrees(tree[0], own) + subtrees(tree[1], own)


@dataclass(frozen=True)
class Lanes:
    """How the global batch is cut into lanes, and each lane into leaves.

    Args:
        batch_size: images of the global batch.
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
        """The slots of a lane."""
        return share(self.batch_size, self.num_lanes, number)

    @cached_property
    def leaves(self) -> tuple[tuple[Part, ...], ...]:
        """The leaves of each lane.

        Mixing partners stay in the lane: the partner of its first image is its last.
        """
        lanes = map(self.lane, range(self.num_lanes))
        return tuple(
            tuple(
                Part(
                    range(first, min(first + self.leaf_images, lane.stop)),
                    lane[(first - lane.start - 1) % len(lane)],
                )
                for first in range(lane.start, lane.stop, self.leaf_images)
            )
            for lane in lanes
        )

    @cached_property
    def num_leaves(self) -> int:
        """Leaves of the global batch: the largest number of processes."""
        return sum(map(len, self.leaves))

    @cached_property
    def tree(self) -> Tree:
        """The order of additions: a tree over the leaves of each lane, and over these one over the lanes."""
        numbers = iter(range(self.num_leaves))
        return binary_tree([binary_tree([next(numbers) for _ in lane]) for lane in self.leaves])

    def most_held(self, rank: int, num_processes: int) -> int:
        """Sums of finished subtrees that a process keeps at most while it computes a leaf."""
        nodes = subtrees(self.tree, self.owned(rank, num_processes))
        return max(number + _held(node) for number, node in enumerate(nodes))

    @property
    def largest_leaf(self) -> int:
        """Images of the largest leaf."""
        return max(len(part.slots) for lane in self.leaves for part in lane)

    def owned(self, rank: int, num_processes: int) -> range:
        """Numbers of the leaves that a process computes: of whole lanes, unless there are more processes than
        lanes.

        Raises:
            DataError: there are more processes than leaves.
        """
        if num_processes > self.num_leaves:
            raise DataError(
                f"{num_processes} processes for {self.num_leaves} leaves: every process needs one of its own"
            )
        if num_processes > self.num_lanes:
            return share(self.num_leaves, num_processes, rank)
        lanes = share(self.num_lanes, num_processes, rank)
        firsts = np.cumsum([0, *map(len, self.leaves)]).tolist()
        return range(firsts[lanes.start], firsts[lanes.stop])

    def parts(self, rank: int, num_processes: int) -> tuple[Part, ...]:
        """The leaves that a process computes, in order."""
        own = self.owned(rank, num_processes)
        return tuple(part for lane in self.leaves for part in lane)[own.start : own.stop]


def _held(tree: Tree) -> int:
    """Sums of finished subtrees of a tree while one of its leaves is computed, at most."""
    return 0 if isinstance(tree, int) else max(_held(tree[0]), 1 + _held(tree[1]))


def own_slots(batch_size: int, lanes: Lanes | None, rank: int, num_processes: int) -> range:
    """The slots of a global batch that a process serves, with or without lanes."""
    if lanes is None:
        return share(batch_size, num_processes, rank)
    parts = lanes.parts(rank, num_processes)
    return range(parts[0].slots.start, parts[-1].slots.stop)


@dataclass(frozen=True)
class LaneOrder:
    """Another order, read by lanes: in every epoch each lane walks through a contiguous run of it.

    With `WindowedOrder` inside, a lane has shards and windows of its own, of which it shares only those at
    the two ends of its run. Position p of the sequence is slot p % batch_size of step p // batch_size. The
    positions of an epoch are those of the order inside, so every epoch visits each sample once, with any
    batch size; a lane's run in an epoch is as long as it has slots there.

    Args:
        order: of all samples.
        batch_size: images of the global batch.
        num_lanes: parts of the batch, as `Lanes` cuts it.
    """

    order: SampleOrder
    batch_size: int
    num_lanes: int

    @property
    def num_samples(self) -> int:
        """Samples in the data set."""
        return self.order.num_samples

    @property
    def window_size(self) -> int:
        """Positions in which every lane reads about one window of the order inside."""
        return self.order.window_size * self.num_lanes

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return epoch and sample at the given positions; see `SampleOrder`."""
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
        """The lane that serves each position."""
        return np.asarray((positions % self.batch_size + 1) * self.num_lanes - 1) // self.batch_size

    def _slots_before(self, bound: np.ndarray, position: np.ndarray) -> np.ndarray:
        """How many of the positions before `position` have slots below `bound`."""
        batches, rest = np.divmod(position, self.batch_size)
        return np.asarray(batches * bound + np.minimum(rest, bound))

    def _of_lane(self, start: np.ndarray, stop: np.ndarray, position: np.ndarray) -> np.ndarray:
        return np.asarray(self._slots_before(stop, position) - self._slots_before(start, position))
