"""Processes are started with what torch reads, signalled, and gone at the end. They are small scripts here."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from vitctl import ranks
from vitctl.ranks import Ended, rank_environment, run_ranks


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "body.py"
    path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    return [sys.executable, str(path)]


def test_environment__is_that_of_the_place_and_leaves_settings_out_that_nobody_chose() -> None:
    env = rank_environment({"HOME": "/h", "RANK": "9", "ACCELERATE_USE_FSDP": "true", "OMP_NUM_THREADS": "5"}, 1, 2, 99)
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "99"}
    assert expected.items() <= env.items()
    assert (env["HOME"], env["OMP_NUM_THREADS"], env[ranks.LAUNCHER]) == ("/h", "5", str(os.getpid()))
    assert "ACCELERATE_USE_FSDP" not in env


def test_run__all_end_well_and_handlers_come_back(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in ranks.SIGNALS}
    ticks: list[int] = []
    ended = run_ranks(script(tmp_path, "print(rank)"), 3, tmp_path / "out.txt", lambda: ticks.append(1))
    assert ended == Ended((0, 0, 0), frozenset(), False)
    assert ended.lost is None
    assert sorted((tmp_path / "out.txt").read_text().split()) == ["0", "1", "2"]
    assert ticks
    assert {number: signal.getsignal(number) for number in ranks.SIGNALS} == before


def test_run__one_is_lost_and_the_others_get_time_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)
    body = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.5 if rank == 0 else 60)\nsys.exit(1)"
    began = time.monotonic()
    ended = run_ranks(script(tmp_path, body), 3, tmp_path / "out.txt", lambda: None)
    assert ended.codes == (1, -signal.SIGKILL, -signal.SIGKILL)
    assert ended.killed_here == {2}
    assert ended.lost == (1, "SIGKILL")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("times", "codes"), [(1, (3, 3)), (2, (-signal.SIGKILL, -signal.SIGKILL))])
def test_run__the_first_signal_is_passed_on_and_the_second_ends_all(
    tmp_path: Path, times: int, codes: tuple[int, int]
) -> None:
    leave = "sys.exit(3)" if times == 1 else "pass"
    body = (
        f"def heard(*_):\n    {leave}\nsignal.signal(signal.SIGUSR1, heard)\n"
        f"open('{tmp_path}/ready_' + str(rank), 'w').close()\nfor _ in range(600): time.sleep(0.1)"
    )

    def interrupt() -> None:
        while len(list(tmp_path.glob("ready_*"))) < 2:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    sender = threading.Thread(target=interrupt)
    sender.start()
    ended = run_ranks(script(tmp_path, body), 2, tmp_path / "out.txt", lambda: None)
    sender.join()
    assert ended.codes == codes
    assert ended.stopped
    assert ended.lost is None
