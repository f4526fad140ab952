"""Whether the shards and large tables that a run reads are, byte for byte, what their index says: found out beside it, each once."""

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
_REMOVED = " (a copy in the cache; it was removed and is fetched anew)"


class _File(NamedTuple):
    """A file that an index names with its digest; `is_kept` is a copy in the cache, which reading does not leave as it is."""

    path: str
    num_bytes: int
    sha256: str
    is_kept: bool = False


@dataclass(frozen=True)
class Verified:
    """How far it came.

    Args:
        share: of the bytes, 0 to 1, that are what the index says. Remote shards count when they are kept whole in the cache, which
            checks what it fetches; what it held before is read like a local shard. Read image by image they do not.
        damaged: "path: what is wrong" of every shard that is not, or that changed after it was read.
        num_unread: shards here that nothing is known of.
    """

    share: float
    damaged: tuple[str, ...]
    num_unread: int = 0


class Verification:
    """Holds the shards of some sources against their digests, in a process beside this one.

    What was found stays in RUN/verified/, so that a run that goes on does not begin again; a file that changed since is read again.

    Args:
        sources: whose shards are read; those without any count as nothing.
        folder: of the run, shared by all processes of it.
        part, num_parts: this process among those that share the work.
    """

    def __init__(self, sources: Sequence[Source], folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
        self._files, self._unread = _files(sources)
        self._fetched = {file.path for file in self._files if file.is_kept and not os.path.exists(file.path)}
        self._folder = folder / FOLDER
        self._changed_before = self._changed()
        known = {*self._records(), *self._fetched}
        todo = [
            file for number, file in enumerate(self._files) if number % num_parts == part and file.path not in known
        ]
        self._process = self._start(todo, f"part_{part}_of_{num_parts}.jsonl") if todo else None
        if self._process is not None:  # also when the job fails: nothing is left, not even a zombie
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
        ]  # by its path: none of our folders on sys.path
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.writelines(json.dumps(file) + "\n" for file in todo)
        return process

    def finish(self, seconds: float | None) -> None:
        """Wait until this process's part is done, at most so long (None: however long it takes); then stop."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """End it as it is."""
        self.finish(0)

    @property
    def is_of_nothing(self) -> bool:
        """Whether no source is stored in shards."""
        return not (self._files or self._unread)

    def found(self) -> Verified:
        """What all parts have found until now."""
        changed = {path: _CHANGED for path, *_ in self._changed() - self._changed_before}
        known = dict.fromkeys(self._fetched, "") | changed | self._records()
        good = sum(file.num_bytes for file in self._files if known.get(file.path) == "")
        total = self._unread + sum(file.num_bytes for file in self._files)
        damaged = tuple(
            f"{file.path}: {known[file.path]}{_REMOVED if file.is_kept else ''}"
            for file in self._files
            if known.get(file.path)
        )
        num_unread = sum(file.path not in known and not file.is_kept for file in self._files)
        return Verified(good / total if total else 1.0, damaged, num_unread)

    def _records(self) -> dict[str, str]:
        """Path -> problem of the files that were read, have not changed since, and are asked for with the same digest."""
        return {path: problem for path, problem, _ in self._read() if problem is not None}

    def _changed(self) -> set[tuple[str, str]]:
        """Paths of files that changed after they were read, with what was noted of them."""
        return {(path, noted) for path, problem, noted in self._read() if problem is None}

    def _read(self) -> Iterator[tuple[str, str | None, str]]:
        """Path, problem (None: it changed since) and line of every record that is asked for with the same digest."""
        wanted = {file.path: file for file in self._files}
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                text = read_bytes(path, RUN_FILE.limit, error=DataError).decode(errors="replace")
            except DataError:  # it is something else: all is read again
                continue
            for line in text.splitlines():
                # A torn line, or a file that is gone, is read again.
                with suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
                    record = json.loads(line)
                    file = wanted[record["path"]]
                    if file.sha256 == record["sha256"]:
                        yield file.path, str(record["problem"]) if _stands(record, file) else None, line


def _stands(record: Mapping[str, Any], file: _File) -> bool:
    """Whether a file is still the one that was read."""
    try:
        found = os.stat(file.path)
    except FileNotFoundError:  # dropped from the cache since: what is fetched in its place is checked there
        return file.is_kept
    # A copy that keeps the time of the file gives it a later ctime; so does whoever notes that it used a file of the cache.
    same = found.st_ino == record["inode"] and found.st_mtime_ns == record["mtime_ns"]
    return same and (file.is_kept or found.st_ctime_ns == record["ctime_ns"])


def _files(sources: Sequence[Source]) -> tuple[list[_File], int]:
    """Local shards, large tables and the places of shards in the cache, each once; and the bytes of shards that nobody checks."""
    files: dict[str, _File] = {}
    unread: dict[str, int] = {}
    for source, shards in (found for one in sources for found in _touched(one, None)):
        for name, noted in source.index.tables.items():
            if noted["num_bytes"] > tables.VERIFIED_ON_OPEN:
                path = os.path.abspath(source.index.folder / name)
                files[path] = _File(path, noted["num_bytes"], noted["sha256"])
        for number in shards:
            shard, address = source.index.shards[number], source.index.address(number)
            is_far = is_remote(address)
            if is_far and source.cache is None:
                unread[address] = shard.num_bytes
                continue
            path = os.path.abspath(source.cache.path(shard.sha256) if is_far and source.cache else address)
            files[path] = _File(path, shard.num_bytes, shard.sha256, is_far)
    return list(files.values()), sum(unread.values())


def _touched(source: Source, rows: np.ndarray | None) -> Iterator[tuple[ShardSource, list[int]]]:
    """The shards that hold some samples of a source, or all (None)."""
    match source:
        case ShardSource():
            ends = np.cumsum([shard.num_samples for shard in source.index.shards])
            every = range(len(ends)) if rows is None else np.unique(np.searchsorted(ends, rows, side="right")).tolist()
            yield source, list(every)
        case Subset():
            yield from _touched(source.source, source.rows if rows is None else source.rows[rows])
        case Relabelled():
            yield from _touched(source.source, rows)
        case Without():
            yield from _touched(source.source, None)
        case Concat():
            for part, begin in zip(source.parts, source.begins, strict=True):
                inside = None if rows is None else rows[(rows >= begin) & (rows < begin + len(part))] - begin
                if inside is None or len(inside):
                    yield from _touched(part, inside)


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """End a process and take it back; in a loader process, which has a copy of everything, nothing is done."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
