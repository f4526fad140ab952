"""Which process failed first; and a process, or a loader process, that is stopped: it is reported, and a run
that should stop ends without it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.conftest import (
    PACED,
    TINY,
    WITH_WORKER,
    Run,
    assert_golden,
    checkpoint,
    command,
    records,
    step_images,
)
from tests.launch.conftest import assert_gone, ended, family_of, logged, rank_of, wait_for
from vitctl.engine.journal import Journal
from vitctl.engine.preemption import StopFlag
from vitctl.errors import DataError, LostProcess, VitctlError
from vitctl.launch import peers
from vitctl.launch.agent import note_first_killed
from vitctl.launch.peers import (
    GIVE_UP_SECONDS,
    STUCK_SECONDS,
    _Rank,
    first_error,
    forget_errors,
    is_cause,
    is_final,
    note_error,
    note_killed,
    raise_first_error,
)
from vitctl.launch.run_folder import LOGS
from vitctl.launch.worker import server_patience
from vitctl.recipe.load import load_recipe
from vitctl.system.process import HERE
from vitctl.system.remote import GaveUpError

HASTY = WITH_WORKER.format(worker="tests.launch.hasty_worker")
EVERY_50 = {"checkpoint.every_steps": 50}


def start(
    code: str, folder: Path, data: Path, suspended: int | None = None, **values: Any
) -> "subprocess.Popen[str]":
    line = [sys.executable, "-c", code, *command(folder, data, **EVERY_50 | values)[3:]]
    env = os.environ | ({} if suspended is None else {"SUSPENDED": str(suspended)})
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
def test_stopped_process__in_the_record_of_a_step_loses_no_step(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 0 waits there for the other one's part: step 8 was trained, and was not saved."""
    monkeypatch.setenv("SUSPENDED_IN", "record")
    folder = tmp_path / "run"
    one = start(HASTY, folder, tiny_data, suspended=1, **{"machine.processes": 2})
    wait_for(logged(folder, 7), [one])
    (rank,) = [child for child in family_of([one]) if rank_of(child) == "1"]
    wait_for(lambda: rank.status() == psutil.STATUS_STOPPED, [one])
    one.send_signal(signal.SIGTERM)
    [(code, _, said)] = ended([one])
    assert code == 3 and "; step 8 saved without it; a resume starts at step 8;" in said
    assert 8 not in step_images(folder)
    line = command(folder, tiny_data, **EVERY_50 | {"machine.processes": 2})
    assert subprocess.run(line, capture_output=True, check=False).returncode == 0
    assert [r["step"] for r in records(folder, "resume")] == [8]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_stopped_process__is_named_and_the_run_ends_without_it(
    run: Run, one_process: Path, tiny_data: Path, tmp_path: Path, stopped: int
) -> None:
    folder = tmp_path / "run"
    values: dict[str, Any] = dict(EVERY_50)
    if stopped == 0:  # the checkpoint is whole before process 0 is stopped
        values = {"checkpoint.every_steps": 6, "checkpoint.background": False}
    one = start(HASTY, folder, tiny_data, suspended=stopped, **values, **{"machine.processes": 2})
    wait_for(logged(folder, 7), [one])
    family = family_of([one])
    (rank,) = [child for child in family if rank_of(child) == str(stopped)]
    wait_for(lambda: rank.status() == psutil.STATUS_STOPPED, [one])
    one.send_signal(signal.SIGTERM)
    began = time.monotonic()
    [(code, out, said)] = ended([one])
    assert time.monotonic() - began < 30
    last = said.splitlines()[-1]
    steps = [r["step"] for r in records(folder, "train")]
    step = max(steps) if stopped == 1 else 6
    assert code == 3, said
    assert f"process {stopped} on " in last
    assert f"(pid {rank.pid}) did not answer" in last
    assert last.endswith(f"a resume starts at step {step}; resume with: vitctl resume {folder}")
    assert f"waiting for process {stopped} on " in out
    assert "did not answer" not in out  # said once
    texts = [r["text"] for r in records(folder, "warning")]
    assert any(f"(pid {rank.pid}), which does not answer" in text for text in texts)
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    assert_gone([*family, rank])
    run("run", **values)
    assert_golden(folder)
    assert step_images(folder) == step_images(one_process)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["evaluation", "loader"])
def test_stopped_process__elsewhere(
    run: Run, one_process: Path, tiny_data: Path, tmp_path: Path, kind: str
) -> None:
    """During an evaluation of averaged weights nothing can be saved; a rank whose loader process is stopped
    answers, but is behind.
    """
    folder = tmp_path / "run"
    values = {
        "machine.processes": 2,
        "evaluation.every_steps": 1 if kind == "evaluation" else 0,
        "machine.workers": 1,
    }
    one = start(HASTY, folder, tiny_data, **values)
    wait_for(logged(folder, 7), [one])
    family = family_of([one])
    rank = next(child for child in family if rank_of(child) == "1")  # before its loader processes
    for process in [rank] if kind == "evaluation" else rank.children():
        process.suspend()
    time.sleep(0.5)
    one.send_signal(signal.SIGTERM)
    [(code, _, said)] = ended([one])
    assert (code, "process 1 on " in said) == (3, True), said
    assert_gone(family)
    run("run", **{**EVERY_50, "evaluation.every_steps": values["evaluation.every_steps"]})
    assert step_images(folder) == step_images(one_process)


@pytest.mark.slow
def test_stopped_loader_process__of_a_single_process_the_run_saves_and_ends(
    run: Run, one_process: Path, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    hasty = "from tests.launch import hasty_worker; hasty_worker.hasten()\n" + PACED
    one = start(hasty, folder, tiny_data, **{"machine.workers": 1})
    wait_for(logged(folder, 4), [one])
    family = psutil.Process(one.pid).children(recursive=True)
    for child in family:
        child.suspend()
    log, size = folder / "log.jsonl", 0
    while log.stat().st_size > size:  # until the batches at hand are used up
        size = log.stat().st_size
        time.sleep(1)
    one.send_signal(signal.SIGTERM)
    [(code, _, said)] = ended([one])
    steps = [r["step"] for r in records(folder, "train")]
    assert code == 3, said
    stuck = re.search(r"waits for images: loader process (\d+) is stopped; a resume", said)
    assert stuck is not None, said
    assert int(stuck[1]) in [child.pid for child in family]
    assert f"a resume starts at step {max(steps)}; resume with: vitctl resume {folder}" in said
    assert_gone(family)
    run("run")
    assert_golden(folder)
    assert step_images(folder) == step_images(one_process)
    assert checkpoint(folder, 20) == checkpoint(one_process, 20)


def test_first_error__is_the_earliest(tmp_path: Path) -> None:
    assert first_error(tmp_path) is None
    (tmp_path / LOGS).mkdir()
    for rank, when in ((0, 7.0), (1, 5.0)):
        note = {"rank": rank, "time": when, "mendable": False}
        (tmp_path / LOGS / f"error_{rank:02d}.json").write_text(json.dumps(note))
    assert first_error(tmp_path) == {"rank": 1, "time": 5.0, "mendable": False}


def test_is_final__what_only_the_user_can_fix(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()

    def note(**values: Any) -> tuple[bool, bool]:
        content = {"rank": 0, "time": 1.0, "mendable": True, "lost_peer": False, **values}
        (tmp_path / LOGS / "error_00.json").write_text(json.dumps(content))
        return is_cause(first_error(tmp_path)), is_final(first_error(tmp_path))

    assert note() == (True, True)
    assert note(lost_peer=True) == (False, False)
    assert note(mendable=False) == (True, False)
    note_killed(tmp_path, 0, "SIGKILL")
    assert (is_cause(first_error(tmp_path)), is_final(first_error(tmp_path))) == (True, False)


@pytest.mark.parametrize("error", [GaveUpError("away"), DataError("damaged")])
def test_is_final__a_server_may_be_back_at_the_next_start(tmp_path: Path, error: VitctlError) -> None:
    note_error(tmp_path, error)
    assert is_final(first_error(tmp_path)) == (not error.passes)
    with pytest.raises(VitctlError, match=str(error)) as caught:
        raise_first_error(tmp_path, 2)
    assert caught.value.passes == error.passes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Timed out waiting 6000ms for recv operation",
            "waited longer than machine.group_timeout for another",
        ),
        ("Connection reset by peer", "lost the connection to another process, which left no error message"),
    ],
)
def test_raise_first_error__of_a_process_that_waited(tmp_path: Path, text: str, said: str) -> None:
    note_error(tmp_path, RuntimeError(text))
    (tmp_path / LOGS / "nccl_rank_1").write_bytes(b"")
    with pytest.raises(LostProcess, match=said) as caught:
        raise_first_error(tmp_path, 2)
    assert f"flight recorder (read it with torchfrtrace): {tmp_path / LOGS / 'nccl_rank_1'}" in str(
        caught.value
    )
    forget_errors(tmp_path)
    assert first_error(tmp_path) is None and not list((tmp_path / LOGS).glob("nccl*"))


@pytest.mark.parametrize(("name", "guesses"), [("SIGKILL", True), ("SIGABRT", False)])
def test_raise_first_error__only_a_kill_may_be_a_lack_of_memory(
    tmp_path: Path, name: str, guesses: bool
) -> None:
    (tmp_path / LOGS).mkdir()
    note_killed(tmp_path, 1, name)
    with pytest.raises(LostProcess, match=rf"process 1 of 2 was killed \({name}\)") as caught:
        raise_first_error(tmp_path, 2)
    assert ("out of memory" in str(caught.value)) == guesses


def test_first_killed__is_read_from_what_torchrun_prints(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()
    failures = {
        rank: ProcessFailure(rank, 100 + rank, code, "")
        for rank, code in ((0, -int(signal.SIGTERM)), (1, -int(signal.SIGABRT)))
    }
    failures[0].timestamp, failures[1].timestamp = 9, 7
    note_first_killed(tmp_path, f"earlier\n{ChildFailedError('worker', failures)}\n")
    error = first_error(tmp_path)
    assert error is not None and (error["rank"], error["killed"]) == (1, "SIGABRT")
    forget_errors(tmp_path)
    note_first_killed(tmp_path, str(ChildFailedError("worker", {0: ProcessFailure(0, 9, 1, "")})))
    assert first_error(tmp_path) is None


class Ended(Exception):  # noqa: N818 - the end of a process
    pass


class Pair:
    """Two processes whose main threads stand in a collective operation, on a clock of the test.

    A value that a test changes from None: what ended the run, and the second at which it ended.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, group_timeout: float = 300.0) -> None:
        self.now, self.cpu, self.each_tick, self.away = 1000.0, 0.0, 0.0, ""
        self.said: list[str] = []
        patch.setattr(peers.time, "monotonic", lambda: self.now)
        patch.setattr(peers.time, "process_time", lambda: self.cpu)
        patch.setattr(peers, "_why_unreachable", lambda *_: self.away)
        for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        for name, value in {"arrivals": 7, "images_since": None, "step": 3, "operation": "a sum"}.items():
            patch.setattr(HERE, name, value)
        (folder / LOGS).mkdir()
        self.stop = StopFlag()
        journal = Journal(folder / "log.jsonl", lambda record: self.said.append(str(record["text"])))
        self.ranks = [_Rank(folder, journal, self.stop, self.end, rank, 2, group_timeout) for rank in (0, 1)]

    def end(self, text: str) -> None:
        raise Ended(text)

    def ended(self, seconds: int) -> tuple[int, str] | None:
        """Let seconds pass; return when the first process ended, and why."""
        for second in range(seconds):
            self.now, self.cpu = self.now + 1, self.cpu + self.each_tick
            for rank in self.ranks:
                try:
                    rank.look()
                except Ended as reason:
                    assert rank.rank == 0, "the first process saves"
                    with pytest.raises(Ended, match=r"^$"):
                        self.ranks[1].look()
                    return second, str(reason)
        return None


def test_stuck__a_cut_network_is_named_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, monkeypatch)
    pair.away = "process 0 at a:1 (timed out)"
    found = pair.ended(60)
    assert found is not None and found[0] in range(int(STUCK_SECONDS), 60)
    assert "; a sum of 2 processes does not end, and none of them computes: process 1 on " in found[1]
    assert "cannot reach process 0 at a:1 (timed out); step 3 not saved: no training was in pro" in found[1]
    assert [text.startswith("step 3: a sum of 2 processes does not end") for text in pair.said] == [
        True,
        False,  # that it stopped
    ]


@pytest.mark.parametrize(
    ("group_timeout", "each_tick", "images", "ends"),
    [
        (300.0, 0.0, False, True),
        (80.0, 0.0, False, True),
        (80.0, 0.5, False, False),
        (80.0, 0.0, True, False),
    ],
    ids=["an unknown cause", "a shorter limit", "one computes", "one waits for images"],
)
def test_stuck__without_a_cut_the_limit_of_the_group_ends_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group_timeout: float,
    each_tick: float,
    images: bool,
    ends: bool,
) -> None:
    pair = Pair(tmp_path, monkeypatch, group_timeout)
    pair.each_tick = each_tick
    if images:
        monkeypatch.setattr(HERE, "images_since", 1000.0)
    found = pair.ended(400)
    assert (found is not None) == ends
    if found is not None:
        assert found[0] in range(int(group_timeout), int(group_timeout) + 5)


def test_stuck__a_signal_ends_it_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, monkeypatch)
    assert pair.ended(12) is None
    pair.stop.signal, pair.stop.since = signal.SIGTERM, pair.now
    found = pair.ended(60)
    assert found is not None and found[0] in range(int(GIVE_UP_SECONDS) - 1, int(GIVE_UP_SECONDS) + 5)


def test_stuck__what_moves_again_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, monkeypatch)
    pair.away = "process 0 at a:1 (timed out)"
    for _ in range(5):
        assert pair.ended(35) is None
        HERE.arrivals += 1


def test_why_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert peers._why_unreachable("127.0.0.1", port) == ""
    assert peers._why_unreachable("127.0.0.1", port) == f"process 0 at 127.0.0.1:{port} (Connection refused)"


def test_server_patience__belongs_to_remote_images_alone() -> None:
    recipe = load_recipe(str(TINY)).recipe
    for place, seconds in (("data", 0.0), ("s3://bucket/set", 7.0)):
        data = recipe.data.model_copy(update={"path": place, "patience": 7.0})
        assert server_patience(recipe.model_copy(update={"data": data})) == seconds
