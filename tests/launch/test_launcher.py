"""The run folder, the launch line, and runs in more than one process.

That two processes read every sample once, and step the learning rate once per update, is held by tests/test_golden.py: the
loss, rate and sample keys of two processes equal those of one.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import TINY, Run, checkpoint, sample_keys
from tests.test_golden import assert_golden, command
from vitctl.engine.journal import append_line, cut_after
from vitctl.errors import LaunchError, RecipeError
from vitctl.launch import _Follower, launch, launch_command, launch_line, new_run_dir, prepare
from vitctl.launch.worker import first_error
from vitctl.recipe.load import Loaded, Override, load_recipe

Load = Callable[..., Loaded]


@pytest.fixture
def load(tiny_data: Path) -> Load:
    def do(**values: Any) -> Loaded:
        given = {"data.path": str(tiny_data), **values}
        return load_recipe(str(TINY), [Override(key, value) for key, value in given.items()])

    return do


def test_new_run_dir__is_named_after_the_recipe_and_new(tmp_path: Path) -> None:
    first = new_run_dir("some/where/jft_h14.toml", tmp_path)
    assert first.parent == tmp_path
    assert first.name.startswith("jft_h14_2")
    first.mkdir()
    assert new_run_dir("jft_h14", tmp_path) not in (first, None)
    assert not new_run_dir("jft_h14", tmp_path).exists()


def test_prepare__writes_what_the_processes_need(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "[b16] ü"
    loaded = load(seed=3)
    prepare(loaded, folder)
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "env.json", "launch.txt", "recipe.toml"]
    assert load_recipe(str(folder / "recipe.toml")).recipe == loaded.recipe
    assert "seed = 3                                  # --set" in (folder / "recipe.toml").read_text()
    assert shlex.split((folder / "launch.txt").read_text()) == [
        sys.executable,
        "-m",
        "vitctl.launch.worker",
        str(folder),
    ]
    env = json.loads((folder / "env.json").read_text())
    assert {"versions", "python", "platform", "host", "cpus", "git_commit"} == set(env)
    assert env["versions"]["torch"][0].isdigit()


def test_prepare__a_changed_recipe_is_refused_and_its_keys_are_named(load: Load, tmp_path: Path) -> None:
    prepare(load(), tmp_path)
    before = (tmp_path / "recipe.toml").read_text()
    with pytest.raises(RecipeError) as caught:
        prepare(load(**{"optimizer.lr": 0.5, "seed": 1}), tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: holds a run of another recipe: seed was 0, now 1; optimizer.lr was 0.01, now 0.5; "
        f"choose another folder with --out, or go on all the same with: vitctl resume {tmp_path} --set KEY=VALUE "
        "--allow seed --allow optimizer.lr"
    )
    assert (tmp_path / "recipe.toml").read_text() == before
    with pytest.raises(RecipeError, match="holds a run of another recipe: seed was 0, now 1; choose"):
        prepare(load(**{"optimizer.lr": 0.5, "seed": 1}), tmp_path, allow=["optimizer"])
    many = load(seed=1, **{"optimizer.lr": 0.5, "model.depth": 3, "data.flip": False, "averaging.decay": 0.5})
    with pytest.raises(RecipeError, match="; and 1 more; choose another"):
        prepare(many, tmp_path)


def test_prepare__precision_decides_the_numbers_and_cannot_change(load: Load, tmp_path: Path) -> None:
    prepare(load(), tmp_path)
    with pytest.raises(RecipeError, match=r'machine.precision was "float64", now "float32"'):
        prepare(load(**{"machine.precision": "float32"}), tmp_path)


def test_prepare__the_machine_the_log_and_the_keep_budgets_may_change(load: Load, tmp_path: Path) -> None:
    prepare(load(), tmp_path)
    free = {
        "machine.workers": 1,
        "machine.micro_batch": 3,
        "log.every_steps": 9,
        "checkpoint.keep_last": 5,
        "note": "again",
    }
    prepare(load(**free), tmp_path)
    assert load_recipe(str(tmp_path / "recipe.toml")).recipe == load(**free).recipe


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("file", "is a file, should be a folder for a run; choose another name with --out"),
        ("file/run", "not a directory; a file stands where a folder should be; choose another place"),
    ],
)
def test_prepare__a_folder_that_cannot_be_written(load: Load, tmp_path: Path, folder: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError) as caught:
        prepare(load(), tmp_path / folder)
    assert str(caught.value) == f"{tmp_path / folder}: {said}"


def test_launch_command__is_the_way_without_this_one(load: Load, tmp_path: Path) -> None:
    one, two = load().recipe, load(**{"machine.processes": 2}).recipe
    assert launch_command(tmp_path, one) == [sys.executable, "-m", "vitctl.launch.worker", str(tmp_path)]
    line = launch_line(tmp_path, two)
    assert line.endswith(f"-m torch.distributed.run --standalone --nproc-per-node 2 -m vitctl.launch.worker {tmp_path}")


HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


def test_launch__one_run_per_folder(load: Load, tmp_path: Path) -> None:
    prepare(load(), tmp_path)
    other = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            LaunchError, match="another vitctl is running in this folder; wait for it, or choose another"
        ):
            launch(tmp_path, lambda _: None)
        holder.communicate("\n")
    assert launch(tmp_path, lambda _: None)["status"] == "done"


def test_follower__reports_each_whole_new_record_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    seen: list[dict[str, Any]] = []
    append_line(path, {"step": 1, "time": 5})
    follower = _Follower(path, seen.append)
    follower.poll()
    assert seen == []
    append_line(path, {"step": 2, "time": time.time() + 1})
    with path.open("a") as file:
        file.write('{"step": 3, "ti')
    follower.poll()
    follower.poll()
    assert [r["step"] for r in seen] == [2]
    with path.open("a") as file:
        file.write(f'me": {time.time() + 1}}}\nnot a record\n')
    follower.poll()
    assert [r["step"] for r in seen] == [2, 3]
    aside = tmp_path / "new"
    append_line(aside, {"step": 4, "time": time.time() + 1})
    aside.replace(path)
    follower.poll()
    assert [r["step"] for r in seen] == [2, 3, 4]


def test_first_error__is_the_earliest(tmp_path: Path) -> None:
    assert first_error(tmp_path) is None
    (tmp_path / "logs").mkdir()
    for rank, when in ((0, 7.0), (1, 5.0)):
        (tmp_path / "logs" / f"error_{rank:02d}.json").write_text(
            json.dumps({"rank": rank, "time": when, "mendable": False})
        )
    assert first_error(tmp_path) == {"rank": 1, "time": 5.0, "mendable": False}


def test_one_process__whatever_the_environment_says_of_accelerate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `accelerate launch` with a configuration file that somebody made for something else."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    folder = run("run")
    assert_golden(folder)
    monkeypatch.undo()
    assert checkpoint(folder, 20) == checkpoint(run("quiet"), 20)


def test_two_processes__whatever_the_environment_says_of_accelerate(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hostile = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    done = subprocess.run(
        command(folder, tiny_data, **{"machine.processes": 2}),
        capture_output=True,
        text=True,
        env={**os.environ, **hostile},
    )
    assert done.returncode == 0, done.stderr
    assert_golden(folder)
    assert sorted(p.name for p in (folder / "samples").iterdir()) == ["rank_00.jsonl", "rank_01.jsonl"]
    assert json.loads((folder / "result.json").read_text())["provenance"]["data_verified"] is True
    assert sorted(p.name for p in (folder / "verified").iterdir()) == ["part_0_of_2.jsonl", "part_1_of_2.jsonl"]
    assert "going on" not in done.stdout
    assert "step 20/20" in done.stdout
    assert re.search(r"^node \S+: processes 0 to 1, CPU", done.stdout, re.M)
    assert (folder / "logs" / "launcher.txt").read_text() == ""


def test_two_processes__stopped_by_a_signal_go_on_as_one_bit_for_bit_in_what_was_read(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    straight, folder = run("straight"), tmp_path / "run"
    two = command(folder, tiny_data, **{"machine.processes": 2})
    with subprocess.Popen(two, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "log.jsonl").exists() or '"step": 2,' not in (folder / "log.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 3, said
    assert f"stopped and saved in {folder}; go on with: vitctl resume {folder}" in said
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    run("run")
    assert_golden(folder)
    assert sample_keys(folder) == sample_keys(straight)
    assert checkpoint(folder, 20).keys() == checkpoint(straight, 20).keys()


def test_two_processes__the_error_of_one_is_the_last_line(tiny_data: Path, tmp_path: Path) -> None:
    """A data set whose scored split has an unreadable image: one process meets it, the other must not hang."""
    from tests.engine.test_training import damaged

    data = damaged(tiny_data, tmp_path / "data", "test", [20])
    folder = tmp_path / "run"
    done = subprocess.run(
        command(folder, data, **{"machine.processes": 2, "schedule.total_steps": 6, "evaluation.every_steps": 0}),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vitctl: ")
    assert "cannot be evaluated" in last
    assert last.endswith(f"(process 1; {folder / 'logs' / 'rank_01.txt'})")
    assert "Traceback" not in done.stderr
    assert "cannot be evaluated" in (folder / "logs" / "rank_01.txt").read_text()
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert last == f"vitctl: {result['error']}"


def test_processes__are_not_started_inside_a_cluster_job(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under srun or torchrun the processes are there already: each is the body, none starts others."""
    prepare(load(**{"machine.processes": 2}), tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    called: list[Path] = []
    from vitctl import worker

    def work(run_dir: Path, _report: Any) -> dict[str, str]:
        called.append(run_dir)
        return {"status": "done"}

    monkeypatch.setattr(worker, "work", work)
    assert launch(tmp_path, lambda _: None) == {"status": "done"}
    assert called == [tmp_path]


def test_prepare__allowed_changes_are_made_and_said(load: Load, tmp_path: Path) -> None:
    prepare(load(), tmp_path)
    longer = load(**{"schedule.total_steps": 30, "optimizer.lr": 0.5})
    prepare(longer, tmp_path, allow=["schedule.total_steps", "optimizer"])
    assert load_recipe(str(tmp_path / "recipe.toml")).recipe == longer.recipe
    [said] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert said["text"] == (
        "the recipe was changed on purpose: optimizer.lr was 0.01, now 0.5; schedule.total_steps was 20, now 30"
    )
    prepare(longer, tmp_path)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_two_processes__a_killed_one_is_named_and_the_run_goes_on(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    straight, folder = run("straight"), tmp_path / "run"
    two = command(folder, tiny_data, **{"machine.processes": 2, "checkpoint.every_steps": 2})
    with subprocess.Popen(two, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "log.jsonl").exists() or '"step": 5,' not in (folder / "log.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        max(ranks, key=lambda p: int(p.environ()["RANK"])).kill()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert said.splitlines()[-1] == (
        "vitctl: process 1 of 2 was killed (SIGKILL), most often for want of memory; "
        f"{folder / 'logs' / 'rank_01.txt'} has its output; go on with: vitctl resume {folder}"
    )
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert not any(p.is_running() and p.status() != "zombie" for p in ranks)
    run("run", **{"checkpoint.every_steps": 2})
    assert_golden(folder)
    assert sample_keys(folder) == sample_keys(straight)


def test_two_processes__none_outlives_the_launcher(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two = command(folder, tiny_data, **{"machine.processes": 2, "machine.workers": 1, "schedule.total_steps": 5000})
    with subprocess.Popen(two, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not (folder / "log.jsonl").exists() or '"step": 2,' not in (folder / "log.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [p for p in alive if p.status() != "zombie"] == []


def test_loaded__is_not_changed_by_prepare(load: Load, tmp_path: Path) -> None:
    loaded = load()
    copy = replace(loaded, origins=dict(loaded.origins))
    prepare(loaded, tmp_path)
    assert loaded == copy


def test_follower__of_a_clock_that_is_set_back(tmp_path: Path) -> None:
    path, now, seen = tmp_path / "log.jsonl", tmp_path / "now.json", list[dict[str, Any]]()
    append_line(path, {"step": 1, "time": 9e9})
    follower = _Follower(path, seen.append, now)
    append_line(path, {"step": 2, "time": 5.0})
    for when in (9e9, 5.0):
        now.write_text(json.dumps({"kind": "now", "time": when}))
        follower.poll()
    cut_after(path, 1)
    append_line(path, {"step": 2, "time": 6.0})
    follower.poll()
    assert [(r.get("step"), r["time"]) for r in seen] == [(2, 5.0), (None, 9e9), (None, 5.0), (2, 6.0)]


def test_follower__hands_on_what_is_under_way_once(tmp_path: Path) -> None:
    now, seen = tmp_path / "now.json", list[dict[str, Any]]()
    follower = _Follower(tmp_path / "log.jsonl", seen.append, now)
    follower.poll()
    for when in (1.0, 2.0):
        now.write_text(json.dumps({"kind": "now", "step": 7, "time": when}))
        follower.poll()
        follower.poll()
    now.write_text('{"kind": "no')
    follower.poll()
    assert [record["time"] for record in seen] == [1.0, 2.0]


def test_launch__progress_is_told_from_step_0(tiny_data: Path, tmp_path: Path) -> None:
    """The log has every tenth of 20 steps; the screen is told before the first, by one process and by two."""
    for processes in (1, 2):
        values = {"data.path": str(tiny_data), "machine.processes": processes, "log.every_steps": 10}
        folder = tmp_path / str(processes)
        prepare(load_recipe(str(TINY), [Override(key, value) for key, value in values.items()]), folder)
        seen: list[dict[str, Any]] = []
        launch(folder, seen.append)
        told = [record for record in seen if record["kind"] == "now"]
        assert {"starting", "reading weights and data"} & {record.get("text") for record in told}
        first = next(n for n, record in enumerate(seen) if record["kind"] == "train")
        if processes == 1:
            assert any(record.get("step") == 0 for record in seen[:first])
        assert '"now"' not in (folder / "log.jsonl").read_text()
