"""Finds the splits that --data names: a folder, a URL, or shards by pattern, by list or by @file."""

import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from braceexpand import braceexpand

from vitctl.data.shards.index import INDEX_FILE, find_splits, read_index, table_limits
from vitctl.data.shards.remote import (
    MissingError,
    ShardCache,
    UnreachableError,
    bounded,
    check_address,
    is_remote,
    read_changed,
    read_file,
)
from vitctl.data.source.exclusion import read_exclusion, without_excluded
from vitctl.data.source.read import ShardSource, Source, Subset
from vitctl.data.source.unindexed import index_folder, index_list
from vitctl.errors import DataError
from vitctl.system.address import without_queries
from vitctl.system.bounds import INDEX, SHARD_LIST
from vitctl.system.files import atomic_write, cache_folder, read_bytes, write_bytes, write_text
from vitctl.system.text import nearest, one_line

_BRACES = re.compile(r"\{([^{}]*)\}")
_STRAY_BRACE = re.compile(r"\{[^}]*(\{|$)|(^|\})[^{]*\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})(\.\.[0-9]{1,18})?")
_MAX_NAMES = 10**6
_ETAG, _MAX_ETAG_BYTES = f"{INDEX_FILE}.etag", 1000
_LOOKED_FOR = ("train", "validation", "val", "test", "train800", "val200", "train800val200")


@dataclass(frozen=True)
class SplitLocation:
    """The location of a split.

    Args:
        folder: holds its index.
        base: URL of its shards when they are not in `folder`.
        shards: names of the selected shards; empty for all.
    """

    folder: Path
    base: str = ""
    shards: tuple[str, ...] = ()

    def open(self, cache_bytes: int) -> Source:
        """Open the split.

        Args:
            cache_bytes: size limit of the cache of remote shards; 0 reads single images without a cache.
        """
        index = read_index(self.folder, self.base)
        cache = (
            ShardCache(cache_folder() / "shards", cache_bytes) if index.is_remote and cache_bytes else None
        )
        source = ShardSource(index, cache)
        if not self.shards:
            return without_excluded(source)
        ends = np.cumsum([shard.num_samples for shard in index.shards])
        numbers = {shard.name: number for number, shard in enumerate(index.shards)}
        if missing := [name for name in self.shards if name not in numbers]:
            raise DataError(
                f"{self.base or self.folder}: {missing[0]} is not in the index ({len(missing)} shards "
                f"are not)"
            )
        chosen = [numbers[name] for name in self.shards]
        rows = np.concatenate(
            [np.arange(ends[number] - index.shards[number].num_samples, ends[number]) for number in chosen]
        )
        return Subset(source, rows[~np.isin(rows, read_exclusion(index))])


def locate_all_splits(text: str) -> dict[str, SplitLocation]:
    """All splits at a location, read as in `locate_splits`; shards without an index are not indexed.

    A URL cannot be listed, so common split names are tried there. A split of another name needs its own URL.

    Raises:
        DataError: as `locate_splits`; or there is no index.
    """
    (text,) = without_queries(text, error=DataError)
    found = locate_splits(text, "+".join(_LOOKED_FOR), makes_index=False)
    if found:
        return found
    if is_remote(text):
        raise DataError(
            f"{text}: no index.json there, nor in {', '.join(_LOOKED_FOR)}; give the address of a folder of "
            f"shards or of one split"
        )
    raise DataError(no_index_message(text))


def locate_splits(text: str, split: str, *, makes_index: bool = True) -> dict[str, SplitLocation]:
    """Find splits at a location: split name to location; empty when there is no index.

    Local shards without an index are indexed first, with a message on stderr; see unindexed.py.

    Args:
        text: a local folder of shards or of splits; the URL of one; shards as `train/{000..127}.tar`, joined
            by commas, or in a text file as `@shards.txt`; local ones also as `train/*.tar`.
        split: the split expression; a URL cannot be listed, so its splits are requested by name.
        makes_index: index local shards that have no index.

    Raises:
        DataError: the text is malformed, a URL is refused or cannot be read.
    """
    (text,) = without_queries(text, error=DataError)
    if (
        not text.startswith("@")
        and not _BRACES.search(text)
        and "," not in text
        and not text.endswith(".tar")
    ):
        if not is_remote(text):
            if makes_index:
                index_folder(Path(text), _names(split))
            return {name: SplitLocation(folder) for name, folder in find_splits(Path(text)).items()}
        return _remote_splits(text.rstrip("/"), split)
    shards = expand(text)
    folders = {shard.rpartition("/")[0] for shard in shards}
    if len(folders) != 1 or not all(shard.endswith(".tar") for shard in shards):
        raise DataError(
            f"{text}: names {len(shards)} files in {len(folders)} folders, should be the .tar shards of "
            f"one split"
        )
    (folder,) = folders
    found = locate_splits(folder or ".", split, makes_index=False)
    if not found and makes_index and not is_remote(text) and all(map(os.path.exists, shards)):
        return {Path(folder).resolve().name: SplitLocation(index_list([Path(shard) for shard in shards]))}
    if len(found) != 1:
        raise DataError(
            f"{folder}: no index.json beside these shards; write one with `vitctl data index '{text}' "
            f"--out FOLDER`"
        )
    names = tuple(shard.rpartition("/")[2] for shard in shards)
    return {name: SplitLocation(place.folder, place.base, names) for name, place in found.items()}


def no_index_message(path: str, split: str = "train") -> str:
    """The error message for a location without an index, and how to fix it, in one line."""
    if is_remote(path):
        return f"{path}: neither index.json nor {split}/index.json there; `vitctl data index URL... --out FOLDER` writes one"
    if not Path(path).exists():
        near = nearest(Path(path).name, _neighbours(Path(path)), 1)
        return f"{path}: no such folder{f'; did you mean {Path(path).parent / near[0]}?' if near else ''}"
    if Path(path).is_dir() and not any(Path(path).iterdir()):
        return f"{path}: is empty; should be a folder of shards made by `vitctl data shards`"
    shard = next(Path(path).rglob("*.tar"), None)
    if Path(path).is_dir() and shard is None:
        out = f"{path.rstrip('/')}-shards"
        return (
            f"{path}: holds files and no shards; make them with `vitctl data shards {path} {out}`, then type "
            f"the same line with "
            f"--data {out}"
        )
    return (
        f"{path}: no shards with an index here; make them with `vitctl data shards SOURCE {path}`, "
        f"or index those you have with `vitctl data index {shard.parent if shard else path}`"
    )


def _neighbours(path: Path) -> list[str]:
    try:
        return [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        return []


def expand(text: str) -> list[str]:
    """Expand a pattern, a list or an @file to names, in order.

    Raises:
        DataError: braces are malformed, no file matches, the list cannot be read, or it is more than a
            million names.
    """
    names: list[str] = []
    (text,) = without_queries(text, error=DataError)
    for name in _parts(text):
        for expanded in _expand_braces(name):
            names += _matching(expanded)
            if len(names) > _MAX_NAMES:
                raise DataError(f"{text[:80]}: more than {_MAX_NAMES:,} names")
    if not names:
        raise DataError(f"{text}: names nothing")
    return names


def _matching(name: str) -> list[str]:
    """The local files that a pattern with *, ? or [ matches, in order; any other name as it is."""
    if is_remote(name) or glob.escape(name) == name or os.path.lexists(name):
        return [name]
    if not (found := sorted(glob.glob(name))):
        raise DataError(f"{name}: no file matches this pattern")
    return found


def _parts(text: str) -> Iterator[str]:
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            lines = read_bytes(path, SHARD_LIST.limit, error=DataError).decode().splitlines()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: cannot be read ({error}); should be a text file with a shard per line"
            ) from None
        names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        yield from without_queries(*names, error=DataError, over=False)
        return
    yield from (part.strip() for part in re.split(r",(?![^{]*\})", text) if part.strip())


def _expand_braces(text: str) -> Iterator[str]:
    """Expand with the package braceexpand, as webdataset does.

    Patterns that it would not expand, or too many names, are refused.
    """
    choices = _BRACES.findall(text)
    for inside in choices:
        span = _RANGE.fullmatch(inside)
        if span is None and "," not in inside:
            raise DataError(
                f"{text[:80]}: '{{{inside[:80]}}}' should be a range as {{000..127}} or a choice as {{a,b}}"
            )
        if len(choices) >= _MAX_NAMES.bit_length() or (
            span and abs(int(span[2]) - int(span[1])) >= _MAX_NAMES
        ):
            raise DataError(f"{text[:80]}: more than {_MAX_NAMES:,} names")
    if not choices:
        return iter((text,))
    if _STRAY_BRACE.search(text):
        raise DataError(
            f"{text[:80]}: braces within braces, or one that is not closed; list the names in @FILE"
        )
    return braceexpand(text, escape=False)


def _names(split: str) -> list[str]:
    """The splits that an expression names."""
    return list(dict.fromkeys(part.split("[")[0].strip() for part in split.split("+")))


def _remote_splits(url: str, split: str) -> dict[str, SplitLocation]:
    """The splits at a URL, which is a split folder itself, or holds a folder for each split."""
    url = check_address(url)
    names = _names(split)
    # Where a split below this URL is cached, the URL itself is not requested: offline the request would fail.
    if not any((_copy(f"{url}/{name}") / INDEX_FILE).exists() for name in names):
        try:
            return {url.rpartition("/")[2]: SplitLocation(_fetched_index(url), url)}
        except MissingError:
            pass
    found = {}
    for name in names:
        try:
            found[name] = SplitLocation(_fetched_index(f"{url}/{name}"), f"{url}/{name}")
        except MissingError:
            continue
    return found


def _fetched_index(url: str) -> Path:
    """Fetch the index of a remote split into the cache; `index.json` is written last.

    A cached index is revalidated by its ETag, so that an unchanged index takes one short response. An
    incomplete copy is fetched again. Where the server does not respond, the cached copy is used, with a
    warning.
    """
    folder = _copy(url)
    cached = _cached_index(folder, url)
    try:
        if cached is None:
            _fetch_index(url, folder, read_file(f"{url}/{INDEX_FILE}", INDEX.limit))
        else:
            _revalidate(url, folder, cached)
    except UnreachableError as error:
        print(f"warning: {one_line(str(error))}; the cached index is used", file=sys.stderr)
    return folder


def _copy(url: str) -> Path:
    """The cache folder for the index of a split."""
    return cache_folder() / "splits" / hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _cached_index(folder: Path, url: str) -> bytes | None:
    """The cached `index.json`, when it and its tables are valid."""
    try:
        read_index(folder, url)
        return read_bytes(folder / INDEX_FILE, INDEX.limit, error=DataError)
    except DataError:
        return None


def _revalidate(url: str, folder: Path, cached: bytes) -> None:
    """Fetch the index again where it has changed since it was cached."""
    index = read_changed(f"{url}/{INDEX_FILE}", INDEX.limit, _etag(folder))
    if index is not None and index[0] != cached:
        _fetch_index(url, folder, *index)
        return
    if index is not None:
        with suppress(OSError):  # owned by another user: reading is enough
            write_text(folder / _ETAG, index[1])


def _fetch_index(url: str, folder: Path, text: bytes, etag: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, max_bytes in table_limits(text).items():
        with atomic_write(folder / name) as aside, aside.open("wb") as file:
            file.writelines(bounded(f"{url}/{name}", max_bytes))
    write_bytes(folder / INDEX_FILE, text)
    write_text(folder / _ETAG, etag)


def _etag(folder: Path) -> str:
    try:
        return read_bytes(folder / _ETAG, _MAX_ETAG_BYTES, error=DataError).decode("ascii", "ignore").strip()
    except DataError:
        return ""
