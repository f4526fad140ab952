"""A cache of complete remote shards on the local disk, shared by all processes of a node."""

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitctl.errors import DataError
from vitctl.system.files import ABANDONED_SECONDS, atomic_write, lock, locked, open_lock
from vitctl.system.remote import copy

_TRIES = 3


@dataclass(frozen=True)
class ShardCache:
    """A cache of complete remote shards, shared by all processes, with least-recently-used eviction.

    Files are named by the SHA-256 of their content. A file is written to a temporary file, verified and
    renamed, so that a file with its final name is complete. A lock for each shard keeps two processes from
    fetching it twice; the kernel releases it when its holder dies. An open file stays readable after its
    eviction. `max_bytes` limits the total size of all shards.
    """

    folder: Path
    max_bytes: int

    def path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.tar"

    def holds(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def open(self, url: str, num_bytes: int, sha256: str) -> int:
        """Return a descriptor of a shard, which is fetched if it is not in the cache.

        Raises DataError if size or digest are wrong, or it cannot be fetched, written, or fitted into the
        cache.
        """
        target, asked = self.path(sha256), time.monotonic()
        for _ in range(_TRIES):
            descriptor = _open_cached(target, num_bytes)
            if descriptor is not None:
                return descriptor
            self.fetch(url, num_bytes, sha256, since=asked)
        raise DataError(self.folder, "the cache evicts shards before they are read", "raise data.cache_gib")

    def fetch(self, url: str, num_bytes: int, sha256: str, *, since: float | None = None) -> None:
        """Fetch a shard, unless it is in the cache. Raises as `open`.

        If another process fetches it, wait with `since`, see `transfer`; without, return at once.
        """
        target, locks = self.path(sha256), self.folder / "locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
            with open_lock(locks / sha256[:3]) as file:
                is_ours = lock(file.fileno(), waits=since is not None) is not False
                if is_ours and not target.exists():
                    self._fetch(url, target, num_bytes, sha256, since)
        except OSError as error:
            raise DataError(
                error.filename or self.folder,
                f"cannot be written ({error.strerror})",
                "set VITCTL_CACHE to a disk with free space",
            ) from None

    def _fetch(self, url: str, target: Path, num_bytes: int, sha256: str, since: float | None) -> None:
        for left in self.folder.glob(f".{target.name}.*.partial"):  # of a killed process: we hold the lock
            left.unlink(missing_ok=True)
        if num_bytes > self.max_bytes:
            raise DataError(
                url, f"{num_bytes} bytes, the cache holds {self.max_bytes}", "raise data.cache_gib"
            )
        with locked(self.folder / "locks" / "room"):
            self._evict(num_bytes)
        with atomic_write(target) as aside, aside.open("r+b") as file:
            parts = copy(url, file, self.max_bytes, num_bytes=num_bytes, since=since)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = parts[0].num_bytes or num_bytes
            if size != num_bytes or digest != sha256:
                raise DataError(
                    url,
                    f"{size} bytes with sha256 {digest[:12]}, its index says {num_bytes} bytes "
                    f"with {sha256[:12]}",
                    "index it again",
                )

    def _evict(self, num_bytes: int) -> None:
        """Delete abandoned temporary files, and the least recently used shards until `num_bytes` more fit."""
        cached, room = [], self.max_bytes - num_bytes
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                state = path.stat()
                if path.suffix == ".partial" and time.time() - state.st_mtime > ABANDONED_SECONDS:
                    path.unlink()
                elif path.suffix in (".tar", ".partial"):
                    room -= state.st_size
                    cached.append((state.st_atime, state.st_size, path))
        for _, size, path in sorted(one for one in cached if one[2].suffix == ".tar"):
            if room >= 0:
                break
            path.unlink(missing_ok=True)
            room += size


def _open_cached(path: Path, num_bytes: int) -> int | None:
    """Open a cached file and mark it as most recently used; None if it is missing or has the wrong size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    state = os.fstat(descriptor)
    if state.st_size != num_bytes:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # owned by another user: reading is enough
        os.utime(descriptor, ns=(time.time_ns(), state.st_mtime_ns))  # keep the time of the download
    return descriptor
