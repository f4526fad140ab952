"""Sweeps through the command line, in this process: run, stopped, gone on with, failed, printed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import TINY
from vitctl.cli.app import app
from vitctl.errors import VitctlError

SHORT = [
    "--set",
    "schedule.total_steps=2",
    "--set",
    "schedule.warmup_steps=1",
    "--set",
    "evaluation.every_steps=0",
]


def sweep(out: Path, *arguments: str) -> Any:
    """The command's result; a VitctlError is left in `exception`, as the error boundary would get it."""
    return CliRunner().invoke(app, ["sweep", str(TINY), *SHORT, *arguments, "--out", str(out)])


def runs(out: Path) -> list[dict[str, Any]]:
    return list(json.loads((out / "sweep.json").read_text())["runs"])


def test_sweep__runs_the_grid_and_makes_one_table_and_one_plot(tmp_path: Path, tiny_data: Path) -> None:
    out = tmp_path / "sweep"
    axes = ("--grid", "optimizer.lr=0.01,0.001", "--grid", "seed=0,1", "--data", str(tiny_data))
    done = sweep(out, *axes)
    assert done.exit_code == 0, done.output
    rows = runs(out)
    assert [row["run"] for row in rows] == [
        f"lr_{lr}__seed_{seed}" for lr in ("0.01", "0.001") for seed in (0, 1)
    ]
    assert {(row["status"], row["numbers"]["total"]) for row in rows} == {("done", 23)}
    for row in rows:
        alone = json.loads((out / row["run"] / "result.json").read_text())
        assert row["value"] == alone["metrics"]["accuracy"]
    assert (out / "sweep.csv").exists()
    assert (out / "sweep.png").exists()
    assert "over seeds" in done.output


def test_sweep__finished_runs_are_kept_and_unfinished_ones_run(tmp_path: Path, tiny_data: Path) -> None:
    out = tmp_path / "sweep"
    axes = ("--grid", "seed=0,1", "--data", str(tiny_data))
    assert sweep(out, *axes).exit_code == 0
    before = [(out / f"seed_{seed}" / "result.json").stat().st_mtime_ns for seed in (0, 1)]
    table = (out / "sweep.json").read_bytes()
    (out / "seed_1" / "result.json").unlink()
    again = sweep(out, *axes)
    said = " ".join(again.output.split())  # the screen wraps where the folder's name ends
    assert "2 runs in" in said
    assert "1 of them already finished" in said
    assert (out / "seed_0" / "result.json").stat().st_mtime_ns == before[0]
    assert (out / "seed_1" / "result.json").stat().st_mtime_ns > before[1]
    assert (out / "sweep.json").read_bytes() == table


def test_sweep__a_run_of_another_recipe_is_refused(tmp_path: Path, tiny_data: Path) -> None:
    out = tmp_path / "sweep"
    axes = ("--grid", "seed=0,1", "--data", str(tiny_data))
    assert sweep(out, *axes, "--print").exit_code == 0
    other = sweep(out, *axes, "--set", "optimizer.weight_decay=0.5")
    assert isinstance(other.exception, VitctlError)
    assert "seed_0: " in str(other.exception)
    assert "holds a run of another recipe: optimizer.weight_decay was 0.1, now 0.5" in str(other.exception)


def test_sweep__print_makes_folders_and_a_line_for_each(tmp_path: Path, tiny_data: Path) -> None:
    out = tmp_path / "my sweep"
    done = sweep(out, "--grid", "model.depth=1,2", "--data", str(tiny_data), "--print")
    assert done.stdout.splitlines() == [f"vitctl resume '{out / name}'" for name in ("depth_1", "depth_2")]
    assert (out / "depth_2" / "recipe.toml").exists()
    assert not (out / "depth_2" / "log.jsonl").exists()


@pytest.mark.slow
def test_sweep__slurm_writes_a_job_for_each_run_and_submits_it(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sbatch here does at once what Slurm would do some day."""
    out, bin_ = tmp_path / "my sweep", tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "sbatch").write_text('#!/bin/sh\nPATH="$REAL_PATH" sh "$1" >&2 || exit 1\necho "Submitted $1"\n')
    (bin_ / "srun").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    for path in bin_.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("REAL_PATH", f"{bin_}:{os.environ['PATH']}")
    axes = ("--grid", "seed=0,1", "--data", str(tiny_data))
    done = sweep(out, *axes, "--slurm", "tasks=1,time=10")
    assert done.exit_code == 0, done.output
    jobs = [out / f"seed_{seed}" / "job.sbatch" for seed in (0, 1)]
    assert done.stdout.splitlines() == [f"wrote {job}; submit it with: sbatch '{job}'" for job in jobs]
    assert "#SBATCH --job-name=seed_1\n" in jobs[1].read_text()
    assert not list(out.glob("seed_*/result.json"))
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    (out / "seed_0" / "result.json").write_text(json.dumps({"job": "pretrain", "status": "done"}))
    done = sweep(out, *axes, "--slurm", "tasks=1,time=10,submit")
    assert done.stdout.splitlines() == [f"Submitted {jobs[1]}"], done.output
    assert (
        f"to make the table when they are done: the same command with --out {out}, without --slurm"
        in done.stderr
    )
    (out / "seed_0" / "result.json").unlink()
    assert sweep(out, *axes).exit_code == 0
    assert [row["status"] for row in runs(out)] == ["done", "done"]


def test_sweep__every_bad_run_is_named_before_the_first_starts(tmp_path: Path, tiny_data: Path) -> None:
    out = tmp_path / "sweep"
    bad = sweep(out, "--grid", "model.num_heads=3,5,7", "--data", str(tiny_data))
    assert isinstance(bad.exception, VitctlError)
    said = str(bad.exception).splitlines()
    assert [line.split(":")[0] for line in said] == ["num_heads_5", "num_heads_7"]
    assert "hidden_size 24 is not a multiple of num_heads 5" in said[0]
    assert not (out / "num_heads_3" / "log.jsonl").exists()


def test_sweep__what_all_runs_lack_is_said_once(tmp_path: Path) -> None:
    said = str(sweep(tmp_path / "sweep", "--grid", "seed=0,1", "--data", str(tmp_path / "none")).exception)
    assert said.startswith(f"{tmp_path}/none: no such folder")
    assert len(said.splitlines()) == 1


def test_sweep__dry_run_prints_the_cost_of_each_and_needs_no_data(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["sweep", "d2_depth", "--dry-run", "--out", str(tmp_path / "sweep")])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()[1:]]
    assert [row[0] for row in rows] == [f"depth_{depth}" for depth in (1, 2, 4, 8, 16, 32, 64)]
    assert rows[3] == ["depth_8", "90.2M", "3.57", "517,822", "45.44"]
    assert not (tmp_path / "sweep").exists()


def test_sweep__one_failure_does_not_keep_the_others_from_running(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vitctl.launch.sweep_cells
    from vitctl.errors import DataError

    launch = vitctl.launch.sweep_cells.launch

    def broken(folder: Path, report: Any) -> Any:
        if folder.name == "seed_0":
            raise DataError("the disk is gone")
        return launch(folder, report)

    monkeypatch.setattr(vitctl.launch.sweep_cells, "launch", broken)
    out = tmp_path / "sweep"
    done = sweep(out, "--grid", "seed=0,1", "--data", str(tiny_data))
    assert str(done.exception) == "1 of 2 runs failed; seed_0: the disk is gone"
    assert [(row["status"], row["error"]) for row in runs(out)] == [
        ("failed", "the disk is gone"),
        ("done", ""),
    ]


def test_sweep__a_signal_stops_it_and_the_rest_waits(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vitctl.launch.sweep_cells

    out = tmp_path / "sweep"
    monkeypatch.setattr(vitctl.launch.sweep_cells, "launch", lambda *_: {"status": "stopped"})
    stopped = sweep(out, "--grid", "seed=0,1", "--data", str(tiny_data))
    assert stopped.exit_code == 3
    assert f"resume with the same command and --out {out}" in stopped.output
    monkeypatch.undo()
    assert sweep(out, "--grid", "seed=0,1", "--data", str(tiny_data)).exit_code == 0
    assert [row["status"] for row in runs(out)] == ["done", "done"]


def test_sweep__a_number_that_no_run_has(tmp_path: Path, tiny_data: Path) -> None:
    done = sweep(tmp_path / "sweep", "--grid", "seed=0,1", "--data", str(tiny_data), "--metric", "acuracy")
    assert (
        "--metric acuracy: no run has this metric; they have best_accuracy, accuracy, correct, total, "
        "mean_per_class" in str(done.exception)
    )


def test_sweep__a_set_that_comes_with_vitctl_is_made_once(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    done = sweep(out, "--grid", "seed=0,1", "--dataset", "digits", "--print")
    assert done.exit_code == 0, done.output
    assert (out / "data" / "digits" / "train").is_dir()
    assert not list(out.glob("seed_*/data"))
    assert str(out / "data") in (out / "seed_1" / "recipe.toml").read_text()
