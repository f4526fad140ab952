"""A pool of forked workers, which inherit their input, return results by pipe, and end with their parent."""

import os
import threading
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
from vitctl.system.process import (
    blocked_signals,
    end_with_parent,
    ignore_signals,
    release_lock,
    shared_lock,
    usable_cores,
    use_lock,
)

Result = TypeVar("Result")
Done = Callable[[int], None]
Work = Callable[[int, Done], Result]
Progress = Callable[[int, int], None]
_REPORT_SECONDS = 0.1
_MAX_WORKERS = 16
_ERROR, _BUG, _DONE = -1, -2, -3  # message kinds, sent in place of a task number


def default_workers() -> int:
    """Return one worker per core that this process may use, at most 16."""
    return min(_MAX_WORKERS, usable_cores())


def run_tasks(
    work: Work[Result], num_tasks: int, *, workers: int, done: Done = lambda _: None
) -> list[Result]:
    """Run independent tasks, and return their results in order.

    Args:
        work: called as `work(task, done)`; it calls `done(count)` to report progress, where a worker also
            notices that its parent has died. Its return value is sent back.
        workers: worker processes; task t runs in worker t % workers. 0: all tasks run in this process.
        done: called in this process with the progress since the last call.

    Raises:
        VitctlError, OSError: raised by a task; the other workers are stopped.
        DataError: a worker was killed.
    """
    if not workers:
        return [work(task, done) for task in range(num_tasks)]
    results: dict[int, Result] = {}
    with _started_workers(work, num_tasks, min(workers, num_tasks)) as readers:
        done(0)  # a progress bar may start a thread, which must follow the fork
        for task, message in _messages(readers):
            if task == _ERROR:
                raise message
            if task == _BUG:
                raise RuntimeError(message)
            if task == _DONE:
                done(message)
            else:
                results[task] = message
    return [results[task] for task in range(num_tasks)]


def counted(progress: Progress | None, total: int) -> Done:
    """Return a function that adds up finished items and passes their number and the total to `progress`."""
    finished = 0

    def done(more: int) -> None:
        nonlocal finished
        finished += more
        if progress:
            progress(finished, total)

    return done


def run_each(work: Callable[[int], Result], num_items: int, per_task: int, **how: Any) -> list[Result]:
    """Run `work(number)` for every item, `per_task` items in a task; return the results in order.

    `how` are arguments of `run_tasks`, whose `done` is called with the number of finished items.
    """

    def task(number: int, done: Done) -> list[Result]:
        results = []
        for item in range(number * per_task, min((number + 1) * per_task, num_items)):
            results.append(work(item))
            done(1)
        return results

    tasks = run_tasks(task, -(-num_items // per_task), **how)
    return [result for results in tasks for result in results]


@contextmanager
def _started_workers(
    work: Work[Any], num_tasks: int, workers: int
) -> Iterator[dict[Connection, ForkProcess]]:
    """Start the workers, keyed by their pipes; kill and join them at the end of the block."""
    fork, readers = get_context("fork"), dict[Connection, ForkProcess]()
    tied = threading.current_thread() is threading.main_thread()
    shared_lock()
    try:
        for number in range(workers):
            reader, writer = fork.Pipe(duplex=False)
            tasks = range(number, num_tasks, workers)
            inherited = (*readers, reader)
            process = fork.Process(
                target=_serve, args=(work, tasks, writer, inherited, os.getpid(), tied), daemon=True
            )
            with warnings.catch_warnings():
                # Python warns of a fork with threads, but the workers take no lock that a thread may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                with blocked_signals():  # until the worker ignores them, and is registered here
                    process.start()
                    readers[reader] = process
            writer.close()  # so that the pipe ends when the worker ends
        yield readers
    finally:
        for reader, process in readers.items():
            process.kill()
            process.join()
            reader.close()


def _messages(readers: dict[Connection, ForkProcess]) -> Iterator[tuple[int, Any]]:
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
                        f"a worker process was killed (exit code {readers[reader].exitcode}), "
                        "most often out of memory",
                        fix="run the same command again, with fewer workers",
                    ) from None


def _serve(
    work: Work[Any],
    tasks: Sequence[int],
    writer: Connection,
    inherited: Sequence[Connection],
    parent: int,
    tied: bool,
) -> None:
    """Run a worker's tasks, ignoring signals to the process group: the parent stops it.

    It ends by `os._exit`: Python's exit flushes streams, whose locks a thread of the parent may have held at
    the fork.
    """
    ignore_signals()
    if tied:
        end_with_parent(parent)
    for reader in inherited:  # a writer with the reading end open would wait forever if the parent died
        reader.close()
    use_lock(shared_lock())
    count, reported = 0, time.monotonic()

    def done(more: int) -> None:
        nonlocal count, reported
        release_lock()
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
    except BrokenPipeError:
        os._exit(1)
    except (VitctlError, OSError) as error:
        writer.send((_ERROR, error))
    except Exception:
        writer.send((_BUG, traceback.format_exc()))
    os._exit(0)
