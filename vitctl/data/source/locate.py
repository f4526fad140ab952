"""Locate the splits that --data names: a folder, a URL, or shards by pattern, by list or by @file.

Local shards without an index, as other programs write them, are read once and indexed. The index of a remote
split is cached.
"""

import errno
import glob
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from braceexpand import braceexpand

from vitctl.data.images.image_types import IMAGE_SUFFIXES, exclusion_reason, is_system_file
from vitctl.data.shards.cache import ShardCache
from vitctl.data.shards.index import INDEX_FILE, find_splits, in_usual_order, table_limits
from vitctl.data.shards.indexing import index_shards
from vitctl.data.shards.tar import LABEL_EXTENSIONS, Fields
from vitctl.data.source.rows import Ranges
from vitctl.data.source.splits import ROLES, TABLES, read_exclusion, without_excluded
from vitctl.data.source.stores import ShardSource, open_index
from vitctl.data.source.views import Source, class_zero_note, subset, unlabelled_samples
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.address import without_queries
from vitctl.system.files import (
    atomic_write,
    cache_folder,
    file_state,
    lock_alone,
    locked,
    open_lock,
    read_bytes,
    write_bytes,
    write_text,
)
from vitctl.system.pool import default_workers
from vitctl.system.process import START
from vitctl.system.remote import (
    FIRST_SECONDS,
    GaveUpError,
    MissingError,
    Span,
    check_address,
    is_remote,
    read_file,
    transfer,
)
from vitctl.system.text import count_text, did_you_mean, nearest, one_line, typed

INDEXED = "indexed by vitctl"  # recorded as provenance of shards without an index
# PLACE:SPLIT. The split expression may contain colons; a port is not a split.
WITH_SPLIT = re.compile(r"(.+?):([A-Za-z][^/]*)")
_BRACES = re.compile(r"\{([^{}]*)\}")
_STRAY_BRACE = re.compile(r"\{[^}]*(\{|$)|(^|\})[^{]*\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})(\.\.[0-9]{1,18})?")
_MAX_NAMES = 10**6
PACKED = (".zip", ".gz", ".tgz", ".xz", ".txz", ".bz2", ".tbz2", ".zst", ".7z", ".rar")
_UNPACK = "if it is an archive, unpack it, and give its folder"
_ASKED, _MAX_ASKED_BYTES = f"{INDEX_FILE}.asked", 1000  # start time of the last command that requested it
_LOOKED_FOR = ("train", "validation", "val", "test", "train800", "val200", "train800val200")
_LOCK = ".index.lock"
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class SplitLocation:
    """The location of a split.

    Args:
        folder: holds its index.
        base: URL of its shards if they are not in `folder`.
        shards: names of the selected shards; empty for all.
    """

    folder: Path
    base: str = ""
    shards: tuple[str, ...] = ()

    def open(self, cache_bytes: int) -> Source:
        """Open the split, with a shard cache of `cache_bytes`; 0 reads single remote images, uncached."""
        index = open_index(self.folder, self.base)
        cache = None
        if index.is_remote and cache_bytes:
            cache = ShardCache(cache_folder() / "shards", cache_bytes)
        source = ShardSource(index, cache)
        if not self.shards:
            return without_excluded(source)
        numbers = {shard.name: number for number, shard in enumerate(index.shards)}
        if missing := [name for name in self.shards if name not in numbers]:
            raise DataError(
                self.base or self.folder, f"{missing[0]} is not in the index ({len(missing)} shards are not)"
            )
        chosen, ends = [numbers[name] for name in self.shards], np.array([0, *source.ends])
        return subset(source, Ranges(ends[chosen], ends[1:][chosen]).without(read_exclusion(index)))


def locate_all_splits(text: str, columns: str = "") -> dict[str, SplitLocation]:
    """Locate all splits, as `locate_splits` does.

    A URL cannot be listed, so only common split names are tried. Any other split needs its own URL.
    """
    (text,) = without_queries(text, error=DataError)
    found = locate_splits(text, "+".join(_LOOKED_FOR), columns=columns)
    if found:
        return found
    if is_remote(text):
        raise DataError(
            text,
            f"no index.json there, nor in {', '.join(_LOOKED_FOR)}",
            "give the address of a folder of shards or of one split",
        )
    raise no_index(text)


def locate_splits(
    text: str, split: str, *, makes_index: bool = True, columns: str = ""
) -> dict[str, SplitLocation]:
    """Map split names to locations; empty if there is no index.

    Local shards without an index are indexed first, with a message on stderr.

    Args:
        text: a local folder of shards or of splits; the URL of one; shards as `train/{000..127}.tar`, joined
            by commas, or in a text file as `@shards.txt`; local ones also as `train/*.tar`.
        split: the split expression; a URL cannot be listed, so its splits are requested by name.
        columns: names the label of the samples of shards without an index, `label=caption`.

    Raises:
        DataError: the text is malformed, a URL is refused or cannot be read.
    """
    (text,) = without_queries(text, error=DataError)
    fields = _fields(columns)
    names = list(dict.fromkeys(part.split("[")[0].strip() for part in split.split("+")))
    is_folder = not (text.startswith("@") or _BRACES.search(text) or "," in text or text.endswith(".tar"))
    if is_folder and is_remote(text):
        return _remote_splits(check_address(text.rstrip("/")), names)
    if is_folder:
        places = find_splits(Path(text))
        if places and columns:
            raise DataError(
                f"--columns {columns}", f"{text} has an index, which has the labels", "leave it out"
            )
        places |= _index_folder(Path(text), names, fields) if makes_index else {}
        return {name: SplitLocation(place) for name, place in in_usual_order(places).items()}
    shards = expand(text)
    folders = {shard.rpartition("/")[0] for shard in shards}
    if len(folders) != 1 or not all(shard.endswith(".tar") for shard in shards):
        raise DataError(
            text,
            f"names {count_text(len(shards), 'file')} in {len(folders)} folders, should be the "
            ".tar shards of one split",
        )
    (folder,) = folders
    found = locate_splits(folder or ".", split, makes_index=False)
    if not found and makes_index and not is_remote(text) and all(map(os.path.exists, shards)):
        return {
            Path(folder).resolve().name: SplitLocation(_index_list([Path(shard) for shard in shards], fields))
        }
    if len(found) != 1:
        raise DataError(
            folder,
            "no index.json beside these shards",
            f"write one with `vitctl data index '{text}' --out FOLDER`",
        )
    chosen = tuple(shard.rpartition("/")[2] for shard in shards)
    return {name: replace(place, shards=chosen) for name, place in found.items()}


def with_split(path: str) -> tuple[str, ...]:
    """Return PLACE and SPLIT of a local PLACE:SPLIT if there is no such path, but there is PLACE; else ()."""
    found = WITH_SPLIT.fullmatch(path)
    return found.groups() if found and Path(found[1]).exists() and not Path(path).exists() else ()


def no_index(path: str, split: str = "train", fix: str = "") -> DataError:
    """Return the error for a location without an index, with a fix; `fix` is for one with nothing there."""
    if is_remote(path):
        what = f"neither index.json nor {split}/index.json there"
        return DataError(path, what, "`vitctl data index URL... --out FOLDER` writes one")
    folder = Path(path)
    if not folder.exists():
        near = nearest(folder.name, [one.name for one in folder.parent.glob("*/")], 1)
        return DataError(
            path,
            "no such folder",
            did_you_mean(with_split(path)[:1] or [str(folder.parent / name) for name in near]) or fix,
        )
    if folder.is_dir() and not any(folder.iterdir()):
        return DataError(path, "is empty", "should be a folder of shards made by `vitctl data shards`")
    shard = next(tars(folder), None)
    if path.lower().endswith(IMAGE_SUFFIXES):
        fix = f"give the folder of all class folders, or classify it: vitctl predict {typed(path)}"
        return DataError(path, "one photograph, and not a data set", fix)
    if shard is None:
        fix = _UNPACK if folder.is_file() else above(folder) or "put its images into class folders"
        if folder.suffix.lower() in (*TABLES, ".parquet") or any(folder.glob("*/")):
            out = typed(f"{path.rstrip('/')}-shards")
            fix = f"make them with `vitctl data shards {typed(path)} {out}`, then give {out} instead"
        return DataError(path, "holds no shards", fix)
    return DataError(
        path,
        "no shards with an index here",
        f"make them with `vitctl data shards SOURCE {path}`, or index those you have with `vitctl data index "
        f"{shard.parent}`",
    )


def above(folder: Path) -> str:
    """Return a fix that asks for the folder of class folders, of which this is one; "" if it is none."""

    def has_images(place: Path) -> bool:
        return any(one.suffix.lower() in IMAGE_SUFFIXES for one in place.iterdir())

    with suppress(OSError):  # a folder beside it may be unreadable
        parent = (
            Path(os.path.relpath(folder / os.pardir)) if folder.name in ("", os.pardir) else folder.parent
        )
        if has_images(folder) and sum(map(has_images, parent.glob("*/"))) > 1:
            return did_you_mean([str(parent)])
    return ""


def expand(text: str) -> list[str]:
    """Expand a pattern, a list or an @file to names, in order."""
    names: list[str] = []
    (text,) = without_queries(text, error=DataError)
    for pattern in _listed(text):
        for name in _expand_braces(pattern):
            if is_remote(name) or glob.escape(name) == name or os.path.lexists(name):
                names.append(name)
            elif matching := sorted(glob.glob(name)):
                names += matching
            else:
                raise DataError(name, "no file matches this pattern")
            if len(names) > _MAX_NAMES:
                raise DataError(text[:80], f"more than {_MAX_NAMES:,} names")
    if not names:
        raise DataError(text, "is empty", "give shards")
    return names


def _listed(text: str) -> Iterable[str]:
    """Return the names in an @file or a comma-separated list."""
    if not text.startswith("@"):
        return [part.strip() for part in re.split(r",(?![^{]*\})", text) if part.strip()]
    path = Path(text[1:])
    try:
        lines = read_bytes(path, limits.SHARD_LIST, error=DataError).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            path, f"cannot be read ({error}); should be a text file with a shard per line"
        ) from None
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return without_queries(*names, error=DataError, over=False)


def _expand_braces(text: str) -> Iterable[str]:
    """Expand with the package braceexpand, as webdataset does."""
    choices = _BRACES.findall(text)
    for choice in choices:
        span = _RANGE.fullmatch(choice)
        if span is None and "," not in choice:
            raise DataError(
                text[:80],
                f"'{{{choice[:80]}}}' should be a range such as {{000..127}} or a choice such as {{a,b}}",
            )
        if len(choices) >= _MAX_NAMES.bit_length() or (
            span and abs(int(span[2]) - int(span[1])) >= _MAX_NAMES
        ):
            raise DataError(text[:80], f"more than {_MAX_NAMES:,} names")
    if not choices:
        return [text]
    if _STRAY_BRACE.search(text):
        raise DataError(text[:80], "nested or unclosed braces", "list the names in @FILE")
    return braceexpand(text, escape=False)


def _fields(columns: str) -> Fields:
    """Return what --columns names in samples: members by extension, fields of their JSON by name."""
    if not columns:
        return Fields()
    members = dict(part.strip().split("=", 1) for part in columns.split(",") if "=" in part)
    if unknown := [name for name in members if name not in ("image", "label")]:
        text = f"samples in shards have an image and a label, and no {unknown[0]}"
        raise DataError(f"--columns {columns}", text, "name image= and label= alone")
    label = members.get("label", "")
    is_member = label in (*LABEL_EXTENSIONS, "") or ":" in label or "." in label
    return Fields(members.get("image", ""), label if is_member else f"json:{label}")


def _index_folder(folder: Path, splits: Sequence[str], fields: Fields) -> dict[str, Path]:
    """Index the shards in a folder, or in its subfolders that are named like splits, where there is no index.

    Args:
        folder: local; nothing is written there.
        splits: names to look for in addition to the common ones.

    Returns:
        split name to the folder of its index, of the splits without one of their own.

    Raises:
        DataError: a shard is damaged or incomplete, the shards belong to several splits by name, or the
            cache is read-only.
    """
    candidates = [folder]
    has_shards = any(tars(folder, "*.tar")) and not any(folder.glob(f"*/{INDEX_FILE}"))
    if not has_shards and not (folder / INDEX_FILE).exists():
        candidates = [one for one in sorted(folder.glob("*/")) if one.name in (*splits, *ROLES)]
    made = {}
    for candidate in candidates:
        if (candidate / INDEX_FILE).exists():
            _check_none_added(candidate)
        elif paths := sorted(tars(candidate, "*.tar")):
            check_one_kind(folder, paths[0])
            _check_one_split(candidate, paths)
            made[candidate.resolve().name] = _index_list(paths, fields)
    return made


def tars(folder: Path, pattern: str = "**/*.tar") -> Iterator[Path]:
    """Yield the tar files of a folder, without hidden files and those of operating systems."""
    return (one for one in folder.glob(pattern) if not is_system_file(one.relative_to(folder).as_posix()))


def check_one_kind(folder: Path, shard: Path) -> None:
    """Raise DataError if a folder holds a tar and several folders of photos: only one would be read."""
    images = dict[Path, Path]()
    for path in folder.glob("*/**/*"):
        if not exclusion_reason(path.as_posix(), bytes):
            images.setdefault(path.parent, path)
        if len(images) > 1:
            raise DataError(
                folder,
                f"holds {one_line(str(shard.relative_to(folder)))} and photographs such as "
                f"{one_line(str(path.relative_to(folder)))}",
                "move one of them away",
            )


def _check_none_added(folder: Path) -> None:
    """Refuse shards added to a folder after vitctl indexed it automatically: they would not be read."""
    try:
        index = open_index(folder, looks_at_shards=False)
    except DataError:  # reported where this split is opened, if it is
        return
    if index.source == INDEXED and (
        added := sorted({path.name for path in tars(folder, "*.tar")} - {one.name for one in index.shards})
    ):
        raise DataError(
            folder,
            f"{count_text(len(added), 'shard')} added after it was indexed (such as {one_line(added[0])})",
            f"remove {folder / INDEX_FILE} and run again to index all of them, or move the new ones away",
        )


def _index_list(paths: Sequence[Path], fields: Fields) -> Path:
    """Index shards without an index. It is stored in the cache, with links to them.

    A changed shard gives a new index.

    Returns:
        the folder of the index.

    Raises:
        DataError: as `index_shards`; or the cache is read-only.
    """
    given = "" if fields == Fields() else repr(fields)
    folder = _cached_index(repr([(str(path.resolve()), file_state(path)) for path in paths]) + given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / INDEX_FILE).exists():
            with open_lock(folder / _LOCK) as lock:  # one process does it, and others wait
                lock_alone(lock.fileno(), folder, error=DataError, seconds=math.inf)
                try:
                    if not (folder / INDEX_FILE).exists():
                        _index(folder, paths, fields)
                finally:
                    (folder / _LOCK).unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        raise DataError(
            paths[0].parent,
            f"its shards have no index, and none can be written to {folder} ({error.strerror})",
            "set VITCTL_CACHE to a folder that can be written",
        ) from None
    with suppress(OSError):  # when it was used last
        os.utime(folder / INDEX_FILE)
    return folder


def _check_one_split(folder: Path, paths: Sequence[Path]) -> None:
    """Refuse training and test shards in one folder, a common layout for ImageNet: they are two splits."""
    named = {
        frozenset(ROLES[word] for word in re.split("[^a-z]+", path.stem.lower()) if word in ROLES)
        for path in paths
    }
    roles = sorted("+".join(sorted(roles)) for roles in named if roles)
    if len(roles) > 1:
        raise DataError(
            folder,
            f"holds shards of several splits, by their names ({', '.join(roles)})",
            f"give the shards of one split, e.g. '{folder}/NAME-{{0000..1023}}.tar', or index each "
            "with `vitctl data index 'SHARDS' --out NEW/train`, then --data NEW",
        )


def _index(folder: Path, paths: Sequence[Path], fields: Fields) -> None:
    size, began = sum(path.stat().st_size for path in paths) / 2**20, time.monotonic()
    place, end, notes = one_line(str(paths[0].parent)), "", list[str]()
    _show(
        f"{place}: reading {count_text(len(paths), 'shard')} without an index once, {size:,.1f} MiB",
        end=" ... ",
    )
    try:
        workers = default_workers()
        index = index_shards(
            paths, folder, source=INDEXED, members=fields, workers=workers, note=notes.append
        )
        seconds = time.monotonic() - began
        classes = count_text(len(index.class_names), "class", "classes")
        unlabelled = len(unlabelled_samples(ShardSource(index)))
        without = f", {unlabelled:,} without a label" if unlabelled else ""
        text = f"{count_text(index.num_samples, 'image')} of {classes}{without}, {seconds:.1f} s"
        end = "; ".join(filter(None, [text, *notes, class_zero_note(ShardSource(index))]))
    except DataError as error:
        if "--columns" in error.fix:
            raise
        path = paths[0] if len(paths) == 1 else Path(f"{paths[0].parent.resolve()}.tar")
        pack = "" if path in paths else f"tar -C {typed(paths[0].parent)} -cf {typed(path)} . && "
        shards = f"{path.with_suffix('')}-shards"
        command = f"{pack}vitctl data shards {typed(path)} {typed(shards)}"
        fix = _UNPACK if "uncompressed" in str(error) else f"if these are not shards, make some: `{command}`"
        raise DataError(error, fix=fix) from None
    finally:
        _show(end)


def _show(text: str, end: str = "\n") -> None:
    with suppress(OSError):  # a closed terminal must not stop the job
        print(text, end=end, file=sys.stderr, flush=True)


def _remote_splits(url: str, names: Sequence[str]) -> dict[str, SplitLocation]:
    """Locate splits at a URL, which is either a split folder or holds a folder for each split."""
    # Where a split below this URL is cached, the URL itself is not requested: offline the request would fail.
    if not any((_cached_index(f"{url}/{name}") / INDEX_FILE).exists() for name in names):
        try:
            return {url.rpartition("/")[2]: SplitLocation(_fetched_index(url), url)}
        except MissingError:
            pass
    found = {}
    for name in names:
        with suppress(MissingError):
            found[name] = SplitLocation(_fetched_index(f"{url}/{name}"), f"{url}/{name}")
    return found


def _fetched_index(url: str) -> Path:
    """Fetch the index of a remote split into the cache, once for all processes of a command on this node."""
    folder, start, asked = _cached_index(url), os.environ.get(START, ""), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / _LOCK) if os.access(folder, os.W_OK) else nullcontext():
        found = ""
        with suppress(DataError):
            found = read_bytes(folder / _ASKED, _MAX_ASKED_BYTES, error=DataError).decode(errors="replace")
        if start and found == f"{start} missing":
            raise MissingError(f"{url}/{INDEX_FILE}", "no such file on the server")
        if not start or found != start:
            try:
                _update_index(url, folder, asked, was_missing=found.endswith(" missing"))
                found = start
            except MissingError:
                found = f"{start} missing"
                raise
            finally:
                with suppress(OSError):
                    write_text(folder / _ASKED, found)
    return folder


def _update_index(url: str, folder: Path, since: float, *, was_missing: bool) -> None:
    """Fetch an index that is new or changed; `since` as for `transfer`.

    The tables of an unchanged index, which are large, are not fetched again; those of an incomplete or
    damaged copy are. If the server does not respond, the cached copy is used, with a warning; one that an
    earlier command found missing is still missing.
    """
    cached = b""
    with suppress(DataError):
        open_index(folder, url)
        cached = read_bytes(folder / INDEX_FILE, limits.INDEX, error=DataError)
    try:
        patience = FIRST_SECONDS if cached or was_missing else None
        text = read_file(f"{url}/{INDEX_FILE}", limits.INDEX, patience=patience, since=since)
        if text != cached:
            _fetch_index(url, folder, text)
    except GaveUpError as error:
        if was_missing:
            raise MissingError(url, "no such file when the server last answered") from None
        if not cached:
            raise
        print(f"warning: {one_line(str(error))}; the cached index is used", file=sys.stderr)


def _cached_index(name: str) -> Path:
    """Return the cache folder for an index, keyed by the address of its split or the state of its shards."""
    return cache_folder() / "splits" / hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _fetch_index(url: str, folder: Path, text: bytes) -> None:
    """Fetch the tables of an index; `index.json` is written last."""
    for name, max_bytes in table_limits(text).items():
        with atomic_write(folder / name) as aside, aside.open("wb") as file:
            try:
                transfer([Span(f"{url}/{name}", file=file)], max_bytes)
            except MissingError:  # else the split would count as missing
                what = f"is not on the server, but {INDEX_FILE} names it"
                raise DataError(f"{url}/{name}", what, "copy it there, or index the shards again") from None
    write_bytes(folder / INDEX_FILE, text)
