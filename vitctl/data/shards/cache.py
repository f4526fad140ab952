"""A cache of remote shards on the local disk: whole files, verified by digest, limited in size, shared by all
processes.
"""

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


@dataclass(frozen=True)
class ShardCache:
    """Files named by the SHA-256 of their content; the least recently used are evicted first.

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
        """The path at which a file of this digest is cached."""
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
        target = self.path(sha256)
        for _ in range(_TRIES):
            try:
                descriptor = _open_whole(target, num_bytes)
                if descriptor is not None:
                    return descriptor
                with self._locked(sha256[:3]):
                    if not target.exists():
                        self._fetch(url, target, num_bytes, sha256)
            except OSError as error:
                raise DataError(
                    f"{error.filename or self.folder}: cannot be written ({error.strerror}); set "
                    f"VITCTL_CACHE to a disk with free space"
                ) from None
        raise DataError(
            f"{self.folder}: shards are evicted before they are read; make the cache larger (data.cache_gib)"
        )

    def _fetch(self, url: str, target: Path, num_bytes: int, sha256: str) -> None:
        for left in self.folder.glob(
            f".{target.name}.*.partial"
        ):  # of a process that was killed: we hold the lock
            left.unlink(missing_ok=True)
        self._evict(url, num_bytes)
        with atomic_write(target) as aside:
            found, size = hashlib.sha256(), 0
            with aside.open("wb") as file:
                for chunk in stream(url):
                    size += len(chunk)
                    if size > num_bytes:
                        break
                    found.update(chunk)
                    file.write(chunk)
            if size != num_bytes or found.hexdigest() != sha256:
                raise DataError(
                    f"{url}: {'more than ' if size > num_bytes else ''}{min(size, num_bytes)} bytes "
                    f"with sha256 "
                    f"{found.hexdigest()[:12]}, its index says {num_bytes} bytes with {sha256[:12]}; index "
                    f"it again"
                )

    def _evict(self, url: str, num_bytes: int) -> None:
        """Delete the least recently used shards until `num_bytes` more fit."""
        if num_bytes > self.max_bytes:
            raise DataError(
                f"{url}: {num_bytes} bytes, the cache holds {self.max_bytes}; raise data.cache_gib"
            )
        with self._locked("room"):
            now, cached = time.time(), []
            for path in self.folder.iterdir():
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                if path.suffix == ".partial" and now - found.st_mtime > _ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)
                elif path.suffix in (".tar", ".partial"):
                    cached.append((path.suffix == ".partial", found.st_atime, found.st_size, path))
            size = num_bytes + sum(each for _, _, each, _ in cached)
            for is_partial, _, each, path in sorted(cached):
                if size <= self.max_bytes or is_partial:
                    break
                path.unlink(missing_ok=True)
                size -= each

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a lock against other processes.

        The lock files are not deleted: two processes could then hold the lock.
        """
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with open_lock(locks / name) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _open_whole(path: Path, num_bytes: int) -> int | None:
    """Open a cached file and mark it as most recently used; None when it is missing or has the wrong size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    found = os.fstat(descriptor)
    if found.st_size != num_bytes:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # owned by another user: reading is enough
        os.utime(
            descriptor, ns=(time.time_ns(), found.st_mtime_ns)
        )  # keep the mtime, the time of the download
    return descriptor
