"""Weights by address: https, hf, gs, s3 and az, cached and checked."""

import base64
import hashlib
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies

from vitctl.errors import CheckpointError, DataError, VitctlError, explained
from vitctl.models.weights.header import INDEX, bounded, parts_of
from vitctl.system import limits
from vitctl.system.address import check, with_query, without_queries
from vitctl.system.files import cache_folder, flush, inside, locked, no_links, write_text
from vitctl.system.process import tell
from vitctl.system.remote import (
    FIRST_SECONDS,
    HUB,
    STORES,
    TRANSIENT,
    GaveUpError,
    MissingError,
    Span,
    TransientError,
    hub_address,
    retried,
    status_text,
    transfer,
)
from vitctl.system.text import one_line

Fetch = Callable[[str], Path]
# In order of preference, each before its index; a .bin is a pickle, read as tensors only.
FILE_NAMES = tuple(
    name + end
    for name in ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors")
    for end in ("", INDEX)
)
NPZ = "model.npz"  # of an export; on a hub such files must be named
# Files that other programs' formats keep next to weights.
CONFIG, PREPROCESSOR, OPEN_CLIP = BESIDE = (
    "config.json",
    "preprocessor_config.json",
    "open_clip_config.json",
)
CARD = "README.md"  # of a repository; its header states the licence


def locate(source: str | Path, fetch: Fetch) -> Path:
    """Return the local file for `source`, fetched with its companion files if it is remote.

    A folder stands for the weights file inside. Raises CheckpointError with what would be right.
    """
    (text,) = without_queries(str(source), error=CheckpointError)
    if text.startswith("hf://"):
        return _from_hub(text, fetch)
    if text.startswith("gs://"):
        public = f"https://storage.googleapis.com/{quote(text.removeprefix('gs://'))}"
        try:
            return _with_parts(public, fetch(public), fetch)
        except VitctlError:  # not public
            if not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
                raise
    if "://" in text:
        return _with_parts(text, fetch(text), fetch)
    path = Path(source).expanduser()
    if not path.is_dir():
        return path
    names = (*FILE_NAMES, NPZ)
    return next((path / name for name in names if (path / name).exists()), path / FILE_NAMES[0])


def _from_hub(source: str, fetch: Fetch) -> Path:
    parts = source.removeprefix("hf://").split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise CheckpointError(source, "write hf://organisation/name, or hf://organisation/name/file")
    organisation, name, *file = parts
    repository = f"{organisation}/{name}"
    for beside in (*BESIDE, CARD):
        _try_fetch(hub_address(repository, beside), fetch)
    candidates = file or FILE_NAMES
    for candidate in candidates:
        url = hub_address(repository, candidate)
        if path := _try_fetch(url, fetch):
            return _with_parts(url, path, fetch)
    if file:
        raise CheckpointError(source, "no such file in that repository")
    raise CheckpointError(
        source, f"holds no {' and no '.join(candidates[::2])}", f"name the file: {source}/FILE"
    )


def _with_parts(url: str, path: Path, fetch: Fetch) -> Path:
    """Fetch the parts listed by an index, which are next to it; return `path`, the file of `url`."""
    if path.name.endswith(INDEX):
        folder = url.rpartition("/")[0]
        deque(bounded(path, (fetch(f"{folder}/{quote(part)}") for part in parts_of(path))), maxlen=0)
    return path


def _try_fetch(url: str, fetch: Fetch) -> Path | None:
    try:
        return fetch(url)
    except NotOnServerError:
        return None


# (bytes done, total bytes or 0 if unknown)
Progress = Callable[[int, int], None]
# Torch's servers put the start of the SHA-256 into the name, as in vit_b_16-c867db91.pth.
_HASHED_NAME_HOST = "download.pytorch.org"
# Classes of huggingface_hub, and of requests and httpx.
OFFLINE, LOST = "OfflineModeIsEnabled", {"ConnectionError", "Timeout", "TransportError"}
_HUB_FILE = re.compile(rf"{HUB}/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
# Cached file -> address with query, once this process has compared it with the server's.
_CHECKED: dict[Path, str] = {}


class NotModifiedError(Exception):
    """The cached file is still current."""


class NotOnServerError(CheckpointError):
    """The server has no such file."""


def fetch(
    url: str,
    *,
    progress: Progress = lambda _done, _total: None,
    cache: Path | None = None,
) -> Path:
    """Return the file behind `url`, from the cache or downloaded and checked.

    An interrupted download resumes where it stopped, in this call and in the next one. The size is checked
    against the server's, the content against every digest that the server or the name states. Files of models
    on Hugging Face are in the cache of huggingface_hub.

    Args:
        url: an address by https, or of a store (s3, gs, az), whose files are compared once a process.
        progress: called after every chunk.
        cache: folder of the cache; $VITCTL_CACHE or ~/.cache/vitctl by default.

    Raises CheckpointError: another scheme, no such file (NotOnServerError), a login is needed, a web page
    came instead of the file, or the connection kept failing.
    """
    url = check(url, CheckpointError, tuple(STORES))
    if hub := _HUB_FILE.fullmatch(url):
        return _from_hub_cache(url, progress, *map(unquote, hub.groups()))
    target, asked = _place(cache or cache_folder(), url), with_query(url)
    if target.exists() and _CHECKED.get(target, None if _may_change(url) else asked) == asked:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(_beside(target, ".lock")):
        if not target.exists() or _may_change(url):  # another process may have been faster
            try:
                _download(url, target, progress)
            except MissingError as error:
                raise NotOnServerError(str(error)) from None
            except DataError as error:
                raise CheckpointError(str(error)).passing(error.passes) from None
            except NotModifiedError:
                pass
    _CHECKED[target] = asked
    return target


def _held_by_hub(url: str, repository: str, revision: str, name: str) -> Path | None:
    """Return a file in huggingface_hub's cache, or None; NotOnServerError if the cache says there is none."""
    from huggingface_hub import try_to_load_from_cache

    held = try_to_load_from_cache(repository, name, revision=revision)
    if held is not None and not isinstance(held, str):
        raise NotOnServerError(url, "no such file on the server")
    return None if held is None else Path(held)


def _from_hub_cache(url: str, progress: Progress, repository: str, revision: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{**named, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            progress(int(self.n), int(self.total or 0))

    def attempt() -> Path:
        try:
            return Path(hf_hub_download(repository, name, revision=revision, tqdm_class=Bar))
        except Exception as error:
            raise _hub_error(url, error) from None

    if held := _held_by_hub(url, repository, revision, name):
        return held
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would say each of its own attempts
    _check_resolves(url)
    try:
        path = retried(url, attempt)
    except GaveUpError as error:
        raise CheckpointError(str(error)).passing(True) from None
    blob = path.resolve()
    if re.fullmatch("[0-9a-f]{64}", blob.name):  # large files are named by their digest
        with blob.open("rb") as file:
            _check_digest(url, file, "sha256", blob.name)
    return path


def _check_resolves(url: str) -> None:
    """Refuse a hub whose name has no address: huggingface_hub would try for minutes. A proxy may know it."""
    from huggingface_hub.constants import ENDPOINT  # HF_ENDPOINT may name another hub

    host = urlsplit(ENDPOINT).hostname
    try:
        if host and not getproxies() and not os.environ.get("HF_HUB_OFFLINE"):
            socket.getaddrinfo(host, None)
    except OSError:
        raise CheckpointError(url, f"{host} has no address here", "check the network") from None


def hub_facts(error: BaseException) -> tuple[int, set[str]]:
    """Return the status of the server's answer, 0 without one, and the classes of an error and its causes."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    responses = (getattr(one, "response", None) for one in chain)
    status = next((one.status_code for one in responses if one is not None), 0)
    return status, {kind.__name__ for one in chain for kind in type(one).__mro__}


def _hub_error(url: str, error: BaseException) -> Exception:
    """Convert an error of huggingface_hub, whose text may quote an address.

    The classes for a lost connection are those of its HTTP library, which differs between versions.
    """
    from huggingface_hub.errors import EntryNotFoundError

    status, names = hub_facts(error)
    if isinstance(error, EntryNotFoundError) and status:
        return NotOnServerError(url, "no such file on the server")
    if OFFLINE in names:
        return CheckpointError(url, "HF_HUB_OFFLINE is set, and the file is not in the cache", "unset it")
    if status in TRANSIENT:
        return TransientError(status_text(status, url))
    if status in (401, 403) or names & {"GatedRepoError", "RepositoryNotFoundError"}:
        page = url.partition("/resolve/")[0]
        return CheckpointError(
            url,
            "private, gated or misspelt",
            f"accept its terms, if it has any, at {page}, and set HF_TOKEN to a token of your account",
        )
    if not status and names & LOST:
        text = "the host cannot be reached; check the network"
        return TransientError(text, is_unknown="gaierror" in names)
    return explained(error) or CheckpointError(url, type(error).__name__)


def _check_digest(url: str, file: BufferedReader, algorithm: str, start: str) -> None:
    """Check a file's digest against the start of the stated one; on a mismatch, remove it and raise."""
    file.seek(0)
    digest = hashlib.file_digest(file, algorithm).hexdigest()
    if not digest.startswith(start):
        os.unlink(file.name)
        raise CheckpointError(
            url, f"its {algorithm} is {digest[:16]}..., the server says {start[:16]}...", "run again"
        )


def cached(url: str) -> Path:
    """Return the cached file behind `url`, or raise NotOnServerError if it has not been fetched."""
    path = _place(cache_folder(), url)
    if hub := _HUB_FILE.fullmatch(url):
        path = _held_by_hub(url, *map(unquote, hub.groups())) or path
    if not path.exists():
        raise NotOnServerError(url, f"not in {cache_folder()} yet")
    return path


def _place(cache: Path, url: str) -> Path:
    """Return the cache file for `url`, in folders like the server's, so that neighbours stay together."""
    address = urlsplit(url)
    parts = [unquote(part).replace("/", "_").replace("\0", "_") for part in address.path.split("/") if part]
    host = address.netloc.replace(":", "_").replace("\\", "_")
    host = f"{address.scheme}_{host}" if address.scheme in STORES else host
    if not parts:
        raise CheckpointError(one_line(url), "names no file")
    return inside(cache, host, *parts, error=CheckpointError, where=url)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _may_change(url: str) -> bool:
    """Return whether an address may name another file later: by its query, or in a store of one's own."""
    return with_query(url) != url or urlsplit(url).scheme in STORES


def _stamp(headers: Mapping[str, str], target: Path) -> str:
    """Return a line that identifies the server's version of a file, and its copy as it was written; "" if the
    server states no version or time.
    """
    version, copy = [headers.get("ETag", ""), headers.get("Last-Modified", "")], target.stat()
    parts = [*version, headers.get("Content-Length", ""), str(copy.st_size), str(copy.st_mtime_ns)]
    return one_line(" ".join(parts)) if any(version) else ""


def _download(url: str, target: Path, progress: Progress) -> None:
    """Fetch the rest of a file, check it, and put it in place.

    Raises NotModifiedError if the cached file of an address with a query, such as ?id=2, is still current;
    another query may name another file at the same path.
    """
    part, version, stamp = (_beside(target, suffix) for suffix in (".part", ".part.etag", ".stamp"))
    etag = version.read_text() if part.exists() and version.exists() else ""
    cached_stamp = stamp.read_text() if target.exists() and stamp.exists() else ""

    def heard() -> None:
        if cached_stamp and _stamp(span.headers, target) == cached_stamp:
            raise NotModifiedError
        if span.headers.get("Content-Type", "").startswith("text/html"):
            raise CheckpointError(
                url, "returned a web page, not weights", "correct the link, or log in and download the file"
            )
        if span.etag:
            write_text(version, span.etag)
        else:
            version.unlink(missing_ok=True)

    with open(part, "r+b" if etag else "wb", opener=no_links) as file:
        done = part.stat().st_size
        span = Span(url, file=file, done=done, etag=etag, heard=heard, progress=progress)
        try:
            try:
                transfer([span], limits.WEIGHTS, patience=FIRST_SECONDS if cached_stamp else None)
            except GaveUpError as error:
                if not cached_stamp:
                    raise
                if not span.headers:
                    tell(f"{error}; the cached copy is used")
                    raise NotModifiedError from None
                transfer([span], limits.WEIGHTS)  # it has changed there
        except (CheckpointError, NotModifiedError):
            part.unlink()
            raise
    with part.open("rb") as file:
        for algorithm, start in _stated_digests(url, span.headers):
            _check_digest(url, file, algorithm, start)
    flush(part)
    version.unlink(missing_ok=True)
    os.replace(part, target)
    if not _may_change(url):
        stamp.unlink(missing_ok=True)
    else:
        write_text(stamp, _stamp(span.headers, target))


def _stated_digests(url: str, headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the digests stated by the server: algorithm and (the start of) the hexadecimal digest."""
    for stated in re.findall(r"md5=([A-Za-z0-9+/]{22}==)", headers.get("x-goog-hash", "")):
        yield "md5", base64.b64decode(stated).hex()
    address = urlsplit(url)
    named = re.search(r"-([0-9a-f]{8,64})\.\w+$", address.path)
    if named and address.hostname == _HASHED_NAME_HOST:
        yield "sha256", named[1]
