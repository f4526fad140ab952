"""Sweeps through the command line, in this process: run, stopped, resumed, failed, printed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import TINY
from vitctl.cli.app import app
from vitctl.errors import DataError, VitctlError
from vitctl.launch import sweep_cells
from vitctl.recipe.load import load_recipe

SHORT = ("schedule.total_steps=2", "schedule.warmup_steps=1", "evaluation.every_steps=0", "model.depth=1")
SEEDS = ("--grid", "seed=0,1")


def sweep(out: Path, *arguments: str) -> Any:
    """The command's result; a VitctlError is left in `exception`, as the error boundary would get it."""
    sets = [word for text in SHORT for word in ("--set", text)]
    return CliRunner().invoke(app, ["sweep", str(TINY), *sets, *arguments, "--out", str(out)])


def runs(out: Path) -> list[dict[str, Any]]:
    return list(json.loads((out / "sweep.json").read_text())["runs"])


@pytest.fixture
def data(tiny_data: Path) -> tuple[str, str]:
    return "--data", str(tiny_data)


def test_sweep__runs_the_grid_and_keeps_finished_runs(tmp_path: Path, data: tuple[str, str]) -> None:
    out = tmp_path / "sweep"
    axes = ("--grid", "optimizer.lr=0.01,0.001", *SEEDS, *data)
    done = sweep(out, *axes)
    assert done.exit_code == 0, done.output
    rows = runs(out)
    names = [f"lr_{lr}__seed_{seed}" for lr in ("0.01", "0.001") for seed in (0, 1)]
    assert [row["run"] for row in rows] == names
    assert {(row["status"], row["numbers"]["total"]) for row in rows} == {("done", 23)}
    for row in rows:
        alone = json.loads((out / row["run"] / "result.json").read_text())
        assert row["value"] == alone["metrics"]["accuracy"]
    assert (out / "sweep.csv").exists() and (out / "sweep.png").exists()
    assert "over seeds" in done.output

    results = [out / name / "result.json" for name in names]
    before, table = [path.stat().st_mtime_ns for path in results], (out / "sweep.json").read_bytes()
    results[1].unlink()
    assert "3 of them already finished" in " ".join(sweep(out, *axes).output.split())
    changed = [path.stat().st_mtime_ns > time for path, time in zip(results, before, strict=True)]
    assert changed == [False, True, False, False]
    assert (out / "sweep.json").read_bytes() == table

    other = sweep(out, *axes, "--set", "optimizer.weight_decay=0.5").exception
    assert isinstance(other, VitctlError)
    assert "optimizer.weight_decay was 0.1, now 0.5" in str(other)
    assert "--metric acuracy: no run has this metric" in str(
        sweep(out, *axes, "--metric", "acuracy").exception
    )


def test_sweep__print_makes_folders_and_a_line_for_each(tmp_path: Path, data: tuple[str, str]) -> None:
    out = tmp_path / "my sweep"
    done = sweep(out, *SEEDS, *data, "--print")
    assert done.stdout.splitlines() == [f"vitctl resume '{out / name}'" for name in ("seed_0", "seed_1")]
    assert (out / "seed_1" / "recipe.toml").exists()
    assert not (out / "seed_1" / "log.jsonl").exists()


@pytest.mark.slow
def test_sweep__slurm_writes_a_job_for_each_run_and_submits_it(
    tmp_path: Path, data: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sbatch here does at once what Slurm would do some day."""
    out, bin_ = tmp_path / "my sweep", tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "sbatch").write_text('#!/bin/sh\nPATH="$REAL_PATH" sh "$1" >&2 || exit 1\necho "Submitted $1"\n')
    (bin_ / "srun").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    for path in bin_.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("REAL_PATH", f"{bin_}:{os.environ['PATH']}")
    done = sweep(out, *SEEDS, *data, "--slurm", "tasks=1,time=10")
    jobs = [out / f"seed_{seed}" / "job.sbatch" for seed in (0, 1)]
    assert done.stdout.splitlines() == [f"wrote {job}; submit it with: sbatch '{job}'" for job in jobs]
    assert "#SBATCH --job-name=seed_1\n" in jobs[1].read_text()
    assert not list(out.glob("seed_*/result.json"))
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    (out / "seed_0" / "result.json").write_text(json.dumps({"job": "pretrain", "status": "done"}))
    done = sweep(out, *SEEDS, *data, "--slurm", "tasks=1,time=10,submit")
    assert done.stdout.splitlines() == [f"Submitted {jobs[1]}"], done.output
    assert f"the same command with --out {out}, without --slurm" in done.stderr
    (out / "seed_0" / "result.json").unlink()
    assert sweep(out, *SEEDS, *data).exit_code == 0
    assert [row["status"] for row in runs(out)] == ["done", "done"]


def test_sweep__every_bad_run_is_named_before_the_first_starts(tmp_path: Path, data: tuple[str, str]) -> None:
    out = tmp_path / "sweep"
    error = sweep(out, "--grid", "model.num_heads=3,5,7", *data).exception
    assert isinstance(error, VitctlError)
    lines = str(error).splitlines()
    assert [line.split(":")[0] for line in lines] == ["num_heads_5", "num_heads_7"]
    assert "hidden_size 24 is not a multiple of num_heads 5" in lines[0]
    assert not (out / "num_heads_3" / "log.jsonl").exists()
    shared = str(sweep(out, *SEEDS, "--data", str(tmp_path / "none")).exception)
    assert shared.startswith(f"{tmp_path}/none: no such folder")
    assert len(shared.splitlines()) == 1  # what all runs lack is reported once


def test_sweep__dry_run_prints_the_cost_of_each_and_needs_no_data(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["sweep", "d2_depth", "--dry-run", "--out", str(tmp_path / "sweep")])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()[1:]]
    assert [row[0] for row in rows] == [f"depth_{depth}" for depth in (1, 2, 4, 8, 16, 32, 64)]
    assert rows[3] == ["depth_8", "90.2M", "3.57", "517,822", "45.44"]
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_sweep__failures_and_signals(
    tmp_path: Path, data: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed run does not keep the others from running; after a signal the rest waits."""
    out, launch = tmp_path / "sweep", sweep_cells.launch
    monkeypatch.setattr(sweep_cells, "launch", lambda *_: {"status": "stopped"})
    stopped = sweep(out, *SEEDS, *data)
    assert stopped.exit_code == 3
    assert f"resume with the same command and --out {out}" in stopped.output

    def broken(folder: Path, report: Any) -> Any:
        if folder.name == "seed_0":
            raise DataError("the disk is gone")
        return launch(folder, report)

    monkeypatch.setattr(sweep_cells, "launch", broken)
    assert str(sweep(out, *SEEDS, *data).exception) == "1 of 2 runs failed; seed_0: the disk is gone"
    rows = [(row["status"], row["error"]) for row in runs(out)]
    assert rows == [("failed", "the disk is gone"), ("done", "")]


@pytest.mark.slow
def test_sweep__generates_a_data_set_of_vitctl_once(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    done = sweep(out, *SEEDS, "--dataset", "digits", "--print")
    assert done.exit_code == 0, done.output
    assert (out / "data" / "digits" / "train").is_dir()
    assert not list(out.glob("seed_*/data"))
    assert str(out / "data") in (out / "seed_1" / "recipe.toml").read_text()


def test_sweep__takes_the_flags_of_a_run_and_several_values(tmp_path: Path, tiny_data: Path) -> None:
    cells = ("--lr", "0.01,0.02", "--data", str(tiny_data), "--steps", "2,3", "--seed", "1", "--print")
    line = ["sweep", str(TINY), *cells, "--out", str(tmp_path / "s")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    made: list[Any] = [load_recipe(path).recipe for path in sorted((tmp_path / "s").glob("*/recipe.toml"))]
    found = [(one.optimizer.lr, one.schedule.total_steps, one.seed) for one in made]
    assert found == [(lr, steps, 1) for lr in (0.01, 0.02) for steps in (2, 3)]
    twice = CliRunner().invoke(app, [*line, "--grid", "optimizer.lr=1,2"]).exception
    assert "optimizer.lr: is varied twice" in str(twice)
