"""Servers that never end, as a person would meet them: each answer ends here, in bounded time and bytes."""

import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fsspec import asyn

from tests.data.server import Faults, serving
from tests.matrix import few
from vitctl.errors import CheckpointError, DataError, VitctlError
from vitctl.models.weights.download import fetch
from vitctl.system import remote
from vitctl.system.remote import MissingError, read_file, read_ranges

Serve = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\n"


def drip(letters: bytes, again: bytes) -> Serve:
    """A start at once, then a byte every 50 ms."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(letters)
        while True:
            time.sleep(0.05)
            connection.sendall(again)

    return serve


def flood(letters: bytes, again: bytes) -> Serve:
    """A start, and then the same for ever, as fast as it goes."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(letters)
        while True:
            connection.sendall(again * 1000)

    return serve


@contextmanager
def server(serve: Serve) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            serve(connection)

    def run() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/index.json"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


SERVERS = {
    "dripping status": drip(b"H", b"T"),
    "dripping headers": drip(OK + b"X: ", b"x"),
    "dripping body": drip(OK + b"Content-Length: 100000\r\n\r\n", b"x"),
    "dripping chunks": drip(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "continue for ever": flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body for ever": flood(OK + b"\r\n", b"{" * 1000),
    "a size of digits": flood(OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b"x"),
    "redirect with a body for ever": flood(
        b"HTTP/1.1 302 Found\r\nLocation: /index.json\r\n\r\n", b"x" * 1000
    ),
}


@pytest.mark.parametrize("name", few([*SERVERS], "dripping headers", "continue for ever", "body for ever"))
def test_endless_answers__end(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vitctl.system.limits.HTTP_SECONDS", 1)
    monkeypatch.setattr(remote, "LEAST_ATTEMPTS", 2 if name == "dripping body" else 1)
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("vitctl.system.limits.WEIGHTS", 4 * 2**20)
    with server(SERVERS[name]) as url, remote.patient(0.0):
        began = time.monotonic()
        with pytest.raises(DataError) as caught:
            read_file(url, 2**20)
        with pytest.raises(CheckpointError) as also:
            fetch(url.replace("index.json", "w.npz"), cache=tmp_path)
        assert time.monotonic() - began < 60
    assert "\n" not in str(caught.value) + str(also.value)


@pytest.mark.parametrize("length", [b"9" * 30, b"-5", b"ten"])
def test_malformed_size__nothing_is_kept(length: bytes, tmp_path: Path) -> None:
    """A file cut short got its final name, and was taken from the cache from then on."""
    answer = OK + b"Content-Length: " + length + b"\r\n\r\n0123456789"
    said = pytest.raises(CheckpointError, match=r"failed|Content-Length|broke")
    with server(lambda connection: connection.sendall(answer)) as url, remote.patient(0.1), said:
        fetch(url, cache=tmp_path)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("read", [lambda url: read_file(url, 100), fetch], ids=["shards", "weights"])
def test_refused__is_said_at_once_and_given_up_soon(
    read: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took 25 silent seconds."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        place = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(remote, "FIRST_SECONDS", 0.0)
    with pytest.raises(VitctlError, match=rf"{place} cannot be reached \(Connection refused\); .*3 attempts"):
        read(f"http://{place}/index.json")
    [line] = capsys.readouterr().err.splitlines()  # not one for each attempt
    assert line.startswith(
        f"warning: http://{place}/index.json: {place} cannot be reached (Connection refused); check"
    )
    assert re.search(r"; since \d\d:\d\d:\d\d, waiting until \d\d:\d\d:\d\d$", line)


def test_refused__by_a_server_that_answered_is_retried_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        place = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(remote, "_ANSWERED", {place})
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(DataError, match=r"gave up after \d+ attempts in [01] s"):
        read_file(f"http://{place}/index.json", 100)


TEXT = bytes(range(256)) * 40


def only(url: str, start: int, stop: int) -> bytes:
    [found] = read_ranges([(url, start, stop)])
    return found


ALL_FAULTS = {"drop": 0.15, "503": 0.15, "429": 0.1, "short": 0.1, "short_range": 0.1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "_ANSWERED", set())  # ports are used again
    monkeypatch.setattr(remote, "_DOWN", {})
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    (tmp_path / "file").write_bytes(TEXT)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stream__is_exact_however_the_server_behaves(tmp_path: Path, seed: int) -> None:
    faults = Faults(seed, **ALL_FAULTS)
    with serving(tmp_path, faults) as url:
        for start in range(0, len(TEXT), 701):
            assert only(f"{url}/file", start, min(start + 701, len(TEXT))) == TEXT[start : start + 701]
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
            only(f"{url}/file", 5, 9)


def test_stream__never_asks_again_for_what_is_not_there(tmp_path: Path) -> None:
    faults = Faults()
    with serving(tmp_path, faults) as url:
        with pytest.raises(MissingError, match=r"/none: no such file on the server$"):
            only(f"{url}/none", 0, 10)
        assert len(faults.asked) == 1
        with pytest.raises(DataError, match=r"is shorter than the index says|ends at byte"):
            only(f"{url}/file", len(TEXT) + 1, len(TEXT) + 2)
        with pytest.raises(DataError, match=rf"ends at byte {len(TEXT)}, should reach {len(TEXT) + 1}"):
            only(f"{url}/file", 10, len(TEXT) + 1)
        with pytest.raises(DataError, match="larger than 100, the limit"):
            read_file(f"{url}/file", 100)
        assert len(faults.asked) == 4
    with (
        serving(tmp_path, Faults(0, **{"403": 1.0})) as url,
        pytest.raises(DataError, match=r"answers 403 Forbidden; .*VITCTL_ADDRESSES"),
    ):
        only(f"{url}/file", 0, 10)


@pytest.mark.parametrize("told", [0.0, 7.0, 10.0**9])
def test_stream__pauses_double_up_to_a_bound_or_as_the_server_says(
    monkeypatch: pytest.MonkeyPatch, told: float
) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.5)
    busy, url = remote.TransientError("busy", told), "https://example.org/x"
    slept = [remote._pause(url, busy, failures, time.monotonic(), 600.0) for failures in range(1, 10)]
    last = remote._pause(url, busy, 10, time.monotonic() - 599.9, 600.0)
    assert 0 < last <= 0.1  # the last attempt is at the time that was told
    longest = [min(0.5 * 2**turn, 30.0) for turn in range(9)]
    least = min(told, 30.0)
    for pause, most in zip(slept, longest, strict=True):
        assert max(most / 2, least) <= pause <= max(most, least)
    assert len({pause / most for pause, most in zip(slept, longest, strict=True)}) > 1
    with pytest.raises(DataError, match="busy; gave up after 10 attempts in 600 s"):
        remote._pause(url, busy, 10, time.monotonic() - 600.0, 600.0)


def test_hub__addresses_are_files_on_the_hub() -> None:
    assert remote._hub_url("hf://datasets/o/n/train/a b.tar") == (
        "https://huggingface.co/datasets/o/n/resolve/main/train/a%20b.tar"
    )
    assert (
        remote._hub_url("hf://datasets/o/n@v1/x.tar")
        == "https://huggingface.co/datasets/o/n/resolve/v1/x.tar"
    )
    with pytest.raises(DataError, match="should look like hf://datasets/OWNER/NAME"):
        remote._hub_url("hf://o/n")


def test_fsspec__a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def url_to_fs(_url: str, **_: object) -> None:
        raise ImportError("Install s3fs")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    with pytest.raises(DataError, match=r"s3://bucket/x: s3:// needs the package s3fs: pip install .*s3"):
        only("s3://bucket/x", 0, 10)


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
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (files, url.removeprefix("s3:/")))
    monkeypatch.setattr(remote, "PART_BYTES", 1000)
    assert only("s3://bucket/file", 3, 5000) == TEXT[3:5000]
    assert read_file("s3://bucket/file", len(TEXT)) == TEXT
    with pytest.raises(MissingError, match="no such file"):
        read_file("s3://bucket/none", 10)


def _read_after_fork(url: str, found: "multiprocessing.Queue[tuple[bool, bytes]]") -> None:
    found.put(
        (asyn.loop[0] is None, b"".join(read_ranges([(url, at, at + 100) for at in range(0, 1000, 100)])))
    )


def test_loop__is_made_anew_after_a_fork(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    found: multiprocessing.Queue[tuple[bool, bytes]] = fork.Queue()
    with serving(tmp_path, Faults()) as url:
        assert only(f"{url}/file", 0, 1000) == TEXT[:1000]
        workers = [fork.Process(target=_read_after_fork, args=(f"{url}/file", found)) for _ in range(4)]
        for worker in workers:
            worker.start()
        assert [found.get(timeout=60) for _ in workers] == [(True, TEXT[:1000])] * 4
        for worker in workers:
            worker.join()


def test_outage__is_of_the_whole_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited for another process during the outage does not wait as long again."""
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    with serving(tmp_path, Faults(0, drop=1.0)) as url:
        span = remote.Span(f"{url}/file", 0, 10)
        began = time.monotonic()
        with pytest.raises(remote.GaveUpError, match=r"gave up after 3 attempts in 60\d s"):
            remote.transfer([span], patience=600.0, since=began - 600.0)
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("silent_seconds", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_outage__leaves_the_connections_of_the_node_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_seconds: int
) -> None:
    """A transfer that waits out an outage holds none: neither in a pause, nor while a server says nothing."""
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(remote, "CONNECTIONS", 2)
    asked: list[float] = []

    def serve(_: socket.socket) -> None:
        asked.append(time.monotonic())
        time.sleep(silent_seconds if len(asked) > 8 else 0)

    def wait_out(url: str) -> None:
        with suppress(DataError):
            remote.transfer([remote.Span(url, n, n + 1) for n in range(4)], patience=3.0, connections=4)

    with server(serve) as url, serving(tmp_path, Faults(0)) as other:
        waiting = threading.Thread(target=wait_out, args=(url,))
        waiting.start()
        time.sleep(1)
        began = time.monotonic()
        assert len(asked) > 8
        assert only(f"{other}/file", 0, 100) == TEXT[:100]
        assert time.monotonic() - began < 1
        waiting.join()


def test_slots__a_finished_task_keeps_none_from_one_that_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has one connection, which the failed request leaves to the next: both waited for ever."""
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "CONNECTIONS", 1)
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.2)
    faults, answers = Faults(0), iter(["503", "", ""])
    monkeypatch.setattr(faults, "draw", lambda *_: next(answers))
    with serving(tmp_path, faults) as url:
        spans = [remote.Span(f"{url}/file", n, n + 9) for n in (0, 50)]
        done = threading.Thread(target=remote.transfer, args=(spans,), kwargs={"connections": 2}, daemon=True)
        done.start()
        done.join(20)
    assert not done.is_alive() and next(answers, None) is None


def test_slots__waiting_for_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "CONNECTIONS", 1)
    monkeypatch.setattr(remote, "_TELL_SECONDS", 0.1)
    slot = remote._free_slot()
    assert slot is not None
    threading.Timer(0.5, os.close, (slot,)).start()
    with serving(tmp_path, Faults(0)) as url:
        assert only(f"{url}/file", 0, 100) == TEXT[:100]
    assert "waiting for one of the 1 connections of this node" in capsys.readouterr().err
