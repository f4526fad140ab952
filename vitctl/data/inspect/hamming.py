"""Duplicates: exact ones by digest, near-duplicates by the Hamming distance of their perceptual hashes."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from vitctl.data.inspect.perceptual_hash import ImageHashes

MAX_BITS = 15
_NUM_CHUNKS, _CHUNK_BITS = 4, 16
_MAX_CANDIDATES = 2**21  # compared at a time


@dataclass(frozen=True)
class Match:
    """An image and its duplicate; `bits` is the Hamming distance of their perceptual hashes, 0 for exact
    duplicates.
    """

    sample: int
    other: int
    bits: int
    is_exact: bool


def find_matches(own: ImageHashes, others: ImageHashes, *, max_bits: int) -> list[Match]:
    """For each image that has a duplicate among others, the nearest one; exact duplicates take precedence.

    Args:
        own: images to check.
        others: images to compare with; `own` again: each image is compared with those before it.
        max_bits: largest Hamming distance of near-duplicates, 0 to 15; -1 for exact duplicates only.

    Returns:
        at most one match per own image, in their order.
    """
    best: dict[int, Match] = {}
    if max_bits >= 0:
        rows, columns = np.flatnonzero(own.has_perceptual), np.flatnonzero(others.has_perceptual)
        pairs = near_pairs(own.perceptual[rows], others.perceptual[columns], max_bits)
        for row, column, bits in zip(
            rows[pairs[0]].tolist(), columns[pairs[1]].tolist(), pairs[2].tolist(), strict=True
        ):
            if (own is not others or column < row) and (row not in best or bits < best[row].bits):
                best[row] = Match(row, column, bits, False)
    by_digest = {digest: number for number, digest in reversed(list(enumerate(others.digests.tolist())))}
    for row, digest in enumerate(own.digests.tolist()):
        if digest in by_digest and (own is not others or by_digest[digest] < row):
            best[row] = Match(row, by_digest[digest], 0, True)
    return [best[row] for row in sorted(best)]


def repeated(digests: np.ndarray) -> list[tuple[int, int]]:
    """Exact duplicates within a split: `(first, later)` for each later image with the same bytes."""
    _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
    first_of = firsts[groups]
    later = np.flatnonzero(first_of != np.arange(len(digests)))
    return list(zip(first_of[later].tolist(), later.tolist(), strict=True))


def shared(digests: np.ndarray, others: np.ndarray) -> list[tuple[int, int]]:
    """Exact duplicates between two splits: `(own, other)`, the first of each."""
    _, own, other = np.intersect1d(digests, others, return_indices=True)
    return list(zip(own.tolist(), other.tolist(), strict=True))


def near_pairs(a: np.ndarray, b: np.ndarray, max_bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of 64-bit words with a small Hamming distance.

    Words are split into four chunks of 16 bits. Where at most `max_bits` bits differ, at least one chunk
    differs in at most a quarter of them; so only words with a similar chunk are compared.

    Args:
        a: uint64 `[n]`.
        b: uint64 `[m]`.
        max_bits: 0 to 15.

    Returns:
        indices in `a`, indices in `b`, and Hamming distances, int64 `[p]` each, sorted by the first two.
    """
    if not 0 <= max_bits <= MAX_BITS:
        raise ValueError(f"max_bits is {max_bits}, should be 0 to {MAX_BITS}")
    masks = [
        sum(1 << bit for bit in bits)
        for count in range(max_bits // _NUM_CHUNKS + 1)
        for bits in combinations(range(_CHUNK_BITS), count)
    ]
    keys = []
    for chunk in range(_NUM_CHUNKS):
        of_a, of_b = (
            (words >> np.uint64(_CHUNK_BITS * chunk) & np.uint64(0xFFFF)).astype(np.int64) for words in (a, b)
        )
        order = np.argsort(of_b, kind="stable")
        starts = np.searchsorted(of_b[order], np.arange((1 << _CHUNK_BITS) + 1))
        for mask in masks:
            keys.append(_near_in_buckets(a, b, of_a ^ mask, order, starts, max_bits))
    found = np.unique(np.concatenate(keys))
    rows, columns = np.divmod(found, max(1, len(b)))
    return rows, columns, np.bitwise_count(a[rows] ^ b[columns]).astype(np.int64)


def _near_in_buckets(
    a: np.ndarray, b: np.ndarray, buckets: np.ndarray, order: np.ndarray, starts: np.ndarray, max_bits: int
) -> np.ndarray:
    """Near pairs of the words of `a` and the words of `b` in the bucket of each; a pair (i, j) as `i * len(b)
    + j`.
    """
    counts = starts[buckets + 1] - starts[buckets]
    rows = np.flatnonzero(counts)
    ends = np.cumsum(counts[rows])
    cuts = (
        np.searchsorted(ends, np.arange(_MAX_CANDIDATES, int(ends[-1]) if len(ends) else 0, _MAX_CANDIDATES))
        + 1
    )
    found = [np.zeros(0, np.int64)]
    for part in np.split(rows, cuts):
        sizes = counts[part]
        own = np.repeat(part, sizes)
        inside = np.arange(len(own)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        other = order[np.repeat(starts[buckets[part]], sizes) + inside]
        near = np.bitwise_count(a[own] ^ b[other]) <= max_bits
        found.append(own[near] * len(b) + other[near])
    return np.concatenate(found)
