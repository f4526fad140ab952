"""The largest batch, with a planted limit; and an allocation that fails where the system would kill the
process.
"""

import sys
from collections.abc import Callable

import pytest
import torch

from vitctl.bench.largest_batch import (
    Attempt,
    Largest,
    attempted,
    free_bytes,
    guarded,
    largest_batch,
    used_bytes,
)

MIB = 2**20
BASE, IMAGE = 500 * MIB, 40 * MIB
INFINITE = float("inf")


def planted(limit: int, tried: list[int], seconds: float = 1.0) -> Callable[[int], Attempt]:
    """A device that holds `limit` images, whose memory grows by IMAGE with each."""

    def attempt(images: int) -> Attempt:
        tried.append(images)
        if images > limit:
            return Attempt(images, False)
        return Attempt(images, True, BASE + images * IMAGE, seconds * images)

    return attempt


@pytest.mark.parametrize("limit", [0, 1, 3, 37, 64, 100])
def test_largest__is_the_planted_limit_of_a_device_that_says_no(limit: int) -> None:
    tried: list[int] = []
    found = largest_batch(planted(limit, tried), 100, INFINITE, lambda: INFINITE, [])
    assert found.images == limit
    assert found.tried
    assert found.bound == ("batch" if limit == 100 else "memory")
    assert len(tried) <= 16


@pytest.mark.parametrize("limit", [1, 3, 37, 64, 99])
def test_largest__on_a_cpu_nothing_larger_than_the_limit_is_tried(limit: int) -> None:
    tried: list[int] = []
    room = BASE + limit * IMAGE + IMAGE // 2
    found = largest_batch(planted(limit, tried), 100, room, lambda: INFINITE, [Attempt(0, True, BASE)])
    assert found == Largest(limit, True, "memory", IMAGE)
    assert max(tried) == limit


def test_largest__where_the_bytes_promise_too_much_it_goes_back() -> None:
    found = largest_batch(planted(21, []), 100, BASE + 30 * IMAGE, lambda: INFINITE, [Attempt(0, True, BASE)])
    assert (found.images, found.tried, found.bound) == (21, True, "memory")


def test_largest__without_time_it_follows_from_the_bytes_and_says_so() -> None:
    tried: list[int] = []
    found = largest_batch(planted(1000, tried), 4096, BASE + 300 * IMAGE, lambda: 5.0, [])
    assert tried == [1, 2, 4]  # 8 would take 8 seconds
    assert found == Largest(300, False, "memory", IMAGE)


def test_largest__growth_within_noise_promises_nothing() -> None:
    def attempt(images: int) -> Attempt:
        return Attempt(images, True, BASE + images * 1000, float(images))

    found = largest_batch(attempt, 4096, BASE + 300 * IMAGE, lambda: 5.0, [])
    assert (found.images, found.tried, found.bound) == (4, True, "time")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_guarded__an_allocation_beyond_the_free_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("vitctl.bench.largest_batch.free_bytes", lambda _: 256 * MIB)

    def compute(images: int) -> float:
        torch.ones(images * MIB, dtype=torch.uint8)
        return 1.0

    assert attempted(cpu, 64, compute).fits
    assert not attempted(cpu, 1024, compute).fits
    assert attempted(cpu, 64, compute).fits  # the limit is lifted, and the memory given back


def test_guarded__other_errors_are_raised() -> None:
    def compute(_images: int) -> float:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        attempted(torch.device("cpu"), 1, compute)
    with guarded(torch.device("cpu")):
        assert used_bytes(torch.device("cpu")) > 0
    assert free_bytes(torch.device("cpu")) > 0
