"""Downloads against a server on this machine that misbehaves in the ways that real ones do."""

import base64
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.data.server import listening
from vitctl.errors import CheckpointError
from vitctl.models.weights import download
from vitctl.models.weights.download import NotOnServerError, fetch
from vitctl.system import remote

CONTENT = bytes(range(256)) * 20_000  # several pieces
AGAIN = (
    "if the address needs a query (?...), which is never stored, give it again with the option, "
    "or in VITCTL_ADDRESSES"
)


@dataclass
class Server:
    """Answers with `content` unless `answers` holds a number of what to do instead for the next requests."""

    url: str = ""
    content: bytes = CONTENT
    headers: dict[str, str] = field(default_factory=dict)
    etag: str = '"one"'
    answers: list[int | str] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.requests.append({"path": self.path, **self.headers})
            answer = server.answers.pop(0) if server.answers else 200
            if isinstance(answer, str):
                self.send_response(302)
                self.send_header("Location", answer)
                self.end_headers()
            elif answer >= 300:
                self.send_error(answer)
            else:
                self.send_file(cut=answer)

        def send_file(self, cut: int) -> None:
            """Send the file or the asked part of it; `cut` below 200 is the percentage after which to hang
            up.
            """
            start = 0
            if "Range" in self.headers and self.headers.get("If-Range") == server.etag:
                start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            body, total = server.content[start:], len(server.content)
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            given = {"Content-Length": str(len(body)), "ETag": server.etag, **server.headers}
            for key, value in given.items():
                if value:
                    self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body if cut == 200 else body[: len(body) * cut // 100])

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    with listening(handler(found)) as address:
        found.url = f"{address}/models/vit,res_384.npz"
        yield found


Get = Callable[..., Path]


@pytest.fixture
def get(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Get:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)

    def run(url: str = "", attempts: int = 0, **options: Any) -> Path:
        if attempts:
            monkeypatch.setattr(remote, "LEAST_ATTEMPTS", attempts)
            monkeypatch.setattr(remote, "PATIENCE", [0.0])
        return fetch(url or server.url, cache=tmp_path, **options)

    return run


def test_fetch__keeps_the_file_under_its_name(server: Server, get: Get) -> None:
    steps: list[tuple[int, int]] = []
    path = get(progress=lambda done, total: steps.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert path.name == "vit,res_384.npz"
    assert path.parent.name == "models"
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert len(steps) > 2
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]
    assert get() == path
    assert len(server.requests) == 1  # the second time from the cache


def test_fetch__goes_on_in_the_next_call(server: Server, get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_RECOVERED_BYTES", 2**30)
    server.answers = [50, 50]
    with pytest.raises(CheckpointError) as error:
        get(attempts=2)
    held = len(CONTENT) * 3 // 4
    assert str(error.value) == (
        f"{server.url}: the connection broke (ClientPayloadError); gave up after 2 attempts in 0 s"
    )
    steps: list[int] = []
    assert get(progress=lambda done, _: steps.append(done)).read_bytes() == CONTENT
    assert server.requests[-1]["Range"] == f"bytes={held}-"
    assert steps[0] > held


def test_fetch__starts_anew_when_the_file_has_changed(server: Server, get: Get) -> None:
    server.answers = [50]
    with pytest.raises(CheckpointError):
        get(attempts=1)
    server.content, server.etag = CONTENT[::-1], '"two"'
    assert get().read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", ["", 'W/"weak"'])
def test_fetch__starts_anew_where_the_version_is_not_told(server: Server, get: Get, etag: str) -> None:
    server.answers, server.headers = [50], {"ETag": etag}
    assert get().read_bytes() == CONTENT
    assert [request for request in server.requests if "Range" in request] == []
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "no such file on the server"),
        (401, f"the server answers 401 Unauthorized; {AGAIN}"),
        (403, f"the server answers 403 Forbidden; {AGAIN}"),
        (400, f"the server answers 400 Bad Request; {AGAIN}"),
        (405, "the server answers 405 Method Not Allowed"),
    ],
)
def test_fetch__says_at_once_what_does_not_pass(server: Server, get: Get, status: int, words: str) -> None:
    server.answers = [status]
    with pytest.raises(CheckpointError) as error:
        get()
    assert str(error.value) == f"{server.url}: {words}"
    assert isinstance(error.value, NotOnServerError) == (status == 404)
    assert len(server.requests) == 1


def test_fetch__recognises_a_web_page(server: Server, get: Get, tmp_path: Path) -> None:
    server.content, server.headers = b"<html>Sign in</html>", {"Content-Type": "text/html; charset=utf-8"}
    with pytest.raises(
        CheckpointError, match="returned a web page, not weights; correct the link, or log in"
    ):
        get()
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".lock"] == []


def test_fetch__checks_the_digest_that_the_server_tells(server: Server, get: Get, tmp_path: Path) -> None:
    ours, other = (hashlib.md5(content) for content in (CONTENT, b"other"))
    server.headers = {"x-goog-hash": f"crc32c=AAAAAA==,md5={base64.b64encode(other.digest()).decode()}"}
    said = f"its md5 is {ours.hexdigest()[:16]}..., the server says {other.hexdigest()[:16]}...; run again"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        get(attempts=2)
    assert list(tmp_path.rglob("*.part")) == []
    server.headers = {"x-goog-hash": f"md5={base64.b64encode(ours.digest()).decode()}"}
    assert get().read_bytes() == CONTENT


def test_fetch__checks_the_digest_in_a_name_of_torch(
    server: Server, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.models.weights.download._HASHED_NAME_HOST", "127.0.0.1")
    start = hashlib.sha256(CONTENT).hexdigest()[:8]
    named = server.url.replace("vit,res_384.npz", "vit_b_16-{}.pth")
    assert get(named.format(start)).read_bytes() == CONTENT
    with pytest.raises(CheckpointError, match=r"the server says 00000000\.\.\."):
        get(named.format("00000000"), attempts=1)


def test_fetch__bounds_what_tells_no_size(server: Server, get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    server.headers = {"Content-Length": ""}
    path = get()
    assert path.read_bytes() == CONTENT
    path.unlink()
    monkeypatch.setattr("vitctl.system.limits.WEIGHTS", len(CONTENT) - 1)
    with pytest.raises(CheckpointError, match=f"larger than {len(CONTENT) - 1:,}, the limit"):
        get()


@pytest.mark.parametrize(
    "url", ["http://example.org/x", "http://127.0.0.1.example.org/x", "ftp://example.org/x",
            "file:///etc/passwd", "pipe:ls",
            "https:///x", "x.npz", "hf://o/n", "s4://a/b"]
)  # fmt: skip
def test_fetch__refuses_what_is_not_https(tmp_path: Path, url: str) -> None:
    with pytest.raises(CheckpointError, match=r"use https|commands are never run|is not an address"):
        fetch(url, cache=tmp_path)


def test_fetch__sends_no_token_to_others(server: Server, get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    path = get()
    assert "Authorization" not in server.requests[0]
    monkeypatch.setattr(remote, "HUB", server.url.partition("/models")[0])
    path.unlink()
    get(f"{server.url}?again")
    assert server.requests[1]["Authorization"] == "Bearer secret"
    with listening(handler(server)) as elsewhere:
        server.answers = [f"{elsewhere}/x.npz"]
        path.unlink()
        get(f"{server.url}?redirected")
    assert "Authorization" in server.requests[2]
    assert "Authorization" not in server.requests[3]


@pytest.mark.parametrize(
    "told", [{}, {"ETag": "", "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {"ETag": ""}]
)
def test_fetch__a_query_may_name_another_file_at_the_same_path(
    server: Server, get: Get, told: dict[str, str]
) -> None:
    server.headers = told
    assert get(f"{server.url}?id=1").read_bytes() == CONTENT
    download._CHECKED.clear()  # as in a new process
    requests = len(server.requests)
    assert get(f"{server.url}?id=1").read_bytes() == CONTENT
    assert len(server.requests) - requests == 1
    server.content, server.etag = CONTENT[::-1], '"two"'
    server.headers = {key: value.replace("2024", "2025") for key, value in told.items()}
    assert get(f"{server.url}?id=2").read_bytes() == CONTENT[::-1]
    assert [
        path.name for path in get(f"{server.url}?id=2").parent.iterdir() if "id=" in path.read_text("latin1")
    ] == []


@pytest.mark.parametrize("path", ["", "/", "/a/%2e%2e/b", "/./b", "/b%1b", "//../x", "//./x"])
def test_fetch__stays_inside_the_cache(tmp_path: Path, path: str) -> None:
    url = f"https:{path}" if path.startswith("//") else f"https://example.org{path}"
    with pytest.raises(CheckpointError, match=r"names no file|is not a plain file name") as caught:
        fetch(url, cache=tmp_path / "cache")
    assert "\x1b" not in str(caught.value) and not (tmp_path / "cache").exists()


def test_fetch__one_download_for_many_at_once(server: Server, get: Get) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == len(server.requests) == 1
