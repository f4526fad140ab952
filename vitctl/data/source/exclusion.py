"""Images that a split has and does not use: a list beside its index, which opening the split applies; no shard is written."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.images.decode import BadSample
from vitctl.data.shards.index import Index, read_index
from vitctl.data.source.image_digest import image_digest
from vitctl.data.source.read import ShardSource, Source, View
from vitctl.errors import DataError
from vitctl.system.bounds import INDEX
from vitctl.system.files import read_json, write_json

FILE = "excluded.json"
_FORMAT, _BY_KEY = "vitctl-excluded/2", "vitctl-excluded/1"
_MAX_KEYS = 2_000_000  # half a minute
_OTHER_SHARDS = "made for other shards than these; make it again with `vitctl data dedup ... --apply`, or remove it"


@dataclass(frozen=True, eq=False)
class Without(View):
    """A source without some of its samples; the others keep their order. Costs memory only for those left out.

    Args:
        source: the whole.
        excluded: int64 `[m]`, numbers of the samples that are left out, ascending.
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
        """Numbers in the source: the i-th that is left out has this many others before it."""
        others_before = self.excluded - np.arange(len(self.excluded))
        return samples + np.searchsorted(others_before, samples, side="right")


def open_shards(folder: Path) -> Source:
    """A split folder as it is to be used: without the images that its `excluded.json`, if there is one, names.

    Raises:
        DataError: as `read_index`; or the list is damaged, or belongs to other shards.
    """
    return without_excluded(ShardSource(read_index(folder)))


def without_excluded(source: ShardSource) -> Source:
    """An opened split without the images that the list beside its index names; see `open_shards`."""
    excluded = read_exclusion(source.index)
    return Without(source, excluded) if len(excluded) else source


def read_exclusion(index: Index) -> np.ndarray:
    """The samples that are left out of a split, int64 `[m]`, ascending; none without a list.

    A list names them by number, and holds for the same bytes in the same shards alone, however these were indexed.

    Raises:
        DataError: the list is damaged, belongs to other shards, leaves nothing, or names images by keys that repeat.
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
    told = all(isinstance(one, dict) for one in images) if isinstance(images, list) else False
    samples = _numbers(
        path, [one.get("sample") for one in images] if isinstance(images, list) and told else [-1], index
    )
    if fields.get("shards") != _shards_digest(index) or fields.get("rows") != _rows_digest(index, samples):
        raise DataError(f"{path}: {_OTHER_SHARDS}")
    return samples


def changed_images(index: Index) -> list[str]:
    """The keys of images that are left out of a split and have other bytes than when they were."""
    if not len(read_exclusion(index)):
        return []
    images = read_json(index.folder / FILE, INDEX.limit, error=DataError)["images"]
    if isinstance(images, dict):
        return []  # by key, without digests
    source = ShardSource(index)
    return [str(one.get("key")) for one in images if one.get("digest") != image_digest(source, one["sample"]).hex()]


def write_exclusion(index: Index, samples: Sequence[int], *, reason: str) -> int:
    """Leave samples out of a split from now on, beside those that are left out already.

    Args:
        index: of the split.
        samples: numbers in its shards.
        reason: in words, kept in the list.

    Returns:
        how many are left out now, as opening the split finds them.
    """
    source, path = ShardSource(index), index.folder / FILE
    together = np.union1d(read_exclusion(index), np.asarray(samples, np.int64))
    if len(together) == index.num_samples:
        raise DataError(f"{path}: would leave none of {index.num_samples} images; nothing was written")
    fields = {
        "format": _FORMAT,
        "shards": _shards_digest(index),
        "rows": _rows_digest(index, together),
        "reason": reason,
        "images": [
            {"sample": sample, "key": _key(source, sample), "digest": image_digest(source, sample).hex()}
            for sample in together.tolist()
        ],
    }
    write_json(path, fields)
    return len(read_exclusion(index))


def _numbers(path: Path, listed: Sequence[object], index: Index) -> np.ndarray:
    good = all(type(one) is int and 0 <= one < index.num_samples for one in listed)
    samples = np.unique(np.array(listed if good else [], np.int64))
    if not good or not len(listed) == len(samples) < index.num_samples:
        raise DataError(f"{path}: images should be different numbers below {index.num_samples}, and not all of them")
    return samples


def _read_by_key(path: Path, fields: dict[str, Any], index: Index) -> np.ndarray:
    """A list of an earlier release, which holds one image of each key: no more than a part where keys repeat."""
    if fields.get("index") != index.index_sha256:
        raise DataError(f"{path}: {_OTHER_SHARDS}")
    images = fields.get("images")
    samples = _numbers(path, list(images.values()) if isinstance(images, dict) else [-1], index)
    assert isinstance(images, dict)
    if index.is_remote or index.num_samples > _MAX_KEYS or _num_named(index, frozenset(images)) != len(images):
        raise DataError(
            f"{path}: made by an earlier release, which kept one image of each key, and keys repeat in this split or are too many "
            "to compare: more images may have been meant; remove it and make it again with `vitctl data dedup ... --apply`"
        )
    return samples


@lru_cache(16)
def _num_named(index: Index, keys: frozenset[str]) -> int:
    """How many samples of a split have one of these keys."""
    source = ShardSource(index)
    return sum(_key(source, sample) in keys for sample in range(len(source)))


def _key(source: Source, sample: int) -> str:
    try:
        return source.key(sample)
    except BadSample:
        return f"number {sample}"


def _shards_digest(index: Index) -> str:
    """Of all bytes of all shards, in their order."""
    shards = [[shard.sha256, shard.num_samples] for shard in index.shards]
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()


def _rows_digest(index: Index, samples: np.ndarray) -> str:
    """Of where some samples lie in their shards."""
    rows = index.rows[samples]
    places = np.stack([samples, *(rows[name].astype(np.int64) for name in ("header", "data", "size"))]).astype("<i8")
    return hashlib.sha256(places.tobytes()).hexdigest()
