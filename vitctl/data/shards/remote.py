"""Bytes of files far away: https and hf:// by ranges, s3:// and gs:// through fsspec; tried again when it may help."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vitctl.errors import DataError
from vitctl.system import http
from vitctl.system.http import (
    LOOPBACK,
    Client,
    TransientError,
    content_range,
    hub_address,
    parse_num_bytes,
    read_chunks,
    split_address,
)
from vitctl.system.text import has_control

_ATTEMPTS_TO_ASK = 3  # whether a file has changed; then what was kept is used
_VERSION = re.compile(r'(?:W/)?"[!-~]{0,500}"')
_FSSPEC_CHUNK = 8 * 2**20
_HUB_ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}


class MissingError(DataError):
    """There is no such file."""


class UnreachableError(DataError):
    """Nobody answers, or not as a server should."""


class _UnchangedError(Exception):
    """The server still has the version that we know."""


class _Answer(NamedTuple):
    """Bytes from the asked place on, in pieces; the size of the whole file (None: not told); its version ("": not told)."""

    pieces: Iterator[bytes]
    num_bytes: int | None
    version: str = ""


def is_remote(place: str) -> bool:
    """Whether a text is an address and no local path."""
    return "://" in place or place.startswith("pipe:")


def check_address(url: str) -> None:
    """Let only addresses pass that read a file: https, hf, s3, gs, and http to this machine itself.

    Raises:
        DataError: another scheme, a command, or a path that climbs out of its folder.
    """
    address = split_address(url, DataError)
    if address.scheme == "http" and address.hostname not in LOOPBACK:
        raise DataError(
            f"{url}: plain http is read from this machine alone, anybody could change it on its way; use https"
        )
    if address.scheme not in ("http", "https", "hf", *_PACKAGES) or not address.netloc:
        raise DataError(
            f"{url}: shards are read from folders, https://, hf://, s3:// and gs://; commands are never run"
        )
    if ".." in address.path.split("/") or has_control(url) or any(map(str.isspace, url)):
        raise DataError(f"{url}: has '..' or a blank in it, should be a plain address")


def read_range(url: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` (excluded) of a remote file, all of them.

    Raises:
        MissingError: there is no such file.
        DataError: it is refused, ends earlier, or kept failing.
    """
    return b"".join(stream(url, start, stop))


def read_file(url: str, max_bytes: int) -> bytes:
    """A whole remote file.

    Raises:
        MissingError: there is no such file.
        DataError: it is refused, larger than `max_bytes`, or kept failing.
    """
    return b"".join(bounded(url, max_bytes))


def read_changed(url: str, max_bytes: int, version: str) -> tuple[bytes, str] | None:
    """A remote file with its version, the server's ETag ("": not told); None when it is still of the version that we know.

    Args:
        url: of the file.
        max_bytes: that it may have.
        version: that we know; "" for none.

    Raises:
        UnreachableError: three times nobody answered, or the answer broke off.
        MissingError, DataError: as `read_file`.
    """
    check_address(url)
    ask = _from_fsspec if urlsplit(url).scheme in _PACKAGES else _from_http
    said = ""
    for attempt in range(_ATTEMPTS_TO_ASK):
        time.sleep(http.PAUSE_SECONDS * attempt)
        try:
            answer = ask(url, 0, None, version)
            content = b"".join(_bounded(url, answer.pieces, max_bytes))
            if answer.num_bytes in (None, len(content)):
                return content, answer.version
            said = f"the answer ended at byte {len(content)} of {answer.num_bytes}"
        except _UnchangedError:
            return None
        except TransientError as error:
            said = str(error)
    raise UnreachableError(f"{url}: {said}")


def bounded(url: str, max_bytes: int) -> Iterator[bytes]:
    """A whole remote file in pieces. Raises as `stream`, and DataError where it is larger than `max_bytes`."""
    return _bounded(url, stream(url), max_bytes)


def _bounded(url: str, pieces: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > max_bytes:
            raise DataError(f"{url}: larger than the {max_bytes} bytes that it may have")
        yield piece


def stream(url: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Bytes `start` to `stop` (None: the end) of a remote file, in pieces.

    What fails in passing (a dropped connection, a short answer, 5xx, 429) is asked for again from where it stopped, after
    pauses that double and are drawn at random, so that many workers do not come back at once.

    Raises:
        MissingError: there is no such file.
        DataError: it is refused, ends earlier, changed meanwhile, or kept failing.
    """
    check_address(url)
    ask = _from_fsspec if urlsplit(url).scheme in _PACKAGES else _from_http
    done, whole, failures = start, None, 0
    while True:
        try:
            answer = ask(url, done, stop)
            if whole is not None and answer.num_bytes not in (None, whole):
                raise DataError(f"{url}: changed from {whole} to {answer.num_bytes} bytes while it was read")
            whole = answer.num_bytes if whole is None else whole
            end = whole if stop is None else stop
            if whole is not None and end is not None and end > whole:
                raise DataError(f"{url}: ends at byte {whole}, should reach {end}")
            for piece in answer.pieces:
                piece = piece if end is None else piece[: end - done]
                done += len(piece)
                yield piece
            if end is None or done == end:
                return
            raise TransientError(f"the answer ended at byte {done} of {end}")
        except TransientError as error:
            failures += 1
            if failures == http.ATTEMPTS:
                raise DataError(f"{url}: {error}; gave up after {failures} attempts, run again to go on") from None
            error.pause(failures)


def _from_http(url: str, start: int, stop: int | None, version: str = "") -> _Answer:
    headers = {"If-None-Match": version} if version else {}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    address = _hub_address(url) if url.startswith("hf://") else url
    response = Client(check_address, DataError, MissingError).open(address, headers, name=url)
    if response.status == 304:
        raise _UnchangedError
    if response.status == 416:
        raise DataError(f"{url}: is shorter than its index says")
    if response.status == 206:
        span = content_range(response)
        if span is None or span[0] != start:
            response.close()
            raise TransientError("the server answered with another range")
        return _Answer(read_chunks(response), span[1])
    if stop is not None and start:
        response.close()
        raise DataError(f"{url}: the server answers no byte ranges; read whole shards with data.cache_gib above 0")
    told, length = response.headers.get("ETag", ""), response.headers.get("Content-Length")
    return _Answer(read_chunks(response, start), parse_num_bytes(length), told if _VERSION.fullmatch(told) else "")


def _hub_address(url: str) -> str:
    """Where a file of hf://datasets/OWNER/NAME[@REVISION]/PATH lies."""
    parts = _HUB_ADDRESS.fullmatch(url)
    if parts is None:
        raise DataError(
            f"{url}: should look like hf://datasets/OWNER/NAME/FOLDER, or hf://datasets/OWNER/NAME@REVISION/..."
        )
    return hub_address(f"datasets/{parts[1]}", parts[3], parts[2] or "main")


def _from_fsspec(url: str, start: int, stop: int | None, _version: str = "") -> _Answer:
    scheme = urlsplit(url).scheme
    try:
        from fsspec.core import url_to_fs

        # Asked for anew each time: fsspec keeps one for each process, and one made before a fork must not be used.
        files, path = url_to_fs(url)
    except ImportError:
        raise DataError(
            f"{url}: {scheme}:// needs the package {_PACKAGES[scheme]}: pip install {_PACKAGES[scheme]}"
        ) from None
    num_bytes = int(_calling(url, lambda: files.info(path)["size"])) if stop is None else None
    end = num_bytes if stop is None else stop

    def pieces() -> Iterator[bytes]:
        for begin in range(start, end or 0, _FSSPEC_CHUNK):
            until = min(begin + _FSSPEC_CHUNK, end or 0)
            piece = _calling(url, lambda begin=begin, until=until: files.cat_file(path, start=begin, end=until))  # type: ignore[misc]
            yield piece
            if len(piece) < until - begin:
                return

    return _Answer(pieces(), num_bytes)


def _calling(url: str, call: Callable[[], Any]) -> Any:
    """What a file system of fsspec gives, its errors sorted into those that pass and those that stay."""
    try:
        return call()
    except FileNotFoundError:
        raise MissingError(f"{url}: no such file on the server") from None
    except PermissionError as error:
        raise DataError(
            f"{url}: the server refuses ({error}); credentials are taken from the environment alone"
        ) from None
    except Exception as error:  # each file system has errors of its own, for dropped connections and all else
        raise TransientError(f"{type(error).__name__}: {str(error)[:200]}") from None
