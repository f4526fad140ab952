"""Checkpoints in the background: the state is copied to host memory, and written to disk, while training
continues.

Weights, averages and the optimizer's state change in the optimizer step alone, so the copy has the whole
forward and backward pass of the next step; only what is left of it then holds training up.
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from vitctl.engine.checkpoint.files import is_set_aside, keep, read_state, save_checkpoint
from vitctl.engine.distributed.sharding import full
from vitctl.engine.journal import CHAINED, Journal
from vitctl.engine.optimizer import Average, optimizer_tensors
from vitctl.engine.run_files import AVERAGE, MODEL, OPTIMIZER
from vitctl.errors import CheckpointError, VitctlError, os_code
from vitctl.system.files import flush
from vitctl.system.text import bytes_text

Snapshot = dict[str, dict[str, Tensor]]
Copy = tuple[Snapshot, list[torch.cuda.Event]]  # and what to wait for, where a GPU copies
RETRY_SECONDS = 10.0  # between two attempts on a full disk
SPARE_BYTES = 2**16  # kept free for the logs
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Saver:
    """Writes the checkpoints of one process, one at a time.

    Args:
        root: the run's checkpoints folder.
        config, meta: of the model, kept inside the weights files.
        last, best: how many checkpoints are kept.
        journal: gets a record of each save and its duration.
    """

    root: Path
    config: Any
    meta: dict[str, Any]
    last: int
    best: int
    journal: Journal
    _buffers: Snapshot = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _stall: float = 0.0  # seconds that the save held training up
    _waiting_since: float | None = None
    _problem: str = ""
    _stop_waiting: threading.Event = field(default_factory=threading.Event)  # set: give up on a full disk

    def __post_init__(self) -> None:
        self._copied.set()

    def start(
        self,
        step: int,
        parts: Iterable[tuple[str, str, Tensor]],
        state: Mapping[str, Any],
        scores: Any,
        *,
        live: bool = False,
    ) -> None:
        """Start to copy and to write what is to be saved.

        Args:
            step: finished steps.
            parts: (file, name, tensor) of the model, of its average if there is one, and of the optimizer.
            state: what else is needed to resume.
            scores: step -> accuracy, to choose the best that are kept.
            live: the tensors are those of the training, which calls `wait_for_copy` before it changes them;
                else they are copied before this returns.
        """
        began = time.perf_counter()
        copy = partial(self._copy, list(parts)) if live else _already(self._copy(parts))
        self._stall, self._waiting_since = time.perf_counter() - began, None
        self._thread = threading.Thread(
            target=self._save, args=(step, copy, dict(state), dict(scores)), daemon=True
        )
        self._stop_waiting.clear()
        self._copied.clear()
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Wait until live tensors may change; on a GPU, until it was told to copy them before."""
        if not self._copied.is_set():
            self._waiting_since = time.perf_counter()
            self._copied.wait()

    def finish(self) -> str:
        """Wait for the write in progress, but not for disk space; returns what went wrong, "" when it is
        complete on disk.
        """
        if self._thread is not None:
            self._stop_waiting.set()
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, ""
        return problem

    def keep(self, scores: Mapping[int, float]) -> None:
        """Delete old checkpoints beyond `last` and `best`; one that cannot be deleted does not stop the run."""
        try:
            keep(self.root, last=self.last, best=self.best, scores=scores)
        except OSError as error:
            self.journal.write(
                "warning", step=0, text=f"{self.root}: old checkpoints stay ({error.strerror})"
            )

    def _save(
        self, step: int, copy: Callable[[], Copy], state: dict[str, Any], scores: dict[int, float]
    ) -> None:
        try:
            snapshot, devices = copy()
        except Exception as error:  # out of memory
            self._fail(step, _reason(error))
            return
        finally:
            if self._waiting_since is not None:
                self._stall += time.perf_counter() - self._waiting_since
            self._copied.set()
        for copied in devices:
            copied.synchronize()
        self._write(step, snapshot, state, scores)

    def _copy(self, parts: Iterable[tuple[str, str, Tensor]]) -> Copy:
        """Copy the tensors to buffers that are allocated once; from a GPU, to pinned memory, which it does
        when the events say so.
        """
        snapshot: Snapshot = {}
        devices: set[torch.device] = set()
        for part, name, tensor in parts:
            buffer = self._buffers.setdefault(part, {}).get(name)
            if buffer is None:
                pinned = tensor.device.type == "cuda"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                self._buffers[part][name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=True)
            snapshot.setdefault(part, {})[name] = buffer
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
        return snapshot, [torch.cuda.current_stream(device).record_event() for device in devices]

    def _write(self, step: int, snapshot: Snapshot, state: dict[str, Any], scores: dict[int, float]) -> None:
        began = time.perf_counter()
        write = partial(
            self._write_behind_records,
            step,
            tensors=snapshot,
            config=self.config,
            meta=self.meta,
            state=state,
        )
        num_bytes = sum(tensor.nbytes for tensors in snapshot.values() for tensor in tensors.values())
        path = self._try_write(step, write, num_bytes, scores)
        if path is None:
            return
        self._problem = ""
        self.keep(scores)
        times = {"seconds": round(time.perf_counter() - began, 3), "stall_seconds": round(self._stall, 4)}
        digest = {}
        with suppress(VitctlError, OSError):  # somebody removed it meanwhile
            digest = {"digest": read_state(path)["sha256"]}
        self.journal.write("checkpoint", step=step, path=str(path), **digest, **times)

    def _write_behind_records(self, step: int, **given: Any) -> Path:
        """Write a checkpoint once the records that it names are on disk: after a power failure it would not
        fit shorter ones.
        """
        for name in CHAINED:
            if (self.root.parent / name).is_file():
                flush(self.root.parent / name)
        return save_checkpoint(self.root, step, **given)

    def _try_write(
        self, step: int, write: Callable[[], Path], num_bytes: int, scores: Mapping[int, float]
    ) -> Path | None:
        """Write a checkpoint; on a full disk delete old ones first, and else retry until there is space.

        Returns:
            its folder; None, with `_problem` set, where it could not be written before the next save or the
            end.
        """
        while True:
            has_room = self._free_bytes() >= num_bytes + SPARE_BYTES
            if not has_room and self._delete_old(step, scores):
                continue
            reason, is_full = os.strerror(errno.ENOSPC), True
            if has_room:
                try:
                    return write()
                except (
                    Exception
                ) as error:  # any error: in this thread it would be lost, and the step would count as saved
                    reason, is_full = _reason(error), os_code(error) in _FULL
                if is_full and self._delete_old(step, scores):  # a quota, which disk_usage does not show
                    continue
            self._fail(step, reason)
            if not is_full or self._stop_waiting.wait(RETRY_SECONDS):
                return None

    def _fail(self, step: int, reason: str) -> None:
        """Say once why a checkpoint is not written."""
        if not self._problem:
            self._problem = f"step {step} could not be saved in {self.root} ({reason})"
            text = f"{self._problem}; earlier checkpoints are complete"
            self.journal.write("warning", step=step, text=text)

    def _free_bytes(self) -> int:
        """Free bytes on the disk."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def _delete_old(self, step: int, scores: Mapping[int, float]) -> bool:
        """Delete the checkpoints that will not be kept once `step` is saved; whether there were any."""
        with suppress(OSError):
            return keep(self.root, last=self.last, best=self.best, scores=scores, coming=step)
        return False


def _already(copy: Copy) -> Callable[[], Copy]:
    return lambda: copy


def _reason(error: Exception) -> str:
    if (code := os_code(error)) > 0:
        return os.strerror(code)
    if isinstance(error, SafetensorError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def parts(
    model: nn.Module, average: Average | None, optimizer: Optimizer
) -> Iterable[tuple[str, str, Tensor]]:
    """All tensors of a training by file and name, unsharded, one at a time; with a sharded model all
    processes must iterate.
    """
    averages = {} if average is None else average.tensors
    for name, tensor in model.state_dict().items():
        yield MODEL, name, full(tensor)
    for name, tensor in model.state_dict().items() if averages else ():
        yield AVERAGE, name, full(averages.get(name, tensor))
    for name, tensor in optimizer_tensors(optimizer, model).items():
        yield OPTIMIZER, name, full(tensor)


def check_space(root: Path, model: nn.Module, average: Average | None, *, slots: int, kept: int) -> None:
    """Check before the first save that the disk has space for all checkpoints that will be kept, and the one
    being written.

    Args:
        root: the run's checkpoints folder; checkpoints that are there count as written, except those that are
            never deleted.
        model, average: what a checkpoint holds, beside the state of the optimizer.
        slots: numbers that the optimizer keeps for each weight.
        kept: checkpoints that are kept.

    Raises:
        CheckpointError: there is not enough space.
    """
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    of_optimizer = slots * sum(p.numel() * p.element_size() for p in model.parameters())
    one = weights * (1 if average is None else 2) + of_optimizer
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    there = sum(
        path.stat().st_size for path in root.rglob("*") if path.is_file() and not is_set_aside(path.parent)
    )
    free = shutil.disk_usage(existing).free
    if free + there < one * (kept + 1):
        raise CheckpointError(
            f"{root}: {bytes_text(free)} are free, the checkpoints of this run need "
            f"{bytes_text(one * (kept + 1) - there)} "
            f"more ({kept} kept and one being written, {bytes_text(one)} each); free some space, choose "
            f"another folder with --out, or "
            "lower checkpoint.keep_last or keep_best"
        )
