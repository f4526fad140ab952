"""Writing a split: images as they are, shuffled once, in shards that come out the same byte for byte."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitctl.data.index import Index, index_shards, read_index
from vitctl.data.order import Order
from vitctl.data.scan import MAX_MEMBER_BYTES, escape_key
from vitctl.errors import DataError

Progress = Callable[[int, int], None]
Sample = dict[str, str | bytes]
MAX_BYTES = 256 * 2**20
MAX_SAMPLES = 100_000
_END_BYTES = 10_240  # tar files are padded to whole records


@dataclass(frozen=True)
class Item:
    """One original image.

    Args:
        key: its name, unique in the split; any text.
        label: class number, -1 for none.
        read: gives the encoded image, which is stored as it is.
    """

    key: str
    label: int
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Originals:
    """One split before it is written: its images, the class names in label order, and where they come from in words."""

    items: Sequence[Item]
    class_names: tuple[str, ...]
    source: str


def write_split(
    items: Sequence[Item],
    out: Path,
    class_names: Sequence[str],
    *,
    seed: int,
    source_text: str,
    max_bytes: int = MAX_BYTES,
    max_samples: int = MAX_SAMPLES,
    progress: Progress | None = None,
) -> Index:
    """Write items as WebDataset shards with an index. The folder appears whole, or not at all.

    The extension of a member follows the bytes of the image, not its old name, so that a PNG called `.jpg` is
    stored untouched as `.png`. The same items and seed give the same bytes.

    Args:
        items: the split; shuffled by `seed` on the way.
        out: the split folder, which must not exist yet.
        class_names: in label order.
        seed: of the shuffle.
        source_text: where the images came from, in words; kept in the index.
        max_bytes: close a shard before it grows beyond this.
        max_samples: close a shard at this many samples.
        progress: called with (samples done, samples in all).

    Raises:
        DataError: `out` is taken, two items share a key, a label has no name, an image is none.
    """
    _check(items, out, len(class_names))
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        paths = _write_shards(items, aside, seed, max_bytes, max_samples, progress)
        index_shards(paths, class_names=class_names, source=source_text)
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return read_index(out)


def image_extension(data: bytes) -> str | None:
    """The extension that the first bytes of a file stand for; None when they are no image that we read."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((extension for signature, extension in _SIGNATURES if data.startswith(signature)), None)


_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)


def _check(items: Sequence[Item], out: Path, num_classes: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: exists already, should be a new folder; remove it or choose another name")
    if not items:
        raise DataError(f"{out}: no images to write")
    seen: set[str] = set()
    for item in items:
        if item.key in seen:
            raise DataError(f"{out}: two images have the key {item.key!r}, should be unique in a split")
        seen.add(item.key)
        if not -1 <= item.label < num_classes:
            raise DataError(f"{item.key}: label {item.label} has no name, {num_classes} class names were given")


def _write_shards(
    items: Sequence[Item], folder: Path, seed: int, max_bytes: int, max_samples: int, progress: Progress | None
) -> list[Path]:
    samples = _shuffled_samples(items, seed, progress)
    paths: list[Path] = []
    sample = next(samples, None)
    while sample is not None:
        paths.append(folder / f"shard-{len(paths):06d}.tar")
        sample = _write_shard(paths[-1], sample, samples, max_bytes, max_samples)
    return paths


def _write_shard(
    path: Path, sample: Sample | None, samples: Iterator[Sample], max_bytes: int, max_samples: int
) -> Sample | None:
    """Fill one shard, beginning with `sample`; returns the first sample that found no room, None at the end."""
    from webdataset import TarWriter

    with path.open("wb") as file:
        with TarWriter(file, user="vitctl", group="vitctl", mtime=0, encoder=False) as tar:
            num_bytes, num_samples = _END_BYTES, 0
            while sample is not None:
                num_bytes, num_samples = num_bytes + _tar_bytes(sample), num_samples + 1
                if num_samples > 1 and (num_bytes > max_bytes or num_samples > max_samples):
                    break
                tar.write(sample)
                sample = next(samples, None)
        file.flush()
        os.fsync(file.fileno())
    return sample


def _shuffled_samples(items: Sequence[Item], seed: int, progress: Progress | None) -> Iterator[Sample]:
    _, order = Order(len(items), seed).at(np.arange(len(items)))
    for done, number in enumerate(order):
        item = items[number]
        data = item.read()
        extension = image_extension(data)
        if extension is None:
            raise DataError(
                f"{item.key}: not a JPEG, PNG, WEBP, GIF, BMP or TIFF file (begins with {data[:8].hex(' ')})"
            )
        if len(data) > MAX_MEMBER_BYTES:
            raise DataError(f"{item.key}: {len(data)} bytes, should have at most {MAX_MEMBER_BYTES}")
        yield {"__key__": escape_key(item.key), extension: data, "cls": str(item.label).encode()}
        if progress:
            progress(done + 1, len(items))


def _tar_bytes(sample: Sample) -> int:
    blocks = sum(1 + -(-len(data) // 512) for name, data in sample.items() if name != "__key__")
    return 512 * blocks
