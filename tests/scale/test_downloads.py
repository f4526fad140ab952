"""What the processes of a node fetch together: every byte once, over few connections."""

import multiprocessing
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import batch_keys, command, started
from tests.data.conftest import encode_png
from tests.data.server import Faults, serving
from tests.matrix import slow
from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.source import stores
from vitctl.data.source.order import WindowedOrder
from vitctl.data.source.views import split_sources
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError
from vitctl.system import remote
from vitctl.system.address import VARIABLE
from vitctl.system.process import START

FORK = multiprocessing.get_context("fork")
NODES, RANKS, LOADERS, BATCH, IMAGES, IN_SHARD = 4, 2, 2, 16, 480, 40
CLASSES, TABLES = ("a", "b", "c"), ("index.json", "samples.npy")


def noise(number: int) -> bytes:
    return encode_png(np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with twelve shards of 40 images of 12 KiB, and three of them to score."""
    folder = tmp_path_factory.mktemp("data")
    items = [Item(f"k{number}", number % 3, partial(noise, number)) for number in range(IMAGES)]
    write_split(items, folder / "train", CLASSES, seed=1, source_text="", max_samples=IN_SHARD)
    write_split(items[:3], folder / "test", CLASSES, seed=1, source_text="", max_samples=IN_SHARD)
    return folder


def epoch(url: str, rank: int, cache_bytes: int, found: "multiprocessing.Queue[list[int]]") -> None:
    """One epoch of one rank, with two loaders."""
    order = WindowedOrder(IMAGES, 1, IN_SHARD, 3)
    source = open_split("train", path=url, cache_bytes=cache_bytes)
    batches = train_batches(
        source, order, TrainTransform(8), seed=5, batch_size=BATCH,
        micro_batch=8, rank=rank, num_processes=RANKS, first_step=0, num_workers=LOADERS,
    )  # fmt: skip
    read = list(islice(batches, IMAGES // BATCH))
    assert all(batch.weights.min() == 1 for batch in read)
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
    ("cache_bytes", "large"),
    [(2**30, 2**20), *slow((2**30, 1), (0, 1))],
    ids=["cache", "first by range", "ranges"],
)
def test_node__fetches_every_byte_once_over_few_connections(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int, large: int
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path))
    monkeypatch.setenv(START, "one command")
    monkeypatch.setattr(stores, "_LARGE_BYTES", large)
    monkeypatch.setattr(remote, "PART_BYTES", 2**17)  # a shard in four parts
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
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@pytest.mark.parametrize("cached", [False, True], ids=["ranges", "cache"])
def test_four_nodes__train_on_every_byte_fetched_once_together(
    data: Path, tmp_path: Path, sharding: str, cached: bool
) -> None:
    """A run of one epoch in eight processes. The server knows a node by the query that it adds."""
    values = {
        "machine.sharding": sharding,
        "machine.processes": NODES * RANKS,
        "machine.workers": LOADERS * cached,  # without a cache they would read images of the next epoch
        "machine.precision": "float32",
        "schedule.batch_size": 2 * BATCH,
        "schedule.total_steps": IMAGES // BATCH // 2,
        "evaluation.every_steps": 0,
        "checkpoint.every_steps": 0,
        "data.cache_gib": int(cached),
        **({"data.order": "windowed", "data.order_window_shards": 1} if cached else {}),
    }
    by_query = {f"node={node}": Faults() for node in range(NODES)}
    with serving(data, Faults(), by_query=by_query) as url:
        nodes = [{"VITCTL_CACHE": str(tmp_path / query), VARIABLE: f"{url}?{query}"} for query in by_query]
        line, shown = command(tmp_path / "run", url, **values), tmp_path / "out.txt"  # type: ignore[arg-type]
        codes = [process.wait(timeout=240) for process in started(line, shown, NODES * RANKS, nodes)]
    assert codes == [0] * NODES * RANKS, shown.read_text()
    read = [key for keys in batch_keys(tmp_path / "run", data) for key in keys]
    assert sorted(read) == sorted(f"k{number}" for number in range(IMAGES))
    size = {f"/{path.relative_to(data)}": path.stat().st_size for path in data.rglob("*") if path.is_file()}
    tables = sum(size[name] for name in size if not name.endswith(".tar"))
    for of_node in by_query.values():
        asked = Counter(path for path, _ in of_node.asked)
        assert {asked[f"/{split}/{name}"] for split in ("train", "test") for name in TABLES} == {1}
        assert of_node.most_open <= remote.CONNECTIONS
        # A cache is filled ahead, with the shards of the next epoch.
        assert of_node.sent <= 1.05 * sum(size[name] for name in asked if name.endswith(".tar")) + tables
    if not cached:
        sent = sum(of_node.sent for of_node in by_query.values())
        assert sent <= 1.05 * sum(size.values()) + NODES * tables


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
