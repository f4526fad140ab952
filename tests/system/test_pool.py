import os
import signal
import time

import psutil
import pytest

from tests.matrix import slow
from vitctl.errors import CheckpointError, DataError
from vitctl.system.pool import _started_workers, default_workers, run_tasks


@pytest.mark.parametrize("workers", [0, 1, 3, *slow(20)])
def test_run_tasks__results_come_in_order_and_all_is_counted(workers: int) -> None:
    counted: list[int] = []

    def work(task: int, done: object) -> tuple[int, int]:
        done(task)  # type: ignore[operator]
        return task * task, os.getpid()

    results = run_tasks(work, 10, workers=workers, done=counted.append)
    assert [result for result, _ in results] == [task * task for task in range(10)]
    assert sum(counted) == 45
    others = {process for _, process in results} - {os.getpid()}
    assert len(others) == min(workers, 10)
    assert run_tasks(work, 0, workers=workers) == []


USERS = [CheckpointError("three is wrong", fix="take two"), FileNotFoundError(2, "No such file", "three")]


@pytest.mark.parametrize("error", USERS)
def test_run_tasks__errors_of_the_user_come_as_they_were(error: Exception) -> None:
    def wrong(task: int, _: object) -> None:
        if task == 3:
            raise error

    with pytest.raises(type(error)) as raised:
        run_tasks(wrong, 5, workers=2)
    assert (str(raised.value), vars(raised.value)) == (str(error), vars(error))


def test_run_tasks__bugs_come_whole() -> None:
    with pytest.raises(RuntimeError, match=r"work\(task, done\)[\s\S]*ZeroDivisionError"):
        run_tasks(lambda task, _: 1 // task, 5, workers=2)


def test_run_tasks__a_killed_process_is_told_and_none_is_left() -> None:
    def work(task: int, _: object) -> None:
        if task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    began, earlier = time.monotonic(), {child.pid for child in psutil.Process().children()}
    with pytest.raises(
        DataError, match=r"a worker process was killed \(exit code -9\), most often out of memory"
    ):
        run_tasks(work, 2, workers=2)
    assert time.monotonic() - began < 300
    assert {child.pid for child in psutil.Process().children()} <= earlier


@pytest.mark.slow
def test_run_tasks__a_worker_whose_reader_died_ends_too() -> None:
    """It held the reading end of its own pipe, and waited for ever."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:

        def work(_: int, __: object) -> bytes:
            os.write(writer, f"{os.getpid()} ".encode())
            return bytes(2**22)  # more than a pipe holds

        with _started_workers(work, 2, 2):
            time.sleep(600)
        os._exit(0)
    os.close(writer)
    workers: list[int] = []
    while len(workers) < 2:
        workers += [int(word) for word in os.read(reader, 100).split()]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], 60)
    assert not alive


def test_default_workers__are_the_cores_of_this_process() -> None:
    assert 1 <= default_workers() <= min(16, len(os.sched_getaffinity(0)))
