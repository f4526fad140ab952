"""The index of a split, stored beside its shards: `index.json` and `samples.npy`.

A *split folder* holds shards, `index.json` and `samples.npy`; a *data set folder* holds split folders. The
index names the address of shards that are stored elsewhere, and a whole split folder may be remote. Opening a
split takes constant time: the same for a thousand samples and for three hundred million.
"""

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.shards.index_fields import INDEX_FILE, field_problems
from vitctl.data.shards.mapped import mapped
from vitctl.data.shards.remote import bounded, check_address
from vitctl.data.shards.scan import ROW, Fields, Scan, embedded_class_names, read_shard
from vitctl.data.shards.tables import LABELS, SAMPLES, table_problems, table_sha256, write_table
from vitctl.errors import DataError
from vitctl.system.address import without_queries
from vitctl.system.bounds import CLASSES, INDEX, SHARD
from vitctl.system.files import parse_json, read_bytes, write_text
from vitctl.system.text import escaped_json, one_line

FORMAT = "vitctl-index/1"
_TABLE_HEADER_BYTES = 2**16
_ANY = Fields()
_SHA256 = re.compile("[0-9a-f]{64}")
_USUAL_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Shard:
    """One tar file of a split.

    `sha256` is in hex; `url` is its address when it is not in the folder of the index.
    """

    name: str
    num_samples: int
    num_bytes: int
    sha256: str
    url: str = ""


@dataclass(frozen=True)
class Index:
    """An opened split.

    Args:
        folder: the split folder.
        shards: in storage order.
        class_names: in label order.
        num_samples: over all shards.
        source: provenance of the images, as text.
        index_sha256: of `index.json`.
        rows: one `ROW` per sample in shard order, `[num_samples]`, memory-mapped.
        base: address of a remote split folder, of which `folder` holds only the index; empty for a local
            split.
        labels: of samples that may have several: int32 `[num_samples, L]`, padded with -1, memory-mapped;
            None for others.
        members: which members of a sample are its image and its label.
        tables: num_bytes and sha256 of `samples.npy` and `labels.npy` by name, as in `index.json`; empty for
            indexes of older releases, which do not record them.
    """

    folder: Path
    shards: tuple[Shard, ...]
    class_names: tuple[str, ...]
    num_samples: int
    source: str
    index_sha256: str
    rows: np.ndarray = field(repr=False, compare=False)
    labels: np.ndarray | None = field(default=None, repr=False, compare=False)
    base: str = ""
    members: Fields = _ANY
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: the bytes of every shard and table, the class names, and which members are
        used.

        Location and provenance are not part of it. Tables whose digests the index does not record are read
        once for it.
        """
        names = (SAMPLES,) if self.labels is None else (SAMPLES, LABELS)
        content = {
            "classes": self.class_names,
            "members": asdict(self.members),
            "shards": [[shard.num_samples, shard.num_bytes, shard.sha256] for shard in self.shards],
            "tables": [
                self.tables[name]["sha256"] if self.tables else table_sha256(self.folder / name)
                for name in names
            ],
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def address(self, shard: int) -> str:
        """The path or URL of a shard."""
        found = self.shards[shard]
        return found.url or f"{self.base or self.folder}/{found.name}"

    @property
    def is_remote(self) -> bool:
        """Whether any shard is remote."""
        return bool(self.base) or any(shard.url for shard in self.shards)


def read_index(folder: Path, base: str = "") -> Index:
    """Open a split, after checking that its index is valid and that every local shard exists with its full
    size.

    Tables of up to 64 MiB are verified against their digests too; larger ones during the run (see
    verification.py).

    Args:
        folder: holds the index.
        base: address of the folder of the shards; empty when they are in the folder of the index.

    Raises:
        DataError: one line with every problem found.
    """
    path = folder / INDEX_FILE
    fields, digest = _read_json(path)
    problems = field_problems(fields)
    if not problems:
        problems = (
            _address_problems(fields, base)
            if base or any("url" in shard for shard in fields["shards"])
            else []
        )
        problems += _size_problems(folder, fields) if not base else []
        problems += _row_problems(folder, fields)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise DataError(f"{path}: {shown}")
    return Index(
        folder=folder,
        shards=tuple(Shard(**shard) for shard in fields["shards"]),
        class_names=tuple(fields["class_names"]),
        num_samples=fields["num_samples"],
        source=fields["source"],
        index_sha256=digest,
        rows=mapped(folder / SAMPLES),
        labels=mapped(folder / LABELS) if "max_labels" in fields else None,
        base=base,
        members=Fields(**fields.get("members", {})),
        tables=fields.get("tables", {}),
    )


def index_shards(
    paths: Sequence[Path],
    *,
    class_names: Sequence[str] | None = None,
    source: str = "",
    members: Fields = _ANY,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """Write `index.json` and `samples.npy` for WebDataset shards, made by any program.

    Args:
        paths: the shards of one split, all in one folder; their order becomes the storage order.
        class_names: in label order; None: the names embedded in the shards, else the class numbers.
        source: provenance of the images, as text.
        members: which members of a sample are its image and its label, where the default extensions do not
            apply.
        progress: called with (shards done, total number of shards).

    Raises:
        DataError: a shard is damaged or unsafe, a sample lacks a field, a label has no class name.
    """
    if not paths or len({path.parent for path in paths}) > 1:
        raise DataError(
            f"{len(paths)} shards in {len({path.parent for path in paths})} folders, should be in one"
        )
    scans = []
    for done, path in enumerate(paths):
        scans.append(read_shard(path, members))
        if progress:
            progress(done + 1, len(paths))
    return write_index(paths, scans, class_names=class_names, source=source, members=members)


def write_index(
    paths: Sequence[Path],
    scans: Sequence[Scan],
    *,
    class_names: Sequence[str] | None = None,
    source: str = "",
    members: Fields = _ANY,
) -> Index:
    """Write the index of shards that were scanned already; see `index_shards`.

    Multiple labels go to `labels.npy`.
    """
    shards = [
        Shard(path.name, len(scan.rows), path.stat().st_size, scan.sha256)
        for path, scan in zip(paths, scans, strict=True)
    ]
    return _write(paths[0].parent, shards, scans, class_names, source, members)


def index_addresses(
    urls: Sequence[str],
    out: Path,
    *,
    class_names: Sequence[str] | None = None,
    source: str = "",
    members: Fields = _ANY,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """Write the index of remote WebDataset shards to a local folder. Each shard is read once and not stored.

    Args:
        urls: URLs of the shards of one split; their order becomes the storage order.
        out: folder that gets `index.json` and `samples.npy`.
        class_names, source, members, progress: as for `index_shards`.

    Raises:
        DataError: as `index_shards`; or a URL is refused, two shards share a name, a shard cannot be fetched.
    """
    urls = without_queries(*urls, error=DataError)
    names = [url.rpartition("/")[2] for url in urls]
    if not urls or len(set(names)) < len(names):
        raise DataError(
            f"{len(urls)} addresses with {len(set(names))} file names, each shard should have its own"
        )
    out.mkdir(parents=True, exist_ok=True)
    scans, shards = [], []
    for done, (url, name) in enumerate(zip(urls, names, strict=True)):
        scan, num_bytes = _scan_remote(url, out, members)
        scans.append(scan)
        shards.append(Shard(name, len(scan.rows), num_bytes, scan.sha256, url))
        if progress:
            progress(done + 1, len(urls))
    return _write(out, shards, scans, class_names, source, members)


def _scan_remote(url: str, parent: Path, members: Fields) -> tuple[Scan, int]:
    with tempfile.TemporaryDirectory(prefix=".shard.", suffix=".partial", dir=parent) as folder:
        aside = Path(folder) / "shard.tar"
        try:
            with aside.open("xb") as file:
                for chunk in bounded(url, SHARD.limit):
                    file.write(chunk)
            return read_shard(aside, members), aside.stat().st_size
        except DataError as error:
            raise DataError(str(error).replace(str(aside), url)) from None


def _write(
    folder: Path,
    shards: Sequence[Shard],
    scans: Sequence[Scan],
    class_names: Sequence[str] | None,
    source: str,
    members: Fields,
) -> Index:
    rows = np.concatenate([scan.rows for scan in scans])
    if not len(rows):
        raise DataError(f"{folder}: the shards hold no samples")
    labels = _joined_labels(scans)
    names = class_names if class_names is not None else embedded_class_names(folder, scans)
    names = _class_names(folder, rows["label"] if labels is None else labels, names)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "class_names": names,
        "num_samples": len(rows),
        "shards": [{key: value for key, value in asdict(shard).items() if value != ""} for shard in shards],
        "source": source,
    }
    if members != _ANY:
        fields["members"] = asdict(members)
    fields["tables"] = {SAMPLES: write_table(folder / SAMPLES, rows)}
    if labels is not None:
        fields["max_labels"] = labels.shape[1]
        fields["tables"][LABELS] = write_table(folder / LABELS, labels)
    text = escaped_json(json.dumps(fields, indent=1, ensure_ascii=False))
    write_text(folder / INDEX_FILE, text + "\n")
    return read_index(folder)


def _joined_labels(scans: Sequence[Scan]) -> np.ndarray | None:
    if all(scan.labels is None for scan in scans):
        return None
    tables = [scan.rows["label"][:, None] if scan.labels is None else scan.labels for scan in scans]
    width = max(table.shape[1] for table in tables)
    padded = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1) for table in tables]
    return np.concatenate(padded).astype(np.int32)


def table_names(text: bytes) -> tuple[str, ...]:
    """The files that belong to an index, besides `index.json` itself.

    Args:
        text: content of `index.json`.
    """
    try:
        fields = parse_json(text, INDEX_FILE, error=DataError)
    except DataError:
        return (SAMPLES,)  # opening the index reports the problem
    return (SAMPLES, LABELS) if isinstance(fields, dict) and "max_labels" in fields else (SAMPLES,)


def table_bytes(text: bytes) -> int:
    """Upper limit on the size of each of these files, from the number of samples in the text of `index.json`."""
    try:
        fields = json.loads(text)
        each = max(ROW.itemsize, 4 * int(fields.get("max_labels", 1)))
        return _TABLE_HEADER_BYTES + int(fields["num_samples"]) * each
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return _TABLE_HEADER_BYTES  # opening the index reports the problem


def find_splits(folder: Path) -> dict[str, Path]:
    """Find the splits of a data set folder, `train` first; a split folder is its own only split.

    Returns:
        split name to split folder; empty when there is no index.
    """
    if (folder / INDEX_FILE).is_file():
        return {folder.resolve().name: folder}
    found = {path.parent.name: path.parent for path in folder.glob(f"*/{INDEX_FILE}")}
    rank = {name: position for position, name in enumerate(_USUAL_SPLITS)}
    return {name: found[name] for name in sorted(found, key=lambda name: (rank.get(name, len(rank)), name))}


def _class_names(folder: Path, labels: np.ndarray, names: Sequence[str] | None) -> list[str]:
    needed = max(int(labels.max()) + 1, 1)
    if names is None and needed > CLASSES.limit:
        raise DataError(f"{folder}: label {needed - 1} of classes without names, should be below {CLASSES}")
    names = [str(label) for label in range(needed)] if names is None else list(names)
    if needed > len(names):
        raise DataError(f"{folder}: label {needed - 1} has no name, {len(names)} class names were given")
    if len(set(names)) < len(names):
        raise DataError(f"{folder}: class name {Counter(names).most_common(1)[0][0]!r} occurs twice")
    return names


def _read_json(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = read_bytes(path, INDEX.limit, error=DataError)
    except DataError as error:
        raise DataError(f"{error}; should be an index of shards") from None
    fields = parse_json(text, path, error=DataError)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else None
        raise DataError(f"{path}: format is {found!r}, should be {FORMAT!r}")
    return fields, hashlib.sha256(text).hexdigest()


def _address_problems(fields: dict[str, Any], base: str) -> list[str]:
    """An index is untrusted: the URLs in it may only name files to read."""
    problems = []
    try:
        urls = without_queries(
            *(shard.get("url", "") for shard in fields["shards"]), error=DataError, over=False
        )
    except DataError as error:
        return [str(error)]
    for shard, url in zip(fields["shards"], urls, strict=True):
        shard |= {"url": url} if url else {}
        try:
            if base or "url" in shard:
                check_address(shard.get("url") or f"{base}/{shard['name']}")
                if not _SHA256.fullmatch(shard["sha256"]):
                    problems.append(f"{one_line(shard['name'])}: sha256 should be 64 hex digits")
        except DataError as error:
            problems.append(str(error))
    return problems


def _size_problems(folder: Path, fields: dict[str, Any]) -> list[str]:
    problems = []
    for shard in fields["shards"]:
        if shard.get("url"):
            continue
        try:
            # A Path for each of many shards would take seconds.
            num_bytes = os.stat(f"{folder}/{shard['name']}").st_size
        except (OSError, ValueError):
            problems.append(f"{one_line(shard['name'])} is missing")
            continue
        if num_bytes != shard["num_bytes"]:
            problems.append(
                f"{one_line(shard['name'])} has {num_bytes} bytes, should have {shard['num_bytes']}"
            )
    return problems


def _row_problems(folder: Path, fields: dict[str, Any]) -> list[str]:
    num_samples, width, recorded = fields["num_samples"], fields.get("max_labels"), fields.get("tables", {})
    problems = table_problems(folder / SAMPLES, (num_samples,), ROW, recorded.get(SAMPLES))
    if width is not None:
        problems += table_problems(
            folder / LABELS, (num_samples, width), np.dtype("<i4"), recorded.get(LABELS)
        )
    return problems
