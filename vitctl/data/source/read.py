"""Access to samples by number: the interface through which loaders, evaluation and few-shot read a data set."""

import bisect
import errno
import hashlib
import io
import os
import resource
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample
from vitctl.data.shards.index import Index, read_index
from vitctl.data.shards.remote import ShardCache, is_remote, read_range
from vitctl.data.shards.tar import member_name, split_name, unescape_key
from vitctl.errors import DataError, explained
from vitctl.system.bounds import IMAGE_FILE
from vitctl.system.descriptors import max_open_shards

_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Source(Protocol):
    """A data set whose samples are numbered from 0. It is passed to other processes by pickling."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names in label order."""
        ...

    @property
    def digest(self) -> str:
        """Hex digest of the samples and their order."""
        ...

    @property
    def parts(self) -> "tuple[Source, ...]":
        """The sources behind a view; empty for a source that holds its samples itself."""
        ...

    def __len__(self) -> int: ...

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Labels of the given samples, or of all: int64 `[n]`, -1 for none.

        Where samples may have several: int64 `[n, L]`, padded with -1; a row of -1 for none.
        """
        ...

    def key(self, sample: int) -> str:
        """The name of a sample, unique in its split."""
        ...

    def location(self, sample: int) -> str:
        """The path or URL of a sample, for messages."""
        ...

    def read(self, sample: int) -> bytes:
        """The encoded image. Raises `BadSample` when it cannot be read."""
        ...


def has_label(labels: np.ndarray) -> np.ndarray:
    """Which of some samples have a label: bool `[n]` of labels `[n]`, or of `[n, L]` where there may be
    several.
    """
    return np.asarray(labels >= 0 if labels.ndim == 1 else (labels >= 0).any(axis=1))


class ShardSource:
    """The samples of an indexed split, read by offset, in storage order.

    Files are opened on first use, at most 64 at a time. Reads are positional (pread), so the source can be
    shared between threads and used after a fork; pickling it sends the folder, never a descriptor.

    Args:
        index: of the split.
        cache: stores remote shards as whole files; None reads single images by byte range.
    """

    def __init__(self, index: Index, cache: ShardCache | None = None) -> None:
        self.index = index
        self.cache = cache
        self._ends = list(accumulate(shard.num_samples for shard in index.shards))
        self._open = lru_cache(max_open_shards(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))(self._opened)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.index.folder, self.index.digest, self.index.base, self.cache)

    def __len__(self) -> int:
        return self.index.num_samples

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.index.class_names

    @property
    def digest(self) -> str:
        return self.index.digest

    @property
    def parts(self) -> tuple[Source, ...]:
        return ()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Labels of the given samples, or of all: int64, -1 for none."""
        labels = self.index.rows["label"] if self.index.labels is None else self.index.labels
        return np.array(labels if samples is None else labels[samples], np.int64)

    def key(self, sample: int) -> str:
        """The key under which the sample was stored."""
        row = self.index.rows[sample]
        header = self._pread(sample, int(row["header"]), int(row["data"]))
        name = member_name(header)
        if not name:
            raise BadSample("damaged", f"{self.location(sample)} has no header at byte {row['header']}")
        return unescape_key(split_name(name)[0])

    def location(self, sample: int) -> str:
        """The path or URL of the shard that holds the sample."""
        return self.index.address(self._shard(sample))

    def read(self, sample: int) -> bytes:
        """The encoded image, exactly as stored in the shard."""
        row = self.index.rows[sample]
        return self._pread(sample, int(row["header"]) + int(row["data"]), int(row["size"]))

    def _shard(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return bisect.bisect_right(self._ends, sample)

    def _pread(self, sample: int, offset: int, size: int) -> bytes:
        number = self._shard(sample)
        address = self.index.address(number)
        if size > IMAGE_FILE.limit:
            raise BadSample("too large", f"{address}: {size} bytes at byte {offset}")
        if offset + size > self.index.shards[number].num_bytes:
            raise BadSample("unreadable", f"{address} ends before byte {offset + size}")
        if self.cache is None and is_remote(address):
            return read_range(address, offset, offset + size)
        try:
            shard = self._open(
                number
            )  # a reference during the read: another thread may evict it from the cache of open files
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


def _reopen(folder: Path, digest: str, base: str, cache: ShardCache | None) -> ShardSource:
    source = ShardSource(read_index(folder, base), cache)
    if source.digest != digest:
        raise DataError(f"{folder}: its index changed while it was in use")
    return source


@dataclass(frozen=True, eq=False)
class View:
    """Samples of another source, `source`; `_one(sample)` is the number of a sample there."""

    source: Source

    @property
    def parts(self) -> tuple[Source, ...]:
        return (self.source,)

    def key(self, sample: int) -> str:
        """The key of the sample in its source."""
        return self.source.key(self._one(sample))

    def location(self, sample: int) -> str:
        """The path or URL of the sample."""
        return self.source.location(self._one(sample))

    def read(self, sample: int) -> bytes:
        """The encoded image."""
        return self.source.read(self._one(sample))

    def _one(self, sample: int) -> int:
        return sample


@dataclass(frozen=True, eq=False)
class Subset(View):
    """Some samples of a source, in a given order.

    Args:
        source: where the samples come from.
        rows: int64 `[n]`, the sample of `source` that each sample of the subset is.
    """

    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @cached_property
    def digest(self) -> str:
        rows = np.ascontiguousarray(self.rows, "<i8")
        return hashlib.sha256(f"subset {self.source.digest} ".encode() + rows.tobytes()).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Labels of the given samples, or of all: int64, -1 for none."""
        return self.source.labels(self.rows if samples is None else self.rows[samples])

    def _one(self, sample: int) -> int:
        return int(self.rows[sample])


@dataclass(frozen=True)
class Concat:
    """The concatenation of several sources with the same classes."""

    parts: tuple[Source, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.class_names != self.parts[0].class_names:
                raise DataError(
                    "splits with different class names cannot be joined, their labels mean different things: "
                    f"{_names(self.parts[0])} and {_names(part)}"
                )

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(part) for part in self.parts))

    @cached_property
    def begins(self) -> list[int]:
        """Number of the first sample of each part."""
        return [0, *self._ends[:-1]]

    @cached_property
    def _width(self) -> tuple[int, ...]:
        """Labels of a sample, where there may be several."""
        return max(part.labels(np.zeros(0, np.int64)).shape[1:] for part in self.parts)

    def _padded(self, labels: np.ndarray) -> np.ndarray:
        if labels.shape[1:] == self._width:
            return labels
        labels = labels.reshape(len(labels), labels.shape[1] if labels.ndim == 2 else 1)
        return np.pad(labels, ((0, 0), (0, self._width[0] - labels.shape[1])), constant_values=-1)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.parts[0].class_names

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(
            " ".join(["concat", *(part.digest for part in self.parts)]).encode()
        ).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Labels of the given samples, or of all: int64, -1 for none."""
        if samples is None:
            return np.concatenate([self._padded(part.labels()) for part in self.parts])
        samples = np.asarray(samples, np.int64)
        numbers = np.searchsorted(self._ends, samples, side="right")
        labels = np.empty((len(samples), *self._width), np.int64)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            labels[chosen] = self._padded(self.parts[number].labels(samples[chosen] - self.begins[number]))
        return labels

    def key(self, sample: int) -> str:
        """The key of the sample in its part."""
        part, row = self._locate(sample)
        return part.key(row)

    def location(self, sample: int) -> str:
        """The path or URL of the sample."""
        part, row = self._locate(sample)
        return part.location(row)

    def read(self, sample: int) -> bytes:
        """The encoded image."""
        part, row = self._locate(sample)
        return part.read(row)

    def _locate(self, sample: int) -> tuple[Source, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = bisect.bisect_right(self._ends, sample)
        return self.parts[number], int(sample) - self.begins[number]


def _names(source: Source) -> str:
    names = source.class_names
    return f"{len(names)} classes ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"


@dataclass(frozen=True)
class SyntheticSource:
    """Generated images of coloured noise, for smoke tests and benchmarks: nothing is stored.

    The tint of an image depends on its class, so that a model can learn it. Labels cycle through the classes.

    Args:
        num_samples: samples in the set.
        num_classes: classes in the set.
        image_size: height and width of each JPEG, in pixels.
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
    def parts(self) -> tuple[Source, ...]:
        return ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Labels of the given samples, or of all: int64."""
        return np.asarray(np.arange(len(self)) if samples is None else samples, np.int64) % self.num_classes

    def key(self, sample: int) -> str:
        """The number of the sample, as text."""
        return str(sample)

    def location(self, sample: int) -> str:
        """Says that the sample is synthetic."""
        return f"synthetic sample {sample}"

    def read(self, sample: int) -> bytes:
        """A JPEG, computed from the sample number."""
        tint = np.random.default_rng((0, sample % self.num_classes)).uniform(64, 192, 3)
        noise = np.random.default_rng((1, sample)).normal(0, 40, (16, 16, 3))
        pixels = np.clip(tint + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((self.image_size, self.image_size)).save(file, "JPEG", quality=90)
        return file.getvalue()


def sample_key(source: Source, sample: int) -> str:
    """The key of a sample, or its number where its shard can no longer tell the key."""
    try:
        return source.key(sample)
    except BadSample:
        return f"number {sample}"
