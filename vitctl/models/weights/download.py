"""Weights by address: hf://, https://, gs:// and s3://, cached and checked."""

import base64
import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from email.message import Message
from itertools import count
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from vitctl.errors import CheckpointError
from vitctl.models.weights.header import INDEX, bounded, parts_of
from vitctl.system.address import check, with_query, without_queries
from vitctl.system.files import WEIGHTS, cache_folder, inside, locked, no_links, write_text
from vitctl.system.http import (
    ATTEMPTS,
    Response,
    TransientError,
    content_range,
    hub_address,
    open_url,
    parse_num_bytes,
    read_chunks,
)
from vitctl.system.text import one_line

Fetch = Callable[[str], Path]
# In the order of preference, each before the index of its parts; a .bin is a pickle: tensors or nothing.
FILE_NAMES = tuple(
    name + end
    for name in ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors")
    for end in ("", INDEX)
)
# What the formats of other programs keep beside their weights.
CONFIG, PREPROCESSOR, OPEN_CLIP = BESIDE = (
    "config.json",
    "preprocessor_config.json",
    "open_clip_config.json",
)
CARD = "README.md"  # of a repository; its head states the licence


def locate(source: str | Path, fetch: Fetch) -> Path:
    """Return the local file that `source` means, fetching it and what belongs beside it when it is remote.

    A folder stands for the weights file inside. Raises CheckpointError, saying what would be right.
    """
    (text,) = without_queries(str(source), error=CheckpointError)
    if text.startswith("hf://"):
        return _from_hub(text, fetch)
    if text.startswith("gs://"):
        text = f"https://storage.googleapis.com/{quote(text.removeprefix('gs://'))}"
    if "://" in text:
        return _with_parts(text, fetch(text), fetch)
    path = Path(source).expanduser()
    if not path.is_dir():
        return path
    return next((path / name for name in FILE_NAMES if (path / name).exists()), path / FILE_NAMES[0])


def _from_hub(source: str, fetch: Fetch) -> Path:
    parts = source.removeprefix("hf://").split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise CheckpointError(f"{source}: write hf://organisation/name, or hf://organisation/name/file")
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
        raise CheckpointError(f"{source}: no such file in that repository")
    raise CheckpointError(
        f"{source}: holds no {' and no '.join(candidates[::2])}; name the file: {source}/FILE"
    )


def _with_parts(url: str, path: Path, fetch: Fetch) -> Path:
    """Fetch the parts that an index lists, which lie beside it; return `path`, the fetched file of `url`."""
    if path.name.endswith(INDEX):
        folder = url.rpartition("/")[0]
        deque(bounded(path, (fetch(f"{folder}/{quote(part)}") for part in parts_of(path))), maxlen=0)
    return path


def _try_fetch(url: str, fetch: Fetch) -> Path | None:
    try:
        return fetch(url)
    except NotOnServerError:
        return None


# Bytes done, and bytes in all (0 when the server does not say).
Progress = Callable[[int, int], None]
# Torch's servers put the start of the sha256 into the name, as in vit_b_16-c867db91.pth.
_HASHED_NAME_HOST = "download.pytorch.org"
# Address with its query, of each cached file that this process has compared with the server's.
_CHECKED: dict[Path, str] = {}


class NotOnServerError(CheckpointError):
    """The server has no such file."""


def fetch(
    url: str,
    *,
    progress: Progress = lambda _done, _total: None,
    cache: Path | None = None,
    attempts: int = ATTEMPTS,
) -> Path:
    """Return the file behind `url`, from the cache when it is there, otherwise downloaded and checked.

    An interrupted download resumes where it stopped, in this call and in the next one. The size is checked
    against the server's, the content against every digest that the server or the name states. `HF_TOKEN` is
    sent to Hugging Face only.

    Args:
        url: an https address.
        progress: called after every chunk.
        cache: folder of the cache; $VITCTL_CACHE or ~/.cache/vitctl when not given.
        attempts: total number of attempts.

    Raises CheckpointError: another scheme, no such file (NotOnServerError), a login is needed, a web page
    came instead of the file, or the connection kept failing.
    """
    url = check(url, CheckpointError)
    target, asked = _place(cache or cache_folder(), url), with_query(url)
    if target.exists() and asked in (url, _CHECKED.get(target)):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(_beside(target, ".lock")):
        for attempt in count(1):
            try:
                if not (target.exists() and _is_current(url, target)):  # another process may have been faster
                    _download(url, target, progress)
                break
            except TransientError as error:
                if not error.retried(url, attempt, attempts):
                    raise CheckpointError(
                        f"{url}: {error}; {attempt} attempts failed, run again to continue where it stopped"
                    ) from error
    _CHECKED[target] = asked
    return target


def cached(url: str) -> Path:
    """Return the cached file behind `url`. Raises NotOnServerError: it has not been fetched yet."""
    path = _place(cache_folder(), url)
    if not path.exists():
        raise NotOnServerError(f"{url}: not in {cache_folder()} yet")
    return path


def _place(cache: Path, url: str) -> Path:
    """Return the file in the cache for `url`, in folders like those on the server, so that neighbours stay
    together.
    """
    address = urlsplit(url)
    parts = [unquote(part).replace("/", "_").replace("\0", "_") for part in address.path.split("/") if part]
    host = address.netloc.replace(":", "_").replace("\\", "_")
    if not parts:
        raise CheckpointError(f"{one_line(url)}: names no file")
    return inside(cache, host, *parts, error=CheckpointError, where=url)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _open(url: str, headers: dict[str, str]) -> Response:
    return open_url(url, headers, error=CheckpointError, missing=NotOnServerError)


def _stamp(headers: Message) -> str:
    """Return what tells one file of a server from another, in one line; "" where the server states neither
    version nor time.
    """
    version = [headers.get("ETag", ""), headers.get("Last-Modified", "")]
    return one_line(" ".join([*version, headers.get("Content-Length", "")])) if any(version) else ""


def _is_current(url: str, target: Path) -> bool:
    """Return whether the server still has the cached file. Only an address with a query is compared: it may
    name another file at the same path, as ?id=2 does.
    """
    if with_query(url) == url:
        return True
    stamp = _beside(target, ".stamp")
    with _open(url, {}) as response:
        now = _stamp(response.headers)
    return bool(now) and stamp.exists() and stamp.read_text() == now


def _download(url: str, target: Path, progress: Progress) -> None:
    """Fetch the rest of a file, check all of it, and put it in its place.

    Raises TransientError when trying again may help.
    """
    part, version, stamp = (_beside(target, suffix) for suffix in (".part", ".part.etag", ".stamp"))
    headers = {}
    if part.exists() and part.stat().st_size and version.exists():
        # The server sends everything again when the file has changed since.
        headers = {"Range": f"bytes={part.stat().st_size}-", "If-Range": version.read_text()}
    response = _open(url, headers)
    if response.status == 416:  # what we have does not fit what the server has
        part.unlink(missing_ok=True)
        raise TransientError("the partial file did not fit")
    with response:
        total = _receive(url, response, part, version, progress)
    size = part.stat().st_size
    if total and size != total:
        raise TransientError(f"the connection ended after {size} of {total} bytes")
    with part.open("rb") as file:
        for algorithm, start in _stated_digests(url, response.headers):
            file.seek(0)
            digest = hashlib.file_digest(file, algorithm).hexdigest()
            if not digest.startswith(start):
                part.unlink()
                raise TransientError(f"its {algorithm} is {digest[:16]}..., the server says {start[:16]}...")
        os.fsync(file.fileno())
    version.unlink(missing_ok=True)
    os.replace(part, target)
    if with_query(url) == url:
        stamp.unlink(missing_ok=True)
    else:
        write_text(stamp, _stamp(response.headers))


def _receive(url: str, response: Response, part: Path, version: Path, progress: Progress) -> int:
    """Append to `part`, or start it again, and return the size of the whole file (0: unknown)."""
    headers: Message = response.headers
    if headers.get_content_type() == "text/html":
        raise CheckpointError(
            f"{url}: returned a web page, not weights; correct the link, or log in and download the file"
        )
    done, total = 0, parse_num_bytes(headers.get("Content-Length")) or 0
    if response.status == 206:
        done, span = part.stat().st_size, content_range(response)
        if span is None or span[0] != done or span[1] is None:
            part.unlink()
            raise TransientError("the server resumed at the wrong place")
        total = span[1]
    if total > WEIGHTS.limit:
        raise CheckpointError(f"{url}: {total} bytes exceed the limit of {WEIGHTS.limit}")
    etag = headers.get("ETag", "")
    if etag and not etag.startswith("W/"):
        write_text(version, etag)
    else:
        version.unlink(missing_ok=True)
    with open(part, "ab" if done else "wb", opener=no_links) as file:
        for chunk in read_chunks(response):
            done += len(chunk)
            if done > (total or WEIGHTS.limit):
                part.unlink()
                raise CheckpointError(f"{url}: sent more than the limit of {total or WEIGHTS.limit} bytes")
            file.write(chunk)
            progress(done, total)
    return total


def _stated_digests(url: str, headers: Message) -> Iterator[tuple[str, str]]:
    """Yield the digests stated by the server: algorithm and (the start of) the hexadecimal digest."""
    linked = headers.get("X-Linked-ETag", "").strip('"')
    if re.fullmatch(r"[0-9a-f]{64}", linked):  # Hugging Face's large files
        yield "sha256", linked
    for stated in re.findall(r"md5=([A-Za-z0-9+/]{22}==)", " ".join(headers.get_all("x-goog-hash") or [])):
        yield "md5", base64.b64decode(stated).hex()
    address = urlsplit(url)
    named = re.search(r"-([0-9a-f]{8,64})\.\w+$", address.path)
    if named and address.hostname == _HASHED_NAME_HOST:
        yield "sha256", named[1]
