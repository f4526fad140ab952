"""Validation of labels, applied to every source that a job opens: which labels are required, and which are
invalid.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from vitctl.data.source.read import Source, has_label
from vitctl.errors import DataError

Use = Literal["training", "scoring", "draws", "pixels"]
_CHUNK = 2**20


class _Found(NamedTuple):
    """How many images were found, and the first of them; -1 for none."""

    number: int
    first: int


def check_labels(source: Source, name: str, use: Use, *, single: bool = False) -> None:
    """Refuse a source whose labels are not valid for the job. Labels are read in chunks, so memory is
    constant.

    A label is 0 to K - 1 of K classes, or -1 for none; of several the missing ones come last. Anything else
    is refused for every use: the index is damaged. An image without a label is refused in `training` and in
    `scoring`; where images may have several labels, a score leaves out those without any. `draws` (few-shot)
    never take one, `pixels` (masked patch prediction) need none.

    Args:
        source: an opened split.
        name: of the split, for messages.
        use: what the job needs the images for.
        single: refuse sources whose images may have several labels.

    Raises:
        DataError: one line with the number of such images and the first of them.
    """
    num_classes, width = len(source.class_names), source.labels(np.zeros(0, np.int64)).shape[1:]
    if single and width:
        raise DataError(f"'{name}': one label per image is needed here, these images may have several")
    odd, lacking = _Found(0, -1), _Found(0, -1)
    for begin, labels in _chunks(source):
        rows = labels.reshape(len(labels), -1)
        is_odd = ((rows >= num_classes) | (rows < -1)).any(axis=1)
        is_odd |= ((rows[:, :-1] < 0) & (rows[:, 1:] >= 0)).any(axis=1)
        odd, lacking = _counted(odd, begin, np.asarray(is_odd)), _counted(lacking, begin, ~has_label(labels))
    if odd.number:
        label = source.labels(np.array([odd.first])).tolist()[0]
        raise DataError(
            f"'{name}': {odd.number:,} of {len(source):,} images have a label that is none of 0 to "
            f"{num_classes - 1}, first "
            f"number {odd.first} ({label}) of {source.location(odd.first)}: the index is damaged or was made "
            f"for other classes; make it "
            "again with `vitctl data index`"
        )
    is_refused = use == "training" or (use == "scoring" and not width)
    if lacking.number and (is_refused or (use == "scoring" and lacking.number == len(source))):
        raise DataError(
            f"'{name}': {lacking.number:,} of {len(source):,} images have no label and cannot be "
            f"{'trained on' if use == 'training' else 'scored'}, first number {lacking.first} of "
            f"{source.location(lacking.first)}; index "
            "the split with its labels"
        )


def _chunks(source: Source) -> Iterator[tuple[int, np.ndarray]]:
    for begin in range(0, len(source), _CHUNK):
        yield begin, source.labels(np.arange(begin, min(begin + _CHUNK, len(source))))


def _counted(before: _Found, begin: int, found: np.ndarray) -> _Found:
    number = int(np.count_nonzero(found))
    first = begin + int(np.argmax(found)) if number and before.first < 0 else before.first
    return _Found(before.number + number, first)
