"""`log.profile`: a trace of some steps by torch's profiler, and on a GPU the history of its memory."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from vitctl.data.loader.batches import Batch, take
from vitctl.engine.runtime import DATA, Runtime

PROFILE = "profile"  # folder in that of a run
_cuda_memory: Any = torch.cuda.memory  # only partly typed


def profiled(
    make: Callable[..., Generator[Batch, None, None]],
    asked: str,
    share: int,
    runtime: Runtime,
    folder: Path,
    *,
    first_step: int,
) -> Generator[Batch, None, None]:
    """Yield the micro-batches that `make` does, `share` images a step, and profile the steps asked for.

    Whatever ends the training before the last of them ends the profile; a resume begins another.
    """
    first, last, rank = steps_of(asked)
    with closing(make(first_step=first_step)) as batches, ExitStack() as stack:
        done = list[int]()  # steps
        for step in count(first_step + 1):
            if step == last + 1:
                stack.close()
            if first <= step <= last and runtime.rank == rank:
                if not done:
                    stack.enter_context(_profile(runtime, folder / PROFILE, done, rank))
                    runtime.clock.switch(DATA)
                done.append(step)
            yield from take(batches, share, missed=lambda _: None)  # whoever takes them notices an outage


def steps_of(asked: str) -> tuple[int, int, int]:
    """Return first and last step, and the process, of `log.profile`."""
    steps, _, rank = asked.partition("@")
    first, _, last = steps.partition("-")
    return int(first), int(last or first), int(rank or 0)


def past_steps(asked: str, step: int, folder: Path) -> str:
    """Return a line if `log.profile` asks for finished steps alone, of which there is no trace; else ""."""
    first, last, _ = steps_of(asked)
    if last > step or any((folder / PROFILE).glob(f"steps_{first}[-.@]*")):
        return ""
    return f"--profile {asked}: no trace is written, since the run goes on after step {step}"


@contextmanager
def _profile(runtime: Runtime, folder: Path, done: Sequence[int], rank: int) -> Iterator[None]:
    """Write a .json.gz named by the steps `done`, in the format of Chrome's traces, and on a GPU a .pickle,
    torch's snapshot of its memory, which nothing here reads.
    """
    is_cuda = runtime.device.type == "cuda"
    if is_cuda:
        _cuda_memory._record_memory_history()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its lines are for developers of torch
    profile = torch.profiler.profile(acc_events=True)  # 2.11 warns without
    profile.start()
    runtime.clock.named(True)
    try:
        yield
    finally:
        runtime.clock.named(False)
        profile.stop()
        with suppress(OSError, RuntimeError):  # a full disk does not end the run
            to, of = f"-{done[-1]}" * (len(done) > 1), f"@{rank}" * (rank > 0)
            path = folder / f"steps_{done[0]}{to}{of}"
            folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(f"{path}.json.gz")
            if is_cuda:
                _cuda_memory._dump_snapshot(f"{path}.pickle")
                _cuda_memory._record_memory_history(enabled=None)
