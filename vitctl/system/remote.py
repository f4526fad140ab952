"""Remote files by https, hf, s3, gs and az: concurrent byte ranges, and one retry loop for all.

The requests of a process run in fsspec's event loop, which is created anew after a fork. aiohttp handles
https and hf, fsspec's file systems handle the other schemes. Time and size of a response are limited from its
first byte, so that a trickling response times out like a stalled one. The processes of a node share
CONNECTIONS connections.
"""

import asyncio
import errno
import io
import itertools
import os
import random
import re
import shutil
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from vitctl.errors import DataError, refuse
from vitctl.system import limits
from vitctl.system.address import LOOPBACK, VARIABLE, check, split, with_query
from vitctl.system.files import atomic_write, cache_folder, error_text, lock
from vitctl.system.process import HERE, tell

CONNECTIONS = 16
_FILE_CONNECTIONS = 4  # for the parts of one file
PATIENCE_SECONDS = 60.0  # for a server that answered before; not in a run
FIRST_SECONDS = 1.5  # for one that never answered; not in a run
PAUSE_SECONDS = 0.5
PART_BYTES = 8 * 2**20
HUB = "https://huggingface.co"  # the only host that receives HF_TOKEN
_LONGEST_PAUSE_SECONDS, _SLOT_SECONDS, _TELL_SECONDS, _SLICE_SECONDS = 30.0, 0.02, 10.0, 0.2
LEAST_ATTEMPTS = 3
_SLOT = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_RECOVERED_BYTES = 2**20  # received in one response: the server works again
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
STORES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # scheme -> package
# What waiting does not cure on a disk.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT}
_KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a key",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}
# Part of an error's class or code, or start of its text, that no retry cures -> what to set; "": the keys.
_MISTAKES = {
    "^Invalid endpoint": "set AWS_ENDPOINT_URL to https://HOST",
    "SSLError|CertificateError|ResponseParserError": "set AWS_ENDPOINT_URL to the address of an S3 server",
    "EndpointResolution|^ValueError$": "set AWS_ENDPOINT_URL to https://HOST",
    "Profile": "set AWS_PROFILE to one that ~/.aws/config has",
    "Region|PermanentRedirect|Malformed|IllegalLocation|^301$": "set AWS_DEFAULT_REGION to the bucket's",
    "TimeTooSkewed": "set the clock of this machine",
    "AccessDenied": "give its keys the right to list, read, write and delete, or set others in AWS_PROFILE",
    "Credential|AccessKeyId|Signature|Token|Authenticat|RefreshError|^40[013]$": "",
    "^unable to connect to account": "",
}
_HUB_ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
_ETAG = re.compile(r'"[!-~]{0,500}"')  # a weak one does not identify bytes
_SPAN = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)")
_MAX_REDIRECTS, _MAX_DIGITS = 5, 18
_ANSWERED: set[str] = set()  # hosts, and buckets
PATIENCE: list[float] = []  # seconds; the last is the current run's
_DOWN: dict[str, tuple[float, float]] = {}  # host -> start of its outage, and time of the last failure
_OLD_SECONDS = 120.0  # after which a failure belongs to another outage


Result = TypeVar("Result")


class MissingError(DataError):
    """The file does not exist on the server."""


class GaveUpError(DataError):
    """The server did not answer, or broke off, until the patience ran out."""

    passes = True


class NoRangesError(DataError):
    """The server sends complete files only."""


class TransientError(Exception):
    """A failure that a retry may cure.

    `pause_seconds` comes from Retry-After. `is_unknown`: the host has no address, so it is mistyped if it
    never answered.
    """

    def __init__(self, text: str, pause_seconds: float = 0.0, *, is_unknown: bool = False) -> None:
        super().__init__(text)
        self.pause_seconds, self.is_unknown = pause_seconds, is_unknown


@dataclass
class Span:
    """A range of a remote file, and the local file that it is written to.

    Args:
        start, stop: first byte, and end (excluded); None: to the end of the file.
        file, at: destination, and the byte at which the range begins in it.
        done, etag: bytes of the range that are already written, and their version.
        heard: called at the start of every response.
        progress: called with (end of the bytes done, end of the range or size of the file, 0 if unknown).
    """

    url: str
    start: int = 0
    stop: int | None = None
    file: Any = field(default_factory=io.BytesIO)
    at: int = 0
    done: int = 0
    etag: str = ""
    heard: Callable[[], None] = lambda: None
    progress: Callable[[int, int], None] = lambda _done, _all: None
    num_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def write(self, chunk: bytes) -> None:
        self.file.seek(self.at + self.done)
        self.file.write(chunk)
        self.done += len(chunk)
        self.progress(self.start + self.done, self.stop or self.num_bytes or 0)


@contextmanager
def patient(seconds: float) -> Iterator[None]:
    """Let every request within the block, which is a run, wait out an outage for so many seconds."""
    PATIENCE.append(seconds)
    try:
        yield
    finally:
        PATIENCE.pop()


def is_remote(location: str) -> bool:
    """Return whether a location is a URL, as opposed to a local path."""
    return "://" in location or location.startswith("pipe:")


def check_address(url: str) -> str:
    """Return the text of an address: https, hf, s3, gs, az, or http on this machine; else raise DataError."""
    return check(url, DataError, ("hf", *STORES))


def hub_address(repository: str, path: str, revision: str = "main") -> str:
    """Return the URL of a file in a Hugging Face repository; data set repositories begin with `datasets/`."""
    return f"{HUB}/{quote(repository)}/resolve/{quote(revision)}/{quote(path)}"


def read_ranges(ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Read ranges (url, start, stop excluded) of remote files concurrently. Raises as `transfer`."""
    spans = [Span(*one) for one in ranges]
    transfer(spans)
    return [span.file.getvalue() for span in spans]


def read_file(
    url: str, max_bytes: int, *, patience: float | None = None, since: float | None = None
) -> bytes:
    """Read a complete remote file. Raises as `transfer`."""
    span = Span(url)
    transfer([span], max_bytes, patience=patience, since=since)
    return bytes(span.file.getvalue())


def copy(
    url: str,
    file: IO[bytes],
    max_bytes: int,
    *,
    num_bytes: int | None = None,
    since: float | None = None,
) -> list[Span]:
    """Copy a complete remote file to a local one, and return the ranges fetched. Raises as `transfer`.

    With `num_bytes`, the file's size, it is fetched in parallel parts. `file` is at its end on return.
    """
    if (num_bytes or 0) > max_bytes:
        raise _too_large(url, max_bytes)
    starts = range(0, num_bytes or 0, PART_BYTES)
    parts = [Span(url, at, min(at + PART_BYTES, num_bytes or 0), file, at) for at in starts]
    try:
        transfer(parts, max_bytes, since=since, connections=_FILE_CONNECTIONS)
    except NoRangesError:
        parts = []
    if not parts:
        parts = [Span(url, 0, num_bytes, file)]
        transfer(parts, max_bytes, since=since)
    file.seek(0, os.SEEK_END)
    return parts


def transfer(
    spans: Sequence[Span],
    max_bytes: int | None = None,
    *,
    patience: float | None = None,
    since: float | None = None,
    connections: int = CONNECTIONS,
) -> None:
    """Fetch ranges of remote files concurrently; each is complete on return.

    A transient failure (a dropped connection, a short response, 5xx, 429) is retried from the last byte
    received, with exponential backoff and jitter.

    Args:
        patience: seconds to wait out an outage; None: as long as the run is `patient`; outside a run a
            minute, and for a server that never answered a few attempts.
        since: `time.monotonic()` since which the caller has waited; None: now.
        connections: most connections to open, while the node has as many left.

    Raises:
        MissingError: a file does not exist.
        GaveUpError: an outage lasted longer than `patience`.
        DataError: access is refused, or a file is larger than its limit, shorter than its range, or changed
            meanwhile.
        OSError: a local file cannot be written.
    """
    from fsspec.asyn import get_loop

    for span in spans:
        span.url = check_address(span.url)
    spans = [span for span in spans if span.stop != span.start]
    work = _transferred(deque(spans), max_bytes, patience, since, min(connections, len(spans)))
    future = asyncio.run_coroutine_threadsafe(work, get_loop())
    try:
        future.result()
    except BaseException:
        future.cancel()
        raise


async def _transferred(
    spans: deque[Span], max_bytes: int | None, patience: float | None, since: float | None, connections: int
) -> None:
    async def work(since: float | None) -> None:
        # The slot is released after the session, which keeps its connection open.
        async with AsyncExitStack() as slot, _session() as session:
            await slot.enter_async_context(_slot(spans))
            while spans:
                await _complete(session, spans.popleft(), max_bytes, patience, since, slot)
                since = None

    asked = time.monotonic() if since is None else since
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(work(asked))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


_LAST_TOLD: list[float] = []  # when the lack of connections was last reported


@asynccontextmanager
async def _slot(spans: Sequence[Span]) -> AsyncIterator[None]:
    """Hold one of this node's connections within the block; wait until one is free or no span is left."""
    began, is_told = time.monotonic(), False
    while (slot := _free_slot()) is None and spans:
        now = time.monotonic()
        if now - max([began, *_LAST_TOLD]) > _TELL_SECONDS:
            _LAST_TOLD[:], is_told = [now], True
            tell(f"waiting for one of the {CONNECTIONS} connections of this node, which other processes use")
        await asyncio.sleep(_SLOT_SECONDS)
    if is_told:
        tell("")
    try:
        yield
    finally:
        if slot is not None and slot >= 0:
            os.close(slot)


def _free_slot() -> int | None:
    """Return the descriptor of a free connection; None if all are used, -1 if they cannot be counted."""
    folder = cache_folder() / "connections"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(CONNECTIONS):
            slot = os.open(folder / f"{socket.gethostname()}-{number:02d}", _SLOT, 0o666)
            if lock(slot) is not False:
                return slot
            os.close(slot)
    except OSError:  # a disk that cannot be written: each process counts for itself
        return -1
    return None


async def _complete(
    session: Any,
    span: Span,
    max_bytes: int | None,
    patience: float | None,
    since: float | None,
    slot: AsyncExitStack,
) -> None:
    """Fetch one range: the retry loop. During an outage `slot` is freed for others."""
    failures = 0
    while True:
        received = span.done
        try:
            opened = _from_fsspec if urlsplit(span.url).scheme in STORES else _from_web
            async with opened(session, span) as (whole, first, chunks):
                if failures:
                    await slot.enter_async_context(_slot([span]))
                end = _begin(span, whole, first)
                received = span.done
                async for chunk in chunks:
                    if max_bytes is not None and (whole or span.done + len(chunk)) > max_bytes:
                        raise _too_large(span.url, max_bytes)
                    span.write(chunk if end is None else chunk[: max(0, end - span.start - span.done)])
                    if end is not None and span.start + span.done == end:
                        break
            if end is not None and span.start + span.done < end:
                raise TransientError(f"the response ended at byte {span.start + span.done} of {end}")
            if span.stop is None:
                span.file.truncate(span.at + span.done)
            _is_up(span.url)
            return
        except TransientError as error:
            if span.done - received >= _RECOVERED_BYTES:
                _is_up(span.url)
                failures, since = 0, None
            failures += 1
            await slot.aclose()  # an exit stack can be reused
            since = time.monotonic() if since is None else since
            await asyncio.sleep(_pause(span.url, error, failures, since, patience))
        except DataError:
            _is_up(span.url)
            raise


def _too_large(url: str, max_bytes: int) -> DataError:
    return DataError(url, f"larger than {max_bytes:,}, the limit of this file in bytes")


def _begin(span: Span, whole: int | None, first: int) -> int | None:
    """Check that a response continues a range, and return where the range ends; None if unknown."""
    known, span.num_bytes = span.num_bytes, whole
    span.heard()
    if first != span.start + span.done:
        if span.start:
            raise NoRangesError(
                span.url,
                "the server does not support byte ranges",
                "set data.cache_gib above 0 to read whole shards",
            )
        known, span.done = None, 0  # a full response: the file changed, or there are no ranges
    refuse(
        DataError,
        (
            whole is not None and known not in (None, whole),
            span.url,
            f"changed from {known} to {whole} bytes while it was read",
        ),
        (
            whole is not None and whole < (span.stop or 0),
            span.url,
            f"ends at byte {whole}, should reach {span.stop}",
        ),
    )
    return whole if span.stop is None else span.stop


def _is_up(url: str) -> None:
    if _DOWN.pop(urlsplit(url).netloc, None) is not None:
        tell("")


def retried(url: str, attempt: Callable[[], Result]) -> Result:
    """Repeat another library's request while it raises TransientError, as long as `transfer` would; after a
    signal no more.

    Raises GaveUpError, and whatever else `attempt` raises.
    """
    for failures in itertools.count(1):
        try:
            result = attempt()
            break
        except TransientError as error:
            until = time.monotonic() + _pause(url, error, failures, time.monotonic(), None)
            while time.monotonic() < until:
                if HERE.is_stopping:
                    raise GaveUpError(url, f"{error}; not waited for, because of the signal") from None
                time.sleep(min(_SLICE_SECONDS, max(0.0, until - time.monotonic())))
    _is_up(url)
    return result


def _pause(url: str, error: TransientError, failures: int, since: float, patience: float | None) -> float:
    """Return the seconds to wait before the next attempt; an outage is reported once, with its deadline.

    Raises GaveUpError if no attempt is left.
    """
    host, now = urlsplit(url).netloc, time.monotonic()
    first, last = _DOWN.get(host, (now, -_OLD_SECONDS))
    is_new = now - last >= _OLD_SECONDS
    since = since if is_new else min(since, first)
    _DOWN[host] = since, now
    if error.is_unknown and host not in _ANSWERED:
        patience = FIRST_SECONDS
    elif patience is None:
        patience = PATIENCE[-1] if PATIENCE else PATIENCE_SECONDS if host in _ANSWERED else FIRST_SECONDS
    left = since + patience - now
    longest = min(PAUSE_SECONDS * 2 ** min(failures - 1, 30), _LONGEST_PAUSE_SECONDS)
    pause: float = max(longest * random.uniform(0.5, 1.0), min(error.pause_seconds, _LONGEST_PAUSE_SECONDS))
    if failures >= LEAST_ATTEMPTS and left <= 0:
        gave_up = GaveUpError(url, f"{error}; gave up after {failures} attempts in {now - since:.0f} s")
        raise gave_up.passing(not error.is_unknown or host in _ANSWERED)
    if is_new:
        began, until = (time.strftime("%H:%M:%S", time.localtime(time.time() + at - now))
                        for at in (since, since + patience))  # fmt: skip
        tell(f"{url}: {error}; since {began}, waiting until {until}")
    return min(pause, left) if left > 0 else pause  # the last attempt is at the deadline


Response = tuple[int | None, int, AsyncIterator[bytes]]


def _store(url: str, attempts: int = 1) -> tuple[Any, str]:
    """Return the file system of a store's address or a local path, and the path in it.

    With `attempts` botocore repeats a request: a large upload is not begun again for one of its parts.
    """
    scheme = urlsplit(url).scheme
    try:
        from fsspec.core import url_to_fs

        of_s3 = {"config_kwargs": {"retries": {"total_max_attempts": attempts}}}
        files, path = url_to_fs(url, **(of_s3 if scheme == "s3" else {}))  # cached in each process
        files.retries = 1  # of s3fs: ours is the only loop
    except ImportError:
        package = f"the package {STORES[scheme]}: pip install 'vitctl[{scheme}]'"
        raise DataError(url, f"{scheme}:// needs {package}") from None
    except Exception as error:  # adlfs looks for keys here
        raise _of_store(url, error) from None
    return files, path


def _on_store(url: str, name: str, *given: Any, **named: Any) -> Any:
    """Call a method of the file system of a store, or of the disks, with the path of an address."""
    attempts = 4 if name == "put_file" else 1
    files, path = _store(check_address(url) if is_remote(url) else url, attempts)

    def attempt() -> Any:
        try:
            files.invalidate_cache()
            return getattr(files, name)(*given, path, **named)
        except Exception as error:
            raise _of_store(url, error) from None

    found = retried(url, attempt)
    _ANSWERED.add(urlsplit(url).netloc)
    return found


def list_store(url: str) -> list[str]:
    """Return the addresses of a folder's .tar files in a store, or of those that a pattern matches, sorted.

    An empty object may be the mark of a folder, and is left out. Raises as `transfer`.
    """
    found = _on_store(url if "*" in url else f"{url.rstrip('/')}/*.tar", "glob", detail=True)
    if not found:
        list_files(url.partition("*")[0])  # a bucket that is not there is an error
    return sorted(f"{urlsplit(url).scheme}://{name}" for name, about in found.items() if about["size"])


def list_files(folder: str) -> dict[str, int]:
    """Return the size of each file below a folder of a store or a disk, by its path from there.

    Empty if there is no such folder. Raises as `transfer`.
    """
    found = _on_store(folder, "find", detail=True)
    start = len(_store(folder)[1].rstrip("/")) + 1
    return {name[start:]: int(about["size"]) for name, about in found.items() if name[start:]}


def put(file: Path, url: str) -> None:
    """Copy a local file to a store or another disk, where it appears complete or not at all.

    Raises as `transfer`.
    """
    if is_remote(url):
        _on_store(url, "put_file", str(file))
        return

    def attempt() -> None:
        try:
            Path(url).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(Path(url)) as aside:
                shutil.copyfile(file, aside)
        except OSError as error:
            if error.errno in _LASTING:
                raise DataError(
                    url, os.strerror(error.errno), "make room there, or name another folder"
                ) from None
            raise _of_store(url, error) from None

    retried(url, attempt)


def fetch(url: str, aside: Path, num_bytes: int | None = None) -> None:
    """Copy a file of a store or another disk, of `num_bytes` if they are known, to a new local one.

    Raises as `transfer`.
    """
    if is_remote(url):
        with aside.open("w+b") as local:
            copy(url, local, num_bytes or limits.RUN_FILE, num_bytes=num_bytes)
    else:
        shutil.copyfile(url, aside)


def remove(url: str) -> None:
    """Remove a file of a store or another disk, if it is there. Raises as `transfer`."""
    with suppress(MissingError):
        _on_store(url, "rm_file")


@asynccontextmanager
async def _from_fsspec(_session: Any, span: Span) -> AsyncIterator[Response]:
    """Begin to fetch the rest of a range; yields file size, number of the first byte, and the chunks."""
    files, path = _store(span.url)

    async def call(name: str, **given: int) -> Any:
        try:
            if files.async_impl:
                return await getattr(files, f"_{name}")(path, **given)
            return await asyncio.to_thread(getattr(files, name), path, **given)
        except Exception as error:
            raise _of_store(span.url, error) from None

    size = None
    if span.stop is None or not span.start:
        about = await call("info")
        if about["type"] == "directory":
            raise DataError(span.url, "is a folder", "name a file in it")
        size, span.etag = int(about["size"]), str(about.get("ETag", about.get("etag", "")))
        span.headers = {"ETag": span.etag, "Content-Length": str(size)}
        span.heard()
    first, end = span.start + span.done, span.stop or size or 0

    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(first, end, PART_BYTES):
            until = min(begin + PART_BYTES, end)
            chunk = await call("cat_file", start=begin, end=until)
            _ANSWERED.add(urlsplit(span.url).netloc)
            yield chunk
            if len(chunk) < until - begin:
                return

    yield size, first, chunks()


def _of_store(url: str, error: BaseException) -> Exception:
    """Convert an error of fsspec's file systems: each has its own types, also for dropped connections.

    A mistake of the user is a DataError. In a store that has answered, lost credentials may be an outage of
    what renews them.
    """
    scheme, host = urlsplit(url)[:2]
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    # Words of the rest of a text may be those of the path.
    facts = [str(error).partition(":")[0].partition(url)[0], *(type(one).__name__ for one in chain)]
    for one in chain:  # of botocore, adlfs, gcsfs
        response = getattr(one, "response", None)
        code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
        facts += map(str, (code, getattr(one, "status_code", ""), getattr(one, "code", "")))
    if "NoSuchBucket" in facts:
        return DataError(url, "no such bucket on the server")
    if isinstance(error, FileNotFoundError):
        return MissingError(url, "no such file on the server")
    fixes = (fix for part, fix in _MISTAKES.items() for fact in facts if re.search(part, fact))
    fix, text = next(fixes, None), re.sub(r"//[^/\s@]+@", "//", error_text(error)).rstrip(".")  # no password
    if isinstance(error, PermissionError) or (fix is not None and host not in _ANSWERED):
        return DataError(url, text, fix or _KEYS.get(scheme, "change its permissions"))
    if "EndpointConnectionError" in facts:
        text += "; check AWS_ENDPOINT_URL, the network and the server"
    is_unknown = any(isinstance(one, socket.gaierror) for one in chain)
    return TransientError(text, is_unknown=is_unknown)


def _session() -> Any:
    """Return an aiohttp session without cookies, whose redirects `_check_redirect` checks."""
    import aiohttp

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_check_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, resolver=aiohttp.ThreadedResolver()),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": "vitctl", "Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        requote_redirect_url=False,  # it may be signed
        trace_configs=[trace],
    )


async def _check_redirect(_session: Any, context: Any, given: Any) -> None:
    """Refuse a redirect to an address that may not be requested, or from another host to this machine."""
    headers = given.response.headers
    text = urljoin(str(given.url), headers.get("Location", headers.get("URI", "")))
    text = check(split(text, DataError)[0], DataError)
    place = urlsplit(text)
    if place.hostname in LOOPBACK and given.url.host not in LOOPBACK:
        raise DataError(text, f"is this machine itself, not {given.url.host}")
    context.trace_request_ctx[:] = [place.netloc]


@asynccontextmanager
async def _from_web(session: Any, span: Span) -> AsyncIterator[Response]:
    """Fetch like `_from_fsspec`, with aiohttp."""
    from yarl import URL

    url = _hub_url(span.url) if span.url.startswith("hf://") else span.url
    if span.stop is None and not span.etag:
        span.done = 0  # the version of these bytes is not known
    first = span.start + span.done
    headers = _credentials(span.url, url)
    if first or span.stop is not None:
        headers["Range"] = f"bytes={first}-{'' if span.stop is None else span.stop - 1}"
    if span.done and span.etag:
        headers["If-Range"] = span.etag  # the server sends the complete file if it has changed
    address, host = with_query(url), [urlsplit(url).netloc]  # host of the last redirect
    with _web_errors(span.url, host):
        async with asyncio.timeout(limits.HTTP_SECONDS):
            response = await session.get(
                URL(address, encoded=address.isascii()),
                headers=headers,
                proxy=None if proxy_bypass(host[0]) else getproxies().get(urlsplit(url).scheme),
                max_redirects=_MAX_REDIRECTS,
                trace_request_ctx=host,
            )
    try:
        _ANSWERED.update((urlsplit(span.url).netloc, *host))
        found = _SPAN.fullmatch(response.headers.get("Content-Range", "")) if response.status == 206 else None
        _check_status(response, span, url, found is not None and int(found[1]) == first)
        length = found[2] if found else response.headers.get("Content-Length")
        etag = _ETAG.fullmatch(response.headers.get("ETag", ""))
        if etag or not found:
            span.etag = etag[0] if etag else ""
        span.headers = response.headers
        yield parse_num_bytes(length), first if found else 0, _chunks(response, span.url, host)
    finally:
        response.close()  # no effect on a connection whose response is complete


def _check_status(response: Any, span: Span, url: str, is_asked: bool) -> None:
    """Raise for a response that is not the file, or not the requested range."""
    status = response.status
    if status == 200 or (status == 206 and is_asked):
        return
    if status == 206:
        raise TransientError("the server answered with another range")
    if status == 416 and span.stop is None:
        span.done = 0
        raise TransientError("the partial file did not fit")
    if status == 416:
        raise DataError(span.url, "is shorter than the index says", "index it again")
    if status in (404, 410):
        raise MissingError(span.url, "no such file on the server")
    text = status_text(status, url)
    if status in TRANSIENT:
        seconds = float(parse_num_bytes(response.headers.get("Retry-After")) or 0)
        raise TransientError(text, seconds)
    raise DataError(span.url, text)


async def _chunks(response: Any, url: str, host: list[str]) -> AsyncIterator[bytes]:
    """Yield the body of a response. Raises TransientError if it is too slow, or breaks off."""
    began, received = time.monotonic(), 0
    while True:
        with _web_errors(url, host, "the connection broke"):
            async with asyncio.timeout(limits.HTTP_SECONDS):
                chunk = await response.content.readany()
        if not chunk:
            return
        received += len(chunk)
        seconds = time.monotonic() - began
        if seconds > limits.HTTP_SECONDS + received / limits.HTTP_BYTES_A_SECOND:
            least = f"{limits.HTTP_BYTES_A_SECOND:,} bytes a second after {limits.HTTP_SECONDS:,} s"
            raise TransientError(f"too slow, {received:,} bytes in {seconds:.0f} s, should be {least}")
        yield chunk


@contextmanager
def _web_errors(url: str, host: list[str], text: str = "the request failed") -> Iterator[None]:
    """Convert the errors of aiohttp, whose texts may repeat the query or the server's response."""
    import aiohttp

    try:
        yield
    except DataError as error:
        raise DataError(url, f"its redirect is refused: {error}") from None
    except aiohttp.TooManyRedirects:
        raise DataError(url, status_text(HTTPStatus.FOUND, url)) from None
    except (aiohttp.InvalidURL, ValueError):
        raise DataError(url, "the address or its redirect is not valid", "correct it") from None
    except aiohttp.ClientConnectorError as error:
        number, is_unknown = error.os_error.errno or 0, isinstance(error.os_error, socket.gaierror)
        why = os.strerror(number) if number > 0 else error.os_error.strerror
        text = f"{host[0]} cannot be reached ({why}); check the address, the network and the server"
        raise TransientError(text, is_unknown=is_unknown) from None
    except TimeoutError:
        raise TransientError(f"{text} (no answer in {limits.HTTP_SECONDS} s)") from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise TransientError(f"{text} ({type(error).__name__})") from None


def status_text(status: int, url: str) -> str:
    """Describe an error status, without the server's message, which may repeat what it was sent."""
    phrase = next((one.phrase for one in HTTPStatus if one == status), "")
    text = f"the server answers {status} {phrase}".rstrip()
    if 300 <= status < 400:
        return f"{text}, which leads in a circle or nowhere; check the address, or give the file's final one"
    if status not in (400, 401, 403):
        return text
    if url.startswith(f"{HUB}/"):
        return f"{text}; what is private or gated on Hugging Face needs HF_TOKEN set"
    return (
        f"{text}; if the address needs a query (?...), which is never stored, give it again with the option, "
        f"or in {VARIABLE}"
    )


def _credentials(name: str, url: str) -> dict[str, str]:
    """Return the header with HF_TOKEN for Hugging Face; aiohttp removes it if a redirect changes the host."""
    token = os.environ.get("HF_TOKEN")
    if not token or not url.startswith(f"{HUB}/"):
        return {}
    if not (token.isascii() and token.isprintable()):
        raise DataError(name, "HF_TOKEN has an invalid character", "set it again")
    return {"Authorization": f"Bearer {token}"}


def _hub_url(url: str) -> str:
    """Return the https URL of hf://datasets/OWNER/NAME[@REVISION]/PATH."""
    parts = _HUB_ADDRESS.fullmatch(url)
    if parts is None:
        raise DataError(
            url, "should look like hf://datasets/OWNER/NAME/FOLDER, or hf://datasets/OWNER/NAME@REVISION/..."
        )
    return hub_address(f"datasets/{parts[1]}", parts[3], parts[2] or "main")


def parse_num_bytes(text: str | None) -> int | None:
    """Parse a number of bytes in a header; None if it is missing or not plausible."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None
