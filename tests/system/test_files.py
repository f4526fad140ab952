"""Files of ours are whole, files of others are bounded."""

import errno
import fcntl
import math
import os
import re
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.matrix import each
from vitctl.errors import CheckpointError, DataError, LaunchError, explaining
from vitctl.system.files import (
    atomic_write,
    flush,
    free_bytes,
    inside,
    lock,
    locked,
    open_lock,
    open_regular,
    opened_folder,
    read_bytes,
    read_json,
    read_toml,
    sweep,
    write_json,
    write_text,
)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(OSError, match="disk"), atomic_write(path) as aside:
        _fill_the_disk(aside)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]


def _fill_the_disk(aside: Path) -> None:
    aside.write_text("half")
    raise OSError("disk full")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_rights_are_the_umasks_whatever_wrote_it(tmp_path: Path, umask: int) -> None:
    import numpy as np

    before = os.umask(umask)
    try:
        with atomic_write(tmp_path / "w.safetensors") as aside:
            save_file({"a": np.zeros(2, np.float32)}, aside)
        write_text(tmp_path / "t.txt", "t")
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_link_of_others_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / f".a.txt.{os.getpid()}.partial").symlink_to(victim)
    write_text(tmp_path / "a.txt", "ours")
    assert victim.read_text() == "untouched" and (tmp_path / "a.txt").read_text() == "ours"
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        open_lock(tmp_path / "lock")


def test_a_lock_file_is_made_and_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    open_lock(path).close()
    path.write_bytes(b"kept")
    open_lock(path).close()
    assert path.read_bytes() == b"kept"


def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the path of a socket is bounded
        server.bind("socket")
    for path, words in (
        (tmp_path / "fifo", "a FIFO"),
        (tmp_path, "a folder"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(DataError, match=f"is {words}, should be a file"):
            open_regular(path, error=DataError)
    with pytest.raises(DataError, match="cannot be read"):
        open_regular(tmp_path / "socket", error=DataError)
    with pytest.raises(CheckpointError, match="No such file"):
        open_regular(tmp_path / "none", error=CheckpointError)


def test_reading_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5, error=DataError) == b"12345"
    with pytest.raises(DataError, match="larger than 4, the limit"):
        read_bytes(tmp_path / "a", 4, error=DataError)


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe", b"[1, NaN]", b"[Infinity]", b"[" * 100_000, b"", b"1" * 5000]
)
def test_what_is_not_json_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match="not JSON") as caught:
        read_json(tmp_path / "a.json", 10**6, error=DataError)
    assert "\n" not in str(caught.value)


def test_json_is_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2.5, "ü", None]})
    assert read_json(tmp_path / "a.json", 1000, error=DataError) == {"b": [1, 2.5, "ü", None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"b": float("nan")})


@given(st.text(alphabet=st.sampled_from("ab./\\~-\0\n \u202eé"), max_size=12), st.text(max_size=300))
def test_inside__is_one_part_below_the_folder_or_refused(short: str, long: str) -> None:
    folder = Path("/out/here")
    for name in (short, long):
        try:
            path = inside(folder, name, error=DataError)
        except DataError:
            continue
        assert path.parent == folder and Path(os.path.normpath(path)) == path and path.name == name
        assert len(os.fsencode(name)) < 255 and "\0" not in name


@each("name", ["a", "val", "fold 2", "résumé", "-", ".git", "a..b", "~", "x" * 240])
def test_inside__takes_plain_names(name: str) -> None:
    assert inside(Path("out"), "b", name, error=DataError) == Path("out/b") / name


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize(("module", "name"), [(os, "fsync"), (os, "chmod"), (fcntl, "flock")])
def test_a_failing_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught, locked(tmp_path / "lock"):
        write_text(tmp_path / "a.txt", "new")
    assert caught.value.errno == code and not (tmp_path / "a.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_atomic_write__never_replaces_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="is not a regular file"):
            write_text(path, "new")
    assert (tmp_path / "pipe").is_fifo() and Path("/dev/null").is_char_device()


def test_unknown_space_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for total, expected in ((0, math.inf), (10**6, 0)):
        usage = shutil._ntuple_diskusage(total, total, 0)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert free_bytes(tmp_path) == expected


def test_a_lock_is_ours_or_of_another_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_lock(tmp_path / "lock") as one, open_lock(tmp_path / "lock") as two:
        assert (lock(one.fileno()), lock(two.fileno())) == (True, False)

        def lack(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", lack)
        assert lock(two.fileno()) is None


def test_temporary_files_of_killed_processes_are_swept(tmp_path: Path) -> None:
    """Those of living processes stay, and young ones, which another machine may be writing."""
    dead = max(psutil.pids()) + 10_000_000
    kept = {
        f".a.txt.{os.getppid()}.partial",
        f".a.txt.{dead}.partial",
        f".b.txt.{dead}.partial",
        ".c.partial",
    }
    for name in (*kept, f".a.txt.{dead + 1}.partial"):
        (tmp_path / name).touch()
        if name != f".a.txt.{dead}.partial":
            os.utime(tmp_path / name, (0, 0))
    write_text(tmp_path / "a.txt", "new")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "a.txt"}
    sweep(tmp_path, seconds=0)
    assert {path.name for path in tmp_path.iterdir()} == {
        f".a.txt.{os.getppid()}.partial",
        ".c.partial",
        "a.txt",
    }


def test_read_toml__with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("\ufeffseed = 3\n")
    assert read_toml(tmp_path / "a.toml", error=DataError) == ({"seed": 3}, "seed = 3\n")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EISDIR])
def test_opened_folder__of_a_disk_that_opens_none_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(path: str, *_: object) -> int:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "open", refuse)
    flush(tmp_path)  # such a disk keeps nothing of a folder to flush
    words = "this file system cannot do that; choose a local disk"
    with pytest.raises(LaunchError, match=words), explaining(tmp_path), opened_folder(tmp_path):
        raise AssertionError("was opened")
