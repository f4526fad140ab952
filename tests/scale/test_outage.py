"""The server of the images goes away: a run waits for it, or all of its processes save and stop together, and
goes on later as if nothing had happened.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import TINY, checkpoint, command, records, two_processes
from tests.data.server import Faults, serving
from tests.matrix import slow
from vitctl.engine.journal import read_run_json
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe

LENGTH = 12
VALUES = {
    "schedule.total_steps": LENGTH,
    "checkpoint.every_steps": 0,
    "evaluation.every_steps": 0,
    "data.cache_gib": 0,
}
LEAVE_AFTER = 90  # requests for images, of 12 x 16


class Leaving(Faults):
    """A server that answers no more after some requests for images, for some seconds."""

    def __init__(self, after: float, seconds: float) -> None:
        super().__init__()
        self.after, self.seconds, self.since = after, seconds, 0.0

    def draw(self, path: str, span: str) -> str:
        """See `Faults`."""
        super().draw(path, span)
        if sum(name.endswith(".tar") for name, _ in self.asked) > self.after:
            self.since = self.since or time.monotonic()
        return "drop" if self.since and time.monotonic() - self.since < self.seconds else ""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))


def run_here(folder: Path, data: str, **values: Any) -> Path:
    """Run in this process."""
    given = {**VALUES, "data.path": data, **values}
    prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in given.items()]), folder)
    work(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "seconds"),
    [(0, 2.0), *slow((2, 2.0), (2, 90.0))],
)
def test_outage__is_waited_out_or_saved(
    tiny_data: Path, tmp_path: Path, workers: int, seconds: float
) -> None:
    values = {"machine.workers": workers}
    plain = checkpoint(run_here(tmp_path / "plain", str(tiny_data), **values), LENGTH)
    faults = Leaving(LEAVE_AFTER, seconds)
    with serving(tiny_data, faults) as url:
        folder = run_here(tmp_path / "waited", url, **values)
        assert faults.since and read_run_json(folder / "result.json")["status"] == "done"
        assert checkpoint(folder, LENGTH) == plain
        told = [record["text"] for record in records(folder, "warning") if "waiting until" in record["text"]]
        assert told and all(url in text for text in told)
        faults.after, faults.seconds, faults.since = len(faults.asked) + LEAVE_AFTER, 1e9, 0.0
        folder = run_here(tmp_path / "saved", url, **values, **{"data.patience": 1.0})
        result = read_run_json(folder / "result.json")
        assert result["status"] == "stopped" and "gave up after" in result["error"]
        step = records(folder, "train")[-1]["step"]
        assert 0 < step < LENGTH and checkpoint(folder, step)
        faults.seconds = 0.0
        work(folder)
    assert checkpoint(folder, LENGTH) == plain


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_outage__at_the_start_is_waited_out_by_the_same_rule(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    """The first request, for the index, was given up after 1.5 s; the resume had no image yet either."""
    with serving(tiny_data, Leaving(-1, 4.0)) as url:
        folder = run_here(tmp_path / "late", url, **{"data.patience": 60.0, "machine.workers": workers})
    assert read_run_json(folder / "result.json")["status"] == "done"
    said = [line for line in capsys.readouterr().err.splitlines() if "waiting until" in line]
    assert len(said) == 1 and "index.json" in said[0]


@pytest.mark.slow
def test_outage__at_the_start_of_two_processes_exits_with_3(tiny_data: Path, tmp_path: Path) -> None:
    """Each process says why it does not come to where they meet; a scheduler starts all of them again."""
    with serving(tiny_data, Leaving(-1, 1e9)) as url:
        values = {**VALUES, "machine.processes": 2, "data.patience": 1.0}
        line = command(tmp_path / "run", url, **values)  # type: ignore[arg-type]
        assert two_processes(line, tmp_path / "out.txt") == (3, 3)
    assert (tmp_path / "out.txt").read_text().count("gave up after") in (1, 2)


def run(folder: Path, data: str, *more: str, **values: Any) -> "subprocess.CompletedProcess[str]":
    line = command(folder, data, **{**VALUES, **values})  # type: ignore[arg-type]
    return warm.run([*line, *more], capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "sharding"), [(1, "none"), (2, "none"), (2, "fsdp")])
def test_outage__that_outlasts_patience_is_survived_by_a_resume_or_a_restart(
    tiny_data: Path, tmp_path: Path, processes: int, sharding: str
) -> None:
    """A server is away for 15 minutes, and patience is 10 minutes: seconds here are hundredths of theirs."""
    values = {"machine.processes": processes, "machine.sharding": sharding, "data.patience": 6.0}
    folder, restarted, plain = tmp_path / "run", tmp_path / "restarted", tmp_path / "plain"
    assert run(plain, str(tiny_data), **values).returncode == 0
    with serving(tiny_data, Leaving(LEAVE_AFTER, 9.0)) as url:
        done = run(folder, url, **values)
        assert done.returncode == 3, done.stderr
        assert "gave up after" in done.stderr and done.stderr.count("resume with") == 1
        step = records(folder, "train")[-1]["step"]
        assert 0 < step < LENGTH and checkpoint(folder, step)
        line = [sys.executable, "-m", "vitctl", "resume", str(folder)]
        done = warm.run(line, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    with serving(tiny_data, Leaving(LEAVE_AFTER, 9.0)) as url:
        done = run(restarted, url, "--restarts", "1", **values)
    assert done.returncode == 0, done.stderr
    assert len(records(restarted, "resume")) == 1
    expected = checkpoint(plain, LENGTH)
    assert checkpoint(folder, LENGTH) == checkpoint(restarted, LENGTH) == expected
