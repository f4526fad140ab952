"""Stores of samples: shards, read by offset; image files; or generated noise. See `views.Source`."""

import bisect
import errno
import hashlib
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample, encode
from vitctl.data.shards.cache import ShardCache
from vitctl.data.shards.index import INDEX_FILE, LABELS, NAMES, SAMPLES, Index, read_index, size_problems
from vitctl.data.shards.tar import stored_key
from vitctl.data.source.rows import CHUNK, Rows
from vitctl.errors import DataError, explained
from vitctl.system import limits
from vitctl.system.address import without_queries
from vitctl.system.files import file_state, read_bytes
from vitctl.system.process import max_open_shards
from vitctl.system.remote import is_remote, read_file, read_ranges

_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MAX_INDEXES = 16
_TOGETHER_BYTES = 256 * 2**20  # of images fetched concurrently
_LARGE_BYTES = 32 * 2**20  # size of a shard that the first batch does not wait for


def open_index(folder: Path, base: str = "", *, looks_at_shards: bool = True) -> Index:
    """Return the index of a split, see `read_index`; it is read again only if a file has changed.

    `looks_at_shards` asks for the size of each shard every time, which takes a while on a file server.
    """
    state = [file_state(folder / name) for name in (INDEX_FILE, SAMPLES, LABELS, NAMES)]
    index = _read_once(folder, base, *state)
    if looks_at_shards and not base and size_problems(folder, index.shards):
        return read_index(folder, base)  # raises, with every problem
    return index


@lru_cache(_MAX_INDEXES)
def _read_once(folder: Path, base: str, *_state: tuple[int, ...]) -> Index:
    return read_index(folder, base)


def array_digest(text: str, samples: Rows) -> str:
    """Return the SHA-256 of a text followed by sample numbers, in hex."""
    digest = hashlib.sha256(text.encode())
    for begin in range(0, len(samples), CHUNK):
        digest.update(np.ascontiguousarray(samples[begin : begin + CHUNK], "<i8").data)
    return digest.hexdigest()


class ShardSource:
    """The samples of an indexed split, in storage order; see `views.Source`.

    Files are opened on first use, and as many as half of the descriptors stay open. Reads are positional
    (pread), so the source can be shared between threads and used after a fork; pickling it sends the folder,
    never a descriptor.

    Args:
        cache: stores complete remote shards; None reads single images by byte range.
    """

    def __init__(self, index: Index, cache: ShardCache | None = None) -> None:
        self.index = index
        self.cache = cache
        self.class_names = index.class_names
        self._reads_ranges = cache is None and index.is_remote
        self._unverified: dict[int, list[tuple[int, bytes]]] = {}  # shard -> offset and bytes read before it
        self.ends = list(accumulate(shard.num_samples for shard in index.shards))  # of each shard's samples

    @cached_property
    def _open(self) -> Callable[[int], "_OpenShard"]:  # a worker's limit is raised before its first image
        return lru_cache(max_open_shards(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))(self._opened)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.index.folder, self.index.base, self.index.digest, self.cache)

    def __len__(self) -> int:
        return self.index.num_samples

    @property
    def digest(self) -> str:
        return self.index.digest

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Return the labels of the given samples, or of all: int64, -1 for none."""
        table = self.index.rows["label"] if self.index.labels is None else self.index.labels
        return np.array(table if samples is None else table[np.asarray(samples)], np.int64)

    def key(self, sample: int) -> str:
        """Return the key under which the sample was stored."""
        shard, header, data, _ = self._place(sample)
        key = stored_key(self._pread(shard, header, data))
        if not key:
            raise BadSample("damaged", f"{self.location(sample)} has no header at byte {header}")
        return key

    def keys(self, samples: np.ndarray | None = None) -> list[str]:
        """Return the keys of the given samples, or of all, from the index."""
        names = self.index.names()
        return names if samples is None else [names[one] for one in samples]

    def location(self, sample: int) -> str:
        """Return the path or URL of the shard that holds the sample."""
        return self.index.address(self._place(sample)[0])

    def read(self, sample: int) -> bytes:
        """Return the encoded image, exactly as stored in the shard."""
        shard, header, data, size = self._place(sample)
        return self._pread(shard, header + data, size)

    def read_together(self, samples: Sequence[int], *, at_once: bool = False) -> dict[int, bytes]:
        """Read concurrently those of some images that take a request each: remote images without a cache.

        `at_once` adds images in large shards that are not in the cache yet, instead of waiting for these.
        """
        places, held = {}, 0
        for sample in samples if self.index.is_remote and (at_once or self.cache is None) else ():
            number, header, data, size = self._place(sample)
            shard, start = self.index.shards[number], header + data
            is_near = self.cache is not None and (
                shard.num_bytes < _LARGE_BYTES or self.cache.holds(shard.sha256)
            )
            if is_near or not is_remote(self.index.address(number)):
                continue
            with suppress(BadSample):  # reported by `read`
                places[sample] = self._checked(number, start, size), start, start + size
                held += size
            if held > _TOGETHER_BYTES:
                break  # the others are read one by one
        found = dict(zip(places, read_ranges([*places.values()]), strict=True))
        for sample, image in found.items() if self.cache is not None else ():
            self._unverified.setdefault(self._place(sample)[0], []).append((places[sample][1], image))
        return found

    def fetch_ahead(self, samples: np.ndarray) -> None:
        """Fetch the remote shards of some samples into the cache, unless they are there or being fetched."""
        for number in self.shards_of(samples):
            shard, address = self.index.shards[number], self.index.address(number)
            if self.cache is not None and is_remote(address) and not self.cache.holds(shard.sha256):
                with suppress(DataError):  # raised by `read`
                    self.cache.fetch(address, shard.num_bytes, shard.sha256)

    def shards_of(self, samples: np.ndarray | None) -> list[int]:
        """Return the numbers of the shards that hold the given samples; None: of all shards."""
        if samples is None:
            return list(range(len(self.ends)))
        shards: list[int] = np.unique(np.searchsorted(self.ends, samples, side="right")).tolist()
        return shards

    def _place(self, sample: int) -> tuple[int, int, int, int]:
        """Return a sample's shard; where its header begins there; the sizes of header and image, in bytes."""
        if not 0 <= sample < self.index.num_samples:
            raise IndexError(f"sample {sample} of {self.index.num_samples}")
        row = self.index.rows[sample]
        return bisect.bisect_right(self.ends, sample), int(row["header"]), int(row["data"]), int(row["size"])

    def _pread(self, number: int, offset: int, size: int) -> bytes:
        address = self._checked(number, offset, size)
        if self._reads_ranges and is_remote(address):
            return read_ranges([(address, offset, offset + size)])[0]
        try:
            shard = self._open(number)  # kept alive during the read: another thread may evict it
            data = os.pread(shard.descriptor, size, offset)
        except OSError as error:
            if error.errno in _RESOURCE_ERRORS:  # the machine's problem, not the sample's
                raise DataError(str(explained(error))) from None
            raise BadSample("unreadable", f"{address}: {error.strerror}") from None
        if len(data) < size:
            raise BadSample("unreadable", f"{address} ends before byte {offset + size}")
        return data

    def _checked(self, number: int, start: int, size: int) -> str:
        """Return the path or URL of a shard, after checking a range of it."""
        address = self.index.address(number)
        if size > limits.IMAGE_FILE:
            raise BadSample(
                "too large", f"{address}: {size} bytes at byte {start}, at most {limits.IMAGE_FILE:,}"
            )
        if start + size > self.index.shards[number].num_bytes:
            raise BadSample("unreadable", f"{address} ends before byte {start + size}")
        return address

    def _opened(self, number: int) -> "_OpenShard":
        shard, address = self.index.shards[number], self.index.address(number)
        if self.cache is not None and is_remote(address):
            opened = _OpenShard(self.cache.open(address, shard.num_bytes, shard.sha256))
            for start, data in self._unverified.pop(number, ()):
                if os.pread(opened.descriptor, len(data), start) != data:
                    raise DataError(address, f"its server sent other bytes at {start} before", "start again")
            return opened
        return _OpenShard(os.open(address, os.O_RDONLY | os.O_CLOEXEC))


class _OpenShard:
    """A descriptor that is closed when the last reference is dropped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _reopen(folder: Path, base: str, digest: str, cache: ShardCache | None) -> ShardSource:
    index = open_index(folder, base)
    if index.digest != digest:
        raise DataError(folder, "its index changed while it was in use")
    return ShardSource(index, cache)


# Images that are not in shards: image files and addresses, and generated noise


class ImageFiles:
    """Image files without labels, read on demand.

    Args:
        names: paths, and addresses of single images (https, hf, s3, gs).
        classes: class of each by the tree that holds it, "" if the tree does not tell; None if it was given
            individually.
    """

    class_names: tuple[str, ...] = ()

    def __init__(self, names: Sequence[str], classes: Sequence[str | None] = ()) -> None:
        self.names = tuple(without_queries(*names, error=DataError, over=False))
        self.classes = tuple(classes) or (None,) * len(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def digest(self) -> str:
        """Hex digest of the names, not of the content."""
        names = "\0".join(self.names).encode("utf-8", "surrogateescape")
        return hashlib.sha256(b"files " + names).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Return -1 for each sample."""
        return np.full(len(self) if samples is None else len(samples), -1, np.int64)

    def key(self, sample: int) -> str:
        """Return the path or address as given."""
        return self.names[sample]

    location = key

    def read(self, sample: int) -> bytes:
        """Return the encoded image. Raises `BadSample` if it cannot be read."""
        name = self.names[sample]
        try:
            if is_remote(name):
                content = read_file(name, limits.IMAGE_FILE)
            else:
                content = read_bytes(Path(name), limits.IMAGE_FILE, error=DataError)
        except DataError as error:
            raise BadSample(str(error).removeprefix(f"{name}: ")) from None
        if not content:
            raise BadSample("empty file")
        return content


@dataclass(frozen=True)
class SyntheticSource:
    """Generated JPEGs of coloured noise, for smoke tests and benchmarks; `image_size` is in pixels.

    The tint of an image shows its class, so that a model can learn it.
    """

    num_samples: int
    num_classes: int
    image_size: int

    def __len__(self) -> int:
        return self.num_samples

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(str(label) for label in range(self.num_classes))

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(np.arange(len(self)) if samples is None else samples, np.int64) % self.num_classes

    def key(self, sample: int) -> str:
        return str(sample)

    def location(self, sample: int) -> str:
        return f"synthetic sample {sample}"

    def read(self, sample: int) -> bytes:
        tint = np.random.default_rng((0, sample % self.num_classes)).uniform(64, 192, 3)
        noise = np.random.default_rng((1, sample)).normal(0, 40, (16, 16, 3))
        pixels = np.clip(tint + noise, 0, 255).astype(np.uint8)
        image = Image.fromarray(pixels).resize((self.image_size, self.image_size))
        return encode(image, "JPEG", quality=90)
