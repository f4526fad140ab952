import hashlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tests.data.server import Faults, serving
from vitctl.data.shards.cache import ShardCache
from vitctl.errors import DataError
from vitctl.system import remote


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "home"))


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
        with pytest.raises(DataError, match=r"1000 bytes with sha256 .*, its index says 999 bytes"):
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

    def half(spans: list[remote.Span], *_: object, **__: object) -> None:
        spans[0].file.write(bytes([3]) * 100_000)
        spans[0].file.flush()
        time.sleep(60)

    remote.transfer = half  # type: ignore[assignment]
    read(cache, url, shard)


def test_cache__a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/cache/.*: cannot be written \(Not a directory\); set"):
        ShardCache(tmp_path / "file" / "cache", 3000).open("https://nowhere.example/0.tar", 1000, "0" * 64)
