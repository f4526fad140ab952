"""Excluded images: a list beside the index of a split (excluded.json), applied when the split is opened.

Shards stay unchanged.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.shards.index import Index, read_index
from vitctl.data.source.image_digest import image_digest
from vitctl.data.source.read import ShardSource, Source, View, sample_key
from vitctl.errors import DataError
from vitctl.system.bounds import INDEX
from vitctl.system.files import read_json, write_json

FILE = "excluded.json"
_FORMAT, _BY_KEY = "vitctl-excluded/2", "vitctl-excluded/1"
_MAX_KEYS = 2_000_000  # half a minute
_OTHER_SHARDS = (
    "made for other shards than these; make it again with `vitctl data dedup ... --apply`, or remove it"
)


@dataclass(frozen=True, eq=False)
class Without(View):
    """A source without the excluded samples; the others keep their order. Memory grows with the number of
    excluded samples only.

    Args:
        source: all samples.
        excluded: int64 `[m]`, numbers of the excluded samples, ascending.
    """

    excluded: np.ndarray

    def __len__(self) -> int:
        return len(self.source) - len(self.excluded)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @cached_property
    def digest(self) -> str:
        excluded = np.ascontiguousarray(self.excluded, "<i8")
        return hashlib.sha256(f"without {self.source.digest} ".encode() + excluded.tobytes()).hexdigest()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        """Labels of the given samples, or of all."""
        if samples is None:
            return np.delete(self.source.labels(), self.excluded, axis=0)
        return self.source.labels(self._whole(np.asarray(samples)))

    def _one(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return int(self._whole(np.array([sample]))[0])

    def _whole(self, samples: np.ndarray) -> np.ndarray:
        """Convert to sample numbers of the source."""
        others_before = self.excluded - np.arange(len(self.excluded))
        return samples + np.searchsorted(others_before, samples, side="right")


def open_shards(folder: Path) -> Source:
    """Open a split folder, without the images listed in its `excluded.json`, if there is one.

    Raises:
        DataError: as `read_index`; or the list is damaged, or belongs to other shards.
    """
    return without_excluded(ShardSource(read_index(folder)))


def without_excluded(source: ShardSource) -> Source:
    """Apply the list of excluded images to an opened split; see `open_shards`."""
    excluded = read_exclusion(source.index)
    return Without(source, excluded) if len(excluded) else source


def read_exclusion(index: Index) -> np.ndarray:
    """Read the excluded samples of a split, int64 `[m]`, ascending; empty without a list.

    The list holds sample numbers, and is valid only for shards with the same bytes; their index may have been
    written again.

    Raises:
        DataError: the list is damaged, belongs to other shards, excludes everything, or uses keys that are
            not unique.
    """
    path = index.folder / FILE
    if not path.exists():
        return np.zeros(0, np.int64)
    fields = read_json(path, INDEX.limit, error=DataError)
    if not isinstance(fields, dict):
        raise DataError(f"{path}: should hold a list of images with the digest of their shards")
    if fields.get("format") == _BY_KEY:
        return _read_by_key(path, fields, index)
    if fields.get("format") != _FORMAT:
        raise DataError(f"{path}: format is {fields.get('format')!r}, should be {_FORMAT!r}")
    images = fields.get("images")
    is_valid = all(isinstance(one, dict) for one in images) if isinstance(images, list) else False
    samples = _numbers(
        path, [one.get("sample") for one in images] if isinstance(images, list) and is_valid else [-1], index
    )
    if fields.get("shards") != _shards_digest(index) or fields.get("rows") != _rows_digest(index, samples):
        raise DataError(f"{path}: {_OTHER_SHARDS}")
    return samples


def changed_images(index: Index) -> list[str]:
    """The keys of excluded images whose bytes have changed since they were excluded."""
    if not len(read_exclusion(index)):
        return []
    images = read_json(index.folder / FILE, INDEX.limit, error=DataError)["images"]
    if isinstance(images, dict):
        return []  # the older format has no digests
    source = ShardSource(index)
    return [
        str(one.get("key"))
        for one in images
        if one.get("digest") != image_digest(source, one["sample"]).hex()
    ]


def write_exclusion(index: Index, samples: Sequence[int], *, reason: str) -> int:
    """Exclude samples of a split, in addition to those that are excluded already.

    Args:
        index: of the split.
        samples: sample numbers.
        reason: text, stored in the list.

    Returns:
        how many samples are excluded now.
    """
    source, path = ShardSource(index), index.folder / FILE
    excluded = np.union1d(read_exclusion(index), np.asarray(samples, np.int64))
    if len(excluded) == index.num_samples:
        raise DataError(f"{path}: would leave none of {index.num_samples} images; nothing was written")
    fields = {
        "format": _FORMAT,
        "shards": _shards_digest(index),
        "rows": _rows_digest(index, excluded),
        "reason": reason,
        "images": [
            {
                "sample": sample,
                "key": sample_key(source, sample),
                "digest": image_digest(source, sample).hex(),
            }
            for sample in excluded.tolist()
        ],
    }
    write_json(path, fields)
    return len(read_exclusion(index))


def _numbers(path: Path, listed: Sequence[object], index: Index) -> np.ndarray:
    good = all(type(one) is int and 0 <= one < index.num_samples for one in listed)
    samples = np.unique(np.array(listed if good else [], np.int64))
    if not good or not len(listed) == len(samples) < index.num_samples:
        raise DataError(
            f"{path}: images should be different numbers below {index.num_samples}, and not all of them"
        )
    return samples


def _read_by_key(path: Path, fields: dict[str, Any], index: Index) -> np.ndarray:
    """Read the format of an earlier release, which holds one image per key, and so is incomplete where keys
    repeat.
    """
    if fields.get("index") != index.index_sha256:
        raise DataError(f"{path}: {_OTHER_SHARDS}")
    images = fields.get("images")
    samples = _numbers(path, list(images.values()) if isinstance(images, dict) else [-1], index)
    assert isinstance(images, dict)
    if (
        index.is_remote
        or index.num_samples > _MAX_KEYS
        or _num_named(index, frozenset(images)) != len(images)
    ):
        raise DataError(
            f"{path}: made by an earlier release, which kept one image of each key, and keys repeat in this "
            f"split or are too many "
            "to compare: more images may have been meant; remove it and make it again with `vitctl data "
            "dedup ... --apply`"
        )
    return samples


@lru_cache(16)
def _num_named(index: Index, keys: frozenset[str]) -> int:
    """How many samples of a split have one of these keys."""
    source = ShardSource(index)
    return sum(sample_key(source, sample) in keys for sample in range(len(source)))


def _shards_digest(index: Index) -> str:
    """SHA-256 over the digests of all shards, in their order."""
    shards = [[shard.sha256, shard.num_samples] for shard in index.shards]
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()


def _rows_digest(index: Index, samples: np.ndarray) -> str:
    """SHA-256 over the byte offsets of some samples in their shards."""
    rows = index.rows[samples]
    offsets = np.stack(
        [samples, *(rows[name].astype(np.int64) for name in ("header", "data", "size"))]
    ).astype("<i8")
    return hashlib.sha256(offsets.tobytes()).hexdigest()
