"""Errors of the operating system are explained in one line. An error in the training loop saves what is
complete, and nothing else.
"""

import copy
import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import SafetensorError

from tests.conftest import (
    Run,
    batch_keys,
    checkpoint,
    harmed,
    records,
    step_images,
    train_records,
    two_processes,
)
from tests.faults.conftest import assert_same, prepared, warnings
from tests.harmed import poisoned
from tests.matrix import few, slow
from vitctl import load_model, open_split
from vitctl.data.datasets.catalog import find_data_set
from vitctl.engine import evaluation, losses, optimizer, trainer, update
from vitctl.engine.checkpoint import newest_checkpoint
from vitctl.engine.journal import CHECKPOINTS
from vitctl.engine.log import SKIPPED, RunLog
from vitctl.engine.state import RunState
from vitctl.errors import DataError, LaunchError, VitctlError, explained, writing
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe
from vitctl.system.pool import run_tasks


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EIO, errno.ENAMETOOLONG]
)
def test_explained__where_what_and_how_to_fix(code: int) -> None:
    text = explained(OSError(code, os.strerror(code), "a/b"), "elsewhere", "go on")
    assert isinstance(text, LaunchError)
    assert (text.where, text.what) == ("a/b", os.strerror(code).lower())
    assert text.fix.endswith(", then go on") and "\n" not in str(text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (("a.toml", "unknown key x", "leave it out"), "a.toml: unknown key x; leave it out"),
        (("a.toml", "unknown key x", ""), "a.toml: unknown key x"),
        (("", "no image", "add one"), "no image; add one"),
        (("", "no image: none", ""), "no image: none"),
    ],
)
def test_error__has_fields_that_its_text_is_made_of(fields: tuple[str, ...], text: str) -> None:
    for error in (made := DataError(*fields), pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert (error.where, error.what, error.fix, str(error)) == (*fields, text)
    assert str(DataError("a.toml", DataError("a.toml", "no table", "add one"))) == "a.toml: no table; add one"
    made.passing(True)
    assert pickle.loads(pickle.dumps(made)).passes
    assert (DataError("all of it", fix="do so").where, DataError("all of it").what) == ("", "all of it")


@pytest.mark.parametrize(
    ("call", "where", "what", "fix"),
    [
        (lambda: load_recipe("jft_b61"), "", "no recipe is called 'jft_b61'", "did you mean jft_b16"),
        (lambda: load_recipe("gone.toml"), "gone.toml", "no such recipe file", ""),
        (
            lambda: load_recipe("smoke", [Override("loss.smothing", 1)]),
            "--set",
            "unknown key loss.smothing",
            "did",
        ),
        (lambda: open_split("train", path="nowhere"), "nowhere", "no such folder", ""),
        (lambda: load_model("nowhere"), "nowhere", "no such weights", "give a run folder"),
        (lambda: find_data_set("pest"), "", "no data set is called 'pest'", "did you mean pets?"),
    ],
)
def test_error__of_a_call_says_where_what_and_how_to_fix(
    call: Callable[[], Any], where: str, what: str, fix: str
) -> None:
    with pytest.raises(VitctlError) as caught:
        call()
    error = caught.value
    assert (error.where, error.what) == (where, what)
    assert error.fix.startswith(fix) and (error.fix or not fix)


def test_explained__the_error_of_a_full_disk_names_no_file() -> None:
    with pytest.raises(OSError, match="No space") as caught, writing("out/x.png"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(explained(caught.value)).startswith(
        "out/x.png: no space left on device; free some space there"
    )


def test_explained__libraries_give_the_code_in_the_message() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("to", ["closed", *slow("/dev/full")])
def test_standard_output__full_or_closed(to: str) -> None:
    redirect = ">&-" if to == "closed" else f"> {to}"
    line = f"{sys.executable} -m vitctl recipes show smoke {redirect}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    if to == "closed":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        text = (
            "vitctl: standard output: no space left on device; free some space there, "
            "or choose another path\n"
        )
        assert (done.returncode, done.stderr) == (2, text)


@pytest.mark.slow
def test_standard_output__that_knows_only_ascii(tmp_path: Path) -> None:
    recipe = tmp_path / "größe.toml"
    recipe.write_text('extends = "smoke"\nnote = "café → 日本"\n', encoding="utf-8")
    command = [sys.executable, "-m", "vitctl", "recipes", "diff", "smoke", str(recipe)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\xe9 \u2192 \u65e5\u672c" in done.stdout


Broken = Callable[..., None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """broken(owner, "function", 5, error): the fifth call from now on raises, before or after its work."""

    def arm(owner: ModuleType | type, name: str, call: int, error: Exception, *, after: bool = False) -> None:
        real, calls = getattr(owner, name), count(1)

        def called(*given: Any, **named: Any) -> Any:
            this = next(calls)
            if this == call and not after:
                raise error
            done = real(*given, **named)
            if this == call:
                raise error
            return done

        monkeypatch.setattr(owner, name, called)

    return arm


WHOLE = {
    "images": (trainer, "take", 6, DataError("a loader process was killed"), 5),
    "forward": (update.TrainStep, "_backward", 6, MemoryError("no memory"), 5),
    "a bug": (update, "clip_gradients", 6, ZeroDivisionError("a bug"), 5),
    "evaluation": (evaluation, "count_hits", 1, KeyError("a bug"), 4),
    "too many bad samples": (RunLog, "add", 5, DataError("too many"), 5),
}


@pytest.mark.parametrize(("owner", "name", "call", "error", "step"), few(WHOLE, "a bug"))
def test_error__between_two_updates_is_saved(
    tiny_data: Path, straight: Path, tmp_path: Path, broken: Broken, owner: Any, name: str, call: int,
    error: Exception, step: int
) -> None:  # fmt: skip
    folder = prepared(tmp_path / "run", tiny_data)
    broken(owner, name, call, error, after=owner is RunLog)
    with pytest.raises((type(error), VitctlError)):
        work(folder)
    saved, problems = newest_checkpoint(folder / CHECKPOINTS)
    assert saved is not None
    assert (saved.step, problems) == (step, [])
    kind = "" if isinstance(error, VitctlError) else f" ({type(error).__name__})"
    assert warnings(folder)[-1] == (
        f"ended by an error{kind} after step {step}, which is saved: the run can resume from its newest "
        f"checkpoint"
    )
    assert work(folder)["status"] == "done"
    assert_same(folder, straight)


HALF = {
    "half an update": (update.Average, "update", 6, "it came in the middle of an update"),
    "before it is counted": (update.TrainStep, "_apply", 6, "it came in the middle of an update"),
    "half a swap": (optimizer, "_swap", 2, "it came while weights and their average were swapped"),
}


@pytest.mark.parametrize("case", few([*HALF], "half an update"))
def test_error__in_the_middle_of_an_update_is_not_saved(
    tiny_data: Path, straight: Path, tmp_path: Path, broken: Broken, case: str
) -> None:
    owner, name, call, why = HALF[case]
    folder = prepared(tmp_path / "run", tiny_data)
    broken(owner, name, call, RuntimeError("a bug"), after=case == "before it is counted")
    with pytest.raises(RuntimeError):
        work(folder)
    saved, problems = newest_checkpoint(folder / CHECKPOINTS)
    assert saved is not None
    assert (saved.step, problems) == (3, [])
    done = 4 if case == "half a swap" else 5
    assert warnings(folder)[-1] == (
        f"ended by an error (RuntimeError) after step {done}, not saved: {why}; the run can resume from its "
        f"newest checkpoint"
    )
    assert work(folder)["status"] == "done"
    assert_same(folder, straight)


@pytest.mark.slow
def test_error__whose_save_fails_too_is_the_one_reported(
    tiny_data: Path, straight: Path, tmp_path: Path, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(tmp_path / "run", tiny_data)
    with monkeypatch.context() as once:
        broken(trainer, "take", 6, DataError("the first error"))
        start = RunState._start_saving

        def failing(run: RunState) -> None:
            if run.step == 5:
                raise MemoryError("no room for a copy")
            start(run)

        once.setattr(RunState, "_start_saving", failing)
        with pytest.raises(DataError, match="the first error"):
            work(folder)
    assert warnings(folder)[-1].startswith(
        "ended by an error after step 5, not saved: MemoryError: no room for a copy"
    )
    assert work(folder)["status"] == "done"
    assert_same(folder, straight)


NOT_FINITE = {"schedule.total_steps": 30, "schedule.warmup_steps": 1, "evaluation.every_steps": 0}


def test_not_finite__updates_are_skipped_and_ten_in_a_row_are_an_error(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with pytest.raises(VitctlError, match=r"^step \d+: the last 10 updates were not finite") as caught:
        run("a", **NOT_FINITE, **{"optimizer.lr": 1e200, "optimizer.clip_norm": 0.0})
    assert f"{folder / SKIPPED} has norms and sample keys; lower optimizer.lr" in str(caught.value)
    skipped = [json.loads(line) for line in (folder / SKIPPED).read_text().splitlines()]
    first, keys = skipped[0], batch_keys(folder)
    assert [line["step"] for line in skipped] == list(range(first["step"], first["step"] + 10))
    assert all(line["keys"] == keys[line["step"] - 1] for line in skipped)
    assert {"nan"} == {line["loss"] for line in skipped}
    assert set(first["gradient_norms"]) == set(first["weight_norms"])
    *each, last = [record["text"] for record in records(folder, "warning")]
    assert len(each) == 10
    assert f"after step {skipped[-1]['step']}, which is saved: " in last
    assert train_records(folder)[-1]["num_skipped"] >= 8
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"


def test_not_finite__on_one_of_two_processes_is_skipped_by_both(
    run: Run, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image has no finite loss.

    Without clipping, two processes and one in two micro-batches add the same numbers.
    """
    values = {
        "schedule.total_steps": 8,
        "evaluation.every_steps": 4,
        "optimizer.clip_norm": 0.0,
        "machine.micro_batch": 8,
    }
    straight = run("straight", **values)
    keys = batch_keys(straight)
    with monkeypatch.context() as poison:
        poison.setattr(losses, "classify", poisoned)
        one = run("one", **values)
    two = prepared(
        tmp_path / "two", tiny_data, **values, **{"machine.processes": 2, "checkpoint.every_steps": 0}
    )
    codes = two_processes(harmed("nan_on_one_rank", two), tmp_path / "out.txt")
    assert codes == (0, 0), (tmp_path / "out.txt").read_text()
    skipped = [json.loads(line) for line in (two / SKIPPED).read_text().splitlines()]
    steps = sorted({line["step"] for line in skipped})
    assert steps == [3, 6]
    assert sorted((line["step"], line["rank"]) for line in skipped) == [
        (s, rank) for s in steps for rank in (0, 1)
    ]
    for number in steps:
        own = {line["rank"]: line["keys"] for line in skipped if line["step"] == number}
        assert own[0] + own[1] == keys[number - 1]
        assert {line["loss"] for line in skipped if line["step"] == number} == {"nan"}
    assert [r["num_skipped"] for r in train_records(two)] == [r["num_skipped"] for r in train_records(one)]
    assert train_records(two)[-1]["num_skipped"] == len(steps)
    assert step_images(two) == step_images(straight)
    assert checkpoint(two, 8) == checkpoint(one, 8)
