"""Verification of the shards and large tables of a run against the digests in their index, in the background, each file once."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitctl.data.shards import tables
from vitctl.data.shards.remote import is_remote
from vitctl.data.source import hashing
from vitctl.data.source.exclusion import Without
from vitctl.data.source.read import Concat, ShardSource, Source, Subset
from vitctl.data.source.subsets import Relabelled
from vitctl.errors import DataError
from vitctl.system.bounds import RUN_FILE
from vitctl.system.files import open_regular, read_bytes

FOLDER = "verified"
_CHANGED = "changed after it was verified, while it was in use"
_REMOVED = " (a copy in the cache; it was removed and is fetched again)"


class _File(NamedTuple):
    """A file with its digest from an index. `is_cached`: a copy in the cache, whose atime and ctime change when it is read."""

    path: str
    num_bytes: int
    sha256: str
    is_cached: bool = False


@dataclass(frozen=True)
class Verified:
    """The state of a verification.

    Args:
        share: fraction of the bytes that are verified, 0 to 1. Remote shards count when they are cached as whole files: the cache
            verifies what it fetches, and files cached before are read like local shards. Read image by image, they do not count.
        damaged: "path: problem" of every damaged shard, and of every shard that changed after it was verified.
        num_unread: local shards that are not verified yet.
    """

    share: float
    damaged: tuple[str, ...]
    num_unread: int = 0


class Verification:
    """Verifies the shards of some sources against their digests, in a background process.

    Results are stored in RUN/verified/, so that a resumed run continues; a file that changed since is read again.

    Args:
        sources: whose shards are verified; sources without shards are ignored.
        folder: of the run, shared by all its processes.
        part, num_parts: number of this process, and of processes that share the work.
    """

    def __init__(self, sources: Sequence[Source], folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
        self._files, self._unread = _files(sources)
        self._fetched = {file.path for file in self._files if file.is_cached and not os.path.exists(file.path)}
        self._folder = folder / FOLDER
        self._changed_before = self._changed()
        known = {*self._records(), *self._fetched}
        todo = [
            file for number, file in enumerate(self._files) if number % num_parts == part and file.path not in known
        ]
        self._process = self._start(todo, f"part_{part}_of_{num_parts}.jsonl") if todo else None
        if self._process is not None:  # also when the job fails: no process is left, not even a zombie
            weakref.finalize(self, _end, self._process, os.getpid())

    def _start(self, todo: Sequence[_File], name: str) -> subprocess.Popen[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self._folder / name):
            open_regular(self._folder / name, error=DataError).close()
        records, parent = str(self._folder / name), str(os.getpid())
        command = [
            sys.executable,
            "-I",
            hashing.__file__,
            records,
            parent,
        ]  # run by path, so that sys.path stays unchanged
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.writelines(json.dumps(file) + "\n" for file in todo)
        return process

    def finish(self, seconds: float | None) -> None:
        """Wait until the part of this process is done, then stop.

        Args:
            seconds: timeout; None for no timeout.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stop at once."""
        self.finish(0)

    @property
    def is_empty(self) -> bool:
        """Whether no source has shards."""
        return not (self._files or self._unread)

    def found(self) -> Verified:
        """The results of all parts so far."""
        changed = {path: _CHANGED for path, *_ in self._changed() - self._changed_before}
        known = dict.fromkeys(self._fetched, "") | changed | self._records()
        good = sum(file.num_bytes for file in self._files if known.get(file.path) == "")
        total = self._unread + sum(file.num_bytes for file in self._files)
        damaged = tuple(
            f"{file.path}: {known[file.path]}{_REMOVED if file.is_cached else ''}"
            for file in self._files
            if known.get(file.path)
        )
        num_unread = sum(file.path not in known and not file.is_cached for file in self._files)
        return Verified(good / total if total else 1.0, damaged, num_unread)

    def _records(self) -> dict[str, str]:
        """Path -> problem of the files that were verified against the same digest and have not changed since."""
        return {path: problem for path, problem, _ in self._read() if problem is not None}

    def _changed(self) -> set[tuple[str, str]]:
        """Paths of files that changed after they were verified, with their records."""
        return {(path, record) for path, problem, record in self._read() if problem is None}

    def _read(self) -> Iterator[tuple[str, str | None, str]]:
        """Path, problem (None: it changed since) and line of every record with the expected digest."""
        wanted = {file.path: file for file in self._files}
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                text = read_bytes(path, RUN_FILE.limit, error=DataError).decode(errors="replace")
            except DataError:  # not a record file: everything is verified again
                continue
            for line in text.splitlines():
                # An incomplete line is skipped, and so is a file that no longer exists.
                with suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
                    record = json.loads(line)
                    file = wanted[record["path"]]
                    if file.sha256 == record["sha256"]:
                        yield file.path, str(record["problem"]) if _is_unchanged(record, file) else None, line


def _is_unchanged(record: Mapping[str, Any], file: _File) -> bool:
    """Whether a file is unchanged since it was verified."""
    try:
        found = os.stat(file.path)
    except FileNotFoundError:  # evicted from the cache since; a new copy is verified when it is fetched
        return file.is_cached
    # Copying with preserved mtime gives a later ctime; so does marking a cached file as recently used.
    same = found.st_ino == record["inode"] and found.st_mtime_ns == record["mtime_ns"]
    return same and (file.is_cached or found.st_ctime_ns == record["ctime_ns"])


def _files(sources: Sequence[Source]) -> tuple[list[_File], int]:
    """Local shards, large tables and cached shards, each once; and the total size of shards that cannot be verified."""
    files: dict[str, _File] = {}
    unread: dict[str, int] = {}
    for source, shards in (found for one in sources for found in _shards_read(one, None)):
        for name, recorded in source.index.tables.items():
            if recorded["num_bytes"] > tables.VERIFIED_ON_OPEN:
                path = os.path.abspath(source.index.folder / name)
                files[path] = _File(path, recorded["num_bytes"], recorded["sha256"])
        for number in shards:
            shard, address = source.index.shards[number], source.index.address(number)
            is_far = is_remote(address)
            if is_far and source.cache is None:
                unread[address] = shard.num_bytes
                continue
            path = os.path.abspath(source.cache.path(shard.sha256) if is_far and source.cache else address)
            files[path] = _File(path, shard.num_bytes, shard.sha256, is_far)
    return list(files.values()), sum(unread.values())


def _shards_read(source: Source, rows: np.ndarray | None) -> Iterator[tuple[ShardSource, list[int]]]:
    """The shards that hold the given samples of a source (None: all samples)."""
    match source:
        case ShardSource():
            ends = np.cumsum([shard.num_samples for shard in source.index.shards])
            every = range(len(ends)) if rows is None else np.unique(np.searchsorted(ends, rows, side="right")).tolist()
            yield source, list(every)
        case Subset():
            yield from _shards_read(source.source, source.rows if rows is None else source.rows[rows])
        case Relabelled():
            yield from _shards_read(source.source, rows)
        case Without():
            yield from _shards_read(source.source, None)
        case Concat():
            for part, begin in zip(source.parts, source.begins, strict=True):
                inside = None if rows is None else rows[(rows >= begin) & (rows < begin + len(part))] - begin
                if inside is None or len(inside):
                    yield from _shards_read(part, inside)


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """Kill a process and wait for it; does nothing in a forked worker, which has a copy of this object."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
