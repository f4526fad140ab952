"""s3:// from a server of moto gives the images of the local split, also in processes forked after a read."""

import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.data.server import Faults, s3_server, serving
from tests.matrix import slow
from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards.index import Index
from vitctl.data.shards.indexing import index_shards
from vitctl.data.source.order import WindowedOrder
from vitctl.data.source.stores import ShardSource
from vitctl.errors import DataError
from vitctl.system import remote

s3fs = pytest.importorskip("s3fs")
pytestmark = pytest.mark.filterwarnings("default")  # those of boto


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    name = f"pictures-{zlib.crc32(str(tmp_path).encode())}"  # moto keeps the buckets of earlier servers
    with s3_server(monkeypatch, name):
        yield f"s3://{name}"


@pytest.mark.parametrize("cache_bytes", [0, *slow(2**30)])
@pytest.mark.parametrize("num_workers", [0, *slow(2)])
def test_s3__gives_the_images_of_the_local_split(
    bucket: str, make_split: Callable[..., Index], cache_bytes: int, num_workers: int
) -> None:
    local = ShardSource(make_split(40))
    s3fs.S3FileSystem().put(str(local.index.folder), f"{bucket}/train", recursive=True)
    there = open_split("train", path=bucket, cache_bytes=cache_bytes)
    assert there.digest == local.digest
    assert [there.read(n) for n in range(3)] == [local.read(n) for n in range(3)]
    order, how = WindowedOrder(40, 1, 7, 2), {"rank": 0, "num_processes": 1, "first_step": 0}
    found, expected = (
        list(islice(train_batches(source, order, TrainTransform(8), seed=5, batch_size=8, micro_batch=8,
                                  num_workers=workers, **how), 5))
        for source, workers in ((there, num_workers), (local, 0))
    )  # fmt: skip
    assert all(np.array_equal(one.images, two.images) for one, two in zip(found, expected, strict=True))
    with pytest.raises(DataError, match="no such file") as caught:
        remote.read_file(f"{bucket}/none", 9)
    assert "S3CR3T" not in str(caught.value)


def test_s3__the_only_loop_of_retries_is_ours(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs and botocore asked again too: up to 25 requests for each of ours."""
    faults = Faults(0, **{"503": 1.0})
    with serving(tmp_path, faults) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(remote.GaveUpError), remote.patient(0.0):
            remote.read_ranges([(f"{bucket}/x", 5, 10)])
    assert len(faults.asked) == remote.LEAST_ATTEMPTS


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_s3__shards_are_indexed_and_one_that_changed_is_read_again(
    bucket: str, make_split: Callable[..., Index], tmp_path: Path, workers: int
) -> None:
    local = make_split(40)
    names, files = [shard.name for shard in local.shards], s3fs.S3FileSystem()
    files.put(str(local.folder), f"{bucket}/train", recursive=True)
    whole = (local.folder / names[1]).read_bytes()
    files.pipe_file(f"{bucket}/train/{names[0]}", (local.folder / names[2]).read_bytes())
    files.pipe_file(f"{bucket}/train/{names[1]}", whole[:700])
    urls = [f"{bucket}/train/{name}" for name in names]
    with pytest.raises(DataError, match=names[1]):
        index_shards(urls, tmp_path / "index", class_names=local.class_names, workers=workers)
    for name in names[:2]:
        files.pipe_file(f"{bucket}/train/{name}", (local.folder / name).read_bytes())
    index = index_shards(urls, tmp_path / "index", class_names=local.class_names, workers=workers)
    assert np.array_equal(index.rows, local.rows)
    assert [shard.sha256 for shard in index.shards] == [shard.sha256 for shard in local.shards]


def test_index__of_a_folder_and_of_a_pattern_passes_over_the_mark_of_a_folder(
    bucket: str, make_split: Callable[..., Index], tmp_path: Path
) -> None:
    local = make_split(12)
    store = s3fs.S3FileSystem()
    store.pipe(f"{bucket}/set/", b"")
    for path in local.folder.glob("*.tar"):
        store.put(str(path), f"{bucket}/set/{path.name}")
    shards = sorted(f"{bucket}/set/{path.name}" for path in local.folder.glob("*.tar"))
    for place in (f"{bucket}/set", f"{bucket}/set/", f"{bucket}/set/*.tar"):
        assert remote.list_store(place) == shards
    assert remote.list_store(f"{bucket}/nothing") == []
    assert index_shards(shards, tmp_path / "index").num_samples == 12
