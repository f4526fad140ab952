"""Verify a run's shards and large tables against their index's digests, in the background, once each."""

import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitctl.data.shards import index as shard_index
from vitctl.data.source import hashing
from vitctl.data.source.views import Source, used_shards
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.files import file_state, open_regular, read_bytes
from vitctl.system.process import blocked_signals
from vitctl.system.remote import is_remote

FOLDER = "verified"
DataVerified = Literal[
    "whole", "part", "none", "damaged"
]  # how much of the data behind a result matches its digests
_RECORDED = ("path", "sha256", "inode", "mtime_ns", "ctime_ns", "problem")
_POLL_SECONDS = 2.0  # every poll asks for the state of every file
_CHANGED = "changed while it was in use"
_REMOVED = " (a copy in the cache; it was removed and is fetched again)"


class _File(NamedTuple):
    """A file with its digest from an index.

    `is_cached`: a copy in the cache, whose atime and ctime change when it is read.
    """

    path: str
    num_bytes: int
    sha256: str
    is_cached: bool = False

    def state(self) -> tuple[int, ...]:
        return file_state(self.path)[: 2 if self.is_cached else 3]

    def recorded_state(self, record: Mapping[str, Any]) -> tuple[int, ...]:
        return (record["inode"], record["mtime_ns"], *(() if self.is_cached else (record["ctime_ns"],)))


@dataclass(frozen=True)
class Verified:
    """The state of a verification.

    Args:
        share: fraction of the bytes that are verified, 0 to 1. Remote shards count if they are cached as
            complete files: the cache verifies what it fetches, and earlier cached files are read like local
            shards. Read image by image, they do not count.
        damaged: "path: problem" of every damaged shard, and of every shard that changed while it was in use.
        num_unread: shards on this machine that are not verified yet.
        damaged_before: "path: problem" of shards that were damaged in an earlier start of the run, and are
            intact now.
    """

    share: float
    damaged: tuple[str, ...]
    num_unread: int = 0
    damaged_before: tuple[str, ...] = ()

    @property
    def state(self) -> DataVerified:
        """The state in one word: "damaged" also if only some of the bytes are."""
        if self.damaged:
            return "damaged"
        return "whole" if self.share == 1 else "part" if self.share else "none"


class Verification:
    """Verifies the shards of some sources against their digests, in background processes.

    Results are stored in RUN/verified/, so that a resumed run continues; a file that changed is read again.

    Args:
        sources: their shards are verified in this order; sources without shards are ignored.
        part, num_parts: number of this process, and of processes that share the work.
    """

    def __init__(self, sources: Sequence[Source], folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
        self._folder, self._part, self._num_parts = folder / FOLDER, part, num_parts
        self._sources: list[Source] = []
        self._first: dict[str, tuple[int, ...]] = {}  # state of each file when it was added
        self._processes: list[subprocess.Popen[str]] = []
        self._here: list[dict[str, Any]] = []  # records that could not be kept in the folder
        self._before: list[dict[str, Any]] = []  # records of earlier starts of the run
        self._before = list(self._records())
        self.add(*sources)

    def add(self, *sources: Source) -> None:
        """Start to verify the shards of more sources; does nothing for shards that were added before."""
        self._sources += sources
        new = [file for file in _files(sources)[0] if file.path not in self._first]
        self._first |= {file.path: file.state() for file in new}
        known = self._known(new)
        todo = [file for file in new[self._part :: self._num_parts] if file.path not in known]
        if not todo:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        records = self._folder / f"part_{self._part}_of_{self._num_parts}.jsonl"
        if os.path.lexists(records):
            open_regular(records, error=DataError).close()
        # Run by path, so that sys.path stays unchanged.
        command = [sys.executable, "-I", hashing.__file__, str(records), str(os.getpid())]
        with blocked_signals():  # they stay blocked in the child: the job stops it
            process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.writelines(json.dumps(file) + "\n" for file in todo)
        self._processes.append(process)
        weakref.finalize(self, _end, process, os.getpid())  # leaves no process, even if the job fails

    def wait(self, *sources: Source) -> None:
        """Wait until the shards of some sources (default: all) are verified, or this process is done."""
        for process in self._processes:
            while process.poll() is None and self.found(*sources).num_unread:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)

    def complete(self, *sources: Source) -> None:
        """Verify here what no process recorded, because the disk was full or the folder removed.

        Call it after all processes have waited.
        """
        files, _ = _files(sources or self._sources)
        known = self._known(files)
        self._here += [
            hashing.hash_file(*file[:3])
            for file in files
            if file.path not in known and (file.state() or not file.is_cached)
        ]

    def finish(self, seconds: float | None) -> None:
        """Wait until this process's part is done, then stop; `seconds` is the timeout, None for no limit."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._processes:
            process = self._processes.pop()
            try:
                process.wait(None if end is None else max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def found(self, *sources: Source) -> Verified:
        """Return the results of all parts so far, for some of the added sources (default: all)."""
        files, unread = _files(sources or self._sources)
        known = self._known(files)
        good = sum(file.num_bytes for file in files if known.get(file.path) == "")
        total = unread + sum(file.num_bytes for file in files)
        damaged = tuple(
            f"{file.path}: {known[file.path]}{_REMOVED if file.is_cached else ''}"
            for file in files
            if known.get(file.path)
        )
        intact = {file.path: file.sha256 for file in files if not known.get(file.path)}
        before = {
            record["path"]: f"{record['path']}: was damaged before ({record['problem']})"
            for record in self._records()
            if record["problem"] and record["sha256"] == intact.get(record["path"])
        }
        num_unread = sum(file.path not in known for file in files)
        return Verified(good / total if total else 1.0, damaged, num_unread, tuple(before.values()))

    def _known(self, files: Sequence[_File]) -> dict[str, str]:
        """Return path -> problem, "" for none, of the files whose state is known."""
        records: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for record in self._records():
            records.setdefault((record["path"], record["sha256"]), []).append(record)
        return {
            file.path: problem
            for file in files
            if (problem := self._problem(file, records.get((file.path, file.sha256), ()))) is not None
        }

    def _problem(self, file: _File, records: Sequence[dict[str, Any]]) -> str | None:
        """Return the problem of a file by its records, "" for none; None while it is not verified."""
        for record in records:
            if record["problem"] and record not in self._before:
                return str(record["problem"])
        first, now = self._first[file.path], file.state()
        if file.is_cached and not first:
            return ""  # fetched later, and verified by the cache
        was_evicted = file.is_cached and now[:1] != first[:1]  # and possibly fetched again, which verifies it
        if first != now and not was_evicted:
            return _CHANGED
        verified = [str(record["problem"]) for record in records if file.recorded_state(record) == first]
        return verified[-1] if verified else None

    def _records(self) -> Iterator[dict[str, Any]]:
        yield from self._here
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                text = read_bytes(path, limits.RUN_FILE, error=DataError).decode(errors="replace")
            except DataError:  # not a record file: everything is verified again
                continue
            for line in text.splitlines():
                with suppress(ValueError, KeyError, TypeError, RecursionError):  # skip an incomplete line
                    record = json.loads(line)
                    names = {"path": str(record["path"]), "sha256": str(record["sha256"])}
                    yield {key: record[key] for key in _RECORDED} | names


def _files(sources: Sequence[Source]) -> tuple[list[_File], int]:
    """Return local shards, large tables and cached shards, each once, and the size of unverifiable shards."""
    files: dict[str, _File] = {}
    unread: dict[str, int] = {}
    for split, used in chain.from_iterable(map(used_shards, sources)):
        for name, recorded in split.index.tables.items():
            if recorded.num_bytes > shard_index.VERIFIED_ON_OPEN:
                path = os.path.abspath(split.index.folder / name)
                files[path] = _File(path, recorded.num_bytes, recorded.sha256)
        for number in used.tolist():
            shard, address = split.index.shards[number], split.index.address(number)
            is_far = is_remote(address)
            if is_far and split.cache is None:
                unread[address] = shard.num_bytes
                continue
            path = os.path.abspath(split.cache.path(shard.sha256) if is_far and split.cache else address)
            files[path] = _File(path, shard.num_bytes, shard.sha256, is_far)
    return list(files.values()), sum(unread.values())


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """Kill a process and wait for it; does nothing in a forked worker, which has a copy of this object."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
