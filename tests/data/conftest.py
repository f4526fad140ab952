"""Small splits for the tests of data: real shards of tiny pictures."""

import io
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.shards.index import Index
from vitctl.data.source.views import Source
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split

MakeSplit = Callable[..., Index]


def _tiny_png(number: int) -> bytes:
    return encode_png(np.random.default_rng(number).integers(0, 256, (12, 15, 3), dtype=np.uint8))


@pytest.fixture
def tiny_png() -> Callable[[int], bytes]:
    """Picture number n, as PNG."""
    return _tiny_png


@pytest.fixture
def make_split(tmp_path: Path) -> MakeSplit:
    """Writes `num_samples` pictures with keys k0, k1 ...; `bad` ones are cut short, with a signature."""

    def make(
        num_samples: int,
        name: str = "train",
        *,
        bad: tuple[int, ...] = (),
        max_samples: int = 7,
        labels: Sequence[int] = (0, 1, 2),
        keys: Sequence[str] = (),
    ) -> Index:
        def read(number: int) -> bytes:
            data = _tiny_png(number)
            return data[: len(data) // 2] if number in bad else data

        items = [
            Item(keys[number] if keys else f"k{number}", labels[number % 3], partial(read, number))
            for number in range(num_samples)
        ]
        return write_split(
            items, tmp_path / name, ("a", "b", "c"), seed=1, source_text="noise", max_samples=max_samples
        )

    return make


def damage(path: Path, byte: int | None = None) -> None:
    """One byte, by default the one in the middle, and the time of the file as it was."""
    found, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2 if byte is None else byte] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


CLASSES = ("a", "b", "c")


def picture(number: int) -> bytes:
    return encode_png(np.full((4, 4 + number % 60), 5 * number % 256, np.uint8))


def make_items(num: int) -> list[Item]:
    return [Item(f"k{number}", number % 3, lambda number=number: picture(number)) for number in range(num)]


def several(num: int) -> list[Item]:
    labels = [(0,), (2, 0), (), (1, 2, 0)]
    return [Item(f"k{n}", labels[n % 4], lambda n=n: picture(n)) for n in range(num)]  # type: ignore[misc]


def store(
    items: Sequence[Item],
    folder: Path,
    class_names: Sequence[str] = CLASSES,
    *,
    seed: int = 0,
    source_text: str = "",
    **how: Any,
) -> Index:
    """Write a split with the defaults that most tests need."""
    return write_split(items, folder, class_names, seed=seed, source_text=source_text, **how)


def contents(source: Source) -> list[tuple[str, int, bytes]]:
    labels = source.labels().tolist()
    return [(source.key(sample), labels[sample], source.read(sample)) for sample in range(len(source))]
