"""Shards that are fetched before they are needed: which, by whom, and that nothing else changes."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from tests.data.server import Faults, serving
from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import Batch, train_batches
from vitctl.data.loader.lanes import LaneOrder, Lanes, own_slots
from vitctl.data.loader.workers import Prefetcher, reads_whole_shards
from vitctl.data.shards.index import Index
from vitctl.data.source.order import MixtureOrder, Order, SampleOrder, WindowedOrder
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.data.source.views import Source
from vitctl.errors import DataError
from vitctl.system import http

MakeSplit = Callable[..., Index]
GIB = 2**30
ORDER = WindowedOrder(40, 1, 7, 2)  # three windows of 14, 14 and 12


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))


def batches(source: Source, order: SampleOrder, num_workers: int) -> Iterator[Batch]:
    sizes = {"batch_size": 4, "micro_batch": 4, "rank": 0, "num_processes": 1, "first_step": 0}
    return train_batches(source, order, TrainTransform(8), seed=1, num_workers=num_workers, **sizes)


def shards(source: Source, order: SampleOrder, positions: range) -> set[str]:
    return {
        source.location(sample).rpartition("/")[2] for sample in order.at(np.array(positions))[1].tolist()
    }


def fetched(faults: Faults) -> Counter[str]:
    return Counter(path.rpartition("/")[2] for path, _ in faults.asked if path.endswith(".tar"))


def soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not (there := holds()) and time.monotonic() < until:
        time.sleep(0.01)
    return there


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader__the_next_window_is_here_before_it_is_read(make_split: MakeSplit, num_workers: int) -> None:
    local = ShardSource(make_split(40))
    faults = Faults()
    with serving(local.index.folder.parent, faults) as url:
        source = open_split("train", path=url, cache_bytes=GIB)
        assert reads_whole_shards(source)
        reading = batches(source, ORDER, num_workers)
        first = next(reading)
        given = range(4 * (1 + 2 * num_workers))  # positions of the first batch, and of two for each worker
        coming = range(
            4 * (1 + num_workers) + ORDER.window_size
        )  # seen from the last batch of the worker that has got least far
        assert soon(lambda: set(fetched(faults)) >= shards(local, ORDER, coming))
        if num_workers == 1:
            assert shards(local, ORDER, coming) > shards(local, ORDER, given)
        found = [first, *islice(reading, 9)]
        del reading
    assert set(fetched(faults).values()) == {1}  # threads and loader processes wait for each other
    expected = list(islice(batches(local, ORDER, 0), 10))
    assert [b.samples.tolist() for b in found] == [b.samples.tolist() for b in expected]
    assert all(np.array_equal(one.images, other.images) for one, other in zip(found, expected, strict=True))


class Recorder(SyntheticSource):
    """Ten samples to a shard; every read is noted, and of shard 1 none succeeds."""

    def location(self, sample: int) -> str:
        return f"shard {sample // 10}"

    def read(self, sample: int) -> bytes:
        READ[self.location(sample)] += 1
        if sample // 10 == 1:
            raise DataError("cannot be fetched")
        return b""


READ: Counter[str] = Counter()


def test_read_ahead__parts_share_the_shards_and_go_on_after_one_that_cannot_be_fetched() -> None:
    source, order, shares = Recorder(100, 3, 8), WindowedOrder(100, 0, 10, 5), []
    for part in range(2):
        READ.clear()
        ahead = Prefetcher(source, order, part, 2)
        for position in range(0, 60, 5):
            ahead.reach(position)
        expected = {f"shard {n}" for n in range(10) if crc32(f"shard {n}".encode()) % 2 == part}
        assert soon(lambda expected=expected: set(READ) == expected)  # type: ignore[misc]
        assert set(READ.values()) == {1}
        shares.append(expected)
    assert len(shares[0] | shares[1]) == 10 == len(shares[0]) + len(shares[1])


def test_stretch__of_every_order() -> None:
    assert (Order(40, 1).window_size, ORDER.window_size) == (0, 14)
    assert MixtureOrder((Order(9, 1), Order(9, 2)), (1, 1), 0).window_size == 0
    assert MixtureOrder((ORDER, Order(9, 2), WindowedOrder(40, 1, 5, 1)), (2, 1, 1), 0).window_size == 20


def test_reads_whole_shards__not_of_local_files_and_not_without_a_cache(make_split: MakeSplit) -> None:
    local = ShardSource(make_split(40))
    assert not reads_whole_shards(local)
    with serving(local.index.folder.parent, Faults()) as url:
        assert not reads_whole_shards(open_split("train", path=url, cache_bytes=0))


@pytest.mark.parametrize(
    ("shard", "window", "batch_size", "num_processes"),
    [(1024, 16, 64, 2), (1050, 8, 64, 1), (4096, 16, 256, 2), (1024, 128, 1024, 2)],
)
def test_probed__every_lane_of_this_process_and_no_other(
    shard: int, window: int, batch_size: int, num_processes: int
) -> None:
    inside = WindowedOrder(2000 * shard, 1, shard, window)
    order, lanes = LaneOrder(inside, batch_size, 8), Lanes(batch_size, 8, 4)
    slots = own_slots(batch_size, lanes, 0, num_processes)
    ahead = Prefetcher(Recorder(10, 3, 8), order, 0, 1, slots)
    found: set[int] = set()
    size, missed, read = order.window_size // 4, 0, 0
    for begin in range(0, 3 * order.window_size, size):
        positions = np.arange(begin, begin + size)
        probed = ahead._probed(positions)
        assert set((probed % batch_size).tolist()) <= set(slots)
        assert set(order.lane(probed).tolist()) == set(range(8 // num_processes))
        found |= set((order.at(probed)[1] // shard).tolist())
        if begin >= order.window_size:  # what is read now was looked up a window ago
            now = positions - order.window_size + size
            own = order.at(now[np.isin(now % batch_size, slots)])[1] // shard
            missed, read = missed + int((~np.isin(own, list(found))).sum()), read + len(own)
    assert missed < 0.03 * read
