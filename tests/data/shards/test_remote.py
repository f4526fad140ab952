import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.server import Faults, serving
from vitctl.data.shards import remote
from vitctl.data.shards.remote import MissingError, ShardCache, read_file, read_range
from vitctl.errors import DataError
from vitctl.system import http

TEXT = bytes(range(256)) * 40
ALL_FAULTS = {"drop": 0.15, "503": 0.15, "429": 0.1, "short": 0.1, "short_range": 0.1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(http, "ATTEMPTS", 30)
    (tmp_path / "file").write_bytes(TEXT)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stream__is_exact_however_the_server_behaves(tmp_path: Path, seed: int) -> None:
    faults = Faults(seed, **ALL_FAULTS)
    with serving(tmp_path, faults) as url:
        for start in range(0, len(TEXT), 701):
            assert read_range(f"{url}/file", start, min(start + 701, len(TEXT))) == TEXT[start : start + 701]
        assert read_file(f"{url}/file", len(TEXT)) == TEXT
    assert set(faults.done) == {*ALL_FAULTS, "well"}


def test_stream__goes_on_where_it_stopped(tmp_path: Path) -> None:
    faults = Faults(1, short=0.7)
    with serving(tmp_path, faults) as url:
        assert read_file(f"{url}/file", len(TEXT)) == TEXT
    spans = [span for _, span in faults.asked]
    assert spans[0] == "" and len(spans) > 1
    assert all(span.startswith("bytes=") and not span.startswith("bytes=0-") for span in spans[1:])


def test_stream__a_whole_file_needs_no_ranges_but_a_part_does(tmp_path: Path) -> None:
    with serving(tmp_path, Faults(4, short=0.4), ranges=False) as url:
        assert read_file(f"{url}/file", len(TEXT)) == TEXT
        with pytest.raises(DataError, match=r"does not support byte ranges; set data\.cache_gib above 0"):
            read_range(f"{url}/file", 5, 9)


def test_stream__never_asks_again_for_what_is_not_there(tmp_path: Path) -> None:
    faults = Faults()
    with serving(tmp_path, faults) as url:
        with pytest.raises(MissingError, match=r"/none: no such file on the server$"):
            read_range(f"{url}/none", 0, 10)
        assert len(faults.asked) == 1
        with pytest.raises(DataError, match=r"is shorter than the index says|ends at byte"):
            read_range(f"{url}/file", len(TEXT) + 1, len(TEXT) + 2)
        with pytest.raises(DataError, match=rf"ends at byte {len(TEXT)}, should reach {len(TEXT) + 1}"):
            read_range(f"{url}/file", 10, len(TEXT) + 1)
        with pytest.raises(DataError, match="larger than 100 bytes"):
            read_file(f"{url}/file", 100)
        assert len(faults.asked) == 4
    with (
        serving(tmp_path, Faults(0, **{"403": 1.0})) as url,
        pytest.raises(DataError, match=r"answers 403 Forbidden; .*VITCTL_ADDRESSES"),
    ):
        read_range(f"{url}/file", 0, 10)


@pytest.mark.parametrize("told", [0.0, 7.0, 10.0**9])
def test_stream__pauses_double_up_to_a_bound_or_as_the_server_says(
    monkeypatch: pytest.MonkeyPatch, told: float
) -> None:
    slept: list[float] = []

    def ask(*_: object) -> remote._Response:
        raise http.TransientError("busy", told)

    monkeypatch.setattr(remote, "_from_http", ask)
    monkeypatch.setattr(http, "ATTEMPTS", 10)
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.5)
    monkeypatch.setattr("vitctl.system.http.time.sleep", slept.append)
    with pytest.raises(DataError, match="busy; gave up"):
        read_range("https://example.org/x", 0, 1)
    longest = [min(0.5 * 2**turn, 30.0) for turn in range(9)]
    least = min(told, 30.0)
    for pause, most in zip(slept, longest, strict=True):
        assert max(most / 2, least) <= pause <= max(most, least)
    assert len({pause / most for pause, most in zip(slept, longest, strict=True)}) > 1


def test_hub__addresses_are_files_on_the_hub() -> None:
    assert remote._hub_address("hf://datasets/o/n/train/a b.tar") == (
        "https://huggingface.co/datasets/o/n/resolve/main/train/a%20b.tar"
    )
    assert (
        remote._hub_address("hf://datasets/o/n@v1/x.tar")
        == "https://huggingface.co/datasets/o/n/resolve/v1/x.tar"
    )
    with pytest.raises(DataError, match="should look like hf://datasets/OWNER/NAME"):
        remote._hub_address("hf://o/n")


def test_fsspec__a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def url_to_fs(_url: str) -> None:
        raise ImportError("Install s3fs")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    with pytest.raises(DataError, match=r"s3://bucket/x: s3:// needs the package s3fs: pip install s3fs$"):
        read_range("s3://bucket/x", 0, 10)


def test_fsspec__reads_ranges_and_whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/file", TEXT)
    real: Callable[..., bytes] = files.cat_file
    failing = iter([True, False] * 100)

    def cat_file(path: str, start: int, end: int) -> bytes:
        if next(failing):
            raise OSError("slow down")
        return real(path, start=start, end=end)

    monkeypatch.setattr(files, "cat_file", cat_file)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (files, url.removeprefix("s3:/")))
    monkeypatch.setattr(remote, "_FSSPEC_CHUNK", 1000)
    assert read_range("s3://bucket/file", 3, 5000) == TEXT[3:5000]
    assert read_file("s3://bucket/file", len(TEXT)) == TEXT
    with pytest.raises(MissingError, match="no such file"):
        read_file("s3://bucket/none", 10)


FORK = multiprocessing.get_context("fork")


def plant(folder: Path, number: int, size: int = 1000) -> tuple[str, int, str]:
    """A file `folder/number`: name, size, digest."""
    data = bytes([number]) * size
    (folder / f"{number}.tar").write_bytes(data)
    return f"{number}.tar", size, hashlib.sha256(data).hexdigest()


def read(cache: ShardCache, url: str, shard: tuple[str, int, str]) -> bytes:
    name, size, sha256 = shard
    descriptor = cache.open(f"{url}/{name}", size, sha256)
    try:
        return os.pread(descriptor, size + 1, 0)
    finally:
        os.close(descriptor)


def kept(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.glob("*.*")}


def test_cache__fetches_once_and_drops_the_least_recently_used(tmp_path: Path) -> None:
    shards = [plant(tmp_path, number) for number in range(4)]
    cache, faults = ShardCache(tmp_path / "cache", 3000), Faults()
    with serving(tmp_path, faults) as url:
        for number in (0, 1, 2, 0, 1):
            assert read(cache, url, shards[number]) == bytes([number]) * 1000
            time.sleep(0.01)
        assert [path for path, _ in faults.asked] == ["/0.tar", "/1.tar", "/2.tar"]
        held = cache.open(f"{url}/2.tar", *shards[2][1:])
        os.utime(cache.folder / f"{shards[2][2]}.tar", (1, 1))
        read(cache, url, shards[3])
    assert kept(cache) == {f"{shards[number][2]}.tar" for number in (0, 1, 3)}
    assert os.pread(held, 2000, 0) == bytes([2]) * 1000  # dropped, and still read by who holds it
    os.close(held)


def test_cache__refuses_what_is_not_what_the_index_says(tmp_path: Path) -> None:
    name, size, sha256 = plant(tmp_path, 7)
    cache = ShardCache(tmp_path / "cache", 5000)
    with serving(tmp_path, Faults()) as url:
        with pytest.raises(
            DataError, match=r"1000 bytes with sha256 .*, its index says 1000 bytes with ffff"
        ):
            cache.open(f"{url}/{name}", size, "f" * 64)
        with pytest.raises(DataError, match="more than 999 bytes"):
            cache.open(f"{url}/{name}", 999, sha256)
        with pytest.raises(DataError, match=r"5001 bytes, the cache holds 5000; raise data.cache_gib"):
            cache.open(f"{url}/{name}", 5001, sha256)
        assert kept(cache) == set()
        assert len(read(cache, url, (name, size, sha256))) == 1000
        (cache.folder / f"{sha256}.tar").write_bytes(b"cut")  # by somebody else
        assert len(read(cache, url, (name, size, sha256))) == 1000


def _read_all(cache: ShardCache, url: str, shards: list[tuple[str, int, str]]) -> None:
    for name, size, sha256 in shards:
        assert read(cache, url, (name, size, sha256)) == bytes([int(name.partition(".")[0])]) * size


def test_cache__processes_share_one_transfer(tmp_path: Path) -> None:
    shards, faults = [plant(tmp_path, number) for number in range(6)], Faults()
    cache = ShardCache(tmp_path / "cache", 10_000)
    with serving(tmp_path, faults) as url:
        workers = [FORK.Process(target=_read_all, args=(cache, url, shards)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted(path for path, _ in faults.asked) == [f"/{number}.tar" for number in range(6)]


def test_cache__a_killed_holder_leaves_no_lock_and_no_half_file(tmp_path: Path) -> None:
    shard = plant(tmp_path, 3, 200_000)
    cache = ShardCache(tmp_path / "cache", 10**6)
    with serving(tmp_path, Faults()) as url:
        monkey = FORK.Process(target=_fetch_and_hang, args=(cache, url, shard))
        monkey.start()
        until = time.monotonic() + 10
        while not _sizes(cache) and time.monotonic() < until:
            time.sleep(0.01)
        (aside,) = cache.folder.glob(".*.partial")
        assert aside.exists() and monkey.is_alive()
        os.kill(monkey.pid or 0, signal.SIGKILL)
        monkey.join()
        assert aside.exists() and not (cache.folder / f"{shard[2]}.tar").exists()
        assert read(cache, url, shard) == bytes([3]) * 200_000
    assert kept(cache) == {f"{shard[2]}.tar"}


def _sizes(cache: ShardCache) -> list[int]:
    return [size for path in cache.folder.glob(".*.partial") if (size := path.stat().st_size)]


def _fetch_and_hang(cache: ShardCache, url: str, shard: tuple[str, int, str]) -> None:
    """Gets half of the shard, then sleeps with the lock in hand."""

    def half(_url: str) -> Iterator[bytes]:
        yield bytes([3]) * 100_000
        time.sleep(60)

    remote.stream = half  # type: ignore[assignment]
    read(cache, url, shard)


def test_cache__a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/cache/.*: cannot be written \(Not a directory\); set"):
        ShardCache(tmp_path / "file" / "cache", 3000).open("https://nowhere.example/0.tar", 1000, "0" * 64)
