"""Split expressions, which count in md5 order: `train[:98%]`, `train[:800]+validation[:200]`, `train[80%: of
each class]`.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vitctl.data.source.read import Concat, Source, Subset
from vitctl.errors import DataError

_PART = re.compile(r"(?P<split>\w+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?(?P<each> of each class)?\])?")

_ORDERS: dict[tuple[str, str], np.ndarray] = {}
_MAX_ORDERS = 64


class Part(NamedTuple):
    """The samples `start` to `stop` (excluded) of a split, counted in md5 order."""

    split: str
    start: int
    stop: int


class Share(NamedTuple):
    """The samples of every class of a split between two percentages, counted in md5 order."""

    split: str
    start: int
    stop: int


def md5_order(keys: Iterable[str | int], split: str) -> np.ndarray:
    """The order in which TensorFlow Datasets stores a split: by the MD5 of the split's name and the sample's
    key.

    Because it is a pure function of the names, "the first 800" are the same 800 samples on every machine.

    Args:
        keys: one per sample, as the original data set names them; numbers count as their decimal text.
        split: name of the split, the salt of the hash.

    Returns:
        int64 `[n]`, the numbers of the samples in that order.
    """
    salt = split.encode()
    digests = [hashlib.md5(salt + _bytes(key), usedforsecurity=False).digest() for key in keys]
    return np.array(sorted(range(len(digests)), key=digests.__getitem__), np.int64)


def _bytes(key: str | int) -> bytes:
    """The bytes of a key as in its shard, also where they are not UTF-8."""
    return str(key).replace("\\", "/").encode(errors="surrogateescape")


def resolve(spec: str, sizes: Mapping[str, int]) -> list[Part]:
    """Convert a split expression to ranges of samples.

    Args:
        spec: parts joined by `+`; each a split's name, and perhaps `[start:stop]` with counts or percentages,
            which count from the end when negative. Percentages round to the nearest sample. Percentages of
            each class work
            in `select` only: their number of samples does not follow from the sizes.
        sizes: samples in each split.

    Raises:
        DataError: the expression is malformed, names an unknown split, or asks for more than there is.
    """
    parts = [_part(part.strip(), sizes) for part in spec.split("+")]
    if any(isinstance(part, Share) for part in parts):
        raise DataError(f"split {spec!r}: how many samples that is depends on the classes")
    return [part for part in parts if isinstance(part, Part)]


def select(spec: str, sources: Mapping[str, Source]) -> Source:
    """Select the samples of a split expression.

    A whole split is in storage order; a range is selected, and ordered, in md5 order of the keys.

    Args:
        spec: see `resolve`; a range may also be `[start%:stop% of each class]`, which applies to every class
            separately.
        sources: the splits of one data set, by name.

    Raises:
        DataError: as `resolve`; or nothing is selected.
    """
    sizes = {name: len(source) for name, source in sources.items()}
    parts = [_part(part.strip(), sizes) for part in spec.split("+")]
    chosen = [_chosen(part, sources[part.split]) for part in parts]
    if not all(len(source) for source in chosen):
        raise DataError(f"split {spec!r} selects no samples")
    return chosen[0] if len(chosen) == 1 else Concat(tuple(chosen))


def num_repeated(source: Source) -> int:
    """How many samples a split expression selects more than once, as `test[:20]+test[10:]` does.

    Args:
        source: as returned by `select`, or a view of that.
    """
    if not isinstance(source, Concat):
        return num_repeated(source.parts[0]) if len(source.parts) == 1 else 0
    wholes: dict[str, np.ndarray] = {}
    repeated = 0
    for part in source.parts:
        whole, rows = (part.source, part.rows) if isinstance(part, Subset) else (part, np.arange(len(part)))
        taken = wholes.setdefault(whole.digest, np.zeros(len(whole), bool))
        repeated += int(np.count_nonzero(taken[rows]))
        taken[rows] = True
    return repeated


def _chosen(part: Part | Share, source: Source) -> Source:
    if isinstance(part, Share):
        return Subset(
            source, _of_each_class(_order_of(source, part.split), source.labels(), part.start, part.stop)
        )
    if (part.start, part.stop) == (0, len(source)):
        return source
    return Subset(source, _order_of(source, part.split)[part.start : part.stop])


def _of_each_class(order: np.ndarray, labels: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The samples of every class between two percentages, in the order given; samples without a label count
    as a class.

    A class of two samples or more has at least one on each side of every cut; a single sample goes to the
    first side.
    """
    first = (labels if labels.ndim == 1 else labels[:, 0])[order]
    _, classes, counts = np.unique(first, return_inverse=True, return_counts=True)
    by_class = np.argsort(classes, kind="stable")
    ranks = np.empty(len(order), np.int64)  # of each sample within its class
    ranks[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin, end = _cuts(counts, start)[classes], _cuts(counts, stop)[classes]
    return order[(ranks >= begin) & (ranks < end)]


def _cuts(counts: np.ndarray, percent: int) -> np.ndarray:
    """How many samples of each class come before a percentage."""
    if percent in (0, 100):
        return counts * (percent // 100)
    nearest = np.round(percent * counts / 100).astype(np.int64)
    return np.asarray(np.minimum(np.maximum(nearest, 1), np.maximum(counts - 1, 1)))


def _order_of(source: Source, split: str) -> np.ndarray:
    """The md5 order of a source, cached: a VTAB task selects from one split three times, and a split may have
    737,280 names.
    """
    cache_key = source.digest, split
    if cache_key not in _ORDERS:
        if len(_ORDERS) >= _MAX_ORDERS:
            _ORDERS.clear()
        order = md5_order(map(source.key, range(len(source))), split)
        order.flags.writeable = False
        _ORDERS[cache_key] = order
    return _ORDERS[cache_key]


def _part(text: str, sizes: Mapping[str, int]) -> Part | Share:
    match = _PART.fullmatch(text)
    if match is None:
        raise DataError(
            f"split {text!r}: should look like train, train[:98%] or train[:800]+validation[:200]"
        )
    split = match["split"]
    if split not in sizes:
        raise DataError(f"split {text!r}: there is no {split!r}, should be one of: {', '.join(sizes)}")
    if match["each"]:
        return Share(split, _percent(match["start"], 0, text), _percent(match["stop"], 100, text))
    start = _boundary(match["start"], 0, sizes[split], text)
    stop = _boundary(match["stop"], sizes[split], sizes[split], text)
    return Part(split, start, max(start, stop))


def _percent(text: str | None, default: int, part: str) -> int:
    if text is None:
        return default
    percent = int(text.removesuffix("%"))
    if not text.endswith("%") or not -100 <= percent <= 100:
        raise DataError(
            f"split {part!r}: of each class takes shares of -100% to 100%, as in train[80%: of each class]"
        )
    return percent + 100 if percent < 0 else percent


def _boundary(text: str | None, default: int, size: int, part: str) -> int:
    if text is None:
        return default
    value = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
    if abs(value) > size:
        raise DataError(f"split {part!r}: {text} is more than the {size} samples there are")
    return value + size if value < 0 else value
