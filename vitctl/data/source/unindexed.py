"""Indexes local shards that have no index, as other programs write them.

The shards are read once, and the index is stored.
"""

import errno
import fcntl
import hashlib
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vitctl.data.shards.index import INDEX_FILE, read_index
from vitctl.data.shards.make_index import index_shards, link_shards
from vitctl.data.source.own_splits import ROLES
from vitctl.errors import DataError
from vitctl.system.files import cache_folder, inside, open_lock
from vitctl.system.text import one_line

INDEXED = "indexed by vitctl"  # the provenance, which is otherwise unknown
_LOCK = ".index.lock"
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MIB = 2**20


def index_folder(folder: Path, splits: Sequence[str]) -> None:
    """Index the shards in a folder, or in its subfolders that are named like splits, where there is no index
    yet.

    Args:
        folder: local.
        splits: names to look for in addition to the common ones.

    Raises:
        DataError: a shard is damaged or incomplete, the shards belong to several splits by name, or the
            folder is read-only.
    """
    if (folder / INDEX_FILE).exists():
        _check_none_added(folder)
        return
    if any(folder.glob("*.tar")) and not any(folder.glob(f"*/{INDEX_FILE}")):
        candidates = [folder]
    else:
        candidates = [
            inside(folder, name, error=DataError) for name in dict.fromkeys((*splits, *ROLES)) if name
        ]
    for candidate in candidates:
        if (candidate / INDEX_FILE).exists():
            _check_none_added(candidate)
        elif paths := sorted(candidate.glob("*.tar")):
            _check_one_split(candidate, paths)
            _index_once(candidate, paths)


def _check_none_added(folder: Path) -> None:
    """Refuse shards that came into a folder after vitctl indexed it by itself: they would not be read."""
    try:
        index = read_index(folder)
    except DataError:  # reported where this split is opened, if it is
        return
    added = sorted({path.name for path in folder.glob("*.tar")} - {shard.name for shard in index.shards})
    if index.source == INDEXED and added:
        raise DataError(
            f"{folder}: {len(added):,} shard(s) came after it was indexed (such as {one_line(added[0])}); "
            f"remove {folder / INDEX_FILE} "
            "and run again to index all of them, or move the new ones away"
        )


def index_list(paths: Sequence[Path]) -> Path:
    """Index selected shards of a folder without an index. The index is stored in the cache, with links to the
    shards.

    A changed shard (path, size or mtime) gives a new index.

    Returns:
        the folder of the index.

    Raises:
        DataError: as `index_folder`; or a shard does not exist.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        digest.update(
            f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0".encode("utf-8", "surrogateescape")
        )
    folder = cache_folder() / "splits" / digest.hexdigest()[:24]
    if not (folder / INDEX_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _index_once(folder, paths)
    return folder


def _check_one_split(folder: Path, paths: Sequence[Path]) -> None:
    """Refuse training and test shards in one folder, a common layout for ImageNet: they must not become one
    split.
    """
    named = {
        frozenset(ROLES[word] for word in re.split("[^a-z]+", path.stem.lower()) if word in ROLES)
        for path in paths
    }
    roles = sorted("+".join(sorted(roles)) for roles in named if roles)
    if len(roles) > 1:
        raise DataError(
            f"{folder}: holds shards of several splits by their names ({', '.join(roles)}); give those of "
            f"one, as "
            f"'{folder}/NAME-{{0000..1023}}.tar', or index each with `vitctl data index 'SHARDS' --out "
            f"NEW/train`, then --data NEW"
        )


def _index_once(folder: Path, paths: Sequence[Path]) -> None:
    """Write the index under a lock, so that one process does it and others wait.

    Without lock support each writes the same file.
    """
    try:
        with open_lock(folder / _LOCK) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            try:
                if not (folder / INDEX_FILE).exists():
                    _index(folder, paths)
            finally:
                (folder / _LOCK).unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        raise DataError(
            f"{folder}: its shards have no index, and none can be written there ({error.strerror}); "
            f"type `vitctl data index {folder} --out FOLDER`, then --data FOLDER"
        ) from None


def _index(folder: Path, paths: Sequence[Path]) -> None:
    size, began = sum(path.stat().st_size for path in paths), time.monotonic()
    message = f"{one_line(str(paths[0].parent))}: {len(paths):,} shard(s) without an index, {size / _MIB:,.1f} MiB, are read once"
    with suppress(OSError):  # a closed terminal must not stop the job
        print(message, end=" ... ", file=sys.stderr, flush=True)
    end = ""
    try:
        own = paths if paths[0].parent == folder else link_shards(paths, folder)
        index = index_shards(own, source=INDEXED)
        end = f"{index.num_samples:,} images of {len(index.class_names):,} classes, {time.monotonic() - began:.1f} s"
    except DataError as error:
        raise DataError(
            f"{error}; if these are not shards, make some: `vitctl data shards SOURCE OUT`"
        ) from None
    finally:
        with suppress(OSError):
            print(end, file=sys.stderr, flush=True)
