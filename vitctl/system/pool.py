"""Work spread over forked processes, which inherit what they need, answer by a pipe, and never outlive their parent."""

import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from vitctl.errors import DataError, VitctlError
from vitctl.system import memory_lock
from vitctl.system.signals import begin_child, blocked

Result = TypeVar("Result")
Done = Callable[[int], None]
Work = Callable[[int, Done], Result]
Progress = Callable[[int, int], None]
_REPORT_SECONDS = 0.1
_MOST_WORKERS = 16
_PROBLEM, _BUG, _DONE, _REFUSED = -1, -2, -3, -4  # in place of a task's number


def default_workers() -> int:
    """One process per core that this one may use, at most 16."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


def run_tasks(work: Work[Result], num_tasks: int, *, workers: int, done: Done = lambda _: None) -> list[Result]:
    """Do numbered tasks that do not depend on each other.

    Args:
        work: called as `work(task, done)`; it calls `done(count)` as it gets on, which is also where a process notices
            that its parent is gone. What it returns is sent back.
        num_tasks: numbered from 0.
        workers: processes; task t is done by process t % workers. 0: all in this process.
        done: called in this process with how much was done since the last call.

    Returns:
        the results in the order of the tasks.

    Raises:
        VitctlError: raised by a task; the other processes are stopped.
        DataError: a process was killed.
        OSError: the operating system refused a task something, as in this process.
    """
    if not workers:
        return [work(task, done) for task in range(num_tasks)]
    results: dict[int, Result] = {}
    with _started(work, num_tasks, min(workers, num_tasks)) as readers:
        for task, answer in _answers(readers):
            if task == _PROBLEM:
                raise DataError(answer)
            if task == _REFUSED:
                raise answer
            if task == _BUG:
                raise RuntimeError(answer)
            if task == _DONE:
                done(answer)
            else:
                results[task] = answer
    return [results[task] for task in range(num_tasks)]


@contextmanager
def _started(work: Work[Any], num_tasks: int, workers: int) -> Iterator[dict[Connection, ForkProcess]]:
    """The processes by the pipes they answer through; whatever happens, none is left."""
    fork, readers = get_context("fork"), {}
    memory_lock.shared()
    try:
        for number in range(workers):
            reader, writer = fork.Pipe(duplex=False)
            tasks = range(number, num_tasks, workers)
            process = fork.Process(target=_serve, args=(work, tasks, writer, os.getpid()), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # of forks beside threads; ours take no locks of theirs
                with blocked():  # until it ignores them
                    process.start()
            writer.close()  # so that the end of the process is the end of the pipe
            readers[reader] = process
        yield readers
    finally:
        for reader, process in readers.items():
            process.kill()
            process.join()
            reader.close()


def _answers(readers: dict[Connection, ForkProcess]) -> Iterator[tuple[int, Any]]:
    waiting = list(readers)
    while waiting:
        for reader in wait(waiting):
            assert isinstance(reader, Connection)
            try:
                yield reader.recv()
            except (EOFError, ConnectionError):
                waiting.remove(reader)
                readers[reader].join()
                if readers[reader].exitcode:
                    raise DataError(
                        f"a worker process was killed (exit code {readers[reader].exitcode}), most often for want of "
                        "memory; use fewer --workers"
                    ) from None


def _serve(work: Work[Any], tasks: Sequence[int], writer: Connection, parent: int) -> None:
    """The body of a process. What is sent to the whole group reaches it too, but stopping it is the parent's business.

    It leaves without Python's farewells: they flush streams whose locks a thread of the parent may have held at the fork.
    """
    begin_child()
    memory_lock.take_part(memory_lock.shared())
    count, reported = 0, time.monotonic()

    def done(more: int) -> None:
        nonlocal count, reported
        memory_lock.end_turn()
        if os.getppid() != parent:
            os._exit(1)
        count += more
        if (now := time.monotonic()) - reported >= _REPORT_SECONDS:
            writer.send((_DONE, count))
            count, reported = 0, now

    try:
        for task in tasks:
            writer.send((task, work(task, done)))
        writer.send((_DONE, count))
    except VitctlError as error:
        writer.send((_PROBLEM, str(error)))
    except OSError as error:
        writer.send((_REFUSED, error))
    except Exception:
        writer.send((_BUG, traceback.format_exc()))
    os._exit(0)
