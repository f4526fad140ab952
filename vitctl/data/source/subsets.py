"""Subsets of a source for experiments: nested random subsets, and subsets of the classes."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitctl.data.source.labels import check_labels
from vitctl.data.source.order import Order
from vitctl.data.source.read import Source, Subset, View, has_label
from vitctl.errors import DataError
from vitctl.system.text import did_you_mean, nearest

_CHUNK = 2**20


def random_subset(source: Source, num_samples: int, seed: int) -> Source:
    """A random subset, in storage order. With the same seed, a smaller subset is contained in a larger one.

    Args:
        source: to select from.
        num_samples: 1 to `len(source)`.
        seed: of the random selection.

    Raises:
        DataError: `num_samples` is out of range.

    Paper: Section 4.3 (random subsets of 9M, 30M and 90M images of JFT-300M)
    """
    if not 1 <= num_samples <= len(source):
        raise DataError(f"a subset of {num_samples:,} images was asked for, there are {len(source):,}")
    if num_samples == len(source):
        return source
    chosen, order = np.zeros(len(source), bool), Order(len(source), seed)
    for begin in range(0, num_samples, _CHUNK):
        chosen[order.at(np.arange(begin, min(begin + _CHUNK, num_samples)))[1]] = True
    return Subset(source, np.flatnonzero(chosen))


def of_classes(source: Source, names: tuple[str, ...]) -> Source:
    """The samples of some classes, in storage order, with labels renumbered in the order of `names`.

    Args:
        source: to select from.
        names: classes to keep.

    Raises:
        DataError: a class is unknown or named twice, none of them has a sample, or a label is out of range.
    """
    known = {name: label for label, name in enumerate(source.class_names)}
    for name in names:
        if name not in known:
            raise no_class(name, known)
    if len(set(names)) < len(names):
        raise DataError(f"class {next(name for name in names if names.count(name) > 1)!r} is named twice")
    check_labels(source, "data.classes", "pixels")
    new = np.full(len(known) + 1, -1, np.int64)  # the last is for samples without a label, -1
    new[[known[name] for name in names]] = np.arange(len(names))
    rows = np.flatnonzero(has_label(new[source.labels()]))
    if not len(rows):
        raise DataError(
            f"no image is of the classes {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        )
    return Relabelled(Subset(source, rows), names, new)


def no_class(name: str, known: Iterable[str]) -> DataError:
    """The error for an unknown class name."""
    hint = did_you_mean(nearest(name, known)) or f"known: {', '.join(list(known)[:5])} ..."
    return DataError(f"there is no class {name!r}; {hint}")


@dataclass(frozen=True, eq=False)
class Relabelled(View):
    """A source with its labels mapped to other labels.

    Args:
        source: the samples.
        class_names: in the order of the new labels.
        new: int64 `[num_old_classes + 1]`, the new label of each old one, -1 for none; the last entry is for
            -1.
    """

    class_names: tuple[str, ...]
    new: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def digest(self) -> str:
        """Digest of the samples and their new labels."""
        text = f"relabelled {self.source.digest} {self.new.tolist()} {list(self.class_names)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Labels of the given samples, or of all: int64, -1 for none, which come last where there may be
        several.
        """
        labels = self.new[self.source.labels(samples)]
        return labels if labels.ndim == 1 else -np.sort(-labels, axis=1)
