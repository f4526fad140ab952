"""Data sets as numbered samples, in shards or not, and views of them.

`Source` is the interface through which loaders, evaluation and few-shot read. A `View` is some samples of
one or more sources in a given order: subsets, classes, concatenations and split expressions are all views.
"""

import bisect
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np

from vitctl.data.images.decode import BadSample
from vitctl.data.shards.index import has_label, wrong_labels
from vitctl.data.shards.tar import padded
from vitctl.data.source.rows import CHUNK, RandomPart, Ranges, Rows
from vitctl.data.source.stores import ShardSource, array_digest
from vitctl.errors import DataError
from vitctl.system.text import count_text, did_you_mean, nearest, one_line, same_name, typed

Use = Literal["training", "scoring", "draws", "pixels"]


class Source(Protocol):
    """A data set whose samples are numbered from 0. It is passed to other processes by pickling."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names in label order."""

    @property
    def digest(self) -> str:
        """Hex digest of the samples and their order."""

    def __len__(self) -> int: ...

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Return the labels of the given samples, or of all: int64 `[n]`, -1 for none.

        If samples may have several: int64 `[n, L]`, padded with -1; a row of -1 for none.
        """

    def key(self, sample: int) -> str:
        """Return the name of a sample, unique in its split."""

    def location(self, sample: int) -> str:
        """Return the path or URL of a sample, for messages."""

    def read(self, sample: int) -> bytes:
        """Return the encoded image. Raises `BadSample` if it cannot be read."""


@dataclass(frozen=True, eq=False)
class View:
    """Samples of one or more sources, in a given order; made by the functions below.

    Args:
        rows: position of each sample in the concatenation of all stores, int64 `[n]` or computed; None: all,
            in order.
        new_labels: replacements for the labels of the stores, `[n]` or `[n, L]`.
    """

    stores: tuple[Source, ...]
    class_names: tuple[str, ...]
    digest: str
    rows: Rows | None = None
    new_labels: np.ndarray | None = None

    @property
    def parts(self) -> tuple[Source, ...]:
        """The concatenated sources; empty for other views."""
        return self.stores if self.rows is None else ()

    def __len__(self) -> int:
        return self._ends[-1] if self.rows is None else len(self.rows)

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        if self.new_labels is not None:
            return self.new_labels[slice(None) if samples is None else samples].copy()
        width = max(map(label_shape, self.stores))
        labels = np.full((len(self) if samples is None else len(samples), *width), -1, np.int64)
        for store, rows, chosen in self.by_store(samples):
            labels[chosen] = padded(store.labels(rows), *width) if width else store.labels(rows)
        return labels

    def key(self, sample: int) -> str:
        store, row = self._one(sample)
        return store.key(row)

    def location(self, sample: int) -> str:
        store, row = self._one(sample)
        return store.location(row)

    def read(self, sample: int) -> bytes:
        store, row = self._one(sample)
        return store.read(row)

    def by_store(
        self, samples: np.ndarray | None = None
    ) -> Iterator[tuple[Source, np.ndarray | None, np.ndarray | slice]]:
        """Yield each store that holds some of the given samples, or of all.

        Yields:
            the store; the samples' rows in it, None for all in order; their indices among those given.
        """
        rows = None if self.rows is None else self.rows[slice(None) if samples is None else samples]
        if samples is not None and rows is None:
            rows = np.asarray(samples, np.int64)
        if rows is None:
            for store, begin, end in zip(self.stores, self._begins, self._ends, strict=True):
                yield store, None, slice(begin, end)
            return
        if len(self.stores) == 1:
            yield self.stores[0], rows, slice(None)
            return
        numbers = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            yield self.stores[number], rows[chosen] - self._begins[number], chosen

    def _one(self, sample: int) -> tuple[Source, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        row = int(sample if self.rows is None else self.rows[sample])
        number = bisect.bisect_right(self._ends, row)
        return self.stores[number], row - self._begins[number]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.stores)))

    @cached_property
    def _begins(self) -> list[int]:
        return [0, *self._ends[:-1]]


def subset(source: Source, rows: Rows) -> View:
    """Select samples by number, int64 `[n]` or computed, in that order."""
    return View((source,), source.class_names, array_digest(f"subset {source.digest} ", rows), rows)


def concat(sources: Sequence[Source]) -> View:
    """Concatenate sources. Raises DataError if their class names differ."""
    for other in sources:
        if other.class_names != sources[0].class_names:
            raise DataError(
                "splits with different class names cannot be joined, their labels mean different things: "
                f"{_names(sources[0])} and {_names(other)}"
            )
    digests = " ".join(["concat", *(source.digest for source in sources)])
    return View(tuple(sources), sources[0].class_names, hashlib.sha256(digests.encode()).hexdigest())


def random_subset(source: Source, num_samples: int, seed: int) -> Source:
    """Select samples at random, in storage order. With the same seed, larger subsets contain smaller ones.

    Raises:
        DataError: `num_samples` is out of range.

    Paper: Section 4.3 (random subsets of 9M, 30M and 90M images of JFT-300M)
    """
    if not 1 <= num_samples <= len(source):
        raise DataError(f"a subset of {num_samples:,} images was requested, but there are {len(source):,}")
    if num_samples == len(source):
        return source
    return subset(source, RandomPart(len(source), num_samples, seed))


def of_classes(source: Source, names: tuple[str, ...]) -> View:
    """Select the samples of some classes, in storage order; labels are numbered in the order of `names`.

    Raises DataError if a class is unknown, named twice or empty, or a label is out of range.
    """
    known = {name: label for label, name in enumerate(source.class_names)}
    as_given, names = names, tuple(map(same_name, names))
    for name in names:
        if name not in known:
            raise no_class(name, known)
        if names.count(name) > 1:
            raise DataError(f"class {name!r} is named twice")
    check_labels(source, "data.classes", "pixels")
    new = np.full(len(known) + 1, -1, np.int64)  # the last entry is for label -1
    new[[known[name] for name in names]] = np.arange(len(names))
    labels = new[source.labels()]
    rows = np.flatnonzero(has_label(labels))
    if not len(rows):
        more = " ..." if len(names) > 3 else ""
        raise DataError(f"there are no images of the classes {', '.join(names[:3])}{more}")
    chosen, labels = subset(source, rows), labels[rows]
    if labels.ndim == 2:
        labels = -np.sort(-labels, axis=1)  # -1 comes last
    content = f"relabelled {chosen.digest} {new.tolist()} {list(as_given)}"
    digest = hashlib.sha256(content.encode()).hexdigest()
    return replace(chosen, class_names=names, new_labels=labels, digest=digest)


def numbered_as(source: Source, class_names: Sequence[str]) -> Source:
    """Number the labels of a source by other class names, if these include all of the source's names."""
    numbers = {name: number for number, name in enumerate(class_names)}
    if tuple(class_names) == tuple(source.class_names) or not numbers.keys() >= {*source.class_names}:
        return source
    new = np.array([*(numbers[name] for name in source.class_names), -1])  # the last entry is for label -1
    return View((source,), tuple(class_names), source.digest, new_labels=new[source.labels()])


def no_class(name: str, known: Iterable[str]) -> DataError:
    hint = did_you_mean(nearest(name, known)) or f"known: {', '.join(list(known)[:5])} ..."
    return DataError(f"there is no class {name!r}", fix=hint)


def check_labels(source: Source, name: str, use: Use, *, single: bool = False) -> None:
    """Refuse a source whose labels are not valid for the job, with the number of bad images and the first.

    Labels are read in chunks to save memory, and not at all if the counts in the index rule out an error. A
    label outside the classes, see `wrong_labels`, means that the index is damaged, and is refused for every
    use. An image without a label is refused in `training` and `scoring`, except that scoring skips it if
    images may have several labels. `draws` (few-shot) never take such images, `pixels` (masked patch
    prediction) need no labels. `single` refuses sources whose images may have several labels.
    """
    num_classes, width = len(source.class_names), label_shape(source)
    if single and width:
        raise DataError(f"'{name}'", "needs one label per image, but these images may have several")
    if num_classes == 1 and not width and use in ("training", "draws"):
        raise DataError(
            f"'{name}'",
            f"{source.class_names[0]!r} is its only class, so that nothing can be learned",
            "give images of other classes too",
        )
    if _are_counted(source, num_classes, use in ("training", "scoring")):
        return
    invalid, unlabelled = [], []
    for begin in range(0, len(source), CHUNK):
        labels = source.labels(np.arange(begin, min(begin + CHUNK, len(source))))
        is_missing, is_invalid = wrong_labels(labels, num_classes)
        invalid.append(begin + np.flatnonzero(is_invalid))
        if use in ("training", "scoring"):
            unlabelled.append(begin + np.flatnonzero(is_missing))
    if num_invalid := sum(map(len, invalid)):
        first = int(np.concatenate(invalid)[0])
        raise DataError(
            f"'{name}'",
            f"{num_invalid:,} of {len(source):,} images have labels outside 0..{num_classes - 1}, "
            f"first number {first} ({source.labels(np.array([first])).tolist()[0]}) of "
            f"{source.location(first)}: the index is damaged or was made for other classes",
            "make it again with `vitctl data index`",
        )
    num_unlabelled = sum(map(len, unlabelled))
    is_refused = use == "training" or not width or num_unlabelled == len(source)
    if num_unlabelled and is_refused:
        raise DataError(f"'{name}'", _unlabelled_text(source, np.concatenate(unlabelled)))


def _are_counted(source: Source, num_classes: int, all_needed: bool) -> bool:
    """Return whether the indexes behind a source show that its labels are valid, and all there if needed."""
    if isinstance(source, View):
        stores = (_are_counted(store, num_classes, all_needed) for store in source.stores)
        return source.new_labels is None and all(stores)
    if not isinstance(source, ShardSource) or len(source.class_names) != num_classes:
        return False
    counts = source.index.label_counts
    return not (counts.outside or (all_needed and counts.missing))


def label_shape(source: Source) -> tuple[int, ...]:
    """Return the shape of an image's label: `()`, or `(L,)` where images may have several."""
    return source.labels(np.zeros(0, np.int64)).shape[1:]


def unlabelled_samples(source: Source) -> np.ndarray:
    return np.flatnonzero(~has_label(source.labels()))


def unlabelled_note(source: Source) -> str:
    """Return a line about the samples whose label is -1; "" if there are none."""
    unlabelled = unlabelled_samples(source)
    return _unlabelled_text(source, unlabelled) if len(unlabelled) else ""


def class_zero_note(source: Source) -> str:
    """Return a line if class names are numbers and no image has class 0; "" otherwise."""
    if tuple(source.class_names[:2]) != ("0", "1"):
        return ""
    for begin in range(0, len(source), CHUNK):
        if (source.labels(np.arange(begin, min(begin + CHUNK, len(source)))) == 0).any():
            return ""
    commands = [
        f", or type `vitctl data shards {typed(folder)} {typed(folder.name)}-from-0 --drop-class 0`"
        for folder in (split.index.folder for split in split_sources(source)[:1])
    ]
    fix = "if the labels count from 1, number them from 0"
    return f"no image has the label 0, so that class 0 is empty; {fix}{''.join(commands)}"


def _unlabelled_text(source: Source, unlabelled: np.ndarray) -> str:
    first = int(unlabelled[0])
    if len(unlabelled) == len(source):
        said, fix = f"no image has a label: all {len(source):,} are -1", "a class, 0 or more,"
    else:
        said = f"{len(unlabelled):,} of {len(source):,} images have no label (-1)"
        fix = f"a class from 0 to {len(source.class_names) - 1}, or leave them out,"
    return (
        f"{said}; the first is {one_line(sample_key(source, first))} of {source.location(first)}; they "
        f"cannot be trained on or scored: give them {fix} and index the shards again"
    )


def keys_of(source: Source, samples: np.ndarray | None = None) -> list[str]:
    """Return the keys of the given samples, or of all; an indexed split opens no shard for it."""
    found = np.empty(len(source) if samples is None else len(samples), object)
    for store, rows, chosen in stored(source, samples, np.arange(len(found))):
        keys = getattr(store, "keys", None)
        numbers = range(len(store)) if rows is None else rows
        found[chosen] = keys(rows) if keys else [store.key(int(one)) for one in numbers]
    return list(found)


def sample_key(source: Source, sample: int) -> str:
    """Return the key of a sample, or its number if its shard is damaged."""
    try:
        return source.key(sample)
    except BadSample:
        return f"number {sample}"


def stored(
    source: Source, samples: np.ndarray | None = None, here: np.ndarray | None = None
) -> Iterator[tuple[Source, np.ndarray | None, np.ndarray | None]]:
    """Yield the sources that are not views behind some samples of a source, or all.

    `here` are the caller's numbers for the samples.

    Yields:
        the source, the samples' numbers there (None for all), and the matching part of `here`.
    """
    if not isinstance(source, View):
        yield source, samples, here
        return
    for store, rows, chosen in source.by_store(samples):
        yield from stored(store, rows, None if here is None else here[chosen])


def is_remote(source: Source) -> bool:
    return any(split.index.is_remote for split in split_sources(source))


def read_together(source: Source, samples: np.ndarray, *, at_once: bool = False) -> dict[int, bytes]:
    """Return the encoded images that take a request each, by number; see `ShardSource.read_together`."""
    found: dict[int, bytes] = {}
    for store, rows, here in stored(source, samples, samples):
        if isinstance(store, ShardSource) and rows is not None and here is not None:
            numbers = dict(zip(rows.tolist(), here.tolist(), strict=True))
            read = store.read_together(list(numbers), at_once=at_once)
            found |= {numbers[row]: data for row, data in read.items()}
    return found


def fetch_ahead(source: Source, samples: np.ndarray) -> None:
    """Fetch the remote shards of some samples into the cache; see `ShardSource.fetch_ahead`."""
    for store, rows, _ in stored(source, samples):
        if isinstance(store, ShardSource) and rows is not None:
            store.fetch_ahead(rows)


def split_sources(source: Source) -> tuple[ShardSource, ...]:
    """Return the indexed splits behind a source, in order; empty if it is not stored in shards."""
    if isinstance(source, View):
        return tuple(split for store in source.stores for split in split_sources(store))
    return (source,) if isinstance(source, ShardSource) else ()


def used_shards(source: Source) -> Iterator[tuple[ShardSource, np.ndarray]]:
    """Yield indexed splits behind a source, and the numbers of the shards that hold its samples."""
    if isinstance(source, ShardSource):
        yield source, np.arange(len(source.ends))
    if not isinstance(source, View):
        return
    first, splits = source.stores[0], dict.fromkeys(split_sources(source))
    if source.rows is None:
        for store in source.stores:
            yield from used_shards(store)
    elif isinstance(source.rows, Ranges) and isinstance(first, ShardSource):
        limits = source.rows.begins, source.rows.ends - 1
        runs = zip(*np.searchsorted(np.array(first.ends), limits, side="right"), strict=True)
        yield first, np.unique(np.concatenate([np.arange(begin, end + 1) for begin, end in runs]))
    else:
        ends = {split: np.array(split.ends) for split in splits}
        used = {split: np.zeros(len(split.ends), bool) for split in splits}
        for begin in range(0, len(source), CHUNK):
            for split, rows, _ in stored(source, np.arange(begin, min(begin + CHUNK, len(source)))):
                if isinstance(split, ShardSource) and rows is not None:
                    used[split][np.searchsorted(ends[split], rows, side="right")] = True
        yield from ((split, np.flatnonzero(found)) for split, found in used.items())


def source_texts(source: Source) -> tuple[str, ...]:
    """Return the distinct provenance texts in a source's indexes, which also mark partial copies."""
    return tuple(dict.fromkeys(split.index.source for split in split_sources(source)))


def source_text(source: Source) -> str:
    """Return the provenance of a source in one line; empty if unknown."""
    return "; ".join(filter(None, source_texts(source)))


def _rows_by_store(source: Source) -> dict[str, np.ndarray]:
    """Map the digest of each store to the rows of a source's samples in it."""
    found: dict[str, list[np.ndarray]] = {}
    for store, rows, _ in stored(source):
        found.setdefault(store.digest, []).append(np.arange(len(store)) if rows is None else rows)
    return {digest: np.concatenate(rows) for digest, rows in found.items()}


def shared_samples(one: Source, other: Source) -> int:
    """Count the samples of the stores that are in both sources."""
    theirs = _rows_by_store(other)
    own = _rows_by_store(one)
    return sum(len(np.intersect1d(rows, theirs.get(digest, []))) for digest, rows in own.items())


def num_repeated(source: Source) -> int:
    """Count the samples that a source selects more than once, as `test[:20]+test[10:]` does."""
    if not isinstance(source, View) or getattr(source.rows, "is_distinct", False):
        return 0
    return sum(len(rows) - len(np.unique(rows)) for rows in _rows_by_store(source).values())


def _names(source: Source) -> str:
    names = source.class_names
    number = count_text(len(names), "class", "classes")
    return f"{number} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
