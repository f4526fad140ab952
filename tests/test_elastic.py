"""Several machines, which are several vitctls on loopback here, and processes that are lost and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Run, checkpoint, sample_keys
from tests.test_golden import assert_golden, command
from tests.test_scale import free_port
from vitctl.cluster import ELASTIC_RUN
from vitctl.elastic import (
    Meeting,
    check_spread,
    exit_code,
    main,
    own_address,
    own_command,
    parse_nodes,
    torchrun_words,
)
from vitctl.engine.preemption import SIGNALS
from vitctl.errors import LaunchError
from vitctl.worker import LOGS, note_lost

# One process computes these to the bit as two do: without clipping, each sums the gradients of the same halves.
EXACT = {"optimizer.clip_norm": 0.0, "machine.micro_batch": 8, "checkpoint.every_steps": 2}
FOREGROUND = {"checkpoint.background": "false"}  # a step that is in the log has been saved before the next
LONG = {"schedule.total_steps": 100_000, "evaluation.every_steps": 0, "checkpoint.every_steps": 0}


def test_parse_nodes() -> None:
    assert parse_nodes("1") == Meeting(1)
    assert parse_nodes("2@gpu01") == Meeting(2, "gpu01", 29_400)
    assert parse_nodes("16@10.0.0.7:512") == Meeting(16, "10.0.0.7", 512)
    assert parse_nodes("2@[fe80::1]:99") == Meeting(2, "[fe80::1]", 99)


@pytest.mark.parametrize("text", ["", "0", "two", "2@", "2@a b", "2@host:", "2@host:70000", "2@host:0", "-1@host"])
def test_parse_nodes__of_nonsense(text: str) -> None:
    with pytest.raises(LaunchError, match=r"should be the number of machines, an address and a port; for example --n"):
        parse_nodes(text)


def test_parse_nodes__several_have_to_meet_somewhere() -> None:
    with pytest.raises(LaunchError, match="--nodes 2: where they meet is missing, the address of one of them; for ex"):
        parse_nodes("2")


def test_check_spread() -> None:
    check_spread(Meeting(2, "a"), 4, 3)
    with pytest.raises(LaunchError) as caught:
        check_spread(Meeting(2, "a"), 1, 0)
    assert str(caught.value) == (
        "--nodes 2: 1 process cannot be spread evenly over them; --processes is their number on all machines, a multiple of 2"
    )
    with pytest.raises(LaunchError, match="--nodes 4: 6 processes cannot be spread"):
        check_spread(Meeting(4, "a"), 6, 0)
    with pytest.raises(LaunchError, match="--restarts -1: should be 0 or more"):
        check_spread(Meeting(), 2, -1)


def test_command__is_what_was_typed_without_the_start() -> None:
    typed = ["resume", "a run", "--nodes", "2@h:1", "--set", "note=--nodes", "--restarts=3", "-n", "4"]
    kept = ["resume", "a run", "--set", "note=--nodes", "-n", "4"]
    assert own_command(typed, None) == kept
    assert own_command(["pretrain", "--nodes=2@h"], Path("runs/x")) == ["pretrain", "--out", "runs/x"]
    words = torchrun_words(Meeting(2, "h", 1), 8, 3, Path("runs/x"), kept)
    assert words[: -len(kept)] == [
        *("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "x"),
        *("--nproc-per-node", "4", "--max-restarts", "3", "-m", "vitctl"),
    ]
    assert torchrun_words(Meeting(), 2, 1, Path("x"), kept)[0] == "--standalone"


def test_own_address() -> None:
    assert own_address(Meeting()) == own_address(Meeting(2, "127.0.0.1")) == "127.0.0.1"
    assert own_address(Meeting(2, "localhost")) == "localhost"
    with pytest.raises(LaunchError, match=r"--nodes: no way from here to nowhere\.invalid \("):
        own_address(Meeting(2, "nowhere.invalid"))


def test_exit_code__tells_torchrun_what_must_not_be_started_again(tmp_path: Path) -> None:
    env = {ELASTIC_RUN: str(tmp_path)}
    assert [exit_code(code, {}) for code in range(4)] == [0, 1, 2, 3]
    assert [exit_code(code, env) for code in range(4)] == [0, 1, 2, 0]
    (tmp_path / LOGS).mkdir()

    def note(**values: Any) -> None:
        content = {"rank": 0, "time": 1.0, "mendable": True, "lost_peer": False, **values}
        (tmp_path / LOGS / "error_00.json").write_text(json.dumps(content))

    note()
    assert [exit_code(code, env) for code in range(4)] == [0, 1, 0, 0]
    for again in ({"lost_peer": True}, {"mendable": False}):
        note(**again)
        assert exit_code(2, env) == 2
    note_lost(tmp_path, 0, "SIGKILL")
    assert exit_code(2, env) == 2


def machine(folder: Path, data: Path, *flags: str, **values: Any) -> "subprocess.Popen[str]":
    """One machine's vitctl."""
    line = [*command(folder, data, **{**FOREGROUND, **values}), *flags]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def machines(folder: Path, data: Path, *flags: str, **values: Any) -> "list[subprocess.Popen[str]]":
    """Two that meet."""
    nodes = ("--nodes", f"2@127.0.0.1:{free_port()}", *flags)
    return [machine(folder, data, *nodes, **values) for _ in range(2)]


def ended(processes: "Sequence[subprocess.Popen[str]]") -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    said = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def wait_for(condition: Callable[[], Any], processes: "Sequence[subprocess.Popen[str]]") -> Any:
    """What the condition gives, once it holds."""
    until = time.monotonic() + 240
    while not (found := condition()):
        assert [process.poll() for process in processes] == [None] * len(processes)
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def logged(folder: Path, step: int) -> Callable[[], bool]:
    log = folder / "log.jsonl"
    return lambda: log.exists() and f'"step": {step},' in log.read_text()


def family_of(processes: "Sequence[subprocess.Popen[str]]") -> list[psutil.Process]:
    return [one for process in processes for one in psutil.Process(process.pid).children(recursive=True)]


def rank_of(process: psutil.Process) -> str | None:
    """The rank of a process, None of one that is no rank or has ended."""
    try:
        return process.environ().get("RANK")
    except (psutil.Error, ProcessLookupError):
        return None


@contextmanager
def held(processes: "Sequence[subprocess.Popen[str]]") -> Iterator[list[psutil.Process]]:
    """Their ranks, which stand still inside of the block."""
    ranks = [one for one in family_of(processes) if rank_of(one) is not None]
    for rank in ranks:
        rank.suspend()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.resume()


def is_signalled(process: psutil.Process) -> bool:
    """Whether a signal of ours waits for a process that stands still."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    waiting = int(next(line for line in status.splitlines() if line.startswith("ShdPnd:")).split()[1], 16)
    return any(waiting >> (number - 1) & 1 for number in SIGNALS)


def kill_rank(rank: int, processes: "Sequence[subprocess.Popen[str]]") -> None:
    """End one process as the out-of-memory killer would."""
    (lost,) = [one for one in family_of(processes) if rank_of(one) == str(rank)]
    lost.kill()


def assert_gone(family: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_two_machines__one_is_told_to_stop_both_save_and_one_process_goes_on(
    run: Run, tiny_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    pair = machines(folder, tiny_data, **{"machine.processes": 2})
    wait_for(logged(folder, 2), pair)
    family = family_of(pair)
    with held(pair) as ranks:  # or they might be through before the signal has found its way to them
        pair[1].send_signal(signal.SIGTERM)
        wait_for(lambda: any(map(is_signalled, ranks)), pair)
    both = ended(pair)
    for code, _, said in both:
        first, last = said.splitlines()
        assert first.startswith("1 process here; 2 machines meet at 127.0.0.1:")
        assert (code, last) == (3, f"stopped and saved in {folder}; go on with: vitctl resume {folder}")
    assert sorted(out.count("step 2/20") for _, out, _ in both) == [0, 1]
    assert_gone(family)
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    line = (folder / "launch.txt").read_text()
    assert "-m torch.distributed.run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:" in line
    assert " --rdzv-id run --nproc-per-node 1 --max-restarts 0 -m vitctl pretrain --recipe " in line
    run("run", **{"checkpoint.background": False})
    assert_golden(folder)
    assert sample_keys(folder) == sample_keys(run("one"))


def test_restart__a_killed_process_costs_nothing(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    one = machine(folder, tiny_data, "--restarts", "1", **EXACT, **{"machine.processes": 2})
    wait_for(logged(folder, 3), [one])
    kill_rank(1, [one])
    [(code, out, said)] = ended([one])
    assert (code, said) == (0, ""), said
    assert "warning: a process was lost, all were started again (restart 1)" in out
    assert "going on from step" in out
    assert "exitcode: -9" in next((folder / LOGS).glob("launcher_*.txt")).read_text()
    straight = run("straight", **EXACT)
    assert checkpoint(folder, 20) == checkpoint(straight, 20)
    assert sample_keys(folder) == sample_keys(straight)


@pytest.mark.slow
def test_two_machines__of_two_processes_each_with_a_killed_one(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pair = machines(folder, tiny_data, "--restarts", "1", **{"machine.processes": 4, "checkpoint.every_steps": 2})
    wait_for(logged(folder, 5), pair)
    kill_rank(3, pair)
    said = ended(pair)
    assert [code for code, _, _ in said] == [0, 0], said
    shown = sorted((out.count("step 20/20"), "going on from step" in out, "0 to 3, CPU" in out) for _, out, _ in said)
    assert shown == [(0, False, False), (1, True, True)]
    assert_golden(folder)
    assert sample_keys(folder) == sample_keys(run("one"))


@pytest.mark.slow
def test_restarts__used_up_are_one_line_on_every_machine(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pair = machines(folder, tiny_data, **{**LONG, "machine.processes": 2})
    wait_for(logged(folder, 5), pair)
    family = family_of(pair)
    kill_rank(0, pair)
    for code, _, said in ended(pair):
        assert code == 2, said
        assert said.splitlines()[1:] == [
            "vitctl: process 0 of 2 was killed (SIGKILL), most often for want of memory; "
            f"{folder / 'logs' / 'rank_00.txt'} has its output; go on with: vitctl resume {folder}"
        ]
    assert_gone(family)
    assert json.loads((folder / "result.json").read_text())["error"].startswith("process 0 of 2 was killed (SIGKILL)")


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["other", "meeting"])
def test_a_whole_machine__is_replaced(run: Run, tiny_data: Path, tmp_path: Path, lost: str) -> None:
    """All of it is gone at once. The same command on a new one, and the run goes on; where the machine was lost at whose
    address they meet, the one that is left ends, and is started again too."""
    folder, port = tmp_path / "run", free_port()
    values = {**EXACT, "machine.processes": 2}
    flags = ("--nodes", f"2@127.0.0.1:{port}", "--restarts", "1")
    host = machine(folder, tiny_data, *flags, **values)
    wait_for(lambda: is_open(port), [host])
    pair = [host, machine(folder, tiny_data, *flags, **values)]
    wait_for(logged(folder, 5), pair)
    left, gone = pair if lost == "other" else pair[::-1]
    family = family_of([gone])
    gone.kill()
    assert_gone(family)
    ended([gone])
    if lost == "other":
        wait_for(says(left, "where one is missing, type the same command there, or on another"), [left])
    else:
        [(code, _, said)] = ended([left])
        assert code == 2, said
        assert len(said.splitlines()) == 2
        assert said.endswith(f"go on with: vitctl resume {folder}\n")
        left = machine(folder, tiny_data, *flags, **values)
    said = ended([left, machine(folder, tiny_data, *flags, **values)])
    assert [code for code, _, _ in said] == [0, 0], said
    assert sum("going on from step" in out for _, out, _ in said) == 1
    assert checkpoint(folder, 20) == checkpoint(run("straight", **EXACT), 20)


def says(process: "subprocess.Popen[str]", text: str) -> Callable[[], bool]:
    """Whether it has said so by now on its standard error."""
    assert process.stderr is not None
    pipe, so_far = process.stderr.fileno(), bytearray()
    os.set_blocking(pipe, False)

    def look() -> bool:
        with suppress(BlockingIOError):
            so_far.extend(os.read(pipe, 10_000))
        return text.encode() in so_far

    return look


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_restarts__are_not_spent_on_what_a_person_has_to_mend(tiny_data: Path, tmp_path: Path) -> None:
    """A split that is not there is found by the first process; an unreadable image by one in the midst of its work."""
    from tests.engine.test_training import damaged

    data = damaged(tiny_data, tmp_path / "data", "test", [20])
    for name, place, values, expected in (
        ("split", tiny_data, {"data.train_split": "tran"}, "tran"),
        ("image", data, {"schedule.total_steps": 6, "evaluation.every_steps": 0}, "cannot be evaluated"),
    ):
        folder = tmp_path / name
        pair = machines(folder, place, "--restarts", "2", **values, **{"machine.processes": 2})
        for code, _, said in ended(pair):
            assert code == 2, said
            own = said.splitlines()[1:]
            assert len(own) == 1, own
            assert expected in own[0]
            assert own[0].endswith(".txt)")
        logs = [path.read_text() for path in (folder / LOGS).glob("rank_*.txt")]
        assert any("Traceback" in text and expected in text for text in logs)


@pytest.mark.slow
def test_signal__the_second_leaves_nothing_behind(tiny_data: Path, tmp_path: Path) -> None:
    """Nor does the end of vitctl itself. The processes hang: they could not save if they would."""
    for name, numbers in (("twice", (signal.SIGINT, signal.SIGTERM)), ("killed", (signal.SIGKILL,))):
        folder = tmp_path / name
        one = machine(folder, tiny_data, "--restarts", "3", **LONG, **{"machine.processes": 2, "machine.workers": 1})
        wait_for(logged(folder, 2), [one])
        family = family_of([one])
        assert len(family) >= 5
        for process in family:
            if "RANK" in process.environ():
                process.suspend()
        one.send_signal(numbers[0])
        if len(numbers) > 1:
            wait_for((folder / ".stop").exists, [one])
            one.send_signal(numbers[1])
        [(code, _, _)] = ended([one])
        assert code == (3 if name == "twice" else -signal.SIGKILL)
        assert_gone(family)


@pytest.mark.slow
def test_signal__while_a_machine_waits_for_the_others(tiny_data: Path, tmp_path: Path) -> None:
    nodes = ("--nodes", f"2@127.0.0.1:{free_port()}")
    one = machine(tmp_path / "run", tiny_data, *nodes, **{"machine.processes": 2})
    wait_for(lambda: family_of([one]), [one])
    family = family_of([one])
    one.send_signal(signal.SIGUSR1)
    [(code, _, said)] = ended([one])
    assert (code, said.splitlines()[-1]) == (3, "vitctl: stopped")
    assert_gone(family)


@pytest.mark.slow
def test_torchrun__that_ends_without_a_process_is_one_line(tiny_data: Path, tmp_path: Path) -> None:
    """As after ten minutes in which the others did not come."""
    place = f"127.0.0.1:{free_port()}"
    one = machine(tmp_path / "run", tiny_data, "--nodes", f"2@{place}", **{"machine.processes": 2})
    [agent] = wait_for(lambda: family_of([one]), [one])
    agent.kill()
    [(code, _, said)] = ended([one])
    assert code == 2
    assert len(said.splitlines()) == 2
    assert f"torchrun ended before the processes had met at {place}: all of them have to run this command; " in said


@pytest.mark.slow
def test_resume_and_finetune__with_restarts(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder, tuned = run("run"), tmp_path / "tuned"
    for file in (folder / "checkpoints" / "step_00000020").iterdir():
        file.unlink()
    vitctl = [sys.executable, "-m", "vitctl"]
    again = [*vitctl, "resume", str(folder), "--processes", "2", "--nodes=1", "--restarts=1"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "going on from step 18 of 20" in done.stdout
    assert_golden(folder)
    line = (folder / "launch.txt").read_text()
    assert line.endswith(f"--max-restarts 1 -m vitctl resume {folder} --processes 2\n")
    own = [
        "--from",
        str(folder),
        "--data",
        str(tiny_data),
        "--out",
        str(tuned),
        "--lr",
        "0.01",
        "--steps",
        "4",
        "-n",
        "2",
    ]
    small = ["--set", "schedule.batch_size=8", "--set", "schedule.warmup_steps=1", "--res", "16"]
    line = [*vitctl, "finetune", *own, *small, "--restarts", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tuned / "result.json").read_text())
    assert (result["status"], result["metrics"]["total"]) == ("done", 23)


@pytest.mark.slow
def test_torchrun__typed_by_a_person_starts_a_killed_process_again(run: Run, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = command(folder, tiny_data, **EXACT, **FOREGROUND)[2:]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*launcher, "--max-restarts", "2", "-m", *own]
    one = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(logged(folder, 5), [one])
    kill_rank(1, [one])
    [(code, out, said)] = ended([one])
    assert code == 0, said
    assert "going on from step" in out
    assert checkpoint(folder, 20) == checkpoint(run("straight", **EXACT), 20)


def test_agent__writes_down_which_process_it_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from vitctl import elastic

    def lose(_arguments: Any) -> None:
        raise ChildFailedError("vitctl", {2: ProcessFailure(0, 1, -signal.SIGSEGV, os.devnull)})

    (tmp_path / LOGS).mkdir()
    monkeypatch.setattr(elastic, "die_with", lambda _: None)
    monkeypatch.setenv("VITCTL_LAUNCHER", "1")
    monkeypatch.setattr(sys, "argv", ["elastic", str(tmp_path), "--standalone", "-m", "vitctl"])
    monkeypatch.setattr(torchrun, "run", lose)
    with pytest.raises(ChildFailedError):
        main()
    note = json.loads((tmp_path / LOGS / "error_02.json").read_text())
    assert (note["rank"], note["killed"], note["lost_peer"]) == (2, "SIGSEGV", False)
