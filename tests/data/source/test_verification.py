"""Shards are held against their digests beside the run: each once, by one process, and what could not be is
said.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import damage
from tests.data.server import Faults, serving
from vitctl.data.shards.cache import ShardCache
from vitctl.data.shards.index import Index, read_index
from vitctl.data.source import hashing
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.data.source.verification import FOLDER, Verification, Verified
from vitctl.data.source.views import Source, concat, of_classes, subset
from vitctl.errors import DataError
from vitctl.system.process import SIGNALS

MakeSplit = Callable[..., Index]


def verified(folder: Path, *sources: Source, num_parts: int = 1) -> Verified:
    parts = [Verification(sources, folder, part=part, num_parts=num_parts) for part in range(num_parts)]
    for part in parts:
        part.finish(60)
    return parts[0].found()


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in (folder / FOLDER).iterdir() for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line]


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_verification__each_shard_once_by_one_of_the_processes(
    make_split: MakeSplit, tmp_path: Path, num_parts: int
) -> None:
    source = ShardSource(make_split(20))
    assert verified(tmp_path / "run", source, source, num_parts=num_parts) == Verified(1.0, ())
    assert sorted(Path(one["path"]).name for one in records(tmp_path / "run")) == [
        s.name for s in source.index.shards
    ]


def test_verification__one_damaged_byte_is_named(make_split: MakeSplit, tmp_path: Path, capfd: Any) -> None:
    source = ShardSource(make_split(20))
    path = source.index.folder / source.index.shards[1].name
    damage(path)
    found = verified(tmp_path / "run", source)
    (problem,) = found.damaged
    assert problem.startswith(f"{path}: checksum mismatch") and "index has" in problem
    whole = sum(shard.num_bytes for shard in source.index.shards)
    assert found.share == pytest.approx(1 - source.index.shards[1].num_bytes / whole)
    assert f"warning: {path}: checksum mismatch" in capfd.readouterr().err


def test_verification__goes_on_where_a_run_was_stopped_and_reads_again_what_changed(
    make_split: MakeSplit, tmp_path: Path
) -> None:
    source = ShardSource(make_split(20))
    assert verified(tmp_path / "run", source).share == 1
    assert verified(tmp_path / "run", source).share == 1
    assert len(records(tmp_path / "run")) == 3
    path = source.index.folder / source.index.shards[0].name
    os.utime(path, ns=(1, 1))
    assert verified(tmp_path / "run", source).share == 1
    assert len(records(tmp_path / "run")) == 4
    (file,) = (tmp_path / "run" / FOLDER).iterdir()
    file.write_text(file.read_text()[:-9])  # torn by a crash
    assert verified(tmp_path / "run", source).share == 1


def test_verification__only_of_the_shards_that_hold_the_samples(
    make_split: MakeSplit, tmp_path: Path
) -> None:
    source = ShardSource(make_split(20))
    ends = np.cumsum([shard.num_samples for shard in source.index.shards])
    last = subset(source, np.arange(ends[1], ends[2]))
    views: dict[str, tuple[Source, set[int]]] = {
        "subset": (last, {2}),
        "of a subset": (subset(last, np.array([1])), {2}),
        "of classes": (of_classes(last, ("a", "b")), {2}),
        "joined": (concat((last, subset(source, np.array([0])))), {0, 2}),
        "of joined": (subset(concat((last, source)), np.array([0, len(last) + int(ends[0])])), {1, 2}),
    }
    for name, (view, shards) in views.items():
        assert verified(tmp_path / name, view).share == 1
        assert {Path(one["path"]).name for one in records(tmp_path / name)} == {
            source.index.shards[n].name for n in shards
        }
    assert verified(tmp_path / "none", SyntheticSource(4, 2, 8)) == Verified(1.0, ())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("is_cached", "share"), [(False, 0.0), (True, 1.0)])
def test_verification__remote_shards_count_where_the_cache_checks_them(
    make_split: MakeSplit, tmp_path: Path, is_cached: bool, share: float
) -> None:
    index = make_split(20)
    with serving(index.folder, Faults()) as url:
        cache = ShardCache(tmp_path / "cache", 2**30) if is_cached else None
        assert verified(tmp_path / "run", ShardSource(read_index(index.folder, url), cache)) == Verified(
            share, ()
        )
    assert not (tmp_path / "run" / FOLDER).exists()


def test_verification__a_shard_that_changes_and_is_put_back_while_it_is_in_use(
    make_split: MakeSplit, tmp_path: Path
) -> None:
    """Its images may have been decoded in between."""
    source = ShardSource(make_split(20))
    path = source.index.folder / source.index.shards[1].name
    content = path.read_bytes()
    assert verified(tmp_path / "run", source).state == "whole"
    begun = Verification([source], tmp_path / "run")
    damage(path)
    path.write_bytes(content)
    begun.wait()
    assert begun.found().damaged == (f"{path}: changed while it was in use",)
    assert verified(tmp_path / "run", source).state == "whole"


def test_verification__of_some_of_its_sources_and_of_one_added_later(
    make_split: MakeSplit, tmp_path: Path
) -> None:
    source = ShardSource(make_split(20))
    ends = np.cumsum([shard.num_samples for shard in source.index.shards])
    parts = [subset(source, np.array([end - 1])) for end in ends]
    damage(source.index.folder / source.index.shards[1].name)
    begun = Verification(parts[:2], tmp_path / "run")
    begun.add(parts[2])
    begun.finish(60)
    assert [begun.found(part).state for part in parts] == ["whole", "damaged", "whole"]
    assert begun.found().state == "damaged"


def test_verification__remembers_that_a_shard_was_damaged(make_split: MakeSplit, tmp_path: Path) -> None:
    source = ShardSource(make_split(20))
    path = source.index.folder / source.index.shards[1].name
    content = path.read_bytes()
    damage(path)
    assert verified(tmp_path / "run", source).state == "damaged"
    path.write_bytes(content)
    found = verified(tmp_path / "run", source)
    assert found.state == "whole"
    (before,) = found.damaged_before
    assert before.startswith(f"{path}: was damaged before (checksum mismatch")


def test_verification__stops_when_told_and_says_how_far_it_came(
    make_split: MakeSplit, tmp_path: Path
) -> None:
    source = ShardSource(make_split(20))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # a disk that answers never
    path = source.index.folder / source.index.shards[1].name
    path.unlink()
    path.symlink_to(fifo)
    begun = Verification([source], tmp_path / "run")
    until = time.monotonic() + 20
    while begun.found().share == 0 and time.monotonic() < until:
        time.sleep(0.02)
    begun.finish(0)
    first, whole = source.index.shards[0].num_bytes, sum(shard.num_bytes for shard in source.index.shards)
    assert begun.found() == Verified(first / whole, (), num_unread=2)


@pytest.mark.parametrize("what", ["a FIFO", "a device", "a folder"])
def test_verification__something_else_in_place_of_its_records(
    make_split: MakeSplit, tmp_path: Path, what: str
) -> None:
    """It was waited for, for ever."""
    source, place = ShardSource(make_split(20)), tmp_path / "run" / FOLDER / "part_0_of_1.jsonl"
    place.parent.mkdir(parents=True)
    {"a FIFO": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero"), "a folder": Path.mkdir}[
        what
    ](place)  # type: ignore[operator]
    with pytest.raises(DataError, match=rf"part_0_of_1.jsonl: is {what}, should be a file"):
        verified(tmp_path / "run", source)
    place.rename(place.with_name("of_another.jsonl"))
    assert verified(tmp_path / "run", source) == Verified(1.0, ())


def test_hashing__takes_no_signal_from_its_first_moment(
    make_split: MakeSplit, tmp_path: Path, capfd: Any
) -> None:
    """Ctrl-C at the start of a run printed the traceback of this process, which then verified nothing."""
    source = ShardSource(make_split(3))
    verification = Verification([source], tmp_path / "run")
    for number in SIGNALS:
        verification._processes[0].send_signal(number)
    verification.wait()
    assert verification.found(source) == Verified(1.0, ())
    assert capfd.readouterr().err == ""


def test_hashing__ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed cannot tell it; it looks."""
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(64 << 30)  # sparse: a minute of work
    script = (
        "import subprocess, sys, os, signal, json\n"
        f"command = [sys.executable, '-I', {hashing.__file__!r}, {str(tmp_path / 'out')!r}, "
        f"str(os.getpid())]\n"
        "p = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
        f"p.stdin.write(json.dumps([{str(big)!r}, 1, 'x', False]).encode() + b'\\n'); p.stdin.close()\n"
        "print(p.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    pid, until = int(done.stdout), time.monotonic() + 20
    while _is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_hash_file__tells_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    good = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, its first example
    problems: Sequence[object] = [
        hashing.hash_file(str(tmp_path / name), size, digest)["problem"]
        for name, size, digest in (("a", 3, good), ("a", 4, good), ("a", 3, "0" * 64), ("b", 3, good))
    ]
    assert problems[0] == ""
    assert all("file has ba7816bf8f01" in str(problem) for problem in problems[1:3])
    assert problems[3] == "cannot be read (No such file or directory)"
