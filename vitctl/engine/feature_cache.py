"""Representations on disk: one pass over a data set serves every later run with the same weights, data and
pre-processing.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitctl.engine.distributed.runtime import Runtime
from vitctl.models.weights.containers import save_tensors
from vitctl.system.files import atomic_write

SUFFIX = ".safetensors"


def cached_features(
    runtime: Runtime,
    folder: Path | None,
    key: Mapping[str, Any],
    compute: Callable[[], Tensor],
    *,
    num_images: int,
    limit_bytes: int,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[Tensor | None, bool]:
    """Representations of a split: read from the cache if a run with the same key stored them, else computed
    and stored.

    Args:
        runtime: this process among its peers; only the main one reads and writes the cache.
        folder: of the cache; None stores nothing.
        key: everything that the numbers depend on: digests of weights and data, pre-processing, precision;
            JSON.
        compute: the pass over the images, [num_images, R] float32; raises unless they are those that the key
            names.
        num_images: a file of another length is not used.
        limit_bytes: the least recently used files are deleted until the folder is no larger.
        note: called with a message when the cache could not be written, or a cached file is not used; the run
            continues.

    Returns:
        the representations, None on the other processes when they came from the cache; and whether they did.
    """
    text = json.dumps(key, sort_keys=True)
    file = None if folder is None else folder / f"{hashlib.sha256(text.encode()).hexdigest()}{SUFFIX}"
    found = _read(file, text, num_images, note) if file is not None and runtime.is_main else None
    if runtime.sum([float(found is not None)])[0]:
        return found, True
    features = compute()
    if file is not None and runtime.is_main:
        try:
            _write(file, text, features)
            _keep_below(file.parent, limit_bytes)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            note(
                f"{folder}: representations could not be cached for later runs ({reason}); choose another "
                f"folder with fewshot.cache"
            )
    return features, False


def _read(file: Path, text: str, num_images: int, note: Callable[[str], None]) -> Tensor | None:
    """The features of a file; None where it is missing, damaged, or has another key."""
    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            fits = metadata.get("key") == text
            features: Tensor | None = stored.get_tensor("features") if fits else None
        with suppress(OSError):  # another user's file can be read, but not touched
            os.utime(file)
    except (OSError, SafetensorError):
        return None
    if features is None or features.ndim != 2 or len(features) != num_images:
        return None
    if _sha256(features) != (noted := metadata.get("sha256")):  # files of early releases have none
        if noted:
            note(f"{file}: the cached representations are damaged; they are computed again")
        return None
    return features


def _sha256(features: Tensor) -> str:
    return hashlib.sha256(features.contiguous().numpy().data.cast("B")).hexdigest()


def _write(file: Path, text: str, features: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    features = features.contiguous()
    with atomic_write(file) as aside:
        save_tensors({"features": features}, aside, metadata={"key": text, "sha256": _sha256(features)})


def _keep_below(folder: Path, limit_bytes: int) -> None:
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > limit_bytes:
            file.unlink(missing_ok=True)
