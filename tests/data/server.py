"""A file server on loopback that misbehaves at random, by seed."""

import random
import re
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

_ESTABLISHED = 1  # TCP_ESTABLISHED of Linux


class Faults:
    """How a server misbehaves: the share of each fault, and what it did so far."""

    def __init__(self, seed: int = 0, **shares: float) -> None:
        self.shares, self.done = shares, Counter[str]()
        self.asked: list[tuple[str, str]] = []
        self.sent = self.most_open = 0  # bytes of files; connections at a time
        self.open: set[socket.socket] = set()
        self._random, self._lock = random.Random(seed), threading.Lock()

    def connected(self, one: socket.socket) -> None:
        """A connection is in use; some that were closed by the other side may still have their thread."""
        with self._lock:
            self.open.add(one)
            states = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for each in self.open]
            self.most_open = max(self.most_open, states.count(_ESTABLISHED))

    def disconnected(self, one: socket.socket) -> None:
        """Its thread has ended."""
        with self._lock:
            self.open.discard(one)

    def draw(self, path: str, span: str) -> str:
        """The fault of the next answer, '' for none."""
        with self._lock:
            self.asked.append((path, span))
            left = self._random.random()
            for name, share in self.shares.items():
                left -= share
                if left < 0:
                    self.done[name] += 1
                    return name
            self.done["well"] += 1
            return ""


@contextmanager
def listening(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests at a port of its own; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(
    folder: Path, faults: Faults, *, ranges: bool = True, by_query: Mapping[str, Faults] | None = None
) -> Iterator[str]:
    """Serve the files of a folder; gives the address.

    With `by_query` each query has its own counts.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            try:
                super().handle()
            finally:
                for one in (faults, *(by_query or {}).values()):
                    one.disconnected(self.connection)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "") if ranges else "")
            name, _, query = self.path.partition("?")
            counts = (by_query or {}).get(query, faults)
            counts.connected(self.connection)
            fault, path = counts.draw(name, span[0] if span else ""), folder / name.lstrip("/")
            if fault == "drop":
                self.close_connection = True
                return
            if fault in ("503", "429", "403"):
                self.send_response(int(fault))
                if fault == "429":
                    self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            version = f'"{zlib.crc32(data):08x}"'
            begin, end = (int(span[1]), int(span[2] or len(data) - 1) + 1) if span else (0, len(data))
            if begin >= len(data):
                self.send_error(416)
                return
            body = data[begin:end]
            self.send_response(206 if span else 200)
            self.send_header("ETag", version)
            if span:
                self.send_header("Content-Range", f"bytes {begin}-{begin + len(body) - 1}/{len(data)}")
            is_part = span and len(body) < len(data)  # a whole file is checked against its digest
            if path.suffix == ".tar" and (fault == "flip" or (fault == "flip_range" and is_part)):
                body = body[:-1] + bytes([body[-1] ^ 1])
            told = body[: len(body) // 3] if fault == "short_range" else body
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            told = told[: len(told) // 2] if fault == "short" else told
            self.close_connection = fault == "short" or self.close_connection
            counts.sent += len(told)
            self.wfile.write(told)

    with listening(Handler) as url:
        yield url


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch, bucket: str) -> Iterator[None]:
    """A server of moto with a bucket, and the environment that leads there."""
    moto, s3fs = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "S3CR3T", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(bucket)
    yield
    server.stop()
