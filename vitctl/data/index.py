"""What a split holds, decided once and kept beside its shards: `index.json` and `samples.npy`.

A *split folder* holds shards, `index.json` and `samples.npy`; a *data set folder* holds split folders.
Opening a split costs the same for a thousand samples and for three hundred million.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from vitctl.data.scan import ROW, scan_shard
from vitctl.errors import DataError

FORMAT = "vitctl-index/1"
_MAX_INDEX_BYTES = 256 * 2**20
_USUAL_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Shard:
    """One tar file of a split. `sha256` is in hex."""

    name: str
    num_samples: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """An opened split.

    Args:
        folder: the split folder.
        shards: in storage order.
        class_names: in label order.
        num_samples: over all shards.
        source: where the images came from, in words.
        digest: SHA-256 of `index.json`, which covers every byte of every shard.
        rows: one `ROW` per sample in shard order, `[num_samples]`, memory-mapped.
    """

    folder: Path
    shards: tuple[Shard, ...]
    class_names: tuple[str, ...]
    num_samples: int
    source: str
    digest: str
    rows: np.ndarray = field(repr=False, compare=False)


def read_index(folder: Path) -> Index:
    """Open a split, after checking that its index is whole and that every shard lies there at its full size.

    Raises:
        DataError: one line with every problem found.
    """
    path = folder / "index.json"
    fields, digest = _read_json(path)
    problems = _field_problems(fields)
    if not problems:
        problems = _shard_problems(folder, fields) + _row_problems(folder, fields["num_samples"])
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise DataError(f"{path}: {shown}")
    return Index(
        folder=folder,
        shards=tuple(Shard(**shard) for shard in fields["shards"]),
        class_names=tuple(fields["class_names"]),
        num_samples=fields["num_samples"],
        source=fields["source"],
        digest=digest,
        rows=np.load(folder / "samples.npy", mmap_mode="r"),
    )


def index_shards(
    paths: Sequence[Path],
    *,
    class_names: Sequence[str] | None = None,
    source: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """Write `index.json` and `samples.npy` beside WebDataset shards, whoever made them.

    Args:
        paths: the shards of one split, all in one folder; their order becomes the storage order.
        class_names: in label order; without them classes are named by their numbers.
        source: where the images came from, in words.
        progress: called with (shards done, shards in all).

    Raises:
        DataError: a shard is damaged or unsafe, a sample lacks a field, a label has no class name.
    """
    if not paths or len({path.parent for path in paths}) > 1:
        raise DataError(f"{len(paths)} shards in {len({path.parent for path in paths})} folders, should be in one")
    folder, tables, shards = paths[0].parent, [], []
    for done, path in enumerate(paths):
        rows, sha256 = scan_shard(path)
        tables.append(rows)
        shards.append(Shard(path.name, len(rows), path.stat().st_size, sha256))
        if progress:
            progress(done + 1, len(paths))
    rows = np.concatenate(tables)
    if not len(rows):
        raise DataError(f"{folder}: the shards hold no samples")
    names = _class_names(folder, rows["label"], class_names)
    fields = {
        "format": FORMAT,
        "class_names": names,
        "num_samples": len(rows),
        "shards": [asdict(shard) for shard in shards],
        "source": source,
    }
    with _replacing(folder / "samples.npy") as file:
        np.save(file, rows, allow_pickle=False)
    with _replacing(folder / "index.json") as file:
        file.write(json.dumps(fields, indent=1, ensure_ascii=False).encode() + b"\n")
    return read_index(folder)


def find_splits(folder: Path) -> dict[str, Path]:
    """Find the splits of a data set folder, `train` first; a split folder is its own only split.

    Returns:
        split name to split folder; empty when nothing is indexed here.
    """
    if (folder / "index.json").is_file():
        return {folder.resolve().name: folder}
    found = {path.parent.name: path.parent for path in folder.glob("*/index.json")}
    rank = {name: position for position, name in enumerate(_USUAL_SPLITS)}
    return {name: found[name] for name in sorted(found, key=lambda name: (rank.get(name, len(rank)), name))}


def _class_names(folder: Path, labels: np.ndarray, names: Sequence[str] | None) -> list[str]:
    needed = max(int(labels.max()) + 1, 1)
    names = [str(label) for label in range(needed)] if names is None else list(names)
    if needed > len(names):
        raise DataError(f"{folder}: label {needed - 1} has no name, {len(names)} class names were given")
    if len(set(names)) < len(names):
        raise DataError(f"{folder}: class name {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return names


def _read_json(path: Path) -> tuple[dict[str, Any], str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise DataError(f"{path}: larger than {_MAX_INDEX_BYTES} bytes, not an index")
        text = path.read_bytes()
        fields = json.loads(text)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); should be an index of shards") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else None
        raise DataError(f"{path}: format is {found!r}, should be {FORMAT!r}")
    return fields, hashlib.sha256(text).hexdigest()


def _field_problems(fields: dict[str, Any]) -> list[str]:
    names, shards, num_samples = fields.get("class_names"), fields.get("shards"), fields.get("num_samples")
    problems = []
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        problems.append("class_names should be a list of names")
    if not isinstance(fields.get("source"), str):
        problems.append("source should be a text")
    if not isinstance(num_samples, int) or num_samples < 1:
        problems.append("num_samples should be a whole number above 0")
    if not (isinstance(shards, list) and shards and all(_is_shard(shard) for shard in shards)):
        problems.append("shards should be a list of {name, num_samples, num_bytes, sha256}, each beside the index")
    elif isinstance(num_samples, int) and num_samples != (total := sum(shard["num_samples"] for shard in shards)):
        problems.append(f"num_samples is {num_samples}, the shards sum to {total}")
    return problems


def _is_shard(shard: Any) -> bool:
    if not isinstance(shard, dict) or shard.keys() != {"name", "num_samples", "num_bytes", "sha256"}:
        return False
    name, num_samples, num_bytes, sha256 = (shard[key] for key in ("name", "num_samples", "num_bytes", "sha256"))
    return (
        isinstance(num_samples, int)
        and isinstance(num_bytes, int)
        and num_samples >= 0 <= num_bytes
        and isinstance(name, str)
        and isinstance(sha256, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
    )


def _shard_problems(folder: Path, fields: dict[str, Any]) -> list[str]:
    problems = []
    for shard in fields["shards"]:
        try:
            num_bytes = os.stat(
                f"{folder}/{shard['name']}"
            ).st_size  # a Path for each of many shards would take seconds
        except OSError:
            problems.append(f"{shard['name']} is missing")
            continue
        if num_bytes != shard["num_bytes"]:
            problems.append(f"{shard['name']} has {num_bytes} bytes, should have {shard['num_bytes']}")
    return problems


def _row_problems(folder: Path, num_samples: int) -> list[str]:
    try:
        rows = np.load(folder / "samples.npy", mmap_mode="r")
    except FileNotFoundError:
        return ["samples.npy is missing"]
    except (OSError, ValueError, EOFError) as error:
        return [f"samples.npy cannot be read ({error})"]
    if rows.dtype != ROW or rows.shape != (num_samples,):
        return [
            f"samples.npy holds {rows.shape} rows of {rows.dtype.names}, should hold ({num_samples},) of {ROW.names}"
        ]
    return []


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write aside, then take the place of `path` at once: a reader sees the old file or the new one, whole."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
