"""Remote shards on a local disk: whole, checked, bounded in size, shared by all processes of a machine."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vitctl.data.shards.remote import stream
from vitctl.errors import DataError
from vitctl.system.files import atomic_write, open_lock

_ABANDONED_SECONDS = 3600
_TRIES = 3


def cache_folder() -> Path:
    """Where downloads are kept: $VITCTL_CACHE, or ~/.cache/vitctl; the same place as for weights."""
    return Path(os.environ.get("VITCTL_CACHE") or Path.home() / ".cache" / "vitctl")


@dataclass(frozen=True)
class ShardCache:
    """Files by the SHA-256 of their content, the least recently used dropped first.

    A file is written aside, checked and renamed, so that what has its name is whole. Two processes that want the same
    shard wait for each other by a lock that the system takes back when its holder dies. Who has a file open goes on
    reading it when it is dropped.

    Args:
        folder: of the cache; made when missing.
        max_bytes: of all shards together.
    """

    folder: Path
    max_bytes: int

    def place(self, sha256: str) -> Path:
        """Where the file of this content lies, when it is here."""
        return self.folder / f"{sha256}.tar"

    def open(self, url: str, num_bytes: int, sha256: str) -> int:
        """A descriptor of the shard behind `url`, fetched when it is not here.

        Args:
            url: where it is fetched from.
            num_bytes, sha256: of its content; the latter 64 hex digits.

        Raises:
            DataError: it has another content, does not fit into the cache, cannot be fetched or written.
        """
        target = self.place(sha256)
        for _ in range(_TRIES):
            try:
                descriptor = _open_whole(target, num_bytes)
                if descriptor is not None:
                    return descriptor
                with self._alone(sha256[:3]):
                    if not target.exists():
                        self._fetch(url, target, num_bytes, sha256)
            except OSError as error:
                raise DataError(
                    f"{error.filename or self.folder}: cannot be written ({error.strerror}); set VITCTL_CACHE to a disk with room"
                ) from None
        raise DataError(
            f"{self.folder}: shards are dropped before they are read; make the cache larger (data.cache_gib)"
        )

    def _fetch(self, url: str, target: Path, num_bytes: int, sha256: str) -> None:
        for left in self.folder.glob(f".{target.name}.*.partial"):  # of a process that was killed: we are alone here
            left.unlink(missing_ok=True)
        self._make_room(url, num_bytes)
        with atomic_write(target) as aside:
            found, size = hashlib.sha256(), 0
            with aside.open("wb") as file:
                for piece in stream(url):
                    size += len(piece)
                    if size > num_bytes:
                        break
                    found.update(piece)
                    file.write(piece)
            if size != num_bytes or found.hexdigest() != sha256:
                raise DataError(
                    f"{url}: {'more than ' if size > num_bytes else ''}{min(size, num_bytes)} bytes with sha256 "
                    f"{found.hexdigest()[:12]}, its index says {num_bytes} bytes with {sha256[:12]}; index it again"
                )

    def _make_room(self, url: str, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise DataError(f"{url}: {num_bytes} bytes, the cache holds {self.max_bytes}; raise data.cache_gib")
        with self._alone("room"):
            now, kept = time.time(), []
            for path in self.folder.iterdir():
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                if path.suffix == ".partial" and now - found.st_mtime > _ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)
                elif path.suffix in (".tar", ".partial"):
                    kept.append((path.suffix == ".partial", found.st_atime, found.st_size, path))
            size = num_bytes + sum(each for _, _, each, _ in kept)
            for is_partial, _, each, path in sorted(kept):
                if size <= self.max_bytes or is_partial:
                    break
                path.unlink(missing_ok=True)
                size -= each

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Wait until no other process is inside. The few lock files stay: removing them would let two in."""
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with open_lock(locks / name) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _open_whole(path: Path, num_bytes: int) -> int | None:
    """A descriptor of a cached file, now the most recently used; None when it is not here, or not as it should be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    found = os.fstat(descriptor)
    if found.st_size != num_bytes:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # another user's: it is read all the same
        os.utime(descriptor, ns=(time.time_ns(), found.st_mtime_ns))  # mtime tells when its content came
    return descriptor
