import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitctl.data.inspect.hamming import Match, find_matches, near_pairs, repeated
from vitctl.data.inspect.perceptual_hash import ImageHashes
from vitctl.data.source.exclusion import DIGEST

WORDS = st.integers(0, 2**64 - 1)


def flipped(word: int, bits: list[int]) -> int:
    for bit in bits:
        word ^= 1 << bit
    return word


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=6), st.data(), st.sampled_from([0, 1, 3, 4, 6, 8]))
def test_near_pairs__are_all_there_are(words: list[int], data: st.DataObject, max_bits: int) -> None:
    """Against every pair one by one; the second list holds neighbours of the first, near and far."""
    flips = st.lists(st.integers(0, 63), max_size=12, unique=True)
    others = [flipped(data.draw(st.sampled_from(words)), data.draw(flips)) for _ in range(8)]
    a, b = np.array(words, np.uint64), np.array(others, np.uint64)
    wanted = [
        (i, j, (x ^ y).bit_count())
        for i, x in enumerate(words)
        for j, y in enumerate(others)
        if (x ^ y).bit_count() <= max_bits
    ]
    assert list(zip(*(column.tolist() for column in near_pairs(a, b, max_bits)), strict=True)) == wanted


@pytest.mark.parametrize("max_bits", [12, 15])
def test_near_pairs__worst_case_is_bits_spread_over_all_chunks(max_bits: int) -> None:
    spread = [16 * (n % 4) + n // 4 for n in range(max_bits)]
    words = np.random.default_rng(0).integers(0, 2**64, 30, dtype=np.uint64)
    others = np.array([flipped(int(word), spread) for word in words], np.uint64)
    rows, columns, bits = near_pairs(words, others, max_bits)
    found = set(zip(rows.tolist(), columns.tolist(), bits.tolist(), strict=True))
    assert {(n, n, max_bits) for n in range(30)} <= found


def test_near_pairs__of_many_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.data.inspect.hamming._MAX_CANDIDATES", 7)
    a, b = np.full(10, 5, np.uint64), np.full(4, 5, np.uint64)
    rows, columns, bits = near_pairs(a, b, 2)
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [
        (i, j) for i in range(10) for j in range(4)
    ]
    assert not bits.any()
    assert all(len(column) == 0 for column in near_pairs(a[:0], b, 2))
    assert all(len(column) == 0 for column in near_pairs(a, b[:0], 2))
    with pytest.raises(ValueError, match="max_bits is 16, should be 0 to 15"):
        near_pairs(a, b, 16)


def test_near_pairs__ten_billion_pairs_take_seconds() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**64, 100_000, dtype=np.uint64) for _ in range(2))
    b[77] = a[99_999] ^ np.uint64(0b111)
    began = time.process_time()
    rows, columns, bits = near_pairs(a, b, 3)
    assert time.process_time() - began < 5
    assert (rows.tolist(), columns.tolist(), bits.tolist()) == ([99_999], [77], [3])


def prints(digests: list[bytes], looks: list[int], seen: list[bool]) -> ImageHashes:
    return ImageHashes(np.array(digests, DIGEST), np.array(looks, np.uint64), np.array(seen, bool))


def test_find_matches__the_nearest_and_exact_before_near() -> None:
    own = prints([b"a", b"b", b"c", b"d", b"e"], [0, 0, 0xFF, 2**63, 0], [True, True, True, True, False])
    others = prints([b"x", b"b", b"y"], [0b11, 0xFFFF0000, 0b1], [True, True, True])
    assert find_matches(own, others, max_bits=2) == [
        Match(0, 2, 1, False),
        Match(1, 1, 0, True),
        Match(3, 2, 2, False),
    ]
    assert find_matches(own, others, max_bits=-1) == [Match(1, 1, 0, True)]


def test_repeated__names_the_first_of_each() -> None:
    assert repeated(np.array([b"b", b"a", b"b", b"c", b"a", b"b"], DIGEST)) == [(0, 2), (1, 4), (0, 5)]
    assert repeated(np.array([b"a", b"b"], DIGEST)) == []
