"""Disks that are full, fail, lose what was written or forbid writing: nothing half written stays, nothing
that was done is lost, and the user reads what to do.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import harmed
from tests.faults.conftest import (
    ROOT,
    assert_same,
    command,
    fill,
    make_room,
    prepared,
    records,
    warnings,
)
from tests.matrix import slow
from vitctl.engine import checkpoint as saving
from vitctl.engine.checkpoint import keep, newest_checkpoint
from vitctl.errors import CheckpointError, LaunchError
from vitctl.launch.worker import work
from vitctl.verify.finding import FAILS
from vitctl.verify.run_check import verify

Act = Callable[[], None]
Bound = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
EVERY_2 = {"checkpoint.every_steps": 2}


def names(folder: Path) -> list[str]:
    """The names of the checkpoints of a run."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def train(folder: Path, acts: dict[int, Act]) -> dict[str, Any]:
    """Do the run, and act right after some of its steps."""
    left, problems = dict(acts), list[Exception]()

    def report(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] in left:
            try:
                left.pop(record["step"])()
            except Exception as error:  # which would be dropped, as all errors of a report
                problems.append(error)

    try:
        return work(folder, report)
    finally:
        assert (left, problems) == ({}, [])


@pytest.mark.slow
def test_full_for_a_while__the_run_goes_on_and_saves_when_there_is_room(
    tiny_data: Path, straight: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save finds no room and waits for it beside the training; log and samples are held back until
    they fit, too.
    """
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.01)
    waited: list[str] = []
    written = saving.Saver._try_write

    def watched(saver: saving.Saver, *given: Any) -> Path | None:
        path = written(saver, *given)
        waited.append(path.name if path else "none")
        return path

    monkeypatch.setattr(saving.Saver, "_try_write", watched)

    def free_and_wait() -> None:
        assert list(folder.glob("checkpoints/*")) == []  # no half of a checkpoint
        make_room(small_disk)
        assert saver_has_written.wait(20)

    saver_has_written = threading.Event()
    save = saving.save_checkpoint

    def saved(*given: Any, **named: Any) -> Path:
        path = save(*given, **named)
        saver_has_written.set()
        return path

    monkeypatch.setattr(saving, "save_checkpoint", saved)
    folder = prepared(small_disk / "run", tiny_data)
    train(folder, {1: lambda: fill(small_disk, 0), 5: free_and_wait})
    assert waited[0] == "step_00000003"  # that of the third step, though the fifth was under way
    assert any("could not be saved" in text and "No space left" in text for text in warnings(folder))
    assert_same(folder, straight)
    assert [
        found for _, found in verify(folder) if found.state in FAILS
    ] == []  # marks that found no room are not forged


@pytest.mark.slow
def test_full__an_old_one_goes_before_room_is_needed_and_never_the_last(
    tiny_data: Path, straight: Path, small_disk: Path
) -> None:
    """There is room for two checkpoints and a little: the third takes that of the first."""
    folder = prepared(small_disk / "run", tiny_data)
    train(folder, {8: lambda: fill(small_disk, 200_000)})
    assert warnings(folder) == []
    assert [r["step"] for r in records(folder, "checkpoint")] == [3, 6, 9, 12]
    assert_same(folder, straight)


def test_full_at_the_end__is_one_clear_error_and_resumable(
    tiny_data: Path, straight: Path, small_disk: Path
) -> None:
    folder = prepared(small_disk / "run", tiny_data, **{"checkpoint.keep_last": 1})

    def fill_once_saved() -> None:
        until = time.monotonic() + 20
        while {path.name for path in (folder / "checkpoints").iterdir()} != {
            "step_00000006"
        } and time.monotonic() < until:
            time.sleep(0.01)  # what the save beside the training lets go would be room
        fill(small_disk, 100_000)

    with pytest.raises(CheckpointError) as caught:
        train(folder, {7: fill_once_saved})
    said = str(caught.value)
    assert said.startswith(
        f"step 12 could not be saved in {folder / 'checkpoints'} (No space left on device)"
    )
    assert said.endswith(f"then: vitctl resume {folder}")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000006"]
    assert newest_checkpoint(folder / "checkpoints")[1] == []
    make_room(small_disk)
    work(folder)
    assert_same(folder, straight)


@pytest.mark.slow
def test_crash__what_it_left_half_written_goes_when_the_run_goes_on(
    tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    folder = prepared(tmp_path / "run", tiny_data)
    half = folder / "checkpoints" / ".step_00000003.123"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(bytes(1000))

    def gone() -> None:
        assert not half.exists()

    train(folder, {1: gone})
    assert_same(folder, straight)


@pytest.mark.slow
def test_full_at_one_save__the_next_save_follows(
    tiny_data: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the write of step 6."""
    save = saving.save_checkpoint

    def failing(root: Path, step: int, **given: Any) -> Path:
        if step == 6:
            (root / f".step_{step:08d}.{os.getpid()}").mkdir(parents=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(root, step, **given)

    monkeypatch.setattr(saving, "save_checkpoint", failing)
    folder = prepared(tmp_path / "run", tiny_data)
    work(folder)
    [text] = warnings(folder)
    assert text.startswith(f"step 6 could not be saved in {folder / 'checkpoints'} (No space left on device)")
    assert [r["step"] for r in records(folder, "checkpoint")] == [3, 9, 12]
    assert names(folder) == ["step_00000009", "step_00000012"]
    assert_same(folder, straight)


@pytest.mark.slow
def test_file_too_large__for_the_kernel(tiny_data: Path, tmp_path: Path) -> None:
    """It refuses every file above 40 kB: no checkpoint fits, the log does."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    code = f"{limit}; from vitctl.__main__ import main; main()"
    line = [sys.executable, "-c", code, *command(tmp_path / "a", tiny_data)[3:]]
    done = warm.run(line, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "step 12 could not be saved in" in done.stderr
    assert "File too large" in done.stderr
    assert len(warnings(tmp_path / "a")) == 4
    assert [r["step"] for r in records(tmp_path / "a", "train")] == list(range(1, 13))


def test_space__is_checked_before_the_first_step(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**6, 10**6, 200_000)  # type: ignore[attr-defined]
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage)
    folder = prepared(tmp_path / "a", tiny_data)
    with pytest.raises(CheckpointError, match=r"195.3 KiB is free, .* \(2 kept and one being written"):
        work(folder)
    assert not (folder / "log.jsonl").exists() or not records(folder, "train")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [".", *slow("checkpoints", "log.jsonl")])
def test_removed__a_folder_that_somebody_deletes_is_made_again(
    tiny_data: Path, straight: Path, tmp_path: Path, lost: str
) -> None:
    folder = prepared(tmp_path / "a", tiny_data)

    def remove() -> None:
        path = folder / lost
        while path.exists():  # a save may be in progress, and write it again
            path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    is_gone = pytest.raises(LaunchError, match="was removed while its run went on; it is not complete")
    with is_gone if lost == "." else nullcontext():  # no command calls what is left a run; it ended with 0
        train(folder, {5: remove})
    saved, _ = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert saved.step == 12
    for name in ("model", "optimizer"):
        file = f"{name}.safetensors"
        expected = straight / "checkpoints" / "step_00000012" / file
        assert (saved.folder / file).read_bytes() == expected.read_bytes()
    assert [r["step"] for r in records(folder, "train")][-3:] == [10, 11, 12]


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO])
def test_save_checkpoint__leaves_nothing_of_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(saving, "write_run_json", failing)
    with pytest.raises(OSError, match=os.strerror(code)):
        saving.save_checkpoint(tmp_path, 3, tensors={}, config=None, meta={}, state={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("last", "best", "coming", "left"),
    [
        (1, 0, 40, [30]),  # the last whole one
        (2, 0, 40, [30]),
        (3, 0, 40, [20, 30]),
        (2, 1, 40, [10, 30]),  # the best stays
        (2, 0, None, [20, 30]),
    ],
)
def test_keep__of_a_checkpoint_to_come(
    tmp_path: Path, last: int, best: int, coming: int | None, left: list[int]
) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}" / "state.json").write_text(json.dumps({"step": step}))
    assert keep(tmp_path, last=last, best=best, scores={10: 0.9, 20: 0.1}, coming=coming) == (len(left) < 3)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == left


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeros(path: Path) -> None:
    """What a journalling file system leaves of a file whose blocks were never written."""
    path.write_bytes(bytes(path.stat().st_size))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model.safetensors", truncate),
        ("state.json", zeros),
        *slow(("ema.safetensors", flip_a_bit), ("optimizer.safetensors", zeros), ("state.json", os.unlink)),
    ],
)
def test_power_cut__the_newest_complete_checkpoint_is_used(
    straight: Path, tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    folder = Path(shutil.copytree(straight, tmp_path / "a"))
    torn = folder / "checkpoints" / "step_00000012"
    harm(torn / name)
    work(folder)
    [text] = warnings(folder)
    assert text.startswith(f"{torn}: damaged checkpoint: {name} ")
    assert [r["step"] for r in records(folder, "resume")] == [9]
    assert_same(folder, straight)
    assert names(folder) == ["step_00000009", "step_00000012", "torn_step_00000012"]


@pytest.mark.slow
def test_torn__is_set_aside_and_pushes_out_no_complete_one(
    tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    """With two checkpoints kept, torn ones of later steps would be taken for the newest, and complete ones
    deleted.
    """
    folder = prepared(tmp_path / "a", tiny_data, **{"checkpoint.keep_last": 2})
    work(folder)
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints / "step_00000012", checkpoints / "step_00000900")
    (checkpoints / "step_00000900" / "state.json").unlink()
    (checkpoints / "step_00000012" / "model.safetensors").unlink()
    work(folder)
    assert_same(folder, straight)
    complete = ["step_00000009", "step_00000012"]
    assert names(folder) == [*complete, "torn_step_00000012", "torn_step_00000900"]
    assert len(warnings(folder)) == 2


# Root may write everywhere, whatever the mode says, but not without these capabilities.
BOUND = (
    "setpriv",
    "--inh-caps=-dac_override,-dac_read_search",
    "--bounding-set=-dac_override,-dac_read_search",
)


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Bound]:
    """bound(line) runs a command that must obey the modes of files and folders."""
    first = BOUND if os.getuid() == 0 else ()

    def run(line: list[str]) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "HOME": str(tmp_path / "nowhere"), "VITCTL_CACHE": str(tmp_path / "data")}
        return subprocess.run([*first, *line], capture_output=True, text=True, cwd=ROOT, env=env)

    (tmp_path / "probe").mkdir(mode=0o555)
    try:
        held = run(["touch", str(tmp_path / "probe" / "x")]).returncode != 0
    except FileNotFoundError:
        held = False
    if not held:
        pytest.skip("root without setpriv of util-linux obeys no mode")
    yield run
    for path in tmp_path.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder, with its time and size."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (root, *root.rglob("*"))}


@pytest.mark.slow
def test_read_only__data(bound: Bound, tiny_data: Path, tmp_path: Path) -> None:
    """Training needs no lock and no index in the data."""
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    for path in (data, *data.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(data)
    done = bound(command(tmp_path / "a", data, **{"machine.workers": 1}))
    assert done.returncode == 0, done.stderr
    assert tree(data) == before


@pytest.mark.slow
def test_read_only__data_and_the_place_of_kept_features(
    bound: Bound, tiny_data: Path, tmp_path: Path
) -> None:
    """Few-shot needs no lock in the data either.

    Features that cannot be cached are computed, with a warning.
    """
    data, folder = Path(shutil.copytree(tiny_data, tmp_path / "data")), tmp_path / "a"
    done = bound(command(folder, data))
    assert done.returncode == 0, done.stderr
    for path in (data, *data.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(data)
    line = ("fewshot", "--from", folder, "--data", data, "--shots", "2", "--out", tmp_path / "few")
    sets = ("--set", f"fewshot.cache={data}", "--set", "machine.device=cpu")
    done = bound([sys.executable, "-m", "vitctl", *map(str, line), *sets])
    assert done.returncode == 0, done.stderr
    texts = warnings(tmp_path / "few")
    assert len(texts) == 2
    for text in texts:
        assert text.startswith(f"{data}: representations could not be cached for later runs (")
        assert "Permission denied" in text and text.endswith("; choose another folder with fewshot.cache")
    assert tree(data) == before


@pytest.mark.slow
def test_permission_denied__while_saving(
    bound: Bound, tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    folder = prepared(tmp_path / "a", tiny_data, **EVERY_2, **{"checkpoint.background": False})
    done = bound(harmed("forbidden_save", folder))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "step 12 could not be saved" in done.stderr
    assert "Permission denied" in done.stderr
    assert done.stderr.endswith(f"vitctl resume {folder}\n")
    assert [r["step"] for r in records(folder, "checkpoint")] == [2, 4]
    assert [text.split()[1] for text in warnings(folder)] == ["6", "8", "10", "12"]
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (4, [])
    (folder / "checkpoints").chmod(0o755)
    work(folder)
    assert_same(folder, straight)


@pytest.mark.slow
def test_permission_denied__while_resuming_nothing_starts_again(
    bound: Bound, straight: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(straight, tmp_path / "a"))
    log = (folder / "log.jsonl").read_text()
    (folder / "checkpoints").chmod(0)
    done = bound([sys.executable, "-m", "vitctl", "resume", str(folder)])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{folder / 'checkpoints'}: permission denied; fix its permissions" in done.stderr
    assert (folder / "log.jsonl").read_text() == log
