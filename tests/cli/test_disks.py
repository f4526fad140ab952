"""Every command that writes: on a real disk that is full, on one that may not be written, and on one that
lacks what network mounts lack.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitctl as vitctl_package
from tests.cli.conftest import Vitctl
from tests.matrix import few, slow
from tests.trained import TINY

COMMANDS = {
    "data shards": "data shards photos disk/out --workers 0",
    "data show": "data show shards disk/sheet.png",
    "data dedup": "data dedup shards/train --against shards/test --report disk/report --workers 0",
    "pretrain": f"pretrain -r {TINY} --data shards --out disk/run --set schedule.total_steps=2 --set "
    f"schedule.warmup_steps=1",
    "evaluate": "evaluate --from run --data shards --out disk/score",
    "export": "export --from run --to safetensors --out disk/file",
    "sweep": f"sweep {TINY} --data shards --grid seed=0,1 --out disk/sweep",
    "quickstart": "quickstart --out disk/quick",
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("a disk can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "full").open("wb") as file, suppress(OSError):
        while os.write(file.fileno(), bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free == 0


@pytest.mark.parametrize("command", few([*COMMANDS], "data shards", "pretrain", "export"))
@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_disk_that_takes_nothing_is_one_line(
    vitctl: Vitctl, disk: Path, tiny_data: Path, pretrained: Path, tmp_path: Path, state: str, command: str
) -> None:
    shutil.copytree(tiny_data, tmp_path / "shards")
    (tmp_path / "run").symlink_to(pretrained)
    for name, colour in (("cat", 0), ("dog", 255)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), colour, np.uint8)).save(tmp_path / "photos" / name / "0.png")
    fill(disk)
    if state == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    words = COMMANDS[command].split()
    said = vitctl(*words, *(() if words[0] in ("data", "quickstart") else ("--set", "machine.workers=0")))
    assert (said.code, "Traceback" in said.err) == (2, False), said
    [line] = [
        line for line in said.err.splitlines() if line.startswith("vitctl: ")
    ]  # a sweep tells of each run below it
    assert "this is a bug" not in line and "disk" in said.err
    if state == "read-only":
        assert [path.name for path in disk.iterdir()] == ["full"]


def lacking(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Let no disk fsync a folder, set modes, lock, map files or tell its space."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refuse()

    for module, name in ((os, "chmod"), (os, "utime"), (fcntl, "flock"), (fcntl, "lockf")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(np.memmap, "__new__", refuse)
    usage = shutil._ntuple_diskusage(0, 0, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        *((name, errno.ENOSYS) for name in ("data shards", "data show", "pretrain")),
        *slow(*((name, errno.ENOSYS) for name in ("data dedup", "evaluate", "export", "sweep"))),
        *slow(*(("pretrain", code) for code in (errno.EINVAL, errno.EBADF, errno.ENOLCK, errno.EPERM))),
    ],
)
def test_what_a_disk_does_not_offer_is_no_error(
    vitctl: Vitctl,
    tiny_data: Path,
    pretrained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    code: int,
) -> None:
    (tmp_path / "disk").mkdir()
    shutil.copytree(tiny_data, tmp_path / "shards")
    (tmp_path / "run").symlink_to(pretrained)
    for name, colour in (("cat", 0), ("dog", 255)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), colour, np.uint8)).save(tmp_path / "photos" / name / "0.png")
    lacking(monkeypatch, code)
    words = COMMANDS[command].split()
    said = vitctl(*words, *(() if words[0] == "data" else ("--set", "machine.workers=0")))
    assert said.code == 0, said
    assert ("no locks; start no second vitctl" in said.err) == (words[0] != "data"), said.err


def test_no_module_asks_a_disk_for_more_than_it_may_offer() -> None:
    """All but one go through `vitctl.system.files`, which knows what disks lack."""
    package = Path(vitctl_package.__file__).parent
    asking = re.compile(r"os\.f?chmod\(|\.chmod\(|os\.fsync\(|fcntl\.(flock|lockf)\b|disk_usage\(|statvfs\(")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if asking.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"system/files.py", "system/process.py"}  # the latter locks its own memory
