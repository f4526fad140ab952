"""Excluded images: a list beside the index of a split (excluded.json), applied when the split is opened.

Shards stay unchanged.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.images.decode import BadSample
from vitctl.data.shards.index import Index
from vitctl.data.source.shard_source import ShardSource, open_index
from vitctl.data.source.views import Source, sample_key
from vitctl.errors import DataError
from vitctl.system.bounds import INDEX
from vitctl.system.files import read_json, write_json

FILE = "excluded.json"
DIGEST = np.dtype("S16")  # of the bytes of an image
_FORMAT, _BY_KEY = "vitctl-excluded/2", "vitctl-excluded/1"


def bytes_digest(data: bytes) -> bytes:
    """Return the BLAKE2b digest of an image's bytes, 16 bytes, to find exact duplicates."""
    return hashlib.blake2b(data, digest_size=DIGEST.itemsize).digest()


def image_digest(source: Source, sample: int) -> bytes:
    """Return the digest of an image; an unreadable image gets a digest that matches no other."""
    try:
        data = source.read(sample)
    except BadSample:
        data = f"unreadable {sample}".encode()
    return bytes_digest(data)


def open_shards(folder: Path) -> Source:
    """Open a split folder, without the images listed in its `excluded.json`, if there is one.

    Raises:
        DataError: as `read_index`; or the list is damaged, or belongs to other shards.
    """
    index = open_index(folder)
    return ShardSource(index, excluded=read_exclusion(index))


def read_exclusion(index: Index) -> np.ndarray:
    """Read the excluded samples of a split, int64 `[m]`, ascending; empty without a list.

    The list holds sample numbers. It is valid only for shards with the same bytes; their index may have been
    written again.

    Raises:
        DataError: the list is damaged, belongs to other shards, or excludes everything.
    """
    path = index.folder / FILE
    if not path.exists():
        return np.zeros(0, np.int64)
    fields = read_json(path, INDEX.limit, error=DataError)
    if not isinstance(fields, dict):
        raise DataError(f"{path}: should hold a list of images with the digest of their shards")
    form, images = fields.get("format"), fields.get("images")
    if form == _FORMAT and isinstance(images, list):
        numbers = [one.get("sample") if isinstance(one, dict) else None for one in images]
    elif form == _BY_KEY and isinstance(images, dict):
        numbers = list(images.values())
    elif form in (_FORMAT, _BY_KEY):
        numbers = [None]
    else:
        raise DataError(f"{path}: format is {form!r}, should be {_FORMAT!r}")
    is_valid = all(type(number) is int and 0 <= number < index.num_samples for number in numbers)
    samples = np.unique(np.array(numbers if is_valid else [], np.int64))
    if not is_valid or not len(numbers) == len(samples) < index.num_samples:
        raise DataError(
            f"{path}: images should be different numbers below {index.num_samples}, and not all of them"
        )
    if form == _BY_KEY:
        belongs = fields.get("index") == index.index_sha256
    else:
        belongs = all(fields.get(name) == digest for name, digest in _digests(index, samples).items())
    if not belongs:
        raise DataError(
            f"{path}: made for other shards than these; make it again with `vitctl data dedup ... --apply`, "
            "or remove it"
        )
    if isinstance(images, dict) and (index.is_remote or _num_named(index, images) != len(images)):
        raise DataError(
            f"{path}: made by an earlier release, which kept one image of each key, and keys may repeat in "
            "this split: more images may have been meant; remove it and make it again with `vitctl data "
            "dedup ... --apply`"
        )
    return samples


def changed_images(index: Index) -> list[str]:
    """Return the keys of excluded images whose bytes have changed since they were excluded."""
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
    images = [
        {"sample": sample, "key": sample_key(source, sample), "digest": image_digest(source, sample).hex()}
        for sample in excluded.tolist()
    ]
    write_json(path, {"format": _FORMAT, **_digests(index, excluded), "reason": reason, "images": images})
    return len(excluded)


def _digests(index: Index, samples: np.ndarray) -> dict[str, str]:
    """Return digests that tie a list to its shards.

    `shards` is over the digests of all shards in their order, `rows` over the samples' byte offsets.
    """
    shards = json.dumps([[shard.sha256, shard.num_samples] for shard in index.shards])
    rows = index.rows[samples]
    offsets = [samples, *(rows[name].astype(np.int64) for name in ("header", "data", "size"))]
    return {
        "shards": hashlib.sha256(shards.encode()).hexdigest(),
        "rows": hashlib.sha256(np.stack(offsets).astype("<i8").tobytes()).hexdigest(),
    }


def _num_named(index: Index, keys: dict[str, Any]) -> int:
    """Return how many samples of a split have one of these keys."""
    source = ShardSource(index)
    return sum(sample_key(source, sample) in keys for sample in range(len(source)))
