"""Check shards: their bytes, members and images, and that a folder holds nothing else."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vitctl.data.datasets.catalog import find_data_set
from vitctl.data.datasets.converted import LOOKED, RECORD
from vitctl.data.images.decode import BadSample, decode
from vitctl.data.images.pixel_digest import pixel_digest
from vitctl.data.inspect.duplicates import MATCHES
from vitctl.data.inspect.overview import look_alikes
from vitctl.data.shards.index import INDEX_FILE, LABELS, NAMES, SAMPLES, Index, LabelCounts, find_splits
from vitctl.data.shards.tar import joined, padded, read_shard
from vitctl.data.source.splits import DIGEST, image_digest, read_exclusion
from vitctl.data.source.splits import FILE as EXCLUDED
from vitctl.data.source.stores import ShardSource, open_index
from vitctl.data.source.views import check_labels, sample_key
from vitctl.data.writer.intake import REPORT as INTAKE
from vitctl.errors import DataError
from vitctl.system.pool import Done, counted, run_tasks
from vitctl.system.remote import copy, is_remote
from vitctl.system.text import count_text

_SAMPLED_IMAGES = 1000
_SHOWN_SHARDS = 3
_IMAGES_PER_TASK = 256  # of a local shard


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Args:
        num_decoded: images that were decoded, successfully or not.
        class_counts: samples of each class, in label order.
        digests: of every image's bytes, `[n]` of 16 bytes, equal for equal images; empty for a sample.
        repeated: duplicate images of the split: `(first, later)`.
    """

    num_samples: int
    num_decoded: int
    class_counts: tuple[int, ...]
    problems: tuple["Problem", ...]
    digests: np.ndarray = field(repr=False, compare=False)
    repeated: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


class Problem(NamedTuple):
    """A problem with a file; `member` is the bad member, or the problem of the file; `line` is complete."""

    file: str
    kind: str
    member: str
    line: str


_Checked = tuple[list[Problem], list[bytes], list[bytes]]  # digests of the bytes, and of the pixels


class _Task(NamedTuple):
    """Images of one shard, by their numbers in it; with `whole` also the shard itself, byte for byte."""

    shard: int
    images: range
    whole: bool


def verify_index(
    index: Index,
    *,
    decode_images: Literal["all", "sample", "none"] = "all",
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check the shards of a split against its index. Remote shards are fetched temporarily, one per worker.

    Args:
        decode_images: "all": every byte is read and every image decoded; "none": every byte is read;
            "sample": a thousand images spread over the split are read and decoded, but no complete shard.
        progress: called with (steps done, steps in total); a step is a shard or an image.
    """
    tasks = list(_tasks(index, decode_images == "sample"))
    decodes = decode_images != "none"
    num_images = sum(len(task.images) for task in tasks)
    num_steps = sum(task.whole for task in tasks) + num_images * decodes

    def check(task: int, done: Done) -> _Checked:
        return _check_task(index, tasks[task], decodes, done)

    results = run_tasks(check, len(tasks), workers=workers, done=counted(progress, num_steps))
    problems = [problem for found, _, _ in results for problem in found]
    source = ShardSource(replace(index, label_counts=LabelCounts(1, 1)))  # so that every label is read
    try:
        check_labels(source, index.folder.name, "pixels")
    except DataError as error:
        table = SAMPLES if index.labels is None else LABELS
        problems.append(Problem(table, "labels of no class", "", str(error)))
    labels, num_classes = source.labels(), len(index.class_names)
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)[:num_classes]
    digests = [] if decode_images == "sample" else [one for _, found, _ in results for one in found]
    begins = np.cumsum([0, *(shard.num_samples for shard in index.shards)]).tolist()
    numbers = [begins[task.shard] + image for task in tasks for image in task.images]
    pixels = [one for _, _, found in results for one in found]
    return Report(
        num_samples=index.num_samples,
        num_decoded=num_images * decodes,
        class_counts=tuple(counts.tolist()),
        problems=tuple(problems),
        digests=np.array(digests, DIGEST),
        repeated=tuple(repeated(np.array(digests, DIGEST))),
        notes=look_alikes(source, numbers, pixels),
    )


def repeated(digests: np.ndarray) -> list[tuple[int, int]]:
    """Return exact duplicates within a split: `(first, later)` for each later image with the same bytes."""
    _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
    first_of = firsts[groups]
    later = np.flatnonzero(first_of != np.arange(len(digests)))
    return list(zip(first_of[later].tolist(), later.tolist(), strict=True))


def shared(digests: np.ndarray, others: np.ndarray) -> list[tuple[int, int]]:
    """Return exact duplicates between two splits: `(one, other)`, the first of each."""
    _, one, other = np.intersect1d(digests, others, return_indices=True)
    return list(zip(one.tolist(), other.tolist(), strict=True))


def _tasks(index: Index, sample: bool) -> Iterator[_Task]:
    every, first = max(1, index.num_samples // _SAMPLED_IMAGES) if sample else 1, 0
    for number, shard in enumerate(index.shards):
        chosen = range(-first % every, shard.num_samples, every)
        size = max(1, len(chosen) if is_remote(index.address(number)) else _IMAGES_PER_TASK)
        for begin in range(0, max(1, len(chosen)), size):
            yield _Task(number, chosen[begin : begin + size], whole=not sample and not begin)
        first += shard.num_samples


def _check_task(index: Index, task: _Task, decodes: bool, done: Done) -> _Checked:
    problems: list[Problem] = []
    digests: list[bytes] = []
    pixels = [b""] * len(task.images)
    address = index.address(task.shard)
    name = address.rpartition("/")[2]
    try:
        with _opened_shard(index, task.shard, fetch=task.whole) as own:
            if task.whole:
                begin = sum(shard.num_samples for shard in index.shards[: task.shard])
                stop = begin + own.num_samples
                problems += _shard_problems(own, address, joined(index.names(begin, stop)))
                done(1)
            source = ShardSource(own)
            for number, image in enumerate(task.images):
                digests.append(image_digest(source, image))
                if decodes:
                    try:
                        pixels[number] = pixel_digest(decode(source.read(image)))
                    except BadSample as error:
                        key = sample_key(source, image)
                        problems.append(Problem(name, error.reason, key, f"{address}: {key}: {error}"))
                    done(1)
            return problems, digests, pixels
    except DataError as error:  # a remote shard that cannot be fetched
        done(task.whole + len(task.images) * decodes)
        digests = [f"unreadable {image}".encode() for image in task.images]
        return [Problem(name, "not fetched", str(error), str(error))], digests, pixels


@contextmanager
def _opened_shard(index: Index, number: int, *, fetch: bool) -> Iterator[Index]:
    """Open the index of one shard of a split; `fetch` copies a remote shard here, temporarily."""
    shard = index.shards[number]
    begin = sum(other.num_samples for other in index.shards[:number])
    rows = slice(begin, begin + shard.num_samples)
    own = replace(
        index,
        shards=(shard,),
        num_samples=shard.num_samples,
        rows=index.rows[rows],
        labels=None if index.labels is None else index.labels[rows],
    )
    if not fetch or not own.is_remote:
        yield own
        return
    with tempfile.TemporaryDirectory(prefix="vitctl-check-") as name:
        folder = Path(name)
        with (folder / shard.name).open("wb") as file:
            copy(own.address(0), file, shard.num_bytes, num_bytes=shard.num_bytes)
        yield replace(own, folder=folder, base="", shards=(replace(shard, url=""),))


def _shard_problems(own: Index, address: str, names: bytes) -> list[Problem]:
    (shard,) = own.shards
    path = own.folder / shard.name

    def problem(kind: str, text: str) -> Problem:
        return Problem(shard.name, kind, text, f"{address}: {text}")

    try:
        scan = read_shard(path, own.members).named(own.class_names)
    except DataError as error:
        return [problem("damaged shard", str(error).removeprefix(f"{path}: "))]
    other_bytes = (
        f"checksum mismatch: index has {shard.sha256[:12]}..., file has {scan.sha256[:12]}...; the file "
        "changed after it was indexed"
    )
    other_names = "tells other class names than the index, or in another order; index it again"
    differences = (
        (scan.sha256 != shard.sha256, "other bytes", other_bytes),
        (scan.class_names and scan.class_names != own.class_names, "other class names", other_names),
    )
    problems = [problem(kind, text) for differs, kind, text in differences if differs]
    rows = scan.rows
    if len(rows) != shard.num_samples:
        problems.append(
            problem(
                "other samples", f"holds {count_text(len(rows), 'sample')}, should hold {shard.num_samples}"
            )
        )
        return problems
    differ = rows != own.rows
    if own.labels is not None:
        labels = padded(rows["label"], 1) if scan.labels is None else scan.labels
        width = own.labels.shape[1]
        table = padded(labels, max(width, labels.shape[1]))
        differ = differ | (table[:, :width] != own.labels).any(axis=1)
    if len(wrong := np.flatnonzero(differ)):
        text = f"sample {wrong[0]} of it is not where, or not labelled as, samples.npy says"
        problems.append(problem("other samples", text))
    if names != scan.names:
        problems.append(problem("other names", "its images have other names than names.bin says"))
    return problems


def unused_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return problems (shards without an index, unfinished writing) and notes on files that no split uses."""
    splits = find_splits(folder)
    problems, notes = list[str](), list[str]()
    for place in splits.values():
        _check_split_folder(place, problems, notes)
    if folder in splits.values():
        return problems, notes
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path in splits.values():
            continue
        shards = sorted(path.glob("*.tar")) if path.is_dir() else []
        if path.is_dir() and path.name.startswith(".") and path.name.endswith(".partial"):
            split = path.name[1:].removesuffix(".partial")
            problems.append(
                f"{path}: writing of '{split}' was not finished; type the same `vitctl data shards` "
                f"line again"
            )
        elif shards or (path / SAMPLES).exists():
            problems.append(
                f"{path}: {count_text(len(shards), 'shard')} and no index.json; "
                f"write it with `vitctl data index {path}`"
            )
        elif path.name not in (INTAKE, LOOKED, RECORD) and not (path / MATCHES).is_file():
            notes.append(f"{path}: left over, of no split")
    class_names = {}
    for split, place in splits.items():
        with suppress(DataError):  # reported when the index is checked
            class_names[split] = open_index(place).class_names
    first = next(iter(class_names), "")
    problems += [
        f"{splits[split].parent}: '{split}' has other class names, or in another order, than '{first}'; make "
        "both with one class list"
        for split, names in class_names.items()
        if names != class_names[first]
    ]
    if splits and not any(name.startswith("train") for name in splits):
        notes.append(f"{folder}: has no split 'train'; found: {', '.join(splits)}")
    return problems, notes


def _check_split_folder(folder: Path, problems: list[str], notes: list[str]) -> None:
    try:
        index = open_index(folder)
    except DataError:  # reported when the index is checked
        return
    try:
        read_exclusion(index)
    except DataError as error:
        problems.append(str(error))
    known = {INDEX_FILE, SAMPLES, NAMES, EXCLUDED, *(shard.name for shard in index.shards)}
    known |= {LABELS} if index.labels is not None else set()
    others = sorted(path for path in folder.iterdir() if path.name not in known)
    notes += [f"{path}: left over, of no split" for path in others if path.suffix != ".tar"]
    if shards := [path.name for path in others if path.suffix == ".tar"]:
        hidden = len(shards) - _SHOWN_SHARDS
        names = ", ".join(shards[:_SHOWN_SHARDS]) + (f" and {hidden} more" if hidden > 0 else "")
        problems.append(
            f"{folder}: {names}: not in the index, so they are not read; `vitctl data index {folder}` "
            "takes all"
        )


def missing_images(name: str, indexes: Mapping[str, Index]) -> tuple[list[str], list[str]]:
    """Return problems and notes on missing splits and images of a known data set, by the catalog's sizes."""
    row = find_data_set(name)
    sizes = row.sizes if "train800" not in indexes else {"train800": 800, "val200": 200}
    problems = [f"{row.name}: split '{split}' is missing" for split in sizes if split not in indexes]
    notes: list[str] = []
    for split, index in indexes.items():
        found = (index.num_samples, len(index.class_names))
        if (wanted := (sizes.get(split, found[0]), row.num_classes)) != found:
            text = (
                f"{row.name}: '{split}' has {found[0]:,} images of {found[1]:,} classes, "
                f"should have {wanted[0]:,} of {wanted[1]:,}"
            )
            (notes if "partial" in index.source else problems).append(text)
    return problems, notes
