"""`vitctl report` and `vitctl runs` as typed."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.launch.conftest import lock_held
from tests.report.conftest import made_up
from vitctl.cli.run_commands import _number
from vitctl.cli.show import run_views as shown
from vitctl.data.datasets.converted import fingerprint, keep_record
from vitctl.engine.journal import append_record
from vitctl.jobs.record.result import RunResult, write_result


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    result = RunResult("pretrain", "done", {"accuracy": 0.5, "correct": 1, "total": 2})
    return made_up(tmp_path / "runs" / "a", "smoke", result, 40)


def test_report__writes_one_page_and_says_where(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    said = vitctl("report", pretrained, "-o", "page.html", "--title", "My <b>run</b>", "--images", 3)
    assert said.code == 0
    assert "report: page.html (" in said.out
    text = (tmp_path / "page.html").read_text()
    assert "<title>My &lt;b&gt;run&lt;/b&gt;</title>" in text
    assert "3 of the 23 images" in text
    assert vitctl("report", pretrained, "--images", 0).code == 0
    assert "none were asked for" in (tmp_path / "report.html").read_text()


def test_report__errors_are_one_line(vitctl: Vitctl, finished: Path, tmp_path: Path) -> None:
    assert (
        vitctl("report", "gone").err == "vitctl: gone: no such folder; give run folders, such as runs/NAME\n"
    )
    said = vitctl("report", finished, "-o", tmp_path / "no" / "such" / "page.html")
    assert said.code == 2
    assert said.err.startswith("vitctl: ") and said.err.count("\n") == 1


def test_runs__lists_them(
    vitctl: Vitctl, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "empty"))
    out = vitctl("runs").out
    assert "run  recipe  state  step  result" in out
    assert "a    smoke   done     40  50.00%" in out
    assert "1 run in runs, " in out
    with lock_held(finished):
        assert "running" in vitctl("runs").out
    assert vitctl("runs", "--in", finished).out == f"no runs in {finished}\n"
    monkeypatch.chdir(finished)
    said = vitctl("runs")
    assert (said.code, said.out) == (0, "no runs in runs yet; to make one: vitctl pretrain --recipe smoke\n")
    assert (
        vitctl("runs", "--in", "gone").err
        == "vitctl: gone: no such folder; give the folder of the runs with --in\n"
    )


def test_show__draws_the_curves(vitctl: Vitctl, finished: Path) -> None:
    append_record(finished / "log.jsonl", {"kind": "warning", "step": 0, "text": "[bold]look[/bold]"})
    out = vitctl("runs", "show", "runs/a").out
    assert "\nloss: " in out and "\naccuracy: 5.00% " in out
    assert "warning: [bold]look[/bold]" in out
    assert "vitctl report runs/a" in out
    assert vitctl("runs", "show", ".").err.startswith("vitctl: .: not a run folder")


def test_show__of_a_run_that_chose_names_the_test_images_first(vitctl: Vitctl, tmp_path: Path) -> None:
    score = {"accuracy": 2 / 3, "sweep": {"0.01": 0.5, "0.03": 0.75}}
    for name, more in (("a", {"test": {"accuracy": 0.65}}), ("b", {})):
        result = RunResult("finetune", "done", score | more, {"split": "validation", "lr": 0.03})
        made_up(tmp_path / "runs" / name, "finetune", result, **{"evaluation.select_best": True})
    said = vitctl("runs", "show", "runs/a").out
    assert "test accuracy  65.00%" in said
    assert said.index("test accuracy") < said.index("66.67% on 'validation', which chose the checkpoint")
    assert "rates tried, accuracy on a part of the training images: 0.01 50.00%, 0.03 75.00% (chosen)" in said
    assert "66.67% on 'validation', which chose the checkpoint" in vitctl("runs", "show", "runs/b").out
    assert "test 65.00%" in vitctl("runs").out


@pytest.mark.parametrize(
    ("status", "file", "says"),
    [
        ("stopped", "", "next: vitctl resume runs/a"),
        ("failed", "", "next: vitctl resume runs/a"),
        (None, "", "next: vitctl resume runs/a"),
        (None, "job.sbatch", "next: sbatch {}/runs/a/job.sbatch"),
        (None, "jobset.yaml", "next: kubectl create -f {}/runs/a/jobset.yaml"),
        ("done", "job.sbatch", ""),
    ],
)
def test_show__ends_with_what_goes_on(
    vitctl: Vitctl, tmp_path: Path, status: str | None, file: str, says: str
) -> None:
    run = made_up(tmp_path / "runs/a", "smoke", RunResult("pretrain", status, {}, {}) if status else None)
    if file:
        (run / file).touch()
    *_, before, last = vitctl("runs", "show", "runs/a").out.splitlines()
    assert (last if says else "") == says.format(tmp_path.resolve())
    assert ("next: " in last, "next: " in before) == (bool(says), False)
    with lock_held(run):
        assert "next: " not in vitctl("runs", "show", "runs/a").out


def test_tail__ends_with_the_run(vitctl: Vitctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_up(tmp_path / "a", "smoke", None)
    line = {"kind": "warning", "step": 0}
    append_record(run / "log.jsonl", line | {"text": "before"})
    monkeypatch.setattr(shown, "_POLL_SECONDS", 0.02)

    def work() -> None:
        with lock_held(run):
            begun.set()
            time.sleep(0.3)
            append_record(run / "log.jsonl", line | {"text": "while it was followed"})
            time.sleep(0.3)
            write_result(run, RunResult("pretrain", "failed", error="the end"))

    begun = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(60)
    said = vitctl("runs", "tail", run)
    worker.join()
    assert [
        text for text in ("before", "while it was followed", "failed: the end") if said.out.count(text) != 1
    ] == []
    assert said.out.index("before") < said.out.index("while it was followed") < said.out.index("the end")
    again = vitctl("runs", "tail", run)
    assert again.code == 0
    assert "failed: the end" in again.out


def test_clean__asks_first(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(pretrained, tmp_path / "runs" / "a"))
    before = sorted((run / "checkpoints").iterdir())
    assert len(before) > 1
    refused = vitctl("runs", "clean")
    assert refused.code == 2
    assert "there is no terminal to answer on; add --yes" in refused.err
    assert sorted((run / "checkpoints").iterdir()) == before
    with lock_held(run):
        assert f"not touched: {Path('runs/a')} is running" in vitctl("runs", "clean", "--yes").out
    assert sorted((run / "checkpoints").iterdir()) == before
    said = vitctl("runs", "clean", "runs/a", "--yes")
    assert said.code == 0
    assert "freed " in said.out
    assert len(list((run / "checkpoints").iterdir())) < len(before)
    assert "nothing to delete" in vitctl("runs", "clean").out


def test_clean__deletes_converted_data_that_no_run_needs(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    shutil.copytree(pretrained, tmp_path / "runs/a")
    (tmp_path / "photos/other").mkdir(parents=True)
    for name in ("needed", "other", "gone"):  # what cannot be made again stays: runs elsewhere may name it
        (tmp_path / "runs/shards" / name).mkdir(parents=True)
        state = fingerprint(f"photos/{name}") if name == "other" else "state"
        keep_record(tmp_path / "runs/shards" / name, f"photos/{name}", state)
    recipe = tmp_path / "runs/a/recipe.toml"
    recipe.write_text(f"# runs/shards/needed\n{recipe.read_text()}")
    for name, age in (("fresh-1", 0), ("stale-2", 2 * 86_400)):
        (tmp_path / "cache/unpacked" / name).mkdir(parents=True)
        record = tmp_path / f"cache/unpacked/{name}.json"
        record.write_text('{"made_of": "photos.zip"}')
        os.utime(record, (time.time() - age,) * 2)
    listed = vitctl("runs").out
    assert not any(name in listed for name in ("needed", "other", "fresh-1", "stale-2", "photos.zip"))
    said = vitctl("runs", "clean", "--yes")
    assert (said.code, "runs of other folders were not looked at" in said.out) == (0, True)
    left = {one.name for one in (*tmp_path.glob("runs/shards/*"), *tmp_path.glob("cache/unpacked/*"))}
    assert left == {"needed", "gone", "fresh-1", "fresh-1.json"}


def test_clean__takes_the_folder_before_or_behind_the_word(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path
) -> None:
    """`runs --in other clean` cleaned ./runs."""
    here, other = (Path(shutil.copytree(pretrained, tmp_path / name / "a")) for name in ("runs", "other"))
    before = sorted((here / "checkpoints").iterdir())
    assert vitctl("runs", "--in", "other", "clean", "--yes").code == 0
    assert sorted((here / "checkpoints").iterdir()) == before
    assert len(list((other / "checkpoints").iterdir())) < len(before)
    assert "nothing to delete" in vitctl("runs", "clean", "--in", "other").out


@pytest.mark.slow
def test_runs__need_no_torch(finished: Path) -> None:
    command = "app(['runs', '--in', sys.argv[1]], standalone_mode=False)"
    code = f"import sys; from vitctl.cli.app import app; {command}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(finished.parent)], check=True, capture_output=True)


def test_runs__a_stopped_run_shows_its_step_and_loss_before_the_first_log_record(
    vitctl: Vitctl, tmp_path: Path
) -> None:
    """The list showed `stopped - -`: log.jsonl has only some of the steps."""
    run = made_up(
        tmp_path / "runs" / "a", "smoke", RunResult("pretrain", "stopped"), **{"schedule.total_steps": 60}
    )
    for step in (1, 2, 30):
        append_record(run / "steps.jsonl", {"step": step, "bits": {"loss": (step / 8).hex()}})
    out = vitctl("runs").out
    assert "stopped  30/60  loss 3.75" in out


def test_runs__a_running_run_was_updated_by_its_last_step(vitctl: Vitctl, finished: Path) -> None:
    (finished / "result.json").unlink()
    before = time.time() - 3 * 3600
    for path in finished.iterdir():
        os.utime(path, (before, before))
    assert "3 h ago" in vitctl("runs").out
    (finished / "logs").mkdir()
    (finished / "logs" / "now.json").write_text("{}")
    assert "3 h ago" in vitctl("runs").out
    with lock_held(finished):
        assert "now" in vitctl("runs").out
        assert "last update" in vitctl("runs", "show", finished).out


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [(1_281_167, "num_images", "1,281,167"), (0.5, "accuracy", "50.00%"), (0.5, "nll", "0.5000"),
     (-0.25, "x", "-0.25"), (1234.5678, "x", "1,234.57"), (None, "x", "-")],
)  # fmt: skip
def test_compare__numbers_as_text(value: float | None, name: str, text: str) -> None:
    assert _number(value, name) == text
