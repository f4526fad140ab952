"""Writes the index of shards: of shards that were just written, of those of other programs, and of remote
ones.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.shards.index import (
    FORMAT,
    INDEX_FILE,
    LABELS,
    SAMPLES,
    Index,
    Shard,
    read_index,
    table_sha256,
)
from vitctl.data.shards.remote import bounded
from vitctl.data.shards.scan import Fields, Scan, read_shard
from vitctl.errors import DataError
from vitctl.system.address import without_queries
from vitctl.system.files import CLASSES, INDEX, SHARD, atomic_write, read_json, write_text
from vitctl.system.text import escaped_json, one_line

_ANY = Fields()
Progress = Callable[[int, int], None] | None


def index_shards(
    paths: Sequence[Path],
    *,
    class_names: Sequence[str] | None = None,
    source: str = "",
    members: Fields = _ANY,
    progress: Progress = None,
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
    num_folders = len({path.parent for path in paths})
    if num_folders != 1:
        raise DataError(f"{len(paths)} shards in {num_folders} folders, should be in one")
    scans = []
    for path in paths:
        scans.append(read_shard(path, members))
        if progress:
            progress(len(scans), len(paths))
    return write_index(paths, scans, class_names=class_names, source=source, members=members)


def index_addresses(
    urls: Sequence[str],
    out: Path,
    *,
    class_names: Sequence[str] | None = None,
    source: str = "",
    members: Fields = _ANY,
    progress: Progress = None,
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
            f"{len(urls)} addresses with {len(set(names))} file names; each shard needs a different one"
        )
    out.mkdir(parents=True, exist_ok=True)
    scans, shards = [], []
    for url, name in zip(urls, names, strict=True):
        with tempfile.TemporaryDirectory(prefix=".shard.", suffix=".partial", dir=out) as folder:
            aside = Path(folder) / "shard.tar"
            try:
                with aside.open("xb") as file:
                    file.writelines(bounded(url, SHARD.limit))
                scan = read_shard(aside, members)
            except DataError as error:
                raise DataError(str(error).replace(str(aside), url)) from None
            scans.append(scan)
            shards.append(Shard(name, len(scan.rows), aside.stat().st_size, scan.sha256, url))
        if progress:
            progress(len(scans), len(urls))
    return _write(out, shards, scans, class_names, source, members)


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


def _write(
    folder: Path,
    shards: Sequence[Shard],
    scans: Sequence[Scan],
    class_names: Sequence[str] | None,
    source: str,
    members: Fields,
) -> Index:
    rows, labels = np.concatenate([scan.rows for scan in scans]), _joined_labels(scans)
    if not len(rows):
        raise DataError(f"{folder}: the shards hold no samples")
    fields: dict[str, Any] = {
        "format": FORMAT,
        "class_names": _class_names(folder, rows["label"] if labels is None else labels, scans, class_names),
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


def write_table(path: Path, rows: np.ndarray) -> dict[str, Any]:
    """Write a table atomically; returns what the index records of it: num_bytes and sha256."""
    with atomic_write(path) as aside, aside.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    return {"num_bytes": path.stat().st_size, "sha256": table_sha256(path)}


def _joined_labels(scans: Sequence[Scan]) -> np.ndarray | None:
    if all(scan.labels is None for scan in scans):
        return None
    tables = [scan.rows["label"][:, None] if scan.labels is None else scan.labels for scan in scans]
    width = max(table.shape[1] for table in tables)
    padded = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1) for table in tables]
    return np.concatenate(padded).astype(np.int32)


def _class_names(
    folder: Path, labels: np.ndarray, scans: Sequence[Scan], names: Sequence[str] | None
) -> list[str]:
    """Return the given class names, else those embedded in the shards, else the class numbers.

    Raises:
        DataError: the shards hold different names, a label has no name, or a name occurs twice.
    """
    needed, embedded = max(int(labels.max()) + 1, 1), {scan.class_names for scan in scans}
    if names is None and len(embedded) > 1:
        raise DataError(
            f"{folder}: the shards hold {len(embedded)} different lists of class names; give one with "
            f"--classes"
        )
    if names is None:
        names = embedded.pop() or None
    if names is None and needed > CLASSES.limit:
        raise DataError(f"{folder}: label {needed - 1} of classes without names, should be below {CLASSES}")
    names = [str(label) for label in range(needed)] if names is None else list(names)
    if needed > len(names):
        raise DataError(f"{folder}: label {needed - 1} has no name, {len(names)} class names were given")
    if len(set(names)) < len(names):
        raise DataError(f"{folder}: class name {Counter(names).most_common(1)[0][0]!r} occurs twice")
    return names


def check_same_shards(out: Path, names: Sequence[str]) -> None:
    """Check that writing an index does not replace the index of other shards.

    Args:
        out: folder of the new index.
        names: of the shards in the new index.

    Raises:
        DataError: the folder holds an index that lists other shards.
    """
    path = out / INDEX_FILE
    if not path.exists():
        return
    fields = read_json(path, INDEX.limit, error=DataError)
    listed = fields.get("shards") if isinstance(fields, dict) else None
    shards = listed if isinstance(listed, list) else []
    others = {str(shard.get("name")) for shard in shards if isinstance(shard, dict)} - set(names)
    if others:
        raise DataError(
            f"{path}: is the index of other shards ({one_line(min(others))}) and would be replaced; choose "
            f"another folder with --out"
        )


def link_shards(paths: Sequence[Path], out: Path) -> list[Path]:
    """Create symbolic links to shards in a folder, for an index that is not stored beside them.

    Raises:
        DataError: two shards have the same name, or another file of that name exists.
    """
    names = Counter(path.name for path in paths)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise DataError(
            f"{len(paths)} shards, two of them called {name}; give the shards of one split, each with a "
            f"different name"
        )
    missing = []
    for path in paths:
        link = out / path.name
        if not link.exists() and not link.is_symlink():
            missing.append((link, path))
        elif not (link.exists() and link.samefile(path)):
            raise DataError(f"{link}: exists already and is not {path}; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    for link, path in missing:
        link.symlink_to(path.resolve())
    return [out / path.name for path in paths]
