"""The samples of an indexed split, read from its shards by offset. An index is read once per process."""

import bisect
import errno
import hashlib
import os
import resource
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.images.decode import BadSample
from vitctl.data.shards.index import INDEX_FILE, Index, read_index
from vitctl.data.shards.remote import ShardCache, is_remote, read_range
from vitctl.data.shards.tar import member_name, split_name, unescape_key
from vitctl.errors import DataError, explained
from vitctl.system.files import IMAGE_FILE
from vitctl.system.process import max_open_shards

_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MAX_INDEXES = 16
_INDEXES: dict[tuple[Path, str], tuple[Index, list[Any]]] = {}  # with the state of their files


def open_index(folder: Path, base: str = "") -> Index:
    """Return the index of a split, see `read_index`. It is read again only if one of its files has changed.

    Raises:
        DataError: as `read_index`.
    """
    known = _INDEXES.get((folder, base))
    if known and known[1] == [_status(folder / INDEX_FILE), *_files_state(known[0])]:
        return known[0]
    status = _status(folder / INDEX_FILE)  # before reading: a later change is noticed
    index = read_index(folder, base)
    _INDEXES.pop((folder, base), None)
    while len(_INDEXES) >= _MAX_INDEXES:
        del _INDEXES[next(iter(_INDEXES))]
    _INDEXES[folder, base] = index, [status, *_files_state(index)]
    return index


def _files_state(index: Index) -> list[Any]:
    """Return the state of the tables, and the sizes of the local shards."""
    tables = [_status(index.folder / name) for name in ("samples.npy", "labels.npy")]
    local = [] if index.base else [shard.name for shard in index.shards if not shard.url]
    sizes = [(_status(f"{index.folder}/{name}") or (None,))[0] for name in local]
    return [*tables, *sizes]


def array_digest(text: str, samples: np.ndarray) -> str:
    """Return the SHA-256 of a text and of the numbers of samples after it, in hex."""
    return hashlib.sha256(text.encode() + np.ascontiguousarray(samples, "<i8").tobytes()).hexdigest()


def _status(path: Path | str) -> tuple[int, ...] | None:
    """Return what changes with a file's content, its size first; None if the file is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


class ShardSource:
    """The samples of an indexed split, in storage order, without excluded ones; see `views.Source`.

    Files are opened on first use, at most 64 at a time. Reads are positional (pread), so the source can be
    shared between threads and used after a fork; pickling it sends the folder, never a descriptor.

    Args:
        index: of the split.
        cache: stores remote shards as whole files; None reads single images by byte range.
        excluded: stored samples to leave out, int64 `[m]`, ascending; see exclusion.py.
    """

    def __init__(
        self, index: Index, cache: ShardCache | None = None, excluded: np.ndarray | None = None
    ) -> None:
        self.index = index
        self.cache = cache
        self.excluded = np.zeros(0, np.int64) if excluded is None else excluded
        self._ends = list(accumulate(shard.num_samples for shard in index.shards))
        self._open = lru_cache(max_open_shards(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))(self._opened)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.index.folder, self.index.base, self.index.digest, self.cache, self.excluded)

    def __len__(self) -> int:
        return self.index.num_samples - len(self.excluded)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.index.class_names

    @cached_property
    def digest(self) -> str:
        if not len(self.excluded):
            return self.index.digest
        return array_digest(f"without {self.index.digest} ", self.excluded)

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Return the labels of the given samples, or of all: int64, -1 for none."""
        table = self.index.rows["label"] if self.index.labels is None else self.index.labels
        if samples is not None:
            table = table[self._stored(np.asarray(samples))]
        elif len(self.excluded):
            table = np.delete(table, self.excluded, axis=0)
        return np.array(table, np.int64)

    def key(self, sample: int) -> str:
        """Return the key under which the sample was stored."""
        stored = self._one(sample)
        row = self.index.rows[stored]
        name = member_name(self._pread(stored, int(row["header"]), int(row["data"])))
        if not name:
            raise BadSample("damaged", f"{self.location(sample)} has no header at byte {row['header']}")
        return unescape_key(split_name(name)[0])

    def location(self, sample: int) -> str:
        """Return the path or URL of the shard that holds the sample."""
        return self.index.address(bisect.bisect_right(self._ends, self._one(sample)))

    def read(self, sample: int) -> bytes:
        """Return the encoded image, exactly as stored in the shard."""
        stored = self._one(sample)
        row = self.index.rows[stored]
        return self._pread(stored, int(row["header"]) + int(row["data"]), int(row["size"]))

    def shards_of(self, samples: np.ndarray | None) -> list[int]:
        """Return the numbers of the shards that hold the given samples; None: of all shards."""
        if samples is None:
            return list(range(len(self._ends)))
        shards: list[int] = np.unique(
            np.searchsorted(self._ends, self._stored(samples), side="right")
        ).tolist()
        return shards

    def _one(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return int(self._stored(np.array([sample]))[0]) if len(self.excluded) else sample

    def _stored(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers of samples in the shards, where the excluded ones count."""
        if not len(self.excluded):
            return samples
        kept_before = self.excluded - np.arange(len(self.excluded))
        return samples + np.searchsorted(kept_before, samples, side="right")

    def _pread(self, stored: int, offset: int, size: int) -> bytes:
        number = bisect.bisect_right(self._ends, stored)
        address = self.index.address(number)
        if size > IMAGE_FILE.limit:
            raise BadSample("too large", f"{address}: {size} bytes at byte {offset}")
        if offset + size > self.index.shards[number].num_bytes:
            raise BadSample("unreadable", f"{address} ends before byte {offset + size}")
        if self.cache is None and is_remote(address):
            return read_range(address, offset, offset + size)
        try:
            shard = self._open(number)  # referenced during the read: another thread may evict it
            data = os.pread(shard.descriptor, size, offset)
        except OSError as error:
            if error.errno in _RESOURCE_ERRORS:  # a problem of the machine, not of the sample
                raise DataError(str(explained(error))) from None
            raise BadSample("unreadable", f"{address}: {error.strerror}") from None
        if len(data) < size:
            raise BadSample("unreadable", f"{address} ends before byte {offset + size}")
        return data

    def _opened(self, number: int) -> "_OpenShard":
        shard, address = self.index.shards[number], self.index.address(number)
        if self.cache is not None and is_remote(address):
            return _OpenShard(self.cache.open(address, shard.num_bytes, shard.sha256))
        return _OpenShard(os.open(address, os.O_RDONLY | os.O_CLOEXEC))


class _OpenShard:
    """A descriptor that is closed when the last reference is dropped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _reopen(
    folder: Path, base: str, digest: str, cache: ShardCache | None, excluded: np.ndarray
) -> ShardSource:
    index = open_index(folder, base)
    if index.digest != digest:
        raise DataError(f"{folder}: its index changed while it was in use")
    return ShardSource(index, cache, excluded)
