"""What goes wrong outside the program: disks, folders, signals at the start, numbers that are not finite."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import SHORT, TINY, Run, checkpoint, command, paced, records, sample_keys, train_records
from vitctl.engine import checkpoint as saving
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.engine.preemption import StopFlag
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.pretrain import pretrain
from vitctl.launch.prepare import prepare_run
from vitctl.recipe.load import Override, load_recipe


def full_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The disk is full when these steps are saved, in the middle of the write."""
    save = saving.save_checkpoint

    def failing(root: Path, step: int, **given: Any) -> Path:
        if step in steps:
            (root / f".step_{step:08d}.{os.getpid()}").mkdir(parents=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(root, step, **given)

    monkeypatch.setattr(saving, "save_checkpoint", failing)


def interfere(folder: Path, data: Path, step: int, harm: Callable[[], None]) -> None:
    """Run to the end, with `harm` done right after a step."""
    values = {"data.path": str(data), **SHORT}
    loaded = load_recipe(str(TINY), [Override(key, value) for key, value in values.items()])
    prepare_run(loaded, folder)

    def report(record: dict[str, Any]) -> None:
        if (record["kind"], record.get("step")) == ("train", step):
            harm()

    pretrain(loaded.recipe, folder, report, StopFlag())  # type: ignore[arg-type]


def test_disk_full__a_save_on_the_way_is_said_and_training_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run("straight", **SHORT)
    full_at(monkeypatch, 4)
    folder = run("a", **SHORT)
    [said] = [r["text"] for r in records(folder, "warning")]
    assert said == (
        f"step 4 could not be saved in {folder / 'checkpoints'} (No space left on device); earlier "
        f"checkpoints are complete"
    )
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    assert [r["step"] for r in records(folder, "checkpoint")] == [2, 6, 8]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000006", "step_00000008"]


def test_disk_full__the_last_save_is_an_error_and_the_one_before_stays_good(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    straight = run("straight", **SHORT)
    with monkeypatch.context() as full:
        full_at(full, 8)
        with pytest.raises(CheckpointError) as caught:
            run("a", **SHORT)
    folder = tmp_path / "a"
    assert str(caught.value) == (
        f"step 8 could not be saved in {folder / 'checkpoints'} (No space left on device); earlier "
        f"checkpoints are complete: "
        f"free space or fix permissions, then: vitctl resume {folder}"
    )
    assert json.loads((folder / "result.json").read_text())["error"] == str(caught.value)
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (6, [])
    run("a", **SHORT)
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    assert sample_keys(folder) == sample_keys(straight)


def test_disk_full__for_real(tiny_data: Path, tmp_path: Path) -> None:
    """The kernel refuses every file above 40 kB: no checkpoint fits, the log does."""

    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    code = f"{limit}; from vitctl.__main__ import main; main()"
    line = [sys.executable, "-c", code, *command(tmp_path / "a", tiny_data, **SHORT)[3:]]
    done = warm.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "step 8 could not be saved in" in done.stderr
    assert "File too large" in done.stderr
    assert len(records(tmp_path / "a", "warning")) == 4
    assert [r["step"] for r in train_records(tmp_path / "a")] == list(range(1, 9))


@pytest.mark.parametrize("lost", ["checkpoints", "log.jsonl", "samples", "."])
def test_removed__a_folder_that_somebody_deletes_comes_again(
    run: Run, tiny_data: Path, tmp_path: Path, lost: str
) -> None:
    straight, folder = run("straight", **SHORT), tmp_path / "a"

    def remove() -> None:
        path = folder / lost
        while path.exists():  # a save may be under way, and write it again
            path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    interfere(folder, tiny_data, 5, remove)
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    assert [r["step"] for r in train_records(folder)][-3:] == [6, 7, 8]


def test_space__is_counted_before_the_first_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        saving.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 200_000)
    )  # type: ignore[attr-defined]
    with pytest.raises(
        CheckpointError, match=r"195.3 KiB are free, .* \(2 kept and one being written"
    ) as caught:
        run("a", **SHORT)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a" / "log.jsonl").exists()


def test_torn__it_is_set_aside_and_does_not_push_out_what_comes_after(run: Run) -> None:
    """With one checkpoint kept, the torn one of a later step would be taken for the newest, and the good ones
    deleted.
    """
    values = {**SHORT, "checkpoint.keep_last": 1}
    straight, folder = run("straight", **values), run("a", **{**values, "schedule.total_steps": 8})
    shutil.copytree(folder / "checkpoints" / "step_00000008", folder / "checkpoints" / "step_00000900")
    (folder / "checkpoints" / "step_00000900" / "state.json").unlink()
    (folder / "checkpoints" / "step_00000008" / "model.safetensors").unlink()
    run("a", **values)
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == ["step_00000008", "torn_step_00000008", "torn_step_00000900"]
    assert len(records(folder, "warning")) == 2


def test_not_finite__updates_are_skipped_counted_and_after_ten_in_a_row_it_stops(
    run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    with pytest.raises(
        VitctlError, match=r"^step \d+: the last 10 updates were not finite \(loss nan"
    ) as caught:
        run("a", **SHORT | {"schedule.total_steps": 30, "optimizer.lr": 1e200, "optimizer.clip_norm": 0.0})
    assert f"{folder / 'skipped.jsonl'} has norms and sample keys; lower optimizer.lr" in str(caught.value)
    skipped = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert len(skipped) == 10
    assert [line["step"] for line in skipped] == list(range(skipped[0]["step"], skipped[0]["step"] + 10))
    keys = sample_keys(folder)
    assert all(sorted(line["keys"]) == keys[line["step"]] for line in skipped)
    assert {"nan"} == {line["loss"] for line in skipped}
    assert set(skipped[0]["gradient_norms"]) == set(skipped[0]["weight_norms"])
    *each, said = [record["text"] for record in records(folder, "warning")]
    assert len(each) == 10
    assert said.startswith(
        f"ended by an error (VitctlError) after step {skipped[-1]['step']}, which is saved: "
    )
    assert train_records(folder)[-1]["num_skipped"] >= 8
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal__while_everything_is_still_being_imported(
    tiny_data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    code = (
        "import os, sys, threading, time\nfrom vitctl.cli import run_job\nstart = run_job.start_command\n"
        "def reported():\n    member = start()\n    print('begun', flush=True)\n    return member\n"
        "run_job.start_command = reported\nfrom vitctl.cli.app import main\nmain()\n"
    )
    line = [sys.executable, "-c", code, *command(tmp_path / "a", tiny_data)[3:]]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (3, "vitctl: stopped\n")


def test_signal__before_the_first_step_leaves_a_whole_checkpoint_of_none(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    straight, folder = run("straight", **SHORT), tmp_path / "a"
    line = paced(command(folder, tiny_data, **SHORT))
    with warm.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "env.json").exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
    assert process.returncode == 3
    run("a", **SHORT)
    assert checkpoint(folder, 8) == checkpoint(straight, 8)
    assert sample_keys(folder) == sample_keys(straight)
