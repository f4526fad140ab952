"""Indexing by several processes: the same files for any number of them, and after any interruption."""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import webdataset

from tests.data.datasets.conftest import tar_of
from tests.data.server import Faults, serving
from vitctl.data.shards import indexing
from vitctl.data.shards.indexing import index_shards
from vitctl.data.shards.tar import Scan, read_shard
from vitctl.errors import DataError

FILES = ("index.json", "labels.npy", "names.bin", "samples.npy")
PARTS = ".index.partial"


def write_shards(folder: Path, count: int = 6) -> list[Path]:
    """Shards of other programs with 1 to 3 labels a sample, each shard with another number."""
    folder.mkdir()
    paths = []
    for number in range(count):
        paths.append(folder / f"s-{number}.tar")
        with paths[-1].open("wb") as file, webdataset.TarWriter(file, encoder=False) as tar:
            for sample in range(4 + number):
                label = b"3" if not number else " ".join(map(str, range(1 + sample % 3))).encode()
                image = bytes([number + sample]) * (100 * sample + number)
                tar.write({"__key__": f"{number}-{sample}", "jpg": image, "cls": label})
    return paths


def written(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """The shards read since the last call, by any process; s-4 hangs while the file `hang` is there."""
    record, hang = tmp_path / "record", tmp_path / "hang"

    def recorded(path: Path, *options: Any, **named: Any) -> Scan:
        while path.name == "s-4.tar" and hang.exists():
            time.sleep(0.01)
        with record.open("a") as file:
            file.write(f"{path.name}\n")
        return read_shard(path, *options, **named)

    def taken() -> list[str]:
        names = sorted(record.read_text().split()) if record.exists() else []
        record.unlink(missing_ok=True)
        return names

    monkeypatch.setattr(indexing, "read_shard", recorded)
    return taken


def _note(calls: list[tuple[int, int]], done: int, total: int) -> None:
    calls.append((done, total))


def names_of(*numbers: int) -> list[str]:
    return [f"s-{number}.tar" for number in numbers]


def test_index_shards__writes_what_numpy_would_for_any_number_of_workers(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards")
    scans = [read_shard(path) for path in paths]
    rows = np.concatenate([scan.rows for scan in scans])
    lists = [[3]] * 4 + [list(range(1 + n % 3)) for number in range(1, 6) for n in range(4 + number)]
    labels = np.array([one + [-1] * (3 - len(one)) for one in lists], np.int32)
    expected = {}
    for name, table in (("samples.npy", rows), ("labels.npy", labels)):
        file = io.BytesIO()
        np.save(file, table)
        expected[name] = file.getvalue()
    texts = set()
    keys = index_shards(paths).names()
    expected["names.bin"] = "".join(f"{key}\0" for key in keys).encode()
    for workers in (0, 1, 2, 4):
        calls: list[tuple[int, int]] = []
        index_shards(paths, workers=workers, progress=partial(_note, calls))
        found = written(paths[0].parent)
        texts.add(found.pop("index.json"))
        assert found == expected
        assert calls[-1] == (6, 6) and (not workers or calls[0] == (0, 6))
        assert sorted(os.listdir(paths[0].parent)) == sorted([*FILES, *names_of(*range(6))])
    assert len(texts) == 1


@pytest.mark.slow
def test_index_shards__continues_after_kill_9(tmp_path: Path, asked: Callable[[], list[str]]) -> None:
    paths = write_shards(tmp_path / "shards")
    index_shards(paths)
    expected = written(tmp_path / "shards")
    for name in FILES:
        (tmp_path / "shards" / name).unlink()
    asked()
    (tmp_path / "hang").touch()
    process = get_context("fork").Process(target=index_shards, args=(paths,), kwargs={"workers": 2})
    process.start()
    parts, until = tmp_path / "shards" / PARTS, time.monotonic() + 30
    while len(list(parts.glob("*.npz"))) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert asked() == names_of(0, 1, 2, 3, 5)
    (tmp_path / "hang").unlink()
    (parts / ".shard.x.partial").touch()  # a remote shard that was being fetched
    damaged = next(parts.glob("*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-9])  # a power failure
    index_shards(paths, workers=2)
    again = asked()
    assert "s-4.tar" in again and len(again) == 2
    assert written(tmp_path / "shards") == expected
    assert not parts.exists()


def test_index_shards__reads_a_shard_that_changed_again_and_keeps_what_a_failure_left(
    tmp_path: Path, asked: Callable[[], list[str]]
) -> None:
    paths = write_shards(tmp_path / "shards")
    damaged, whole = paths[5], paths[5].read_bytes()
    damaged.write_bytes(whole[:700])
    with pytest.raises(DataError, match=r"^\S+/s-5.tar: [^\n]+$"):
        index_shards(paths)
    asked()
    damaged.write_bytes(whole)
    before = paths[1].stat()
    paths[1].write_bytes(paths[1].read_bytes().replace(b"\3" * 100, b"\4" * 100))
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))  # size and time of change stay
    index_shards(paths)
    assert asked() == names_of(1, 5)
    expected = written(tmp_path / "shards")
    index_shards(paths)
    assert asked() == names_of(*range(6))
    assert written(tmp_path / "shards") == expected


def test_index_shards__leaves_nothing_where_no_shard_could_be_read(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(DataError, match=r"s.tar: not a complete"):
        index_shards([tmp_path / "s.tar"])
    assert os.listdir(tmp_path) == ["s.tar"]


@pytest.mark.slow
def test_index_addresses__fetches_only_what_is_missing_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitctl.system.remote.PART_BYTES", 5000)
    paths, faults = write_shards(tmp_path / "shards"), Faults()
    whole, out = paths[5].read_bytes(), tmp_path / "out"
    paths[5].write_bytes(whole[:2000])
    with serving(tmp_path / "shards", faults) as url:
        urls = [f"{url}/{path.name}" for path in paths]
        with pytest.raises(DataError, match=rf"^{url}/s-5.tar: [^\n]+$"):
            index_shards(urls, out)
        paths[5].write_bytes(whole)
        paths[1].write_bytes(paths[2].read_bytes())
        faults.sent = 0
        index_shards(urls, out, workers=2)
        assert faults.sent == 6 + len(whole) + paths[1].stat().st_size
        first, faults.sent = written(out), 0
        for workers in (0, 6):
            index_shards(urls, out, workers=workers)
            assert written(out) == first
        assert faults.most_open <= 16  # 6 workers would open 24
        assert faults.sent == 2 * (6 + sum(path.stat().st_size for path in paths))
    index_shards(paths)
    assert {**written(out), "index.json": b""} == {**written(tmp_path / "shards"), "index.json": b""}


def test_index_addresses__refuses_a_shard_that_changes_while_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitctl.system.remote.PART_BYTES", 1000)
    (path,), copy = write_shards(tmp_path / "shards", 1), indexing.copy

    def changed(*args: Any, **options: Any) -> Any:
        path.write_bytes(path.read_bytes().replace(b"\1" * 100, b"\2" * 100))
        return copy(*args, **options)

    monkeypatch.setattr(indexing, "copy", changed)
    with serving(tmp_path / "shards", Faults()) as url, pytest.raises(DataError, match=r"s-0.tar: changed"):
        index_shards([f"{url}/s-0.tar"], tmp_path / "out")


@pytest.mark.slow
def test_data_index__ends_at_once_at_ctrl_c(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/s-{{0..3}}.tar"
        words = ["data", "index", url, "--out", str(tmp_path), "--workers", "2"]
        line = [sys.executable, "-m", "vitctl", *words]
        env = {**os.environ, "VITCTL_CACHE": str(tmp_path)}
        process = subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until = time.monotonic() + 30
        while len(workers := psutil.Process(process.pid).children()) < 2 and time.monotonic() < until:
            time.sleep(0.001)  # the signal comes while the second worker starts
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, said = process.communicate(timeout=20)
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.returncode is None else None
    assert (process.returncode, said.count("\n")) == (3, 1)
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_index_shards__tells_what_is_of_no_sample(tmp_path: Path) -> None:
    members = {"README": b"", "a.png": b"image", "a.cls": b"0", "x/.DS_Store": b"", "__MACOSX/._a.png": b""}
    (tmp_path / "s.tar").write_bytes(tar_of(members))
    for _ in range(2):
        said: list[str] = []
        assert index_shards([tmp_path / "s.tar"], note=said.append).num_samples == 1
        assert said == ["3 files in the shards, of no sample, passed over, such as README"]


def test_index_shards__two_at_a_time_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.system.files._LOCK_SECONDS", 0)
    paths = write_shards(tmp_path / "shards", 1)

    def inside(path: Path, *options: Any, **named: Any) -> Scan:
        with pytest.raises(DataError, match="shards: is being written by another process; wait for it or"):
            index_shards(paths)
        return read_shard(path, *options, **named)

    monkeypatch.setattr(indexing, "read_shard", inside)
    index_shards(paths)
