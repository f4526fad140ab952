"""SIGKILL, a power cut, a second signal, forbidden folders: what is left is found whole, used, and said."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.conftest import (
    SHORT,
    TINY,
    Run,
    checkpoint,
    command,
    harmed,
    records,
    sample_keys,
    train_records,
    two_processes,
)
from tests.harmed import poisoned
from vitctl.engine import losses
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.engine.step import SKIPPED
from vitctl.launch.prepare import prepare_run
from vitctl.recipe.load import Override, load_recipe

ROOT = Path(__file__).resolve().parents[1]
SHARED_MEMORY = Path("/dev/shm")
FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json")

Bound = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def prepared(folder: Path, data: Path, **values: Any) -> Path:
    given = {"data.path": str(data), **SHORT, **values}
    prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in given.items()]), folder)
    return folder


def soon(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not (there := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(there)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeros(path: Path) -> None:
    """What a journalling file system leaves of a file whose blocks were never written."""
    path.write_bytes(bytes(path.stat().st_size))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def whole(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of eight steps with whole checkpoints of steps 6 and 8."""
    from vitctl.launch.worker import work

    folder = prepared(tmp_path_factory.mktemp("whole") / "run", tiny_data)
    work(folder)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000006", "step_00000008"]
    return folder


@pytest.mark.parametrize("harm", [truncate, zeros, flip_a_bit, os.unlink], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FILES)
def test_power_cut__the_newest_whole_one_is_found_used_and_said(
    run: Run, whole: Path, tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "a"))
    torn = folder / "checkpoints" / "step_00000008"
    harm(torn / name)
    run("a", **SHORT)
    [said] = [r["text"] for r in records(folder, "warning")]
    assert said.startswith(f"{torn}: not a whole checkpoint: {name} ")
    assert [r["step"] for r in records(folder, "resume")] == [6]
    assert checkpoint(folder, 8) == checkpoint(whole, 8)
    assert [(r["step"], r["loss"]) for r in train_records(folder)] == [
        (r["step"], r["loss"]) for r in train_records(whole)
    ]
    assert sample_keys(folder) == sample_keys(whole)
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == ["step_00000006", "step_00000008", "torn_step_00000008"]


def test_second_signal__in_the_middle_of_a_save_tears_nothing(
    run: Run, whole: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The save writes in the background and never ends: the first signal waits for it, the second does not."""
    folder = prepared(tmp_path / "a", tiny_data)
    with warm.Popen(
        harmed("stuck_save", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith(
            "vitctl: SIGTERM: stopping as soon as the work so far is safe"
        )
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (3, "vitctl: stopped at once; earlier checkpoints are complete\n")
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (2, [])
    run("a", **SHORT)
    assert [r["step"] for r in records(folder, "resume")] == [2]
    assert checkpoint(folder, 8) == checkpoint(whole, 8)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000006", "step_00000008"]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_compile__the_first_signal_waits_for_its_end_and_the_second_does_not(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """torch's own compiler, with nothing kept from before: minutes for a large model, a while for this one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder, family = prepared(tmp_path / "a", tiny_data, **{"machine.compile": True}), []
    with subprocess.Popen(
        harmed("compiling", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "compiling\n"
        for _ in range(times):
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            said = process.stderr.readline()
        process.communicate(timeout=300)
    assert process.returncode == 3
    assert psutil.wait_procs(family, timeout=30)[1] == []
    saved, problems = newest_checkpoint(folder / "checkpoints")
    compiled = [r["step"] for r in records(folder, "compile")] if (folder / "log.jsonl").exists() else []
    if times == 2:
        assert said == "vitctl: stopped at once; earlier checkpoints are complete\n"
        assert (saved, problems, compiled) == (None, [], [])
    else:
        assert saved is not None
        assert (saved.step, problems, compiled) == (0, [], [0])
    done = subprocess.run(
        [sys.executable, "-m", "vitctl", "resume", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    straight = prepared(tmp_path / "straight", tiny_data, **{"machine.compile": True})
    done = subprocess.run(
        [sys.executable, "-m", "vitctl", "resume", str(straight)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert checkpoint(folder, 8) == checkpoint(straight, 8)


def zombies() -> set[int]:
    """Children of this process that ended and were not waited for; tests before this one may have left some."""
    return {p.pid for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("whom", ["loader worker", pytest.param("all", marks=pytest.mark.slow)])
def test_killed__nothing_is_left_behind(tiny_data: Path, tmp_path: Path, whom: str) -> None:
    """One loader process, or the run with its loader processes: one line where one is left to say it, no
    process, no memory.
    """
    values = {**SHORT, "machine.workers": 2, "schedule.total_steps": 4000, "evaluation.every_steps": 0}
    folder, shared, earlier = tmp_path / "a", set(os.listdir(SHARED_MEMORY)), zombies()
    line = command(folder, tiny_data, **values)
    with warm.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert soon(lambda: (folder / "checkpoints" / "step_00000004").exists() or process.poll() is not None)
        family = psutil.Process(process.pid).children(
            recursive=True
        )  # among them one that verified the shards and ended
        workers = [one for one in family if one.status() != psutil.STATUS_ZOMBIE]
        assert len(workers) == 2
        for one in workers[:1] if whom == "loader worker" else [*workers, psutil.Process(process.pid)]:
            one.kill()
        _, said = process.communicate(timeout=60)
    if whom == "loader worker":
        assert process.returncode == 2
        [line] = said.splitlines()
        assert line.startswith(
            "vitctl: a loader process was killed (SIGKILL), most often out of memory; use fewer"
        )
        assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    else:
        assert (process.returncode, said) == (-signal.SIGKILL, "")
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
    assert zombies() <= earlier
    assert soon(
        lambda: not [n for n in set(os.listdir(SHARED_MEMORY)) - shared if n.startswith(("torch_", "sem."))]
    )
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None and problems == []


def test_not_finite__on_one_of_two_processes_is_skipped_by_both(
    run: Run, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image has no finite loss.

    Without clipping, two processes and one in two micro-batches add the same numbers.
    """
    values = {**SHORT, "optimizer.clip_norm": 0.0, "machine.micro_batch": 8}
    keys = sample_keys(run("straight", **values))
    with monkeypatch.context() as poison:
        poison.setattr(losses, "classify", poisoned)
        one = run("one", **values)
    two = prepared(tmp_path / "two", tiny_data, **values, **{"machine.processes": 2})
    codes = two_processes(harmed("nan_on_one_rank", two), tmp_path / "out.txt")
    assert codes == (0, 0), (tmp_path / "out.txt").read_text()
    skipped = [json.loads(line) for line in (two / SKIPPED).read_text().splitlines()]
    steps = sorted({line["step"] for line in skipped})
    assert steps == [3, 6]
    assert sorted((line["step"], line["rank"]) for line in skipped) == [
        (s, rank) for s in steps for rank in (0, 1)
    ]
    for step in steps:
        own = [set(line["keys"]) for line in skipped if line["step"] == step]
        assert sorted(own[0] | own[1]) == keys[step] and not own[0] & own[1]
        assert {line["loss"] for line in skipped if line["step"] == step} == {"nan"}
    assert [r["num_skipped"] for r in train_records(two)] == [r["num_skipped"] for r in train_records(one)]
    assert train_records(two)[-1]["num_skipped"] == len(steps)
    assert sample_keys(two) == keys
    assert checkpoint(two, 8) == checkpoint(one, 8)


# Root may write everywhere, whatever the mode says, but not without these capabilities.
BOUND = (
    "setpriv",
    "--inh-caps=-dac_override,-dac_read_search",
    "--bounding-set=-dac_override,-dac_read_search",
)


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Bound]:
    """bound(line) runs a command that is held to the modes of files and folders."""
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
        pytest.skip("root without setpriv of util-linux is held to no mode")
    yield run
    for path in tmp_path.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder, with its time and size."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (root, *root.rglob("*"))}


def test_read_only__data(bound: Bound, tiny_data: Path, tmp_path: Path) -> None:
    """Training needs no lock and no index in the data."""
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    for path in (data, *data.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(data)
    done = bound(command(tmp_path / "a", data, **SHORT, **{"machine.workers": 1}))
    assert done.returncode == 0, done.stderr
    assert tree(data) == before


@pytest.mark.slow
def test_read_only__data_and_the_place_of_kept_features(
    bound: Bound, tiny_data: Path, tmp_path: Path
) -> None:
    """Few-shot needs no lock in the data either; features that cannot be kept are computed, and that is said."""
    data, folder = Path(shutil.copytree(tiny_data, tmp_path / "data")), tmp_path / "a"
    done = bound(command(folder, data, **SHORT))
    assert done.returncode == 0, done.stderr
    for path in (data, *data.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(data)
    line = ("fewshot", "--from", folder, "--data", data, "--shots", "2", "--out", tmp_path / "few")
    sets = ("--set", f"fewshot.cache={data}", "--set", "machine.device=cpu")
    done = bound([sys.executable, "-m", "vitctl", *map(str, line), *sets])
    assert done.returncode == 0, done.stderr
    said = [r["text"] for r in records(tmp_path / "few", "warning")]
    assert len(said) == 2
    for text in said:
        assert text.startswith(f"{data}: representations could not be cached for later runs (")
        assert "Permission denied" in text and text.endswith("; choose another folder with fewshot.cache")
    assert tree(data) == before


def test_permission_denied__while_saving(
    run: Run, bound: Bound, whole: Path, tiny_data: Path, tmp_path: Path
) -> None:
    folder = prepared(tmp_path / "a", tiny_data, **{"checkpoint.background": False})
    done = bound(harmed("forbidden_save", folder))
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"vitctl: step 8 could not be saved in {folder / 'checkpoints'} (Permission denied); earlier "
        f"checkpoints are complete: "
        f"free space or fix permissions, then: vitctl resume {folder}\n"
    )
    assert [r["step"] for r in records(folder, "checkpoint")] == [2, 4]
    assert [r["text"] for r in records(folder, "warning")] == [
        f"step {step} could not be saved in {folder / 'checkpoints'} (Permission denied); earlier "
        f"checkpoints are complete"
        for step in (6, 8)
    ]
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (4, [])
    (folder / "checkpoints").chmod(0o755)
    run("a", **SHORT)
    assert checkpoint(folder, 8) == checkpoint(whole, 8)


@pytest.mark.slow
def test_permission_denied__while_resuming_nothing_is_begun_anew(
    bound: Bound, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "a"))
    log = (folder / "log.jsonl").read_text()
    (folder / "checkpoints").chmod(0)
    done = bound([sys.executable, "-m", "vitctl", "resume", str(folder)])
    said = f"vitctl: {folder / 'checkpoints'}: permission denied; fix its permissions, or remove it to continue without it\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert (folder / "log.jsonl").read_text() == log
