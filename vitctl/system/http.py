"""Files over http: redirects, refusals, pauses; answers are bounded in time and size from their first byte, so that a slow drip
ends as surely as silence does.
"""

import http.client
import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, cast
from urllib.error import HTTPError
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

from vitctl.errors import VitctlError
from vitctl.system.bounds import HTTP_SECONDS, HTTP_SLOWEST, WEIGHTS
from vitctl.system.parsing import parsing, said_by
from vitctl.system.text import one_line

ATTEMPTS = 8
PAUSE_SECONDS = 0.5
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LONGEST_PAUSE_SECONDS = 30.0
_CHUNK = 2**20
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_FOR_THE_CALLER = (304, 416)
Response = http.client.HTTPResponse | HTTPError
HUB = "https://huggingface.co"  # alone is sent HF_TOKEN
_MOST_HEADER_BYTES = 2**20
_MOST_DIGITS = 18


class _Watched(io.RawIOBase):
    """What comes out of a socket. Each read may take as long as the socket's own timeout; all of them together may not."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._began, self._received = raw, time.monotonic(), 0
        self.most = _MOST_HEADER_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """As of any raw file. Raises TimeoutError at less than the slowest rate, OSError after too many bytes."""
        seconds = time.monotonic() - self._began
        if seconds > HTTP_SECONDS.most + self._received / HTTP_SLOWEST.most:
            raise TimeoutError(f"too slow, {self._received:,} bytes in {seconds:.0f} s")
        if self._received > self.most:
            raise OSError(f"more than {self.most:,} bytes")
        count = self._raw.readinto(buffer)
        self._received += count or 0
        return cast("int | None", count)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._watched = _Watched(self.fp.detach())
        self.fp = io.BufferedReader(self._watched)

    def begin(self) -> None:
        """Status and headers, which may be said a second time, but not for ever."""
        super().begin()
        self._watched.most = WEIGHTS.most


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SafeConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Http(HTTPHandler):
    def http_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(HTTPSHandler):
    def https_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_SafeConnection, req)


def told_bytes(text: str | None) -> int | None:
    """The size that a server tells; None where it tells none, or none that could be."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


class PassingError(Exception):
    """It failed in a way that may not happen again; `pause_seconds` is what the server asks for."""

    def __init__(self, text: str, pause_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.pause_seconds = pause_seconds

    def pause(self, failures: int) -> None:
        """Wait before the next attempt, after so many failures from 1: twice as long each time, and drawn at random, so that many
        workers do not come back at once; as long as the server asks for, within bounds.
        """
        longest = min(PAUSE_SECONDS * 2 ** (failures - 1), _LONGEST_PAUSE_SECONDS)
        time.sleep(max(longest * random.uniform(0.5, 1.0), min(self.pause_seconds, _LONGEST_PAUSE_SECONDS)))


@dataclass(frozen=True)
class Client:
    """Asks for files, and says what is wrong in errors of the caller's.

    Args:
        check: raises for an address that may not be asked for; redirects are held against it too.
        error: for what stays wrong.
        missing: where there is no such file.
    """

    check: Callable[[str], None]
    error: type[VitctlError]
    missing: type[VitctlError]

    def open(self, url: str, headers: Mapping[str, str], *, name: str = "") -> Response:
        """Begin to get a file; its answer, of status 200, 206, 304 (not modified) or 416 (no such range).

        Its headers also have the `X-Linked-ETag` of a redirect.

        Args:
            url: http or https.
            headers: of this request, beside those of every one; `HF_TOKEN` goes to Hugging Face alone.
            name: what the file is called in errors; the address where that is not given.

        Raises:
            PassingError: trying again may help.
        """
        name, redirects = name or url, _Redirects(self)
        own = {"User-Agent": "vitctl", "Accept-Encoding": "identity"}
        address = urlsplit(url)
        if (token := os.environ.get("HF_TOKEN")) and f"{address.scheme}://{address.netloc}" == HUB:
            own["Authorization"] = f"Bearer {token}"
        try:
            request = Request(url, headers={**own, **headers})
            response = build_opener(_Http(), _Https(), redirects).open(request, timeout=HTTP_SECONDS.most)
        except HTTPError as error:
            error.close()  # it holds the connection
            if error.code in _FOR_THE_CALLER:
                return error
            raise self._refusal(name, error) from None
        except http.client.InvalidURL as error:
            raise self.error(f"{name}: not an address ({error})") from None
        except (OSError, http.client.HTTPException) as error:
            raise PassingError(str(error) or type(error).__name__) from None
        except ValueError as error:  # a letter in the address, or in HF_TOKEN, that no request may have
            text = f"{name}: cannot be asked for ({said_by(error)}); mend the address, or HF_TOKEN"
            raise self.error(text) from None
        if redirects.linked_etag and "X-Linked-ETag" not in response.headers:
            response.headers["X-Linked-ETag"] = redirects.linked_etag
        return cast(Response, response)

    def _refusal(self, name: str, error: HTTPError) -> Exception:
        """What a status that is no success means."""
        text = f"the server answers {error.code} {one_line(' '.join(str(error.reason).split()))}"
        if error.code in _PASSING:
            return PassingError(text, _retry_after(error))
        if error.code in (404, 410):
            return self.missing(f"{name}: no such file on the server")
        hint = "; what is private or gated on Hugging Face needs HF_TOKEN set" if error.code in (401, 403) else ""
        return self.error(f"{name}: {text}{hint}")


class _Redirects(HTTPRedirectHandler):
    """Follows a few redirects to addresses that would pass themselves, and keeps the token at home."""

    max_redirections = 5

    def __init__(self, client: Client) -> None:
        self.client, self.linked_etag = client, ""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        fp.close()  # or all of it would be read first
        self.client.check(newurl)
        if urlsplit(newurl).hostname in LOOPBACK and urlsplit(req.full_url).hostname not in LOOPBACK:
            raise self.client.error(f"{req.full_url}: sends us on to {newurl}, which is this machine itself")
        self.linked_etag = headers.get("X-Linked-ETag", self.linked_etag)
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)
        if follow is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            follow.remove_header("Authorization")
        return follow


def pieces(response: Response, skip: int = 0) -> Iterator[bytes]:
    """The body of an answer after its first `skip` bytes; closed at the end. Raises PassingError where it breaks off."""
    try:
        with response:
            while piece := response.read(_CHUNK):
                kept, skip = piece[skip:], max(0, skip - len(piece))
                if kept:
                    yield kept
    except (OSError, http.client.HTTPException) as error:
        raise PassingError(f"the connection broke ({str(error) or type(error).__name__})") from None


def told_span(response: Response) -> tuple[int, int | None] | None:
    """Of an answer of status 206 its first byte in the file, and the size of the whole file (None: not told); None: neither is told."""
    found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range", ""))
    return None if found is None else (int(found[1]), told_bytes(found[2]))


def split_address(url: str, error: type[VitctlError]) -> SplitResult:
    """The parts of an address, all of which can be told. Raises `error` where they cannot."""
    with parsing(url, error, "not an address"):
        address = urlsplit(url)
        _ = address.port, address.hostname, url.encode("utf-8")
    return address


def hub_address(repository: str, path: str, revision: str = "main") -> str:
    """Where a file of a repository on Hugging Face lies; those of data sets begin with `datasets/`."""
    return f"{HUB}/{quote(repository)}/resolve/{quote(revision)}/{quote(path)}"


def _retry_after(error: HTTPError) -> float:
    """Seconds that the server asks us to wait, 0 when it does not say."""
    told = error.headers.get("Retry-After") or ""
    if (seconds := told_bytes(told)) is not None:
        return float(seconds)
    try:
        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
