"""A disk that is really full, for a while or to the end: nothing half written stays, and nothing is lost that
was done.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import assert_same, fill, make_room, prepared, records, warnings
from vitctl.engine import checkpoint as saving
from vitctl.engine.checkpoint import keep, newest_checkpoint
from vitctl.errors import CheckpointError
from vitctl.launch.worker import work
from vitctl.verify.finding import FAILS
from vitctl.verify.run_check import verify

Act = Callable[[], None]


def train(folder: Path, acts: dict[int, Act]) -> dict[str, Any]:
    """Do the run, and something right after some of its steps, all of which come."""
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
