"""Remote files: https:// and hf:// by byte ranges, s3:// and gs:// through fsspec, with retries; and a cache
of remote shards on the local disk.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vitctl.errors import DataError
from vitctl.system import http
from vitctl.system.address import check
from vitctl.system.files import atomic_write, locked
from vitctl.system.http import (
    TransientError,
    content_range,
    hub_address,
    open_url,
    parse_num_bytes,
    read_chunks,
)

_ATTEMPTS_TO_REVALIDATE = 3  # then the cached copy is used
_ETAG = re.compile(r'(?:W/)?"[!-~]{0,500}"')
_FSSPEC_CHUNK = 8 * 2**20
_HUB_ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_ABANDONED_SECONDS = 3600
_TRIES = 3


class MissingError(DataError):
    """The file does not exist."""


class GaveUpError(DataError):
    """All attempts failed; another call would repeat them."""


class UnreachableError(DataError):
    """The server does not respond, or the response is broken."""


class _NotModifiedError(Exception):
    """The ETag is still the same (HTTP 304)."""


class _Response(NamedTuple):
    """Bytes from the requested offset on, in chunks; the size of the whole file (None: unknown); its ETag
    ("": none).
    """

    chunks: Iterator[bytes]
    num_bytes: int | None
    etag: str = ""


def is_remote(location: str) -> bool:
    """Return whether a location is a URL, as opposed to a local path."""
    return "://" in location or location.startswith("pipe:")


def check_address(url: str) -> str:
    """Return the text of an address that reads a file: https, hf, s3, gs, and http from this machine.

    Raises DataError.
    """
    return check(url, DataError, ("hf", *_PACKAGES))


def read_range(url: str, start: int, stop: int) -> bytes:
    """Read the bytes `start` to `stop` (excluded) of a remote file.

    Raises:
        MissingError: the file does not exist.
        DataError: access is refused, the file is shorter, or all retries failed.
    """
    return b"".join(stream(url, start, stop))


def read_file(url: str, max_bytes: int) -> bytes:
    """Read a whole remote file.

    Raises:
        MissingError: the file does not exist.
        DataError: access is refused, the file is larger than `max_bytes`, or all retries failed.
    """
    return b"".join(bounded(url, max_bytes))


def read_changed(url: str, max_bytes: int, etag: str) -> tuple[bytes, str] | None:
    """Read a remote file, unless it is unchanged since it had the given ETag.

    Args:
        url: of the file.
        max_bytes: upper limit on its size.
        etag: of the cached copy; "" for none.

    Returns:
        content and new ETag ("": none); None when the file is unchanged.

    Raises:
        UnreachableError: three attempts failed: no response, or the connection broke.
        MissingError, DataError: as `read_file`.
    """
    url = check_address(url)
    request = _from_fsspec if urlsplit(url).scheme in _PACKAGES else _from_http
    for attempt in count(1):
        try:
            response = request(url, 0, None, etag)
            content = b"".join(_bounded(url, response.chunks, max_bytes))
            if response.num_bytes in (None, len(content)):
                break
            raise TransientError(f"the response ended at byte {len(content)} of {response.num_bytes}")
        except _NotModifiedError:
            return None
        except TransientError as error:
            if not error.retried(url, attempt, _ATTEMPTS_TO_REVALIDATE):
                raise UnreachableError(f"{url}: {error}") from None
    return content, response.etag


def bounded(url: str, max_bytes: int) -> Iterator[bytes]:
    """Stream a whole remote file in chunks.

    Raises as `stream`, and DataError where it is larger than `max_bytes`.
    """
    url = check_address(url)
    return _bounded(url, stream(url), max_bytes)


def _bounded(url: str, chunks: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise DataError(f"{url}: larger than {max_bytes} bytes, the limit for this file")
        yield chunk


def stream(url: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Stream the bytes `start` to `stop` (None: the end) of a remote file, in chunks.

    Transient failures (a dropped connection, a short response, 5xx, 429) are retried from the last byte
    received, with exponential backoff and jitter.

    Raises:
        MissingError: the file does not exist.
        DataError: access is refused, the file is shorter, it changed meanwhile, or all retries failed.
    """
    url = check_address(url)
    request = _from_fsspec if urlsplit(url).scheme in _PACKAGES else _from_http
    done, whole, failures = start, None, 0
    while True:
        try:
            response = request(url, done, stop)
            if whole is not None and response.num_bytes not in (None, whole):
                raise DataError(
                    f"{url}: changed from {whole} to {response.num_bytes} bytes while it was read"
                )
            whole = response.num_bytes if whole is None else whole
            end = whole if stop is None else stop
            if whole is not None and end is not None and end > whole:
                raise DataError(f"{url}: ends at byte {whole}, should reach {end}")
            for chunk in response.chunks:
                chunk = chunk if end is None else chunk[: end - done]
                done += len(chunk)
                yield chunk
            if end is None or done == end:
                return
            raise TransientError(f"the response ended at byte {done} of {end}")
        except TransientError as error:
            failures += 1
            if not error.retried(url, failures, http.ATTEMPTS):
                raise GaveUpError(
                    f"{url}: {error}; gave up after {failures} attempts, run again to continue"
                ) from None


def _from_http(url: str, start: int, stop: int | None, etag: str = "") -> _Response:
    headers = {"If-None-Match": etag} if etag else {}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    address = _hub_address(url) if url.startswith("hf://") else url
    response = open_url(address, headers, error=DataError, missing=MissingError, name=url)
    if response.status == 304:
        raise _NotModifiedError
    if response.status == 416:
        raise DataError(f"{url}: is shorter than the index says; index it again")
    if response.status == 206:
        span = content_range(response)
        if span is None or span[0] != start:
            response.close()
            raise TransientError("the server answered with another range")
        return _Response(read_chunks(response), span[1])
    if stop is not None and start:
        response.close()
        raise DataError(
            f"{url}: the server does not support byte ranges; set data.cache_gib above 0 to read whole shards"
        )
    new_etag, length = response.headers.get("ETag", ""), response.headers.get("Content-Length")
    new_etag = new_etag if _ETAG.fullmatch(new_etag) else ""
    return _Response(read_chunks(response, start), parse_num_bytes(length), new_etag)


def _hub_address(url: str) -> str:
    """Return the https URL of hf://datasets/OWNER/NAME[@REVISION]/PATH."""
    parts = _HUB_ADDRESS.fullmatch(url)
    if parts is None:
        raise DataError(
            f"{url}: should look like hf://datasets/OWNER/NAME/FOLDER, or "
            f"hf://datasets/OWNER/NAME@REVISION/..."
        )
    return hub_address(f"datasets/{parts[1]}", parts[3], parts[2] or "main")


def _from_fsspec(url: str, start: int, stop: int | None, _etag: str = "") -> _Response:
    scheme = urlsplit(url).scheme
    try:
        from fsspec.core import url_to_fs

        # Not stored: fsspec caches one instance per process, and an instance from before a fork must not be
        # used.
        files, path = url_to_fs(url)
    except ImportError:
        raise DataError(
            f"{url}: {scheme}:// needs the package {_PACKAGES[scheme]}: pip install {_PACKAGES[scheme]}"
        ) from None
    num_bytes = int(_call_fsspec(url, lambda: files.info(path)["size"])) if stop is None else None
    end = stop or num_bytes or 0

    def chunks() -> Iterator[bytes]:
        for begin in range(start, end, _FSSPEC_CHUNK):
            until = min(begin + _FSSPEC_CHUNK, end)
            chunk = _call_fsspec(url, partial(files.cat_file, path, start=begin, end=until))
            yield chunk
            if len(chunk) < until - begin:
                return

    return _Response(chunks(), num_bytes)


def _call_fsspec(url: str, call: Callable[[], Any]) -> Any:
    """Call a file system of fsspec, with its errors converted to transient and permanent ones."""
    try:
        return call()
    except FileNotFoundError:
        raise MissingError(f"{url}: no such file on the server") from None
    except PermissionError as error:
        raise DataError(
            f"{url}: access denied ({error}); credentials are read from the environment"
        ) from None
    except Exception as error:  # each file system has its own exception types, also for dropped connections
        raise TransientError(f"{type(error).__name__}: {str(error)[:200]}") from None


@dataclass(frozen=True)
class ShardCache:
    """A cache of whole remote shards, shared by all processes. Files are named by the SHA-256 of their
    content; the least recently used are evicted first.

    A file is written to a temporary file, verified and renamed, so that a file with its final name is
    complete. A lock for each shard keeps two processes from fetching it twice; the kernel releases it when
    its holder dies. A process that has a file open can still read it after it was evicted.

    Args:
        folder: of the cache; created when missing.
        max_bytes: limit on the total size of all shards.
    """

    folder: Path
    max_bytes: int

    def path(self, sha256: str) -> Path:
        """Return the path at which a file of this digest is cached."""
        return self.folder / f"{sha256}.tar"

    def open(self, url: str, num_bytes: int, sha256: str) -> int:
        """Return a descriptor of a shard, which is fetched when it is not in the cache.

        Args:
            url: address to fetch it from.
            num_bytes: size of the shard.
            sha256: of its content, 64 hex digits.

        Raises:
            DataError: size or digest are wrong, it does not fit into the cache, or it cannot be fetched or
                written.
        """
        target, locks = self.path(sha256), self.folder / "locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
            for _ in range(_TRIES):
                descriptor = _open_cached(target, num_bytes)
                if descriptor is not None:
                    return descriptor
                with locked(locks / sha256[:3]):
                    if not target.exists():
                        self._fetch(url, target, num_bytes, sha256)
        except OSError as error:
            raise DataError(
                f"{error.filename or self.folder}: cannot be written ({error.strerror}); set "
                f"VITCTL_CACHE to a disk with free space"
            ) from None
        raise DataError(f"{self.folder}: the cache evicts shards before they are read; raise data.cache_gib")

    def _fetch(self, url: str, target: Path, num_bytes: int, sha256: str) -> None:
        for left in self.folder.glob(f".{target.name}.*.partial"):  # of a killed process: we hold the lock
            left.unlink(missing_ok=True)
        if num_bytes > self.max_bytes:
            raise DataError(
                f"{url}: {num_bytes} bytes, the cache holds {self.max_bytes}; raise data.cache_gib"
            )
        with locked(self.folder / "locks" / "room"):
            self._evict(num_bytes)
        with atomic_write(target) as aside:
            digest, size = hashlib.sha256(), 0
            with aside.open("wb") as file:
                for chunk in stream(url):
                    size += len(chunk)
                    if size > num_bytes:
                        break
                    digest.update(chunk)
                    file.write(chunk)
            if size != num_bytes or digest.hexdigest() != sha256:
                more = "more than " if size > num_bytes else ""
                raise DataError(
                    f"{url}: {more}{min(size, num_bytes)} bytes with sha256 {digest.hexdigest()[:12]}, its "
                    f"index says {num_bytes} bytes with {sha256[:12]}; index it again"
                )

    def _evict(self, num_bytes: int) -> None:
        """Delete abandoned temporary files, and the least recently used shards until `num_bytes` more fit."""
        cached, room = [], self.max_bytes - num_bytes
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                state = path.stat()
                if path.suffix == ".partial" and time.time() - state.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
                elif path.suffix in (".tar", ".partial"):
                    room -= state.st_size
                    cached.append((state.st_atime, state.st_size, path))
        for _, size, path in sorted(one for one in cached if one[2].suffix == ".tar"):
            if room >= 0:
                break
            path.unlink(missing_ok=True)
            room += size


def _open_cached(path: Path, num_bytes: int) -> int | None:
    """Open a cached file and mark it as most recently used; None when it is missing or has the wrong size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    state = os.fstat(descriptor)
    if state.st_size != num_bytes:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # owned by another user: reading is enough
        os.utime(descriptor, ns=(time.time_ns(), state.st_mtime_ns))  # keep the time of the download
    return descriptor
