"""Local shards without an index, as other programs leave them: they are read once, and the index is kept."""

import errno
import fcntl
import hashlib
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vitctl.data.shards.index import index_shards
from vitctl.data.shards.index_fields import INDEX_FILE
from vitctl.data.shards.links import link_shards
from vitctl.data.source.own_splits import ROLES
from vitctl.errors import DataError
from vitctl.system.files import cache_folder, open_lock
from vitctl.system.text import one_line

INDEXED = "indexed by vitctl"  # where the images came from, as far as anybody can tell
_LOCK = ".index.lock"
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MIB = 2**20


def index_folder(folder: Path, splits: Sequence[str]) -> None:
    """Index the shards in a folder, or in those of its folders that are called as splits, where there is no index yet.

    Args:
        folder: local.
        splits: names that are looked for beside the usual ones.

    Raises:
        DataError: a shard is damaged or lacks something, its names are those of several splits, or nothing can be written there.
    """
    if (folder / INDEX_FILE).exists():
        return
    if any(folder.glob("*.tar")) and not any(folder.glob(f"*/{INDEX_FILE}")):
        places = [folder]
    else:
        places = [folder / name for name in dict.fromkeys((*splits, *ROLES)) if name]
    for place in places:
        if not (place / INDEX_FILE).exists() and (paths := sorted(place.glob("*.tar"))):
            _check_one_split(place, paths)
            _index_once(place, paths)


def index_list(paths: Sequence[Path]) -> Path:
    """Index some shards of a folder without an index; it is kept in the cache, with links to them, and belongs to these files as they are.

    Returns:
        its folder.

    Raises:
        DataError: as `index_folder`; or a shard is not there.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        digest.update(f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    folder = cache_folder() / "splits" / digest.hexdigest()[:24]
    if not (folder / INDEX_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _index_once(folder, paths)
    return folder


def _check_one_split(folder: Path, paths: Sequence[Path]) -> None:
    """Training and test shards side by side are the usual layout of ImageNet, and must not become one split."""
    named = {
        frozenset(ROLES[word] for word in re.split("[^a-z]+", path.stem.lower()) if word in ROLES) for path in paths
    }
    roles = sorted("+".join(sorted(roles)) for roles in named if roles)
    if len(roles) > 1:
        raise DataError(
            f"{folder}: holds shards of several splits by their names ({', '.join(roles)}); give those of one, as "
            f"'{folder}/NAME-{{0000..1023}}.tar', or index each with `vitctl data index 'SHARDS' --out NEW/train`, then --data NEW"
        )


def _index_once(folder: Path, paths: Sequence[Path]) -> None:
    """Of processes that come at once one does it, and the others wait; where locks are not to be had all write the same."""
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
    told = f"{one_line(str(paths[0].parent))}: {len(paths):,} shard(s) without an index, {size / _MIB:,.1f} MiB, are read once"
    with suppress(OSError):  # a screen that is gone ends no work
        print(told, end=" ... ", file=sys.stderr, flush=True)
    end = ""
    try:
        own = paths if paths[0].parent == folder else link_shards(paths, folder)
        index = index_shards(own, source=INDEXED)
        end = f"{index.num_samples:,} images of {len(index.class_names):,} classes, {time.monotonic() - began:.1f} s"
    except DataError as error:
        raise DataError(f"{error}; if these are no shards, make some: `vitctl data shards SOURCE OUT`") from None
    finally:
        with suppress(OSError):
            print(end, file=sys.stderr, flush=True)
