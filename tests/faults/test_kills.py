"""SIGKILL and second signals: nothing is left behind, nothing is torn, and a run that is hit again and again
equals one that never was.
"""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.conftest import checkpoint, harmed
from tests.faults.conftest import (
    ROOT,
    assert_same,
    command,
    fill,
    make_room,
    prepared,
    records,
    resume,
    status,
)
from vitctl.__main__ import main
from vitctl.engine.checkpoint.files import newest_checkpoint
from vitctl.jobs import pretrain  # noqa: F401 - imported once, for all attempts
from vitctl.launch.worker import work
from vitctl.system.process import SIGNALS as HANDLED

SHARED_MEMORY = Path("/dev/shm")
PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
EVERY_2 = {"checkpoint.every_steps": 2}


def soon(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not (value := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(value)


def test_second_signal__in_the_middle_of_a_save_tears_nothing(
    tiny_data: Path, straight: Path, tmp_path: Path
) -> None:
    """The save writes in the background and never ends: the first signal waits for it, the second does not."""
    folder = prepared(tmp_path / "a", tiny_data, **EVERY_2)
    with warm.Popen(harmed("stuck_save", folder), **PIPED, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("vitctl: SIGTERM: stopping as soon as")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=60)
    assert (process.returncode, text) == (3, "vitctl: stopped at once; earlier checkpoints are complete\n")
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (2, [])
    work(folder)
    assert [r["step"] for r in records(folder, "resume")] == [2]
    assert_same(folder, straight)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000010", "step_00000012"]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_compile__the_first_signal_waits_for_its_end_and_the_second_does_not(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """With torch's compiler and an empty cache: minutes for a large model, seconds for this one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder, family = prepared(tmp_path / "a", tiny_data, **{"machine.compile": True}), []
    with subprocess.Popen(harmed("compiling", folder), **PIPED, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "compiling\n"
        for _ in range(times):
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            text = process.stderr.readline()
        process.communicate(timeout=300)
    assert process.returncode == 3
    assert psutil.wait_procs(family, timeout=30)[1] == []
    saved, problems = newest_checkpoint(folder / "checkpoints")
    compiled = [r["step"] for r in records(folder, "compile")] if (folder / "log.jsonl").exists() else []
    if times == 2:
        assert text == "vitctl: stopped at once; earlier checkpoints are complete\n"
        assert (saved, problems, compiled) == (None, [], [])
    else:
        assert saved is not None
        assert (saved.step, problems, compiled) == (0, [], [0])
    straight = prepared(tmp_path / "straight", tiny_data, **{"machine.compile": True})
    for run_dir in (folder, straight):
        resume(run_dir)
    assert checkpoint(folder, 12) == checkpoint(straight, 12)


def zombies() -> set[int]:
    """Children of this process that ended and were not waited for; tests before this one may have left some."""
    return {p.pid for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("whom", ["loader worker", pytest.param("all", marks=pytest.mark.slow)])
def test_killed__no_process_and_no_memory_is_left(tiny_data: Path, tmp_path: Path, whom: str) -> None:
    """One loader process, which the run reports; or the run with its loader processes."""
    values = {"machine.workers": 2, "schedule.total_steps": 4000, "evaluation.every_steps": 0}
    folder, shared, earlier = tmp_path / "a", set(os.listdir(SHARED_MEMORY)), zombies()
    line = command(folder, tiny_data, **values)
    with warm.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert soon(lambda: (folder / "checkpoints" / "step_00000003").exists() or process.poll() is not None)
        family = psutil.Process(process.pid).children(recursive=True)  # one verified the shards and ended
        workers = [one for one in family if one.status() != psutil.STATUS_ZOMBIE]
        assert len(workers) == 2
        for one in workers[:1] if whom == "loader worker" else [*workers, psutil.Process(process.pid)]:
            one.kill()
        _, text = process.communicate(timeout=60)
    if whom == "loader worker":
        assert process.returncode == 2
        [line] = text.splitlines()
        assert line.startswith(
            "vitctl: a loader process was killed (SIGKILL), most often out of memory; use fewer"
        )
        assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    else:
        assert (process.returncode, text) == (-signal.SIGKILL, "")
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
    assert zombies() <= earlier
    assert soon(
        lambda: not [n for n in set(os.listdir(SHARED_MEMORY)) - shared if n.startswith(("torch_", "sem."))]
    )
    saved, problems = newest_checkpoint(folder / "checkpoints")
    assert saved is not None and problems == []


SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGKILL")
KINDS = (
    *SIGNALS,
    "head",
    "closed terminal",
    "nohup and closed terminal",
    "full disk",
    "full disk and SIGKILL",
)
CODES = {"SIGKILL": {-signal.SIGKILL}, "full disk": {2, 3}, "full disk and SIGKILL": {-signal.SIGKILL}}
LIMIT_SECONDS = 300.0


@pytest.mark.slow
def test_thirty_kills__of_every_kind(tiny_data: Path, tmp_path: Path, small_disk: Path) -> None:
    steps, kills = 400, 30
    values = {"schedule.total_steps": steps, "checkpoint.every_steps": 5, "evaluation.every_steps": 40}
    straight = tmp_path / "straight"
    assert Forked(command(straight, tiny_data, **values)[3:], os.open(os.devnull, os.O_WRONLY)).wait() == 0
    folder, draws, tally = small_disk / "run", random.Random(11), Counter[str]()
    line = command(folder, tiny_data, **values)
    kinds = [KINDS[n % len(KINDS)] for n in range(kills)]
    draws.shuffle(kinds)
    began = time.monotonic()
    for kind in kinds:
        code = hit(kind, line, folder, small_disk, draws)
        tally[f"{kind}: {code}"] += 1
        assert code in CODES.get(kind, {3}) | {0}, (kind, code)
        assert code or status(folder) == "done"
        assert newest_checkpoint(folder / "checkpoints")[1] == []
    assert Forked(line[3:], os.open(os.devnull, os.O_WRONLY)).wait() == 0
    print("\n" + ", ".join(f"{name} {number}" for name, number in sorted(tally.items())))
    print(f"{kills} kills, {time.monotonic() - began:.0f} s")
    print(f"resumed at the steps: {sorted(record['step'] for record in records(folder, 'resume'))}")
    assert list((folder / "checkpoints").glob(".*")) == []
    assert_same(folder, straight, steps)


def hit(kind: str, line: list[str], folder: Path, disk: Path, draws: random.Random) -> int | None:
    """Start or resume the run, hit it some steps later, and return its exit code."""
    first = last_step(folder)

    def wait(more: int) -> None:
        until = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and last_step(folder) < first + more and time.monotonic() < until:
            time.sleep(0.005)

    at, process, close = draws.randrange(1, 12), *start(kind, line)
    wait(at)
    if "full" in kind:
        fill(disk, draws.choice([0, 4096, 100_000]))
        time.sleep(draws.uniform(0.0, 0.3))
    if kind == "head" or "terminal" in kind:
        close()
    if kind in ("head", "nohup and closed terminal"):
        wait(at + 5)  # it goes on
    number = {"full disk": "SIGTERM", "full disk and SIGKILL": "SIGKILL", "closed terminal": "SIGHUP"}.get(
        kind, kind
    )
    if kind != "closed terminal" and process.poll() is None:
        os.kill(process.pid, getattr(signal, number, signal.SIGTERM))
    code = process.wait()
    if "full" in kind:
        make_room(disk)
    return code


class Forked:
    """`vitctl` as it is typed, in a process that has imported it: 30 attempts cost what they do, not what
    torch's import does.

    Args:
        arguments: of the command.
        stdout: the descriptor that it prints to; a terminal becomes its own.
        ignoring: SIGHUP is ignored, as by nohup.
    """

    def __init__(self, arguments: list[str], stdout: int, *, ignoring: bool = False) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            if os.isatty(stdout):
                fcntl.ioctl(stdout, termios.TIOCSCTTY, 0)
            for number in HANDLED:
                signal.signal(
                    number, signal.SIG_IGN if ignoring and number == signal.SIGHUP else signal.SIG_DFL
                )
            for stream in (1, 2):
                os.dup2(stdout, stream)
            os.closerange(3, 256)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            sys.argv = ["vitctl", *arguments]
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        """Its exit code, once it has one."""
        return self._look(0)

    def _look(self, how: int) -> int | None:
        if self.code is None and (ended := os.waitpid(self.pid, how))[0]:
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code


def start(kind: str, line: list[str]) -> tuple[Forked, Callable[[], None]]:
    """The process, and what closes the eyes of whoever reads it."""
    ours, theirs = os.openpty() if "terminal" in kind else os.pipe()
    if "terminal" not in kind and kind != "head":
        os.close(theirs)
        theirs = os.open(os.devnull, os.O_WRONLY)
    process = Forked(line[3:], theirs, ignoring="nohup" in kind)
    os.close(theirs)
    return process, lambda: os.close(ours)


def last_step(folder: Path) -> int:
    """The last step that the log tells of."""
    return max((record["step"] for record in records(folder, "train")), default=0)
