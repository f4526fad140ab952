"""Files from the web: https alone, resumed after an interruption, checked, and kept in a cache."""

import base64
import fcntl
import hashlib
import http.client
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request

from vitctl.errors import CheckpointError
from vitctl.system.bounds import HTTP_SECONDS, WEIGHTS
from vitctl.system.files import no_links, open_lock, write_text
from vitctl.system.http import bounded_opener, told_bytes
from vitctl.system.parsing import parsing, said_by
from vitctl.system.text import has_control, one_line

# Bytes done, and bytes in all (0 when the server does not say).
Progress = Callable[[int, int], None]
_CHUNK = 2**20
_MOST_REDIRECTS = 5
_TOKEN_HOST = "huggingface.co"
_PASSING = {408, 425, 429, 500, 502, 503, 504}
# Torch's servers put the start of the sha256 into the name, as in vit_b_16-c867db91.pth.
_HASHED_NAME_HOST = "download.pytorch.org"


class NotOnServerError(CheckpointError):
    """The server has no such file."""


class _InterruptedError(Exception):
    """The transfer failed in a way that may not happen again."""


def fetch(
    url: str,
    *,
    progress: Progress = lambda _done, _total: None,
    cache: Path | None = None,
    attempts: int = 5,
    pause_seconds: float = 1.0,
    loopback: bool = False,
) -> Path:
    """Return the file behind `url`, from the cache when it is there, otherwise downloaded and checked.

    An interrupted download goes on where it stopped, in this call and in the next one. The size is checked against the
    server's, the content against every digest that server or name tell. `HF_TOKEN` goes to Hugging Face alone.

    Args:
        url: an https address.
        progress: told after every piece.
        cache: folder of the cache; $VITCTL_CACHE or ~/.cache/vitctl when not given.
        attempts, pause_seconds: tries in all, and the pause after the first, which then doubles.
        loopback: let plain http to 127.0.0.1 pass as well.

    Raises CheckpointError: another scheme, no such file (NotOnServerError), a login is needed, a web page came instead
    of the file, or the connection kept failing.
    """
    _check_address(url, loopback)
    target = _place(cache or cache_folder(), url)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_name(target.name + ".lock")):
        for attempt in range(attempts):
            if target.exists():  # another process was faster
                break
            try:
                os.replace(_transfer(url, target.with_name(target.name + ".part"), progress, loopback), target)
            except _InterruptedError as error:
                if attempt + 1 == attempts:
                    raise CheckpointError(
                        f"{url}: {error}; {attempts} attempts failed, run again to go on where it stopped"
                    ) from error
                time.sleep(pause_seconds * 2**attempt)
    return target


def cached(url: str) -> Path:
    """The file behind `url` where the cache has it. Raises NotOnServerError: it has not been fetched yet."""
    path = _place(cache_folder(), url)
    if not path.exists():
        raise NotOnServerError(f"{url}: not in {cache_folder()} yet")
    return path


def cache_folder() -> Path:
    """Return where downloads are kept."""
    return Path(os.environ.get("VITCTL_CACHE") or Path.home() / ".cache" / "vitctl")


def _place(cache: Path, url: str) -> Path:
    """Return the file in the cache for `url`, in folders like those on the server, so that neighbours stay together."""
    address = urlsplit(url)
    parts = [unquote(part).replace("/", "_").replace("\0", "_") for part in address.path.split("/") if part]
    host = address.netloc.replace(":", "_").replace("\\", "_")
    if not parts or any(part in (".", "..") or has_control(part) for part in (host, *parts)):
        raise CheckpointError(f"{one_line(url)}: names no file")
    if address.query:
        parts.insert(-1, hashlib.sha256(address.query.encode()).hexdigest()[:12])
    return cache.joinpath(host, *parts)


def _check_address(url: str, loopback: bool) -> None:
    with parsing(url, CheckpointError, "not an address"):
        address = urlsplit(url)
        _ = address.port, address.hostname, url.encode("utf-8")
    if address.scheme == "https" and address.hostname:
        return
    if not (loopback and address.scheme == "http" and address.hostname == "127.0.0.1"):
        raise CheckpointError(f"{url}: weights are fetched over https only")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process is inside; the system lets go of the lock when a process dies."""
    with open_lock(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Redirects(HTTPRedirectHandler):
    """Follows a few redirects to allowed addresses, keeps the token at home, and remembers digests told on the way."""

    max_redirections = _MOST_REDIRECTS

    def __init__(self, loopback: bool) -> None:
        self.loopback = loopback
        self.linked_etag = ""

    def redirect_request(
        self,
        req: Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> Request | None:
        try:
            _check_address(newurl, self.loopback)
        except CheckpointError:
            fp.close()
            raise
        self.linked_etag = headers.get("X-Linked-ETag", self.linked_etag)
        fp.close()  # or all of it would be read first
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if follow is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            follow.remove_header("Authorization")
        return follow


def _transfer(url: str, part: Path, progress: Progress, loopback: bool) -> Path:
    """Bring `part` to its full size, check it, and return it. Raises _InterruptedError when trying again may help."""
    version = part.with_name(part.name + ".etag")
    redirects = _Redirects(loopback)
    try:
        with bounded_opener(redirects).open(_request(url, part, version), timeout=HTTP_SECONDS.most) as response:
            total = _receive(url, response, part, version, progress)
            digests = list(_told_digests(url, response.headers, redirects.linked_etag))
    except HTTPError as error:
        error.close()  # it holds the connection
        raise _refusal(url, error, part) from error
    except http.client.InvalidURL as error:
        raise CheckpointError(f"{url}: not an address ({error})") from error
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(str(error) or type(error).__name__) from error
    except ValueError as error:  # a letter in the address, or in HF_TOKEN, that no request may have
        raise CheckpointError(
            f"{url}: cannot be asked for ({said_by(error)}); mend the address, or HF_TOKEN"
        ) from error
    size = part.stat().st_size
    if total and size != total:
        raise _InterruptedError(f"the connection ended after {size} of {total} bytes")
    for algorithm, start in digests:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if not found.startswith(start):
            part.unlink()
            raise _InterruptedError(f"its {algorithm} is {found[:16]}..., the server says {start[:16]}...")
    version.unlink(missing_ok=True)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    return part


def _request(url: str, part: Path, version: Path) -> Request:
    headers = {"User-Agent": "vitctl", "Accept-Encoding": "identity"}
    if (token := os.environ.get("HF_TOKEN")) and urlsplit(url).hostname == _TOKEN_HOST:
        headers["Authorization"] = f"Bearer {token}"
    if part.exists() and part.stat().st_size and version.exists():
        # The server sends everything again when the file has changed since.
        headers |= {"Range": f"bytes={part.stat().st_size}-", "If-Range": version.read_text()}
    return Request(url, headers=headers)


def _receive(url: str, response: Any, part: Path, version: Path, progress: Progress) -> int:
    """Append to `part`, or start it anew, and return the size that the whole file should have (0: not told)."""
    headers: Message = response.headers
    if headers.get_content_type() == "text/html":
        raise CheckpointError(f"{url}: answered with a web page, not weights; the link is wrong or needs a login")
    done, total = 0, told_bytes(headers.get("Content-Length")) or 0
    if response.status == 206:
        done = part.stat().st_size
        span = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", headers.get("Content-Range", ""))
        if span is None or told_bytes(span[1]) != done:
            part.unlink()
            raise _InterruptedError("the server went on at the wrong place")
        total = told_bytes(span[2]) or 0
    _remember_version(version, headers)
    with open(part, "ab" if done else "wb", opener=no_links) as file:
        while chunk := response.read(_CHUNK):
            done += len(chunk)
            if done > (total or WEIGHTS.most):
                part.unlink()
                raise CheckpointError(f"{url}: sends more than the {total or WEIGHTS.most} bytes that it may")
            file.write(chunk)
            progress(done, total)
    return total


def _remember_version(version: Path, headers: Message) -> None:
    etag = headers.get("ETag", "")
    if etag and not etag.startswith("W/"):
        write_text(version, etag)
    else:
        version.unlink(missing_ok=True)


def _refusal(url: str, error: HTTPError, part: Path) -> Exception:
    """Return what a status that is no success means."""
    if error.code == 416:  # what we have does not fit what the server has
        part.unlink(missing_ok=True)
        return _InterruptedError("the partial file did not fit")
    if error.code in _PASSING:
        return _InterruptedError(f"the server answers {error.code} {one_line(' '.join(str(error.reason).split()))}")
    if error.code in (404, 410):
        return NotOnServerError(f"{url}: no such file on the server")
    if error.code in (401, 403):
        return CheckpointError(f"{url}: the server refuses ({error.code}); a private or gated model needs HF_TOKEN set")
    return CheckpointError(f"{url}: the server answers {error.code} {one_line(' '.join(str(error.reason).split()))}")


def _told_digests(url: str, headers: Message, linked_etag: str) -> Iterator[tuple[str, str]]:
    """The digests that this server tells: algorithm and (the start of) its hexadecimal form."""
    linked = (headers.get("X-Linked-ETag") or linked_etag).strip('"')
    if re.fullmatch(r"[0-9a-f]{64}", linked):  # Hugging Face's large files
        yield "sha256", linked
    for told in re.findall(r"md5=([A-Za-z0-9+/]{22}==)", " ".join(headers.get_all("x-goog-hash") or [])):
        yield "md5", base64.b64decode(told).hex()
    address = urlsplit(url)
    named = re.search(r"-([0-9a-f]{8,64})\.\w+$", address.path)
    if named and address.hostname == _HASHED_NAME_HOST:
        yield "sha256", named[1]
