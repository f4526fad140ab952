"""Bytes of files far away: https and hf:// by ranges, s3:// and gs:// through fsspec; tried again when it may help."""

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from http.client import HTTPException, InvalidURL
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request

from vitctl.errors import DataError
from vitctl.system.bounds import HTTP_SECONDS
from vitctl.system.http import bounded_opener, told_bytes
from vitctl.system.parsing import parsing, said_by
from vitctl.system.text import has_control, one_line

_ATTEMPTS = 8
_ATTEMPTS_TO_ASK = 3  # whether a file has changed; then what was kept is used
_VERSION = re.compile(r'(?:W/)?"[!-~]{0,500}"')
_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_CHUNK = 2**20
_FSSPEC_CHUNK = 8 * 2**20
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_HUB = "huggingface.co"
_HUB_ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MissingError(DataError):
    """There is no such file."""


class _PassingError(Exception):
    """It failed in a way that may not happen again; `pause_seconds` is what the server asks for."""

    def __init__(self, text: str, pause_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.pause_seconds = pause_seconds


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
    with parsing(url, DataError, "not an address"):
        address = urlsplit(url)
        _ = address.port, address.hostname, url.encode("utf-8")
    if address.scheme == "http" and address.hostname not in _LOOPBACK:
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


def read_file(url: str, most_bytes: int) -> bytes:
    """A whole remote file.

    Raises:
        MissingError: there is no such file.
        DataError: it is refused, larger than `most_bytes`, or kept failing.
    """
    return b"".join(bounded(url, most_bytes))


def read_changed(url: str, most_bytes: int, version: str) -> tuple[bytes, str] | None:
    """A remote file with its version, the server's ETag ("": not told); None when it is still of the version that we know.

    Args:
        url: of the file.
        most_bytes: that it may have.
        version: that we know; "" for none.

    Raises:
        UnreachableError: three times nobody answered, or the answer broke off.
        MissingError, DataError: as `read_file`.
    """
    check_address(url)
    ask = _from_fsspec if urlsplit(url).scheme in _PACKAGES else _from_http
    said = ""
    for attempt in range(_ATTEMPTS_TO_ASK):
        time.sleep(_PAUSE_SECONDS * attempt)
        try:
            answer = ask(url, 0, None, version)
            content = b"".join(_bounded(url, answer.pieces, most_bytes))
            if answer.num_bytes in (None, len(content)):
                return content, answer.version
            said = f"the answer ended at byte {len(content)} of {answer.num_bytes}"
        except _UnchangedError:
            return None
        except _PassingError as error:
            said = str(error)
    raise UnreachableError(f"{url}: {said}")


def bounded(url: str, most_bytes: int) -> Iterator[bytes]:
    """A whole remote file in pieces. Raises as `stream`, and DataError where it is larger than `most_bytes`."""
    return _bounded(url, stream(url), most_bytes)


def _bounded(url: str, pieces: Iterator[bytes], most_bytes: int) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > most_bytes:
            raise DataError(f"{url}: larger than the {most_bytes} bytes that it may have")
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
            raise _PassingError(f"the answer ended at byte {done} of {end}")
        except _PassingError as error:
            failures += 1
            if failures == _ATTEMPTS:
                raise DataError(f"{url}: {error}; gave up after {_ATTEMPTS} attempts, run again to go on") from None
            longest = min(_PAUSE_SECONDS * 2 ** (failures - 1), _LONGEST_PAUSE_SECONDS)
            time.sleep(max(longest * random.uniform(0.5, 1.0), min(error.pause_seconds, _LONGEST_PAUSE_SECONDS)))


class _Redirects(HTTPRedirectHandler):
    """Follows a few redirects to addresses that would pass themselves, and keeps the token at home."""

    max_redirections = 5

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        check_address(newurl)
        if urlsplit(newurl).hostname in _LOOPBACK and urlsplit(req.full_url).hostname not in _LOOPBACK:
            raise DataError(f"{req.full_url}: sends us on to {newurl}, which is this machine itself")
        fp.close()  # or all of it would be read first
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)
        if follow is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            follow.remove_header("Authorization")
        return follow


def _from_http(url: str, start: int, stop: int | None, version: str = "") -> _Answer:
    address = _hub_address(url) if url.startswith("hf://") else url
    headers = {"User-Agent": "vitctl", "Accept-Encoding": "identity"}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    if (token := os.environ.get("HF_TOKEN")) and urlsplit(address).netloc == _HUB and address.startswith("https:"):
        headers["Authorization"] = f"Bearer {token}"
    if version:
        headers["If-None-Match"] = version
    try:
        response = bounded_opener(_Redirects()).open(Request(address, headers=headers), timeout=HTTP_SECONDS.most)
    except HTTPError as error:
        error.close()  # it holds the connection
        if error.code == 304:
            raise _UnchangedError from None
        raise _refusal(url, error) from None
    except InvalidURL as error:
        raise DataError(f"{url}: not an address ({error})") from None
    except (OSError, HTTPException) as error:
        raise _PassingError(str(error) or type(error).__name__) from None
    except ValueError as error:  # a letter in the address, or in HF_TOKEN, that no request may have
        raise DataError(f"{url}: cannot be asked for ({said_by(error)}); mend the address, or HF_TOKEN") from None
    length = response.headers.get("Content-Length")
    if response.status == 206:
        span = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range", ""))
        if span is None or told_bytes(span[1]) != start:
            response.close()
            raise _PassingError("the server answered with another range")
        return _Answer(_pieces(response, 0), told_bytes(span[2]))
    if stop is not None and start:
        response.close()
        raise DataError(f"{url}: the server answers no byte ranges; read whole shards with data.cache_gib above 0")
    told = response.headers.get("ETag", "")
    return _Answer(_pieces(response, start), told_bytes(length), told if _VERSION.fullmatch(told) else "")


def _pieces(response: Any, skip: int) -> Iterator[bytes]:
    """The body after its first `skip` bytes."""
    try:
        with response:
            while piece := response.read(_CHUNK):
                kept, skip = piece[skip:], max(0, skip - len(piece))
                if kept:
                    yield kept
    except (OSError, HTTPException) as error:
        raise _PassingError(f"the connection broke ({str(error) or type(error).__name__})") from None


def _refusal(url: str, error: HTTPError) -> Exception:
    """What a status that is no success means."""
    if error.code in _PASSING:
        return _PassingError(
            f"the server answers {error.code} {one_line(' '.join(str(error.reason).split()))}", _retry_after(error)
        )
    if error.code in (404, 410):
        return MissingError(f"{url}: no such file on the server")
    if error.code == 416:
        return DataError(f"{url}: is shorter than its index says")
    hint = "; private data on Hugging Face needs HF_TOKEN set" if error.code in (401, 403) else ""
    return DataError(f"{url}: the server answers {error.code} {one_line(' '.join(str(error.reason).split()))}{hint}")


def _retry_after(error: HTTPError) -> float:
    """Seconds that the server asks us to wait, 0 when it does not say."""
    told = error.headers.get("Retry-After") or ""
    if (seconds := told_bytes(told)) is not None:
        return float(seconds)
    try:
        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _hub_address(url: str) -> str:
    """Where a file of hf://datasets/OWNER/NAME[@REVISION]/PATH lies."""
    parts = _HUB_ADDRESS.fullmatch(url)
    if parts is None:
        raise DataError(
            f"{url}: should look like hf://datasets/OWNER/NAME/FOLDER, or hf://datasets/OWNER/NAME@REVISION/..."
        )
    return f"https://{_HUB}/datasets/{parts[1]}/resolve/{quote(parts[2] or 'main')}/{quote(parts[3])}"


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
        raise _PassingError(f"{type(error).__name__}: {str(error)[:200]}") from None
