"""Write a split as shards: images unchanged, shuffled once; the shards are reproducible byte for byte."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from vitctl.data.images.decode import Reencode
from vitctl.data.images.image_types import image_extension, refusal
from vitctl.data.shards.index import INDEX_FILE, Index, Shard, read_index, write_index
from vitctl.data.shards.tar import (
    ROW,
    Scan,
    ShardWriter,
    escape_key,
    joined,
    names_header,
    pad_labels,
    read_shard,
)
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item, Originals, read_item
from vitctl.errors import DataError, refuse
from vitctl.system import limits
from vitctl.system.files import atomic_write, inside, lock_alone, opened_folder, write_text
from vitctl.system.pool import Done, Progress, counted, run_each, run_tasks
from vitctl.system.text import breaks_line, count_text, one_line

MAX_BYTES = 256 * 2**20
MAX_SAMPLES = 100_000
_PLAN, _PLAN_FORMAT = "plan.sha256", "vitctl-shards/2"
_BLOCK = 512
_END_BYTES = 10_240  # tar files are padded to whole records
_HELD_BYTES = 256 * 2**20
_IMAGES_PER_TASK = 256


def write_split(
    items: Sequence[Item],
    out: Path,
    class_names: Sequence[str],
    *,
    seed: int,
    source_text: str,
    max_bytes: int = MAX_BYTES,
    max_samples: int = MAX_SAMPLES,
    workers: int = 0,
    reencode: Reencode | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Index:
    """Write items as WebDataset shards with an index. The folder is written atomically.

    Each shard embeds its class names, see `ShardWriter`. A member's extension follows the image's bytes, not
    its old name, so that a PNG called `.jpg` is stored unchanged as `.png`. The same items and seed give the
    same bytes, whatever the number of processes, and despite interruptions: writing resumes after the shards
    that are finished in `.OUT.partial`. An existing split with the same images is left unchanged.

    Args:
        out: the split folder, which must not exist yet, or be what would be written.
        max_bytes: close a shard before it exceeds this; the bytes of the originals count.
        reencode: shrinks JPEG files; None keeps every byte. Recorded in the index.
        progress: called with (images done, images in total). Images of unknown size count twice: they are
            measured first.
        note: called with a line about the remains of an unfinished run, and the number of changed JPEGs.

    Raises:
        DataError: `out` is taken or being written, two items share a key, a label has no name, or an item is
            not an image.
    """
    _check(items, out, class_names, source_text)
    source = f"{source_text}; {reencode}" if reencode else source_text
    count = counted(progress, len(items) + sum(item.size is None for item in items))
    with _own_folder(out) as aside:
        sizes, held = _measure(items, workers, count)
        plan = plan_shards(
            items,
            sizes,
            seed=seed,
            max_bytes=max_bytes - len(names_header(class_names)),
            max_samples=max_samples,
            about=(list(class_names), source),
        )
        job = _Job(items, sizes, held, plan, aside, reencode, tuple(class_names))
        if (out / INDEX_FILE).exists():
            return job.finished_before(out, list(class_names), source, note)
        _prepare_folder(aside, plan, note)
        scans = run_tasks(job.shard, plan.num_shards, workers=workers, done=count)
        write_index(
            aside,
            [
                Shard(job.path(number).name, len(scan.rows), scan.num_bytes, scan.sha256)
                for number, scan in enumerate(scans)
            ],
            scans,
            width=max(scan.width for scan in scans),
            class_names=class_names,
            source=source,
        )
        (aside / _PLAN).unlink()
        os.replace(aside, out)
    index = read_index(out)
    if reencode is not None:
        changed = sum(int((scan.rows["size"] != sizes[plan.items(n)]).sum()) for n, scan in enumerate(scans))
        same = f"{changed:,} of {count_text(len(items), 'image')} changed; the others are as they were"
        note(f"{reencode}: {same}")
    return index


def write_originals(originals: Originals, out: Path, split: str, *, seed: int = 0, **how: Any) -> Index:
    """Write a split to the folder OUT/SPLIT; the rest as `write_split`.

    Raises DataError also if the split's name, which may come from a table, is not a plain folder name.
    """
    if split.startswith((".", "-")):
        raise DataError(originals.source, f"the split {split[:100]!r} begins with {split[0]!r}", "rename it")
    place = inside(out, split, error=DataError, where=originals.source)
    return write_split(
        originals.items, place, originals.class_names, seed=seed, source_text=originals.source, **how
    )


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """A shuffle, cut into shards.

    Args:
        order: int64 `[n]`, item number at each position.
        bounds: int64 `[num_shards + 1]`, the position at which each shard begins, and the end.
        digest: SHA-256 of everything that determines the shards' content, in hex.
    """

    order: np.ndarray
    bounds: np.ndarray
    digest: str

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    def items(self, shard: int) -> np.ndarray:
        """Return the items of a shard in their order, int64 `[k]`."""
        return self.order[self.bounds[shard] : self.bounds[shard + 1]]


def plan_shards(
    items: Sequence[Item],
    sizes: np.ndarray,
    *,
    seed: int,
    max_bytes: int,
    max_samples: int,
    about: Sequence[object],
) -> ShardPlan:
    """Shuffle a split, and close each shard before it grows too large."""
    _, order = Order(len(items), seed).at(np.arange(len(items)))
    label_bytes = np.array([len(label_text(item.label)[1]) for item in items], np.int64)
    ends = np.cumsum((_tar_bytes(sizes) + _tar_bytes(label_bytes))[order])
    bounds = [0]
    while bounds[-1] < len(order):
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + max_bytes - _END_BYTES, side="right"))
        bounds.append(min(max(stop, start + 1), start + max_samples, len(order)))
    digest = hashlib.sha256(json.dumps([_PLAN_FORMAT, seed, max_bytes, max_samples, *about]).encode())
    for number, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        digest.update(json.dumps([items[number].key, items[number].label, size]).encode())
    return ShardPlan(order, np.array(bounds, np.int64), digest.hexdigest())


def label_text(label: int | tuple[int, ...]) -> tuple[str, bytes]:
    """Return extension and content of the label member: one label as `cls`, several as `json`."""
    if isinstance(label, tuple):
        return "json", json.dumps({"labels": list(label)}).encode()
    return "cls", str(label).encode()


def _tar_bytes(sizes: np.ndarray) -> np.ndarray:
    """Return the bytes that members of these sizes take in a tar file, with their headers."""
    return _BLOCK * (1 + -(-sizes // _BLOCK))


@dataclass(frozen=True)
class _Job:
    items: Sequence[Item]
    sizes: np.ndarray
    held: dict[int, bytes]
    plan: ShardPlan
    folder: Path
    reencode: Reencode | None
    class_names: tuple[str, ...]

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:06d}.tar"

    def shard(self, shard: int, done: Done) -> Scan:
        """Write a shard unless it exists; return its content."""
        path, numbers = self.path(shard), self.plan.items(shard)
        if path.exists():
            found = self._scan_again(path, numbers)
            if found is not None:
                done(len(numbers))
                return found
        with atomic_write(path) as aside, aside.open("wb") as file:
            return self._write(file, numbers.tolist(), done)

    def finished_before(
        self, out: Path, class_names: list[str], source: str, note: Callable[[str], None]
    ) -> Index:
        """Return the existing split if it is what the plan would write."""
        index = read_index(out)
        stored, planned = ShardSource(index), self.plan.order.tolist()
        same = (
            (list(index.class_names), index.source, len(stored)) == (class_names, source, len(planned))
            and [shard.num_samples for shard in index.shards] == np.diff(self.plan.bounds).tolist()
            and (self.reencode is not None or np.array_equal(index.rows["size"], self.sizes[self.plan.order]))
            and np.array_equal(self._labels(planned), _as_table(stored.labels()))
            and stored.keys() == [self.items[number].key for number in planned]
        )
        if not same:
            raise DataError(
                out, "exists already with other images or options", "remove it or choose another name"
            )
        note("is there already, whole; nothing was written")
        return index

    def _labels(self, numbers: list[int]) -> np.ndarray:
        return pad_labels([self.items[number].labels for number in numbers])

    def _write(self, file: IO[bytes], numbers: list[int], done: Done) -> Scan:
        """Write the samples of one shard. Return what a scan of it would return."""
        rows, table = [], self._labels(numbers)
        with ShardWriter(file, self.class_names) as writer:
            for number, first in zip(numbers, table[:, 0].tolist(), strict=True):
                item = self.items[number]
                extension, data = self._image(item, number)
                label_extension, label = label_text(item.label)
                places = writer.write(escape_key(item.key), {extension: data, label_extension: label})
                header, begin = places[extension]
                rows.append((header, begin - header, len(data), first))
                done(1)
        several = any(isinstance(self.items[number].label, tuple) for number in numbers)
        labels = table if several else None
        names = joined(self.items[number].key for number in numbers)
        return Scan(np.array(rows, ROW), labels, writer.sha256, writer.num_bytes, names, self.class_names)

    def _image(self, item: Item, number: int) -> tuple[str, bytes]:
        data = self.held[number] if number in self.held else read_item(item)
        if len(data) != self.sizes[number]:
            raise DataError(
                item.key, f"changed while shards were written: {self.sizes[number]} bytes, now {len(data)}"
            )
        extension = image_extension(data)
        if extension is None:
            reason, what = refusal(data)
            raise DataError(item.key, f"{reason}: {what}", "remove it, or leave it out with --bad skip")
        if len(data) > limits.IMAGE_FILE:
            raise DataError(item.key, f"{len(data)} bytes, should have at most {limits.IMAGE_FILE}")
        if self.reencode and extension == "jpg":
            try:
                data = self.reencode(data)
            except DataError as error:
                raise DataError(
                    item.key, f"cannot be resized or recompressed ({error})", "fix or remove it"
                ) from None
        return extension, data

    def _scan_again(self, path: Path, numbers: np.ndarray) -> Scan | None:
        """Return the content of a finished shard of an earlier run; None if it does not match the plan."""
        try:
            scan = read_shard(path)
        except DataError:
            return None
        found = scan.rows["label"] if scan.labels is None else scan.labels
        same = np.array_equal(self._labels(numbers.tolist()), _as_table(found))
        return (
            scan
            if same and (self.reencode or np.array_equal(scan.rows["size"], self.sizes[numbers]))
            else None
        )


def _as_table(labels: np.ndarray) -> np.ndarray:
    return labels.reshape(len(labels), -1)


def _check(items: Sequence[Item], out: Path, class_names: Sequence[str], source: str) -> None:
    num_classes = len(class_names)
    if breaks_line(str(out)):
        raise DataError(one_line(str(out)), "has a control character in its name", "choose another")
    for name in filter(breaks_line, class_names):
        raise DataError(source, f"the class {name!r} has a control character in its name", "rename it")
    refuse(
        DataError,
        (
            out.exists() and not (out / INDEX_FILE).exists() and (not out.is_dir() or any(out.iterdir())),
            out,
            "exists already, should be a new folder",
            "remove it or choose another name",
        ),
        (not items, source, "no images to write"),
    )
    seen: set[str] = set()
    for item in items:
        if breaks_line(item.key):
            raise DataError(
                source, f"the image {item.key!r} has a control character in its name", "rename it"
            )
        if item.key in seen:
            raise DataError(source, f"two images have the key {item.key!r}, should be unique in a split")
        seen.add(item.key)
        least = 0 if isinstance(item.label, tuple) else -1
        for label in item.labels:
            if not least <= label < num_classes:
                raise DataError(item.key, f"label {label} has no name, {num_classes} class names were given")


@contextmanager
def _own_folder(out: Path) -> Iterator[Path]:
    """Lock and yield the folder that becomes `out`; until then only this process and its children use it."""
    aside = out.with_name(f".{out.name}.partial")
    aside.mkdir(parents=True, exist_ok=True)
    with opened_folder(aside) as descriptor:
        lock_alone(descriptor, out, error=DataError)
        try:
            yield aside
        finally:
            if aside.exists() and not any(aside.iterdir()):
                aside.rmdir()


def _measure(items: Sequence[Item], workers: int, done: Done) -> tuple[np.ndarray, dict[int, bytes]]:
    """Return the bytes of every image, int64 `[n]`, and the images read for that, as far as memory allows."""
    sizes = np.array([-1 if item.size is None else item.size for item in items], np.int64)
    unknown = np.flatnonzero(sizes < 0).tolist()
    room = _HELD_BYTES // max(workers, 1)  # per process

    def measure(place: int) -> tuple[int, bytes | None]:
        nonlocal room
        data = read_item(items[unknown[place]])
        if len(data) > room:
            return len(data), None
        room -= len(data)
        return len(data), data

    measured = run_each(measure, len(unknown), _IMAGES_PER_TASK, workers=workers, done=done)
    sizes[unknown] = [size for size, _ in measured]
    held = {number: data for number, (_, data) in zip(unknown, measured, strict=True) if data is not None}
    return sizes, held


def _prepare_folder(aside: Path, plan: ShardPlan, note: Callable[[str], None]) -> None:
    """Keep finished shards of an earlier run of the same plan, or empty the folder."""
    file, finished = aside / _PLAN, len(list(aside.glob("shard-*.tar")))
    if file.is_file() and file.read_text() == plan.digest:
        for left in aside.glob(".*.partial"):  # left by a killed process
            left.unlink()
        if finished:
            note(f"continuing: {finished} of {plan.num_shards} shards are finished already")
        return
    if finished:
        note(f"starting again: the images or the options are not those of the {finished} shards in {aside}")
    for path in aside.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    write_text(file, plan.digest)
