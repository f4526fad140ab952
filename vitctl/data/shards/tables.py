"""The tables of an index: byte offset and label of each sample, and the labels of samples that may have
several.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.shards.mapped import mapped
from vitctl.errors import DataError
from vitctl.system.files import atomic_write
from vitctl.system.parsing import error_text

SAMPLES, LABELS = "samples.npy", "labels.npy"
# Tables up to this many bytes are verified when a split is opened; larger ones during the run, like shards.
VERIFIED_ON_OPEN = 64 * 2**20
_SHA256 = re.compile("[0-9a-f]{64}")
_CACHED_DIGESTS = 64


def write_table(path: Path, rows: np.ndarray) -> dict[str, Any]:
    """Write a table atomically; returns what the index records of it: num_bytes and sha256."""
    with atomic_write(path) as aside, aside.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    return {"num_bytes": path.stat().st_size, "sha256": table_sha256(path)}


def table_sha256(path: Path) -> str:
    """SHA-256 of a file, cached in this process until the file changes."""
    found = os.stat(path)
    return _hashed(str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(_CACHED_DIGESTS)
def _hashed(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table_problems(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, recorded: Mapping[str, Any] | None = None
) -> list[str]:
    """The problems of a table, as messages.

    Args:
        path: of the table.
        shape: expected shape.
        dtype: expected dtype.
        recorded: num_bytes and sha256 as in the index; None for indexes of older releases, which do not
            record them.
    """
    try:
        rows = mapped(path)
        if rows.dtype != dtype or rows.shape != shape:
            held, wanted = rows.dtype.names or rows.dtype, dtype.names or dtype
            return [f"{path.name} holds {rows.shape} rows of {held}, should hold {shape} of {wanted}"]
        found = table_sha256(path) if recorded and path.stat().st_size <= VERIFIED_ON_OPEN else None
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except DataError as error:
        return [f"{path.name} cannot be read ({error})"]
    except Exception as error:  # NumPy raises many types for a damaged header
        return [f"{path.name} cannot be read ({error_text(error)})"]
    if recorded and found not in (None, recorded["sha256"]):
        return [
            f"{path.name} changed since its index was written (sha256 {found[:12]}..., should be "
            f"{recorded['sha256'][:12]}...); "
            "copy the split again, or write its index again with `vitctl data index`"
        ]
    return []


def has_table_digests(tables: Any, wanted: set[str]) -> bool:
    """Whether the field `tables` of an index holds num_bytes and sha256 of each wanted table."""
    return (
        isinstance(tables, dict)
        and set(tables) == wanted
        and all(
            isinstance(one, dict)
            and one.keys() == {"num_bytes", "sha256"}
            and type(one["num_bytes"]) is int
            and isinstance(one["sha256"], str)
            and _SHA256.fullmatch(one["sha256"])
            for one in tables.values()
        )
    )
