"""A full check of a split: every byte against its digest, every member against the index, every image decoded, none twice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from vitctl.data.decode import BadSample, decode
from vitctl.data.duplicates import repeated
from vitctl.data.fingerprints import DIGEST, image_digest
from vitctl.data.index import Index, Shard
from vitctl.data.read import ShardSource, has_label
from vitctl.data.scan import read_shard
from vitctl.errors import DataError

_SAMPLED_IMAGES = 1000
_SHOWN_PROBLEMS = 100


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
        digests: of the bytes of every image, `[n]` of 16 bytes; the same where images are the same.
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


@dataclass(frozen=True)
class _Problem:
    file: Path
    kind: str
    member: str
    line: str


def verify_index(
    index: Index,
    *,
    decode_images: Literal["all", "sample", "none"] = "sample",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check the shards of a split against its index.

    Args:
        index: an opened split.
        decode_images: decode every image, a thousand spread over the split, or none.
        progress: called with (steps done, steps in all); a step is a shard or an image.
    """
    source = ShardSource(index)
    labels = source.labels()
    every = {"all": 1, "sample": max(1, index.num_samples // _SAMPLED_IMAGES), "none": 0}[decode_images]
    chosen = range(0, index.num_samples, every) if every else range(0)
    num_steps, done, first_row = len(index.shards) + len(chosen), 0, 0
    problems: list[_Problem] = []
    digests = np.zeros(index.num_samples, DIGEST)
    for shard in index.shards:
        problems += _shard_problems(index, shard, first_row)
        for sample in range(first_row, first_row + shard.num_samples):
            digests[sample] = image_digest(source, sample)
        first_row += shard.num_samples
        done += 1
        if progress:
            progress(done, num_steps)
    for sample in chosen:
        problems += _image_problems(source, sample)
        done += 1
        if progress:
            progress(done, num_steps)
    counts = np.bincount(labels[labels >= 0], minlength=len(index.class_names))
    return Report(
        num_samples=index.num_samples,
        num_decoded=len(chosen),
        class_counts=tuple(counts.tolist()),
        num_unlabelled=int((~has_label(labels)).sum()),
        num_problems=len(problems),
        problems=tuple(problem.line for problem in problems[:_SHOWN_PROBLEMS]),
        kinds=_by_kind(problems),
        digests=digests,
        repeated=tuple(repeated(digests)),
    )


def _by_kind(problems: list[_Problem]) -> tuple[Kind, ...]:
    groups: dict[tuple[str, str], list[_Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.file.name, problem.kind), []).append(problem)
    return tuple(Kind(file, kind, len(own), own[0].member) for (file, kind), own in groups.items())


def _shard_problems(index: Index, shard: Shard, first_row: int) -> list[_Problem]:
    path = index.folder / shard.name
    try:
        scan = read_shard(path, index.members)
    except DataError as error:
        return [_Problem(path, "damaged shard", str(error).removeprefix(f"{path}: "), str(error))]
    problems, rows = [], scan.rows
    if scan.sha256 != shard.sha256:
        was, should = f"sha256 is {scan.sha256[:12]}...", f"should be {shard.sha256[:12]}...; it changed since"
        problems.append(_Problem(path, "other bytes", was, f"{path}: {was}, {should}"))
    kept = index.rows[first_row : first_row + shard.num_samples]
    if len(rows) != shard.num_samples:
        text = f"holds {len(rows)} samples, should hold {shard.num_samples}"
        problems.append(_Problem(path, "other samples", text, f"{path}: {text}"))
        return problems
    differ = rows != kept
    if index.labels is not None:
        own = rows["label"][:, None] if scan.labels is None else scan.labels
        listed = index.labels[first_row : first_row + shard.num_samples]
        padded = np.pad(own, ((0, 0), (0, max(0, listed.shape[1] - own.shape[1]))), constant_values=-1)
        differ = differ | (padded[:, : listed.shape[1]] != listed).any(axis=1)
    if len(wrong := np.flatnonzero(differ)):
        text = f"sample {wrong[0]} of it is not where, or not labelled as, samples.npy says"
        problems.append(_Problem(path, "other samples", text, f"{path}: {text}"))
    return problems


def _image_problems(source: ShardSource, sample: int) -> list[_Problem]:
    try:
        decode(source.read(sample))
    except BadSample as error:
        try:
            key = source.key(sample)
        except BadSample:
            key = f"number {sample}"
        place = source.place(sample)
        return [_Problem(Path(place), error.reason, key, f"{place}: {key}: {error}")]
    return []
