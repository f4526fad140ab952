"""Samples that are rows of arrays: made when they are asked for, because there may be a million."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

import numpy as np

from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.writer.items import Item


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Item]):
    """A sequence of items without a list of them.

    Args:
        labels: int64 `[N]`.
        read: row number to the bytes of the image.
        key: row number to the key; its decimal text when not given.
    """

    labels: np.ndarray
    read: Callable[[int], bytes]
    key: Callable[[int], str] = str

    def __len__(self) -> int:
        """Rows."""
        return len(self.labels)

    @overload
    def __getitem__(self, row: int) -> Item: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Item]: ...

    def __getitem__(self, row: int | slice) -> Item | Sequence[Item]:
        """The item of a row, or a list of them. Raises IndexError behind the last."""
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        return Item(self.key(number), int(self.labels[number]), partial(self.read, number))


def pixel_rows(pixels: np.ndarray, labels: np.ndarray) -> Rows:
    """Rows of pixels as PNG, which loses nothing.

    Args:
        pixels: uint8 `[N, H, W]` or `[N, H, W, 3]`.
        labels: int64 `[N]`.
    """
    return Rows(labels, partial(_png, pixels))


def _png(pixels: np.ndarray, row: int) -> bytes:
    return encode_png(np.ascontiguousarray(pixels[row]))
