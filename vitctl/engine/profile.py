"""`log.profile`: a trace of some steps by torch's profiler, and on a GPU the history of its memory."""

import os
from collections.abc import Callable, Generator, Iterator
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

    Whatever ends the training before the last of them ends the profile.
    """
    steps, _, rank = asked.partition("@")
    first, last = (int(text or 0) for text in steps.partition("-")[::2])
    with closing(make(first_step=first_step)) as batches, ExitStack() as stack:
        for step in count(first_step + 1):
            if step == max(first, last) + 1:
                stack.close()
            if step == first and runtime.rank == int(rank or 0):
                stack.enter_context(_profile(runtime, folder / PROFILE / f"steps_{asked}"))
                runtime.clock.switch(DATA)
            yield from take(batches, share, missed=lambda _: None)  # whoever takes them notices an outage


@contextmanager
def _profile(runtime: Runtime, path: Path) -> Iterator[None]:
    """Write `path`.json.gz, in the format of Chrome's traces, and on a GPU `path`.pickle, torch's snapshot of
    its memory, which nothing here reads.
    """
    is_cuda = runtime.device.type == "cuda"
    if is_cuda:
        _cuda_memory._record_memory_history()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its lines are for developers of torch
    profile = torch.profiler.profile()
    profile.start()
    runtime.clock.named(True)
    try:
        yield
    finally:
        runtime.clock.named(False)
        profile.stop()
        with suppress(OSError, RuntimeError):  # a full disk does not end the run
            path.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(f"{path}.json.gz")
            if is_cuda:
                _cuda_memory._dump_snapshot(f"{path}.pickle")
                _cuda_memory._record_memory_history(enabled=None)
