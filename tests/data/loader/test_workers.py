"""Loader processes: their signals, their end, and what is said of one that died; the memory without a name in
which they pass images; and shards that are fetched before they are needed.
"""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import warm
from tests.data.server import Faults, serving
from tests.matrix import slow
from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader import workers as lifecycle
from vitctl.data.loader.batches import Batch, train_batches
from vitctl.data.loader.workers import Prefetcher, SharedMemory, cause_of_death, reads_whole_shards
from vitctl.data.shards.index import Index
from vitctl.data.source.order import (
    LaneOrder,
    MixtureOrder,
    Order,
    SampleOrder,
    WindowedOrder,
)
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.data.source.views import Source
from vitctl.errors import DataError
from vitctl.system import remote
from vitctl.system.files import cache_folder


def batches_of(
    source: Source, order: SampleOrder, num_workers: int, *, batch_size: int = 4, micro_batch: int = 4
) -> Iterator[Batch]:
    where = {"rank": 0, "num_processes": 1, "first_step": 0, "num_workers": num_workers}
    sizes = {"batch_size": batch_size, "micro_batch": micro_batch}
    return train_batches(source, order, TrainTransform(8), seed=5, **sizes, **where)


def endless(source: Source) -> Iterator[Batch]:
    return batches_of(source, Order(len(source), 1), 2, batch_size=10)


def test_workers__ignore_signals_and_a_dead_one_is_reported() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    others = set(active_children())
    batches = endless(SyntheticSource(20, 3, 12))
    list(islice(batches, 8))
    workers = [child for child in active_children() if child not in others]
    assert len(workers) == 2
    assert signal.getsignal(signal.SIGCHLD) == handler
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    list(islice(batches, 8))
    assert all(worker.is_alive() for worker in workers)
    workers[0].kill()
    said = r"a loader process was killed \(SIGKILL\), most often out of memory; use fewer loader workers \("
    with pytest.raises(DataError, match=said):
        list(islice(batches, 200))
    del batches
    assert not any(worker.is_alive() for worker in workers)


SCRIPT = """
import sys, threading, time
from itertools import islice
from multiprocessing import active_children
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order
from vitctl.data.source.stores import SyntheticSource
from vitctl.data.images.transforms import TrainTransform
{source}
batches = train_batches(Chosen(99, 3, 64), Order(99, 0), TrainTransform(64), seed=0, batch_size=16,
                        micro_batch=16, rank=0, num_processes=1, first_step=0, num_workers=2)
{held}
print(*[child.pid for child in active_children()], flush=True)
{end}
"""


EAGER = """
import os, signal
from vitctl.data.loader import workers
from vitctl.engine.preemption import stop_on_signals
begin = workers._init_worker
def hit(*given):
    os.kill(os.getpid(), signal.SIGINT)
    begin(*given)
workers._init_worker = hit
block = stop_on_signals()
flag = block.__enter__()
Chosen = SyntheticSource
"""


@pytest.mark.slow
def test_workers__that_are_hit_while_they_start_do_not_stop_their_parent() -> None:
    """As Ctrl-C hits all processes of a terminal: two that count it in the parent's pipe would make the
    parent leave at once.
    """
    process, workers = start("sys.exit(7 + flag.raised)", source=EAGER)
    assert len(workers) == 2
    assert process.wait(timeout=60) == 7


STUCK = """
class Chosen(SyntheticSource):
    def read(self, sample):
        time.sleep(600)
def tell():
    while len(active_children()) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    print(*[child.pid for child in active_children()], flush=True)
threading.Thread(target=tell).start()
"""


def start(
    end: str, *, source: str = "Chosen = SyntheticSource", held: str = "held = list(islice(batches, 6))"
) -> tuple[warm.Popen, list[int]]:
    line = [sys.executable, "-c", SCRIPT.format(end=end, source=source, held=held)]
    process = warm.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        return process, [int(pid) for pid in output.readline().split()]


def alive(pids: list[int]) -> list[int]:
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in states.items() if stat.exists() and stat.read_text().split()[2] != "Z"]


def named_memory(pids: list[int]) -> list[str]:
    """What these processes left in /dev/shm; torch names its files by the process."""
    return [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]


@pytest.mark.parametrize("held", ["held = list(islice(batches, 6))", "next(batches)"], ids=["busy", "stuck"])
def test_workers__kill_leaves_no_process_and_no_shared_memory(held: str) -> None:
    source = STUCK if held == "next(batches)" else "Chosen = SyntheticSource"
    process, workers = start("time.sleep(600)", source=source, held=held)
    assert len(workers) == 2 == len(alive(workers))
    process.kill()
    process.wait(timeout=60)
    assert soon(
        lambda: not alive(workers), seconds=3
    )  # torch's own watch takes five, and never sees a stuck one
    assert not named_memory([process.pid, *workers])


def soon(holds: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not (there := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return there


def end_by(how: int) -> None:
    if how < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -how)
    os._exit(how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (-signal.SIGKILL, "killed (SIGKILL), most often out of memory"),
        (-signal.SIGTERM, "killed by SIGTERM"),
        (3, "ended by its exit code 3"),
    ],
)
def test_cause_of_death(how: int, said: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=end_by, args=(how,))
    process.start()
    assert cause_of_death([process]) == said
    process.join()


def open_memories() -> int:
    names = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("memfd:vitctl (" in name for name in names)  # beside it there may be the memory lock


def fill(there: Connection) -> None:
    memory = SharedMemory.zeros(6)
    memory.tensor()[:-1].copy_(torch.arange(6))
    there.send(memory)
    assert there.recv() == "seen"


def images_of(num_workers: int, num: int, micro_batch: int = 20) -> list[Tensor]:
    made = batches_of(
        SyntheticSource(99, 3, 16), Order(99, 0), num_workers, batch_size=40, micro_batch=micro_batch
    )
    return [batch.images for batch in islice(made, num)]


def test_batches__of_workers_lie_in_it_in_the_layout_of_those_made_here() -> None:
    before = open_memories()
    ours, theirs = images_of(0, 6), images_of(2, 6)
    assert open_memories() == before + 6
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    del theirs, other
    gc.collect()
    assert open_memories() == before


def test_new_images__use_the_memory_of_dropped_batches_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "get_worker_info", lambda: True)
    monkeypatch.setattr(lifecycle, "_KEPT", [])
    made = [lifecycle.new_images(2, 4)[1] for _ in range(5)]
    memories = [memory for memory in made if memory is not None]
    received = [memory.tensor() for memory in memories]
    if not (child := os.fork()):
        received.clear()  # says nothing about its parent
        os._exit(0)
    os.waitpid(child, 0)
    assert lifecycle.new_images(2, 4)[1] not in memories
    view = received[1][3:5]
    del received[1:3]
    assert lifecycle.new_images(3, 4)[1] is not memories[2]  # of another size
    assert lifecycle.new_images(2, 4)[1] is memories[2]
    assert lifecycle.new_images(2, 4)[1] not in memories  # a part of memories[1] is still in use
    del view
    assert lifecycle.new_images(2, 4)[1] is memories[1]


class Blank(SyntheticSource):
    """Every third sample cannot be used."""

    def read(self, sample: int) -> bytes:
        return super().read(sample) if sample % 3 else b"no image"


def test_batches__dropped_one_by_one_are_those_made_here() -> None:
    made = (batches_of(Blank(99, 3, 16), Order(99, 0), num, batch_size=10, micro_batch=10) for num in (0, 1))
    for ours, theirs in islice(zip(*made, strict=True), 20):
        assert torch.equal(ours.images, theirs.images)
        assert 0 < len(ours.bad) == int((ours.images.amax(dim=(1, 2, 3)) == 0).sum())


def test_batches__more_than_are_read_at_once_come_in_order() -> None:
    """Groups of 16 images are begun together; 20 make one and a part of one."""
    [whole] = images_of(0, 1)
    assert torch.equal(whole, torch.cat(images_of(0, 20, micro_batch=1)))


MakeSplit = Callable[..., Index]
GIB = 2**30
ORDER = WindowedOrder(40, 1, 7, 2)  # three windows of 14, 14 and 12


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))


def shards(source: Source, order: SampleOrder, positions: Sequence[int]) -> set[str]:
    return {
        source.location(sample).rpartition("/")[2] for sample in order.at(np.array(positions))[1].tolist()
    }


def fetched(faults: Faults) -> Counter[str]:
    return Counter(path.rpartition("/")[2] for path, _ in faults.asked if path.endswith(".tar"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("num_workers", [2, *slow(1)])
def test_loader__the_next_window_is_here_before_it_is_read(make_split: MakeSplit, num_workers: int) -> None:
    local = ShardSource(make_split(40))
    faults = Faults()
    with serving(local.index.folder.parent, faults) as url:
        source = open_split("train", path=url, cache_bytes=GIB)
        assert reads_whole_shards(source)
        reading = batches_of(source, ORDER, num_workers)
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
    expected = list(islice(batches_of(local, ORDER, 0), 10))
    assert [b.samples.tolist() for b in found] == [b.samples.tolist() for b in expected]
    assert all(np.array_equal(one.images, other.images) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("quick")
def test_read_ahead__processes_share_the_shards_and_go_on_after_one_that_cannot_be_fetched(
    make_split: MakeSplit,
) -> None:
    local = ShardSource(make_split(40))
    (local.index.folder / "shard-000001.tar").unlink()
    faults = Faults()
    with serving(local.index.folder.parent, faults) as url:
        aheads = [Prefetcher(open_split("train", path=url, cache_bytes=GIB), ORDER) for _ in range(3)]
        for position in range(0, 60, 5):
            for ahead in aheads:
                ahead.reach(position)
        expected = shards(local, ORDER, range(60))
        assert soon(lambda: set(fetched(faults)) == expected)
        assert soon(lambda: len(list((cache_folder() / "shards").glob("*.tar"))) == len(expected) - 1)
    assert {count for name, count in fetched(faults).items() if "000001" not in name} == {1}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("speed", "windows", "nodes", "ahead"),
    [
        *slow((0.5, 40, 1, 14), (3.0, 40, 1, 60)),  # 10 images in 20 seconds, and a window is 14
        (3.0, 4, 1, 42),  # the cache holds the window that is read and three more
        (3.0, 4, 2, 60),  # and eight of the lane that this node reads, half as large
    ],
)
def test_read_ahead__is_20_seconds_at_the_measured_rate(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch, speed: float, windows: int, nodes: int, ahead: int
) -> None:
    local, faults, now = ShardSource(make_split(280)), Faults(), [1000.0]
    size = max(shard.num_bytes for shard in local.index.shards)
    monkeypatch.setenv("WORLD_SIZE", str(nodes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    order: SampleOrder = WindowedOrder(280, 1, 7, 2)
    if nodes > 1:
        order = LaneOrder(WindowedOrder(280, 1, 7, 1), 4, nodes)  # two shards in both lanes, as above
    with serving(local.index.folder.parent, faults) as url:
        source = open_split("train", path=url, cache_bytes=2 * windows * size)
        prefetcher = Prefetcher(source, order, range(4 // nodes))
        monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: now[0]))
        for position in range(0, 121, 4):
            prefetcher.reach(position)
            now[0] += 4 / speed
        own = [position for position in range(124 + ahead) if position % 4 < 4 // nodes]
        due = shards(local, order, own[: own.index((120 + ahead) // 4 * 4)])
        assert soon(lambda: set(fetched(faults)) >= due)
        assert soon(prefetcher._chunks.empty)
    assert set(fetched(faults)) <= shards(local, order, own)  # not even a chunk more


def test_stretch__of_every_order() -> None:
    assert (Order(40, 1).window_size, ORDER.window_size) == (0, 14)
    assert MixtureOrder((Order(9, 1), Order(9, 2)), (1, 1), 0).window_size == 0
    assert MixtureOrder((ORDER, Order(9, 2), WindowedOrder(40, 1, 5, 1)), (2, 1, 1), 0).window_size == 20


@pytest.mark.usefixtures("quick")
def test_reads_whole_shards__not_of_local_files_and_not_without_a_cache(make_split: MakeSplit) -> None:
    local = ShardSource(make_split(40))
    assert not reads_whole_shards(local)
    with serving(local.index.folder.parent, Faults()) as url:
        assert not reads_whole_shards(open_split("train", path=url, cache_bytes=0))
