"""A full check of a split: every byte against its digest, every member against the index, every image decoded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitctl.data.decode import BadSample, decode
from vitctl.data.index import Index, Shard
from vitctl.data.read import ShardSource
from vitctl.data.scan import scan_shard
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
    """

    num_samples: int
    num_decoded: int
    class_counts: tuple[int, ...]
    num_unlabelled: int
    num_problems: int
    problems: tuple[str, ...]


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
    labels = np.asarray(index.rows["label"])
    every = {"all": 1, "sample": max(1, index.num_samples // _SAMPLED_IMAGES), "none": 0}[decode_images]
    chosen = range(0, index.num_samples, every) if every else range(0)
    num_steps, done, first_row = len(index.shards) + len(chosen), 0, 0
    problems: list[str] = []
    for shard in index.shards:
        problems += _shard_problems(index, shard, first_row)
        first_row += shard.num_samples
        done += 1
        if progress:
            progress(done, num_steps)
    source = ShardSource(index)
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
        num_unlabelled=int((labels < 0).sum()),
        num_problems=len(problems),
        problems=tuple(problems[:_SHOWN_PROBLEMS]),
    )


def _shard_problems(index: Index, shard: Shard, first_row: int) -> list[str]:
    path = index.folder / shard.name
    try:
        rows, sha256 = scan_shard(path)
    except DataError as error:
        return [str(error)]
    problems = []
    if sha256 != shard.sha256:
        problems.append(f"{path}: sha256 is {sha256[:12]}..., should be {shard.sha256[:12]}...; it changed since")
    kept = index.rows[first_row : first_row + shard.num_samples]
    if len(rows) != shard.num_samples:
        problems.append(f"{path}: holds {len(rows)} samples, should hold {shard.num_samples}")
    elif len(wrong := np.flatnonzero(rows != kept)):
        problems.append(f"{path}: sample {wrong[0]} of it is not where, or not labelled as, samples.npy says")
    return problems


def _image_problems(source: ShardSource, sample: int) -> list[str]:
    try:
        decode(source.read(sample))
    except BadSample as error:
        try:
            key = source.key(sample)
        except BadSample:
            key = f"number {sample}"
        return [f"{source.place(sample)}: {key}: {error}"]
    return []
