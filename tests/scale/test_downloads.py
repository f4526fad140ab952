"""What the processes of a node fetch together: every byte once, over few connections."""

import multiprocessing
import os
from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import encode_png
from tests.data.server import Faults, serving
from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards import cache as shard_cache
from vitctl.data.source import stores
from vitctl.data.source.order import LaneOrder, WindowedOrder
from vitctl.data.source.views import split_sources
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError
from vitctl.system import remote
from vitctl.system.process import START

FORK = multiprocessing.get_context("fork")
NODES, RANKS, LOADERS, BATCH, IMAGES, IN_SHARD = 4, 2, 2, 16, 480, 40


def noise(number: int) -> bytes:
    return encode_png(np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with twelve shards of 40 images of 12 KiB."""
    folder = tmp_path_factory.mktemp("data")
    items = [Item(f"k{number}", number % 3, partial(noise, number)) for number in range(IMAGES)]
    write_split(items, folder / "train", ("a", "b", "c"), seed=1, source_text="", max_samples=IN_SHARD)
    return folder


def epoch(
    url: str,
    rank: int,
    cache_bytes: int,
    found: "multiprocessing.Queue[list[int]]",
    nodes: int = 1,
    all_done: Any = None,
) -> None:
    """One epoch of one rank, with two loaders; of several nodes each reads its lane."""
    order: Any = WindowedOrder(IMAGES, 1, IN_SHARD, 3)
    if nodes > 1:
        order = LaneOrder(order, BATCH, nodes)
        os.environ["VITCTL_CACHE"] += f"/node_{rank // RANKS}"
    source = open_split("train", path=url, cache_bytes=cache_bytes)
    batches = train_batches(
        source, order, TrainTransform(8), seed=5, batch_size=BATCH,
        micro_batch=8, rank=rank, num_processes=RANKS * nodes, first_step=0, num_workers=LOADERS,
    )  # fmt: skip
    read = list(islice(batches, IMAGES // BATCH))
    assert all(batch.weights.min() == 1 for batch in read)
    if all_done is not None:  # loaders that are stopped while they fetch ahead leave that to others
        all_done.wait(120)
    del batches  # and with it the loaders
    found.put([int(sample) for batch in read for sample in batch.samples])


def samples_of(ranks: "list[Any]", found: "multiprocessing.Queue[list[int]]") -> list[int]:
    """The samples that all processes read."""
    for process in ranks:
        process.start()
    samples = [sample for _ in ranks for sample in found.get(timeout=120)]
    for process in ranks:
        process.join()
    return samples


@pytest.mark.parametrize(
    ("cache_bytes", "large"), [(2**30, 2**20), (2**30, 1), (0, 1)], ids=["cache", "first by range", "ranges"]
)
def test_node__fetches_every_byte_once_over_few_connections(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int, large: int
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path))
    monkeypatch.setenv(START, "one command")
    monkeypatch.setattr(stores, "_LARGE_BYTES", large)
    monkeypatch.setattr(shard_cache, "PART_BYTES", 2**17)  # a shard in four parts
    faults: Faults = Faults()
    found: multiprocessing.Queue[list[int]] = FORK.Queue()
    with serving(data, faults) as url:
        ranks = [FORK.Process(target=epoch, args=(url, rank, cache_bytes, found)) for rank in range(RANKS)]
        samples = samples_of(ranks, found)
    assert sorted(samples) == list(range(IMAGES))
    asked = Counter(path.rpartition("/")[2] for path, _ in faults.asked)
    assert (
        asked["index.json"] == 2 and asked["samples.npy"] == 1
    )  # it is looked for in the folder above first
    size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    first = RANKS * LOADERS * 8 * 12_800 if large == 1 and cache_bytes else 0
    assert faults.sent <= 1.05 * size + first
    assert faults.most_open <= remote.CONNECTIONS


@pytest.mark.slow
@pytest.mark.parametrize("cache_bytes", [2**30, 0], ids=["cache", "ranges"])
def test_four_nodes__fetch_every_byte_once_together(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    """Eight processes. Each node asks a server of its own, so that its requests can be counted."""
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path))
    monkeypatch.setenv(START, "one command")
    monkeypatch.setattr(stores, "_LARGE_BYTES", 2**20 if cache_bytes else 1)
    faults = [Faults() for _ in range(NODES)]
    found: multiprocessing.Queue[list[int]] = FORK.Queue()
    all_done = FORK.Barrier(NODES * RANKS)
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(data, of_node)) for of_node in faults]
        ranks = [
            FORK.Process(target=epoch, args=(urls[rank // RANKS], rank, cache_bytes, found, NODES, all_done))
            for rank in range(NODES * RANKS)
        ]
        samples = samples_of(ranks, found)
    assert sorted(samples) == list(range(IMAGES))
    size = {path.name: path.stat().st_size for path in data.rglob("*") if path.is_file()}
    tables = sum(size[name] for name in size if not name.endswith(".tar"))
    for of_node in faults:
        asked = Counter(path.rpartition("/")[2] for path, _ in of_node.asked)
        assert (asked["index.json"], asked["samples.npy"]) == (2, 1)
        assert of_node.most_open <= remote.CONNECTIONS
        # A cache is filled ahead, with the shards of the next epoch.
        assert of_node.sent <= 1.05 * sum(size[name] for name in asked if name.endswith(".tar")) + tables
    if not cache_bytes:
        assert sum(of_node.sent for of_node in faults) <= 1.05 * sum(size.values()) + NODES * tables


@pytest.mark.parametrize("fault", ["", "flip"])
def test_first_batch__is_compared_with_the_shard(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path))
    monkeypatch.setattr(stores, "_LARGE_BYTES", 1)
    faults = Faults()
    with serving(data, faults) as url:
        [store] = split_sources(open_split("train", path=url, cache_bytes=2**30))
        faults.shares = {fault: 1.0}
        read = store.read_together(range(3), at_once=True)
        faults.shares = {}
        assert list(read) == [0, 1, 2]
        if fault:
            with pytest.raises(DataError, match="sent other bytes at"):
                store.read(0)
        else:
            assert read == {number: store.read(number) for number in range(3)}
