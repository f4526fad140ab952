"""The plan of the shards of a split: which sample goes to which position of which shard."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitctl.data.source.order import Order

_FORMAT = "vitctl-shards/2"
_BLOCK = 512
_END_BYTES = 10_240  # tar files are padded to whole records


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """A shuffle, cut into shards.

    Args:
        order: int64 `[n]`, which item stands at each place.
        bounds: int64 `[num_shards + 1]`, the place at which each shard begins, and the end.
        digest: SHA-256 of all that decides what the shards will hold, in hex.
    """

    order: np.ndarray
    bounds: np.ndarray
    digest: str

    @property
    def num_shards(self) -> int:
        """How many shards there will be."""
        return len(self.bounds) - 1

    def items(self, shard: int) -> np.ndarray:
        """The items of a shard in their order, int64 `[k]`."""
        return self.order[self.bounds[shard] : self.bounds[shard + 1]]


def plan_shards(
    keys: Sequence[str],
    labels: Sequence[int | tuple[int, ...]],
    sizes: np.ndarray,
    *,
    seed: int,
    max_bytes: int,
    max_samples: int,
    about: Sequence[object],
) -> ShardPlan:
    """Shuffle a split, and close each shard before it grows too large.

    Args:
        keys: one per item.
        labels: one per item.
        sizes: int64 `[n]`, bytes of each image.
        seed: of the shuffle.
        max_bytes: of a shard; an item that is larger gets one of its own.
        max_samples: of a shard.
        about: whatever else the content of the shards depends on; goes into the digest.
    """
    _, order = Order(len(keys), seed).at(np.arange(len(keys)))
    label_bytes = np.array([len(label_text(label)[1]) for label in labels], np.int64)
    ends = np.cumsum((_tar_bytes(sizes) + _tar_bytes(label_bytes))[order])
    bounds = [0]
    while bounds[-1] < len(order):
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + max_bytes - _END_BYTES, side="right"))
        bounds.append(min(max(stop, start + 1), start + max_samples, len(order)))
    digest = hashlib.sha256(json.dumps([_FORMAT, seed, max_bytes, max_samples, *about]).encode())
    for number, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        digest.update(json.dumps([keys[number], labels[number], size]).encode())
    return ShardPlan(order, np.array(bounds, np.int64), digest.hexdigest())


def label_text(label: int | tuple[int, ...]) -> tuple[str, bytes]:
    """How labels stand in a shard: extension and content of the member; one number as `cls`, several as
    `json`.
    """
    if isinstance(label, tuple):
        return "json", json.dumps({"labels": list(label)}).encode()
    return "cls", str(label).encode()


def _tar_bytes(sizes: np.ndarray) -> np.ndarray:
    """What members of these sizes take in a tar file, headers and all."""
    return _BLOCK * (1 + -(-sizes // _BLOCK))
