"""HTTP client: redirects, status codes, retries. Time and size of a response are limited from its first byte,
so that a response that trickles in slowly times out as one that stalls does.
"""

import http.client
import io
import os
import random
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
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
from vitctl.system.address import LOOPBACK, VARIABLE, check, split, with_query
from vitctl.system.files import HTTP_SECONDS, HTTP_SLOWEST, WEIGHTS

ATTEMPTS = 8
PAUSE_SECONDS = 0.5
_FIRST_ATTEMPTS = 3  # at a server that never answered: 1.5 s of pauses
_ANSWERED: set[str] = set()  # servers that answered
_NOTICE_SECONDS = 5.0  # between two messages about the same file
_NOTICED: dict[str, float] = {}  # URL -> time of the last message
_LONGEST_PAUSE_SECONDS = 30.0
_CHUNK = 2**20
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_LEFT_TO_CALLER = (304, 416)
Response = http.client.HTTPResponse | HTTPError
HUB = "https://huggingface.co"  # the only host that receives HF_TOKEN
_MAX_HEADER_BYTES = 2**20
_MAX_DIGITS = 18


class _LimitedSocket(io.RawIOBase):
    """The bytes of a socket.

    The timeout of the socket limits each read; this class limits all reads in total.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._began, self._received = raw, time.monotonic(), 0
        self.limit = _MAX_HEADER_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer.

        Raises TimeoutError where the transfer is too slow, OSError after too many bytes.
        """
        seconds = time.monotonic() - self._began
        if seconds > HTTP_SECONDS.limit + self._received / HTTP_SLOWEST.limit:
            raise TimeoutError(f"too slow, {self._received:,} bytes in {seconds:.0f} s")
        if self._received > self.limit:
            raise OSError(f"more than {self.limit:,} bytes")
        count = self._raw.readinto(buffer)
        self._received += count or 0
        return cast("int | None", count)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._socket = _LimitedSocket(self.fp.detach())
        self.fp = io.BufferedReader(self._socket)

    def begin(self) -> None:
        """Read status and headers; interim responses (1xx) may come first, within the header limit."""
        super().begin()
        self._socket.limit = WEIGHTS.limit


class _Connections(HTTPHandler, HTTPSHandler):
    def http_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_limited, http.client.HTTPConnection), req)

    def https_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_limited, http.client.HTTPSConnection), req)


def _limited(kind: type[http.client.HTTPConnection], *args: Any, **named: Any) -> http.client.HTTPConnection:
    connection = kind(*args, **named)
    connection.response_class = _Response
    return connection


def parse_num_bytes(text: str | None) -> int | None:
    """Return the number of bytes in a header; None if it is missing or not plausible."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


class TransientError(Exception):
    """A failure that a retry may cure; `pause_seconds` is the server's Retry-After, `attempts` limits the
    caller's attempts.
    """

    def __init__(self, text: str, pause_seconds: float = 0.0, attempts: int = sys.maxsize) -> None:
        super().__init__(text)
        self.pause_seconds, self.attempts = pause_seconds, attempts

    def retried(self, url: str, failures: int, attempts: int) -> bool:
        """Say on standard error that the request failed, and wait before the next attempt.

        The wait is an exponential backoff with jitter, at least the server's Retry-After, within a limit.

        Args:
            url: of the file, for the message; one line in `_NOTICE_SECONDS` for each.
            failures: failed attempts so far, from 1.
            attempts: the caller's limit on them.

        Returns:
            False, at once, if no attempt is left.
        """
        attempts = min(attempts, self.attempts)
        if failures >= attempts:
            return False
        longest = min(PAUSE_SECONDS * 2 ** (failures - 1), _LONGEST_PAUSE_SECONDS)
        pause = max(longest * random.uniform(0.5, 1.0), min(self.pause_seconds, _LONGEST_PAUSE_SECONDS))
        if time.monotonic() - _NOTICED.get(url, -_NOTICE_SECONDS) >= _NOTICE_SECONDS:
            _NOTICED[url] = time.monotonic()
            text = f"warning: {url}: {self}; attempt {failures + 1} of {attempts} in {pause:.1f} s"
            print(text, file=sys.stderr, flush=True)
        time.sleep(pause)
        return True


def open_url(
    url: str,
    headers: Mapping[str, str],
    *,
    error: type[VitctlError],
    missing: type[VitctlError],
    name: str = "",
) -> Response:
    """Send a GET request; returns a response of status 200, 206, 304 (not modified) or 416 (no such range).

    The headers of the response include the `X-Linked-ETag` of a redirect. No message holds a query or a
    token.

    Args:
        url: http or https; its query is sent with it, see `with_query`.
        headers: of this request, in addition to the common ones; `HF_TOKEN` is sent to Hugging Face only.
        error: type to raise for permanent failures.
        missing: type to raise where the file does not exist.
        name: name of the file in errors; the URL where not given.

    Raises:
        TransientError: a retry may help.
        error, missing: as given.
    """
    url = check(url, error)
    name, redirects = name or url, _Redirects(url, error)
    common = {"User-Agent": "vitctl", "Accept-Encoding": "identity"}
    if (token := os.environ.get("HF_TOKEN")) and _is_hub(url):
        if not (token.isascii() and token.isprintable()):
            raise error(f"{name}: HF_TOKEN has an invalid character; set it again")
        common["Authorization"] = f"Bearer {token}"
    try:
        request = Request(with_query(url), headers={**common, **headers})
        response = build_opener(_Connections(), redirects).open(request, timeout=HTTP_SECONDS.limit)
    except HTTPError as problem:
        problem.close()  # it holds the connection
        _ANSWERED.add(redirects.address.netloc)
        if problem.code in _LEFT_TO_CALLER:
            return problem
        if problem.code in (404, 410):
            raise missing(f"{name}: no such file on the server") from None
        text = _status_text(problem, url)
        if problem.code in _TRANSIENT:
            raise TransientError(text, _retry_after(problem)) from None
        raise error(f"{name}: {text}") from None
    except (http.client.InvalidURL, ValueError):  # their texts quote the address
        raise error(f"{name}: the address or its redirect is not valid; correct it") from None
    except (OSError, http.client.HTTPException) as problem:
        raise _connection_error(problem, redirects.address) from None
    _ANSWERED.add(redirects.address.netloc)
    length = response.headers.get("Content-Length")
    if length and parse_num_bytes(length) is None:
        response.close()
        raise TransientError("the server's Content-Length is not a number of bytes")
    if redirects.linked_etag and "X-Linked-ETag" not in response.headers:
        response.headers["X-Linked-ETag"] = redirects.linked_etag
    return cast(Response, response)


def _status_text(problem: HTTPError, url: str) -> str:
    """Describe a status other than success. The server's own words may repeat what it was sent, so they are
    not shown.
    """
    phrase = next((one.phrase for one in HTTPStatus if one == problem.code), "")
    text = f"the server answers {problem.code} {phrase}".rstrip()
    if 300 <= problem.code < 400:
        return f"{text}, which leads in a circle or nowhere; check the address, or give the file's final one"
    if problem.code not in (400, 401, 403):
        return text
    if _is_hub(url):
        return f"{text}; what is private or gated on Hugging Face needs HF_TOKEN set"
    return (
        f"{text}; if the address needs a query (?...), which is never stored, give it again with the option, "
        f"or in {VARIABLE}"
    )


def _is_hub(url: str) -> bool:
    return url.startswith(f"{HUB}/")


def _connection_error(error: Exception, address: SplitResult) -> TransientError:
    attempts = sys.maxsize if address.netloc in _ANSWERED else _FIRST_ATTEMPTS
    cause = getattr(error, "reason", error)
    if isinstance(cause, socket.gaierror):
        return TransientError(
            f"the host {address.hostname} cannot be found; check the address and the network",
            attempts=attempts,
        )
    if isinstance(cause, ConnectionRefusedError):
        return TransientError(
            f"{address.netloc} refuses connections; check the address, and that the server runs",
            attempts=attempts,
        )
    return TransientError((isinstance(error, OSError) and str(error)) or type(error).__name__)


class _Redirects(HTTPRedirectHandler):
    """Follows a few redirects to addresses that may be requested.

    Removes the token where the host changes.
    """

    max_redirections = 5

    def __init__(self, url: str, error: type[VitctlError]) -> None:
        self.error, self.address, self.linked_etag = error, urlsplit(url), ""

    def http_error_302(self, req: Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()  # otherwise urllib reads the whole body first
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        text = check(split(newurl, self.error)[0], self.error)
        self.address = urlsplit(text)
        if self.address.hostname in LOOPBACK and urlsplit(req.full_url).hostname not in LOOPBACK:
            raise self.error(f"{req.host}: redirects to {text}, which is this machine itself")
        self.linked_etag = headers.get("X-Linked-ETag", self.linked_etag)
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)
        if follow is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            follow.remove_header("Authorization")
        return follow


def read_chunks(response: Response, skip: int = 0) -> Iterator[bytes]:
    """Yield the body of a response after its first `skip` bytes, in chunks; closed at the end.

    Raises:
        TransientError: the connection broke.
    """
    try:
        with response:
            while chunk := response.read(_CHUNK):
                wanted, skip = chunk[skip:], max(0, skip - len(chunk))
                if wanted:
                    yield wanted
    except (OSError, http.client.HTTPException) as error:
        raise TransientError(f"the connection broke ({str(error) or type(error).__name__})") from None


def content_range(response: Response) -> tuple[int, int | None] | None:
    """Content-Range of a response of status 206: first byte, and size of the whole file (None: unknown).

    None: no such header.
    """
    found = re.fullmatch(
        r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range", "")
    )
    return None if found is None else (int(found[1]), parse_num_bytes(found[2]))


def hub_address(repository: str, path: str, revision: str = "main") -> str:
    """Return the URL of a file in a repository on Hugging Face.

    Repositories of data sets begin with `datasets/`.
    """
    return f"{HUB}/{quote(repository)}/resolve/{quote(revision)}/{quote(path)}"


def _retry_after(error: HTTPError) -> float:
    """Seconds of the header Retry-After, 0 where it is missing or unreadable."""
    value = error.headers.get("Retry-After") or ""
    if (seconds := parse_num_bytes(value)) is not None:
        return float(seconds)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
