"""Folders of photographs given as --data: how they are recognised and counted, and where their shards are."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.detect import open_originals
from vitctl.data.shards.index import find_splits
from vitctl.data.source.views import Source
from vitctl.data.writer.items import Originals, read_item

RECORD = "photographs.json"  # in the folder of shards, written last: what they were made of


def is_photographs(path: str) -> bool:
    """Return whether a path is a local folder with class folders and no shards."""
    folder = Path(path)
    if not path or not folder.is_dir() or find_splits(folder) or next(folder.rglob("*.tar"), None):
        return False
    return any(one.is_dir() and not one.name.startswith(".") for one in folder.iterdir())


def shards_folder(path: str, runs: Path, state: Mapping[str, Any]) -> Path:
    """Return the folder beside the runs for the shards of photographs in a state, see `fingerprint`.

    Photographs that changed get another folder, so that the shards of earlier runs stay.
    """
    place = Path(path).resolve()
    digest = hashlib.sha256(os.fsencode(place) + str(state["sha256"]).encode())
    return runs / "shards" / f"{place.name}-{digest.hexdigest()[:8]}"


def fingerprint(path: str) -> dict[str, Any]:
    """Return the number of files in a folder, and a digest of their names, sizes and times; no file is read."""
    digest, count = hashlib.sha256(), 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(folder, name)
            stat = os.stat(file, follow_symlinks=os.path.exists(file))
            digest.update(os.fsencode(f"{os.path.relpath(file, path)}\0{stat.st_size}\0{stat.st_mtime_ns}\n"))
            count += 1
    return {"files": count, "sha256": digest.hexdigest()}


@dataclass(frozen=True)
class _Unwritten:
    """A split of photographs before it is written, for plans: the samples of its shards in another order."""

    originals: Originals
    parts: tuple[Source, ...] = ()
    digest: str = ""

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.originals.class_names

    def __len__(self) -> int:
        return len(self.originals.items)

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        labels = np.array([item.label for item in self.originals.items], np.int64)
        return labels if samples is None else labels[samples]

    def key(self, sample: int) -> str:
        return self.originals.items[sample].key

    def location(self, sample: int) -> str:
        return self.key(sample)

    def read(self, sample: int) -> bytes:
        return read_item(self.originals.items[sample])


def planned_splits(path: str) -> dict[str, Source]:
    """Return the splits that the shards of photographs will have; nothing is decoded or written.

    Raises DataError.
    """
    return {name: _Unwritten(originals) for name, originals in open_originals(path).items()}
