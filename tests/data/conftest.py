"""Small splits for the tests of data: real shards of tiny pictures."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.shards.index import Index
from vitctl.data.writer.items import Item
from vitctl.data.writer.write import write_split

MakeSplit = Callable[..., Index]


def _tiny_png(number: int) -> bytes:
    return encode_png(np.random.default_rng(number).integers(0, 256, (12, 15, 3), dtype=np.uint8))


@pytest.fixture
def tiny_png() -> Callable[[int], bytes]:
    """Picture number n, as PNG."""
    return _tiny_png


@pytest.fixture
def make_split(tmp_path: Path) -> MakeSplit:
    """Writes `num_samples` pictures with keys k0, k1, ...; `bad` ones are cut short but keep their signature."""

    def make(num_samples: int, name: str = "train", *, bad: tuple[int, ...] = (), max_samples: int = 7) -> Index:
        def read(number: int) -> bytes:
            data = _tiny_png(number)
            return data[: len(data) // 2] if number in bad else data

        items = [Item(f"k{number}", number % 3, partial(read, number)) for number in range(num_samples)]
        return write_split(
            items, tmp_path / name, ("a", "b", "c"), seed=1, source_text="noise", max_samples=max_samples
        )

    return make
