"""What the operating system refuses, in one line; what nobody foresaw stays a bug."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from vitctl.errors import DataError, LaunchError, VitctlError, explained, writing
from vitctl.system.pool import run_tasks


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EIO, errno.ENAMETOOLONG]
)
def test_explained__where_what_and_how_to_mend(code: int) -> None:
    said = explained(OSError(code, os.strerror(code), "a/b"), "elsewhere", "go on")
    assert isinstance(said, LaunchError)
    where, what, how = str(said).replace("; ", ": ", 1).split(": ")
    assert (where, what) == ("a/b", os.strerror(code).lower())
    assert how.endswith(", then go on") and "\n" not in str(said)


def test_explained__a_disk_that_fills_up_does_not_say_where() -> None:
    with pytest.raises(OSError, match="No space") as caught, writing("out/x.png"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(explained(caught.value)).startswith(
        "out/x.png: no space left on device; free some space there"
    )


def test_explained__what_the_libraries_say_in_words_alone() -> None:
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    assert str(explained(full, "run")).startswith("run: no space left on device; free some space")
    worker = OSError("Caught OSError in DataLoader worker process 0.\nOSError: [Errno 27] File too large\n")
    assert str(explained(worker, "run")).startswith("run: file too large; ")
    no_memory = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    )
    for error in (no_memory, MemoryError()):
        assert "not enough memory" in str(explained(error, "run"))


def test_explained__a_bug_stays_a_bug() -> None:
    known = DataError("shards: none")
    assert explained(known) is known
    for bug in (ValueError("x"), OSError("no code"), OSError(errno.EBADF, "closed by us"), KeyError("a")):
        assert explained(bug) is None


def test_run_tasks__a_full_disk_is_the_same_in_every_process(tmp_path: Path) -> None:
    def work(task: int, _done: object) -> int:
        if task == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return task

    for workers in (0, 2):
        with pytest.raises(OSError, match="No space left") as caught, writing(tmp_path):
            run_tasks(work, 2, workers=workers)
        assert isinstance(explained(caught.value), VitctlError)
        assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("to", ["/dev/full", "closed"])
def test_standard_output__full_or_closed(to: str) -> None:
    redirect = ">&-" if to == "closed" else f"> {to}"
    line = f"{sys.executable} -m vitctl recipes show smoke {redirect}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    if to == "closed":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        said = "vitctl: standard output: no space left on device; free some space there, or choose another path\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_standard_output__that_knows_only_ascii(tmp_path: Path) -> None:
    recipe = tmp_path / "größe.toml"
    recipe.write_text('extends = "smoke"\nnote = "café → 日本"\n', encoding="utf-8")
    command = [sys.executable, "-m", "vitctl", "recipes", "diff", "smoke", str(recipe)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\xe9 \u2192 \u65e5\u672c" in done.stdout
