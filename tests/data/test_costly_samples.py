"""What samples may cost, and that none of them, nor their tables, ends a training by a crash."""

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import MakeSplit, encoded, store
from tests.data.noted_tables import note_tables
from tests.fuzz.conftest import header, member, record
from tests.matrix import slow
from vitctl.data.images.decode import BadSample, decode
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader import workers
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards.index import LABELS, read_index
from vitctl.data.shards.tar import read_shard
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
from vitctl.errors import DataError, LaunchError, explained
from vitctl.system import process
from vitctl.system.process import ensure_descriptors

END = bytes(1024)
TARS = {
    "negative": member("a.png", b"abc") + header("a.cls", (-512).to_bytes(12, "big", signed=True)) + END,
    "negative pax": member("x", record(b"size", b"-1024"), b"x") + member("a.png", b"abc") + END,
    "long name": header("././@LongLink", 2**31, b"L") + END,
    "digits": member("x", record(b"comment", b"1" * 60_000), b"x") + member("a.png", b"abc") + END,
    "records": member("x", b"5 a\n " * 12_000 + b"=", b"x") + member("a.png", b"abc") + END,
    "chain": member("x", record(b"comment", b"1"), b"x") * 5000 + END,
}


@pytest.mark.parametrize("name", TARS)
def test_tar__headers_that_cost_without_end(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.tar").write_bytes(TARS[name])
    began = time.process_time()
    with pytest.raises(DataError, match=r"x.tar: not a complete, uncompressed tar file"):
        read_shard(tmp_path / "x.tar")
    assert time.process_time() - began < 1


def black(mode: str, kind: str, size: tuple[int, int], **options: object) -> bytes:
    return encoded(Image.new(mode, size), kind, **options)


def in_a_child(work: Callable[[], object]) -> int:
    """How many bytes the largest resident size of a fresh child grows by."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        os.write(writer, str(grown).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as file:
        return int(file.read())


def quietly(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with suppress(BadSample):
            work()

    return run


@pytest.mark.parametrize(
    ("mode", "kind", "size"),
    [
        ("RGB", "WEBP", (9400, 9400)),
        ("I;16", "PNG", (9400, 9400)),
        ("L", "PNG", (89_000_000, 1)),
        ("RGBA", "PNG", (9400, 9400)),
        ("P", "GIF", (9400, 9400)),
    ],
)
@pytest.mark.slow
def test_pictures__no_more_than_a_gibibyte(mode: str, kind: str, size: tuple[int, int]) -> None:
    data = black(mode, kind, size, **({"method": 0, "lossless": True} if kind == "WEBP" else {}))
    assert in_a_child(quietly(lambda: decode(data))) < 2**30


def test_pictures__memory_is_counted_by_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.system.limits.PICTURE", 2**20)
    decode(black("RGB", "PNG", (290, 300)))
    for kind in ("PNG", "WEBP", "GIF", "TIFF", "BMP"):
        with pytest.raises(BadSample, match=r"too large: 310x300 pixels need 1 MiB|too large: 310x300"):
            decode(black("RGB", kind, (310, 300)))


def test_jpeg__scans_are_counted_before_they_are_gone_through() -> None:
    data = black("RGB", "JPEG", (64, 64), progressive=True)
    decode(data)
    last = data.rindex(b"\xff\xda")
    many = data[:last] + data[last:-2] * 400 + data[-2:]
    with pytest.raises(BadSample, match=r"too large: a JPEG with 409 scans of 4096 pixels"):
        decode(many)


def test_batches__pictures_in_flight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 WEBPs of a few kilobytes were all decoded before the first was used: 6 GB."""
    data = black("RGB", "WEBP", (1000, 1000), method=0)
    index = store([Item(str(n), 0, lambda: data) for n in range(16)], tmp_path / "train", ("a",))
    monkeypatch.setattr("vitctl.system.limits.HELD", 4 * 2**20)

    def epoch() -> None:
        batches = train_batches(
            ShardSource(read_index(index.folder)), Order(16, 0), TrainTransform(8), seed=0, batch_size=16,
            micro_batch=16,
            rank=0, num_processes=1, first_step=0, num_workers=0,
        )  # fmt: skip
        assert next(batches).weights.sum() == 16

    assert in_a_child(epoch) < 16 * 3_000_000


def test_turns__one_worker_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FOR_CHILDREN", [])
    monkeypatch.setattr(process, "_IN_USE", [])
    shared = process.shared_lock()
    (reader, writer), (told, tell) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        process.use_lock(shared)
        process.acquire(2**30)
        os.write(writer, b"x")
        time.sleep(0.3 if os.read(told, 1) else 0)
        os._exit(0)
    os.read(reader, 1)
    process.acquire(2**30)  # not a worker: never waits
    process.use_lock(shared)
    process.acquire(10)  # not large
    assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it has its turn until it is told to end
    began = time.monotonic()
    os.write(tell, b"x")
    process.acquire(2**30)
    assert os.waitpid(child, 0)[1] == 0 and time.monotonic() - began > 0.25
    process.release_lock()


def rows_of(folder: Path) -> np.ndarray:
    return np.load(folder / "samples.npy", mmap_mode="r+")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("header", 2**63 + 5, "unreadable"),
        ("header", 2**64 - 1, "unreadable"),
        ("size", 2**32 - 1, "too large"),
        ("label", 2**31 - 1, "no such class"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, *slow(1)])
def test_rows_of_others__bad_samples(
    make_split: MakeSplit, field: str, value: int, reason: str, num_workers: int
) -> None:
    folder = make_split(10).folder
    rows_of(folder)[field][3] = value
    note_tables(folder)
    batches = train_batches(
        ShardSource(read_index(folder)), Order(10, 0), TrainTransform(8), seed=0, batch_size=10,
        micro_batch=10,
        rank=0, num_processes=1, first_step=0, num_workers=num_workers,
    )  # fmt: skip
    batch = next(batches)
    assert [(sample, why) for sample, _, why in batch.bad] == [(3, reason)]
    assert int(batch.labels.max()) < 3


def test_a_table_cut_while_it_is_mapped_is_one_line(make_split: MakeSplit) -> None:
    """It was SIGBUS, which no process survives."""
    folder = make_split(700, max_samples=700).folder
    source = ShardSource(read_index(folder))
    os.truncate(folder / "samples.npy", 200)
    for use in (lambda: source.labels(np.array([699])), lambda: source.read(699), source.labels):
        with pytest.raises(DataError, match=r"samples.npy: was truncated from \d+ to 200 bytes while in use"):
            use()
    assert not (folder / LABELS).exists()


def test_workers__descriptors_are_counted_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    limits = [40, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: set_to.append(both))
    ensure_descriptors(8)
    assert set_to and set_to[0][0] > 60
    limits[1] = 40
    with pytest.raises(LaunchError, match=r"8 loader workers need \d+ open files, the limit is 40; raise"):
        ensure_descriptors(8)
    ensure_descriptors(0)


def test_workers__a_full_dev_shm_is_named() -> None:
    class Full:
        num_workers = 1

        def __iter__(self) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        workers.start_workers(Full())
    assert "/dev/shm: no space left" in str(explained(caught.value, "/a/run"))
