"""The tables beside an index: where each sample lies and its label, and the labels of those that may have several."""

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
# Bytes that are held against their digest whenever a split is opened; larger tables are read beside the run, like shards.
READ_AT_ONCE = 64 * 2**20
_SHA256 = re.compile("[0-9a-f]{64}")
_KEPT = 64  # digests of this process


def write_table(path: Path, rows: np.ndarray) -> dict[str, Any]:
    """Write a table whole or not at all; what an index notes of it: num_bytes and sha256."""
    with atomic_write(path) as aside, aside.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    return {"num_bytes": path.stat().st_size, "sha256": table_sha256(path)}


def table_sha256(path: Path) -> str:
    """SHA-256 of a file, read once by this process while it stays as it is."""
    found = os.stat(path)
    return _hashed(str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(_KEPT)
def _hashed(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table_problems(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, noted: Mapping[str, Any] | None = None
) -> list[str]:
    """What is wrong with a table, in words.

    Args:
        path: of the table.
        shape, dtype: that it should have.
        noted: num_bytes and sha256 that its index says; None for an index of before they were noted.
    """
    try:
        rows = mapped(path)
        if rows.dtype != dtype or rows.shape != shape:
            held, wanted = rows.dtype.names or rows.dtype, dtype.names or dtype
            return [f"{path.name} holds {rows.shape} rows of {held}, should hold {shape} of {wanted}"]
        found = table_sha256(path) if noted and path.stat().st_size <= READ_AT_ONCE else None
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except DataError as error:
        return [f"{path.name} cannot be read ({error})"]
    except Exception as error:  # NumPy raises many types for a header that is something else
        return [f"{path.name} cannot be read ({error_text(error)})"]
    if noted and found not in (None, noted["sha256"]):
        return [
            f"{path.name} changed since its index was written (sha256 {found[:12]}..., should be {noted['sha256'][:12]}...); "
            "copy the split again, or write its index anew with `vitctl data index`"
        ]
    return []


def are_noted(tables: Any, wanted: set[str]) -> bool:
    """Whether what an index says of its tables is num_bytes and sha256 of each."""
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
