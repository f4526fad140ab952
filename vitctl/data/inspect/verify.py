"""A full check of a split: shards against their digests, members against the index, every image decoded,
duplicates found.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vitctl.data.images.decode import BadSample, decode
from vitctl.data.inspect.hamming import repeated
from vitctl.data.shards.index import LABELS, SAMPLES, Index
from vitctl.data.shards.remote import bounded, is_remote
from vitctl.data.shards.scan import read_shard
from vitctl.data.source.image_digest import DIGEST, image_digest
from vitctl.data.source.labels import check_labels
from vitctl.data.source.read import ShardSource, has_label
from vitctl.errors import DataError
from vitctl.system.pool import Done, run_tasks

_SAMPLED_IMAGES = 1000
_SHOWN_PROBLEMS = 100
_IMAGES_PER_TASK = 256  # images of a task, where the shard lies here


@dataclass(frozen=True)
class Report:
    """What a check found.

    Args:
        num_samples: in the split.
        num_decoded: images that were decoded, or tried.
        class_counts: samples of each class, in label order.
        num_unlabelled: samples with label -1.
        num_problems: all that was found.
        problems: one line each, the first hundred.
        kinds: how many problems of which kind each file has, and the first of them.
        digests: of the bytes of every image, `[n]` of 16 bytes; the same where images are the same; empty for
            a sample.
        repeated: images whose bytes an earlier one of the split has, with that one: `(first, later)`.
    """

    num_samples: int
    num_decoded: int
    class_counts: tuple[int, ...]
    num_unlabelled: int
    num_problems: int
    problems: tuple[str, ...]
    kinds: tuple["Kind", ...]
    digests: np.ndarray = field(repr=False, compare=False)
    repeated: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Kind:
    """Problems of one kind in one file; `first` is the first bad member, or what is wrong with the file."""

    file: str
    kind: str
    count: int
    first: str


class _Problem(NamedTuple):
    file: str
    kind: str
    member: str
    line: str


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
        index: an opened split.
        decode_images: "all": every byte is read and every image decoded; "none": every byte is read;
            "sample": a thousand images spread over the split are read and decoded, and no shard is read
            whole.
        workers: processes; 0: this one.
        progress: called with (steps done, steps in all); a step is a shard or an image.
    """
    tasks = list(_tasks(index, decode_images == "sample"))
    decodes, done = decode_images != "none", 0
    num_images = sum(len(task.images) for task in tasks)
    num_steps = sum(task.whole for task in tasks) + num_images * decodes

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress and more:
            progress(done, num_steps)

    def check(task: int, done: Done) -> tuple[list[_Problem], list[bytes]]:
        return _check_task(index, tasks[task], decodes, done)

    found = run_tasks(check, len(tasks), workers=workers, done=count)
    problems = [problem for own, _ in found for problem in own]
    problems += _label_problems(index)
    labels = ShardSource(index).labels()
    counts = np.bincount(labels[labels >= 0], minlength=len(index.class_names))[: len(index.class_names)]
    digests = np.array([one for _, own in found for one in own] if decode_images != "sample" else [], DIGEST)
    return Report(
        num_samples=index.num_samples,
        num_decoded=num_images * decodes,
        class_counts=tuple(counts.tolist()),
        num_unlabelled=int((~has_label(labels)).sum()),
        num_problems=len(problems),
        problems=tuple(problem.line for problem in problems[:_SHOWN_PROBLEMS]),
        kinds=_by_kind(problems),
        digests=digests,
        repeated=tuple(repeated(digests)),
    )


def _tasks(index: Index, sample: bool) -> Iterator[_Task]:
    every, first = max(1, index.num_samples // _SAMPLED_IMAGES) if sample else 1, 0
    for number, shard in enumerate(index.shards):
        chosen = range(-first % every, shard.num_samples, every)
        together = len(chosen) if is_remote(index.address(number)) else _IMAGES_PER_TASK
        for begin in range(0, max(1, len(chosen)), max(1, together)):
            yield _Task(number, chosen[begin : begin + together], whole=not sample and not begin)
        first += shard.num_samples


def _check_task(index: Index, task: _Task, decodes: bool, done: Done) -> tuple[list[_Problem], list[bytes]]:
    """Problems and digests of the images of a task."""
    problems: list[_Problem] = []
    own = _only(index, task.shard)
    address = index.address(task.shard)
    try:
        with _here(own, fetch=task.whole) as own:
            if task.whole:
                problems += _shard_problems(own, address)
                done(1)
            source, digests = ShardSource(own), []
            for image in task.images:
                digests.append(image_digest(source, image))
                if decodes:
                    problems += _image_problems(source, image, address)
                    done(1)
            return problems, digests
    except DataError as error:  # a remote shard that cannot be fetched
        done(task.whole + len(task.images) * decodes)
        name = address.rpartition("/")[2]
        none = [f"unreadable {image}".encode() for image in task.images]
        return [_Problem(name, "not fetched", str(error), str(error))], none


def _only(index: Index, number: int) -> Index:
    """The index of one shard of a split."""
    ends = list(accumulate(shard.num_samples for shard in index.shards))
    rows = slice(ends[number] - index.shards[number].num_samples, ends[number])
    labels = None if index.labels is None else index.labels[rows]
    shard = index.shards[number]
    return replace(
        index, shards=(shard,), num_samples=shard.num_samples, rows=index.rows[rows], labels=labels
    )


@contextmanager
def _here(own: Index, *, fetch: bool) -> Iterator[Index]:
    """The index of one shard that lies here; of a remote one a copy that is deleted afterwards."""
    if not fetch or not own.is_remote:
        yield own
        return
    (shard,) = own.shards
    with tempfile.TemporaryDirectory(prefix="vitctl-check-") as folder:
        with (Path(folder) / shard.name).open("wb") as file:
            for piece in bounded(own.address(0), shard.num_bytes):
                file.write(piece)
        yield replace(own, folder=Path(folder), base="", shards=(replace(shard, url=""),))


def _by_kind(problems: list[_Problem]) -> tuple[Kind, ...]:
    groups: dict[tuple[str, str], list[_Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.file, problem.kind), []).append(problem)
    return tuple(Kind(file, kind, len(own), own[0].member) for (file, kind), own in groups.items())


def _shard_problems(own: Index, address: str) -> list[_Problem]:
    (shard,) = own.shards
    path = own.folder / shard.name

    def problem(kind: str, text: str) -> _Problem:
        return _Problem(shard.name, kind, text, f"{address}: {text}")

    try:
        scan = read_shard(path, own.members)
    except DataError as error:
        return [problem("damaged shard", str(error).removeprefix(f"{path}: "))]
    problems, rows = [], scan.rows
    if scan.sha256 != shard.sha256:
        text = f"sha256 is {scan.sha256[:12]}..., should be {shard.sha256[:12]}...; it changed since"
        problems.append(problem("other bytes", text))
    if scan.class_names and scan.class_names != own.class_names:
        text = "tells other class names than the index, or in another order; index it again"
        problems.append(problem("other class names", text))
    if len(rows) != shard.num_samples:
        problems.append(
            problem("other samples", f"holds {len(rows)} samples, should hold {shard.num_samples}")
        )
        return problems
    differ = rows != own.rows
    if own.labels is not None:
        labels = rows["label"][:, None] if scan.labels is None else scan.labels
        padded = np.pad(
            labels, ((0, 0), (0, max(0, own.labels.shape[1] - labels.shape[1]))), constant_values=-1
        )
        differ = differ | (padded[:, : own.labels.shape[1]] != own.labels).any(axis=1)
    if len(wrong := np.flatnonzero(differ)):
        text = f"sample {wrong[0]} of it is not where, or not labelled as, samples.npy says"
        problems.append(problem("other samples", text))
    return problems


def _label_problems(index: Index) -> list[_Problem]:
    try:
        check_labels(ShardSource(index), index.folder.name, "pixels")
    except DataError as error:
        return [
            _Problem(LABELS if index.labels is not None else SAMPLES, "labels of no class", "", str(error))
        ]
    return []


def _image_problems(source: ShardSource, sample: int, address: str) -> list[_Problem]:
    try:
        decode(source.read(sample))
    except BadSample as error:
        try:
            key = source.key(sample)
        except BadSample:
            key = f"number {sample}"
        return [_Problem(address.rpartition("/")[2], error.reason, key, f"{address}: {key}: {error}")]
    return []
