"""Digests of a batch: the same however it is split, others where anything of it is other; against a
computation in plain Python.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from vitctl.data.loader.batches import Batch
from vitctl.engine.trace.digests import batch_digest, norm_marks

WORD = 2**64


class Peers:
    """Processes whose words are collected, then added."""

    def __init__(self) -> None:
        self.words: list[np.ndarray] = []

    def sum_words(self, words: np.ndarray) -> np.ndarray:
        self.words.append(words.copy())
        return words


def mix(word: int) -> int:
    """SplitMix64's finaliser, as published."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def batch(rows: np.ndarray, labels: np.ndarray | None = None) -> Batch:
    labels = rows[:, 3] if labels is None else labels
    size = len(rows)
    images = torch.zeros(size, 3, 1, 1, dtype=torch.uint8)
    return Batch(
        images,
        torch.from_numpy(labels),
        torch.ones(size),
        torch.from_numpy(rows[:, 0]),
        checksums=rows[:, 1:3],
    )


@pytest.fixture
def rows() -> np.ndarray:
    """Number, checksums and label of 11 samples."""
    return np.random.default_rng(0).integers(0, 2**32, (11, 4))


def digest(
    rows: np.ndarray, cuts: list[list[int]], labels: np.ndarray | None = None
) -> tuple[list[int], list[int]]:
    """Of a batch whose processes begin at the first number of each list, and whose micro-batches at the
    others.
    """
    peers: Any = Peers()
    ends = [cut[0] for cut in cuts[1:]] + [len(rows)]
    for cut, end in zip(cuts, ends, strict=True):
        begins = [*cut, end]
        parts = [batch(rows[a:b], None if labels is None else labels[a:b]) for a, b in pairwise(begins)]
        batch_digest(peers, parts, range(cut[0], end), len(rows))
    total = np.sum(peers.words, axis=0, dtype=np.uint64)
    return total[:4].tolist(), total[4:].view(np.uint16)[: len(rows)].tolist()


def test_digest__is_the_documented_sum(rows: np.ndarray) -> None:
    parts, marks = digest(rows, [[0]])
    expected = [
        sum(mix(mix(int(v)) ^ mix(n + 1)) for n, v in enumerate(rows[:, part])) % WORD for part in range(4)
    ]
    assert parts == expected
    assert marks == [mix(mix(mix(int(r[1])) ^ int(r[2])) ^ int(r[3])) >> 48 for r in rows]


@pytest.mark.parametrize(
    "cuts", [[[0, 4, 8]], [[0], [5]], [[0, 2], [3], [7, 9]], [[n] for n in range(11)]], ids=str
)
def test_digest__does_not_depend_on_how_the_batch_is_split(rows: np.ndarray, cuts: list[list[int]]) -> None:
    assert digest(rows, cuts) == digest(rows, [[0]])


def test_digest__of_several_labels(rows: np.ndarray) -> None:
    labels = np.random.default_rng(1).integers(-1, 9, (11, 3))
    whole = digest(rows, [[0]], labels)
    assert digest(rows, [[0], [3, 6]], labels) == whole
    labels[7, 2] += 1
    other = digest(rows, [[0]], labels)
    assert [a == b for a, b in zip(whole[0], other[0], strict=True)] == [True, True, True, False]
    assert [n for n in range(11) if whole[1][n] != other[1][n]] == [7]


@pytest.mark.parametrize("part", range(4))
def test_digest__tells_which_part_and_which_sample(rows: np.ndarray, part: int) -> None:
    whole, other = digest(rows, [[0]]), rows.copy()
    other[6, part] ^= 1
    found = digest(other, [[0]])
    assert [n for n in range(4) if whole[0][n] != found[0][n]] == [part]
    assert [n for n in range(11) if whole[1][n] != found[1][n]] == ([6] if part else [])


def test_digest__of_the_same_samples_in_another_order_is_another(rows: np.ndarray) -> None:
    assert all(
        a != b for a, b in zip(digest(rows, [[0]])[0], digest(rows[::-1].copy(), [[0]])[0], strict=True)
    )


def test_norm_marks__of_the_last_bit(rows: np.ndarray) -> None:
    norms = rows[:, 0] / 7
    other = norms.copy()
    other[4] = np.nextafter(other[4], np.inf)
    assert np.flatnonzero(norm_marks(norms) != norm_marks(other)).tolist() == [4]
