"""Stores: a mistake of the user ends at once and names what to set; an outage is waited out, by one loop."""

import os
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.data.server import listening
from tests.matrix import slow
from vitctl.errors import CheckpointError, DataError
from vitctl.models.weights import download
from vitctl.system import remote

s3fs = pytest.importorskip("s3fs")
NoCredentialsError = pytest.importorskip("botocore.exceptions").NoCredentialsError
pytestmark = pytest.mark.filterwarnings("default")  # those of boto

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "S3CR3T", "AWS_DEFAULT_REGION": "us-east-1"}
ADDRESS = "s3://bucket/a.bin"


class Files:
    """Objects of a bucket by path, and the status and code of the next answers."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.errors: list[tuple[int, str]] = []
        self.asked: list[tuple[float, str]] = []


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Files]:
    """An S3 server that knows objects of `bucket`, and the environment that leads there."""
    known = Files()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            known.asked.append((time.monotonic(), self.path))
            status, code = known.errors.pop(0) if known.errors else (200, "")
            body = known.objects.get(self.path)
            if status == 200 and body is None:
                status, code = 404, "NoSuchKey"
            text = (
                body if status == 200 else f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
            )
            span = self.headers.get("Range", "")
            if status == 200 and span:
                first, last = (int(end) for end in span.removeprefix("bytes=").split("-"))
                status, text = 206, text[first : last + 1]
                self.send_response(status)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(body or b'')}")
            else:
                self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if status < 300:
                self.send_header("ETag", f'"{hash(body)}"')
                self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(text)

    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(remote, "_ANSWERED", set())
    monkeypatch.setattr(remote, "_DOWN", {})
    monkeypatch.setattr(download, "_CHECKED", {})
    s3fs.S3FileSystem.clear_instance_cache()
    with listening(Handler) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield known
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "AWS_ACCESS_KEY_ID"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "none"}, "AWS_PROFILE"),
        ({"AWS_DEFAULT_REGION": "eu west"}, "AWS_DEFAULT_REGION"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:9"}, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "htp://127.0.0.1:9"}, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:99999"}, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://user:S3CR3T@127.0.0.1:9"}, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://no-such-host.invalid"}, "AWS_ENDPOINT_URL"),
    ],
)
def test_mistake__of_the_environment_is_refused_at_once(
    files: Files, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], named: str
) -> None:
    for name, value in changed.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    began = time.monotonic()
    with remote.patient(60), pytest.raises(DataError) as caught:
        remote.read_file(ADDRESS, 100)
    assert named in str(caught.value) and not caught.value.passes and "S3CR3T" not in str(caught.value)
    assert time.monotonic() - began < 10 and not files.asked


@pytest.mark.parametrize(
    ("status", "code", "named"),
    [
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (301, "PermanentRedirect", "AWS_DEFAULT_REGION"),
        (404, "NoSuchBucket", "bucket"),
        *slow(
            (400, "ExpiredToken", "AWS_ACCESS_KEY_ID"),
            (403, "AccessDenied", "AWS_PROFILE"),
            (400, "AuthorizationHeaderMalformed", "AWS_DEFAULT_REGION"),
            (403, "RequestTimeTooSkewed", "clock"),
        ),
    ],
)
def test_mistake__that_the_store_names_is_refused_at_once(
    files: Files, status: int, code: str, named: str
) -> None:
    files.objects["/bucket/a.bin"] = bytes(10)
    files.errors += [(status, code)] * 4
    with remote.patient(60), pytest.raises(DataError) as caught:
        remote.read_ranges([(ADDRESS, 2, 8)])  # GET: the answer to HEAD has a status alone
    assert named in str(caught.value) and not caught.value.passes
    assert len(files.asked) <= (5 if status == 301 else 2)  # botocore follows a redirect by itself


def test_outage__of_a_path_with_the_words_of_a_mistake_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ANSWERED", set())
    for name in ("Profile/Token.tar", "Region/403", "SSLError"):
        url = f"s3://bucket/{name}"
        for text in (f"{url}: broken", f"the connection broke: {url}", f"cannot read {url}"):
            assert isinstance(remote._of_store(url, OSError(text)), remote.TransientError), text


def test_outage__is_waited_out_by_one_loop(files: Files) -> None:
    files.objects["/bucket/a.bin"] = bytes(range(10))
    files.errors += [(503, "SlowDown"), (500, "InternalError"), (503, "SlowDown")]
    with remote.patient(60):
        assert remote.read_ranges([(ADDRESS, 2, 8)]) == [bytes(range(2, 8))]
    assert len(files.asked) == 4  # one request an attempt


def test_lost_credentials__of_a_store_that_answered_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's role is renewed by a service of its own."""
    lost = NoCredentialsError()
    monkeypatch.setattr(remote, "_ANSWERED", set())
    assert isinstance(remote._of_store(ADDRESS, lost), DataError)
    monkeypatch.setattr(remote, "_ANSWERED", {"bucket"})
    assert isinstance(remote._of_store(ADDRESS, lost), remote.TransientError)


def test_weights__of_a_store_are_fetched_again_when_they_change(files: Files) -> None:
    files.objects["/bucket/a.bin"] = b"first"
    path = download.fetch(ADDRESS)
    assert path.read_bytes() == b"first"
    files.objects["/bucket/a.bin"] = b"second, longer"
    assert download.fetch(ADDRESS).read_bytes() == b"first"  # once a process
    download._CHECKED.clear()
    s3fs.S3FileSystem.clear_instance_cache()
    assert download.fetch(ADDRESS).read_bytes() == b"second, longer"
    asked = len(files.asked)
    download._CHECKED.clear()
    assert download.fetch(ADDRESS).read_bytes() == b"second, longer"
    assert len(files.asked) - asked == 1  # its version alone
    path.write_bytes(b"second, damaged")
    download._CHECKED.clear()
    assert download.fetch(ADDRESS).read_bytes() == b"second, longer"
    files.errors += [(503, "SlowDown")] * 10
    download._CHECKED.clear()
    with remote.patient(600):
        assert download.fetch(ADDRESS).read_bytes() == b"second, longer"  # no server, but a copy
    assert download.cached(ADDRESS) == path


def test_weights__a_store_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(CheckpointError, match=r"az:// needs the package adlfs: pip install 'vitctl\[az\]'"):
        download.fetch("az://container/model.safetensors")
