"""Servers that never end, as a person would meet them: each answer ends here, in bounded time and bytes."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from vitctl.data.shards.remote import read_file
from vitctl.errors import CheckpointError, DataError, VitctlError
from vitctl.models.weights.download import fetch
from vitctl.system import http

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


@pytest.mark.parametrize("name", SERVERS)
def test_endless_answers__end(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITCTL_MAX_HTTP_SECONDS", "1")
    attempts = 2 if name == "dripping body" else 1
    monkeypatch.setattr(http, "ATTEMPTS", attempts)
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("VITCTL_MAX_WEIGHTS", "4")
    with server(SERVERS[name]) as url:
        began = time.monotonic()
        with pytest.raises(DataError) as caught:
            read_file(url, 2**20)
        with pytest.raises(CheckpointError) as also:
            fetch(url.replace("index.json", "w.npz"), cache=tmp_path, attempts=attempts)
        assert time.monotonic() - began < 60
    assert "\n" not in str(caught.value) + str(also.value)


@pytest.mark.parametrize("length", [b"9" * 30, b"-5", b"ten"])
def test_malformed_size__nothing_is_kept(
    length: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file cut short got its final name, and was taken from the cache from then on."""
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.01)

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.sendall(OK + b"Content-Length: " + length + b"\r\n\r\n0123456789")

    with server(answer) as url, pytest.raises(CheckpointError, match="Content-Length is not a number"):
        fetch(url, cache=tmp_path, attempts=2)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("read", [lambda url: read_file(url, 100), fetch], ids=["shards", "weights"])
def test_refused__is_said_at_once_and_given_up_soon(
    read: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took 25 silent seconds."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        place = f"127.0.0.1:{unused.getsockname()[1]}"
    printed: list[str] = []
    monkeypatch.setattr("vitctl.system.http.time.sleep", lambda _: printed.append(capsys.readouterr().err))
    with pytest.raises(VitctlError, match=f"{place} refuses connections; .*3 attempts"):
        read(f"http://{place}/index.json")
    text = f"warning: http://{place}/index.json: {place} refuses connections; check the address"
    assert printed[0].startswith(text)
    assert "; attempt 2 of 3 in 0." in printed[0]
    assert printed[1:] == [""]  # not for each attempt, while it is quick


def test_refused__by_a_server_that_answered_is_retried_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        place = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(http, "_ANSWERED", {place})
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.0)
    with pytest.raises(DataError, match=f"gave up after {http.ATTEMPTS} attempts"):
        read_file(f"http://{place}/index.json", 100)
