"""The record of every step: a chained line in steps.jsonl, and marks of its samples and gradients in
trace.bin.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.agreement import checksum
from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.distributed.sharding import is_sharded
from vitctl.engine.journal import Journal
from vitctl.engine.run_files import STEP_RECORDS, TRACE
from vitctl.engine.step import Result
from vitctl.engine.trace.chain import end_of
from vitctl.engine.trace.digests import PARTS, batch_digest, norm_marks, norms_digest
from vitctl.engine.trace.steps import START
from vitctl.errors import CheckpointError
from vitctl.system.files import no_links, open_regular

FORMAT = "vitctl-steps/1"

_HEADER = struct.Struct("<16sIIQ")
_MAGIC = b"vitctl-trace/1"


@dataclass(frozen=True)
class StepRecord:
    """What is recorded of one step.

    Args:
        fields: of its line in steps.jsonl.
        marks: uint16, of the samples of the global batch, then of the norm of each parameter's gradient; see
            digests.py.
    """

    fields: dict[str, Any]
    marks: np.ndarray


def describe_step(
    runtime: Runtime,
    step: int,
    result: Result,
    batches: Sequence[Batch],
    positions: range,
    batch_size: int,
    weights: nn.Module | None,
) -> StepRecord:
    """The record of a step; all processes call this together.

    Args:
        runtime: this process among its peers.
        step: finished steps, this one included.
        result: of the update.
        batches: micro-batches of this process, with checksums.
        positions: of their samples in the global batch.
        batch_size: of the global batch.
        weights: the model after the step, to record a digest of its weights; None: none is recorded.
    """
    digest = batch_digest(runtime, batches, positions, batch_size)
    norms = np.zeros(0) if result.gradient is None else result.gradient.numpy()
    marks = np.concatenate((digest.marks, norm_marks(norms))).astype("<u2")
    fields: dict[str, Any] = {
        "step": step,
        "bits": {
            "loss": result.loss.hex(),
            "grad_norm": result.grad_norm.hex(),
            "lr": float(result.lr).hex(),
        },
        "batch": {name: f"{word:016x}" for name, word in zip(PARTS, digest.parts.tolist(), strict=True)},
        "gradient": norms_digest(norms),
        "trace": f"{zlib.crc32(marks.tobytes()):08x}",
    }
    if result.skipped:
        fields["skipped"] = True
    if weights is not None:
        fields["weights"] = weights_checksum(weights)
    return StepRecord(fields, marks)


def end_of_steps(folder: Path, step: int) -> tuple[str, int]:
    """The digest of the last line of steps.jsonl, "" where there is none, and how many steps up to `step`
    have no record behind it.
    """
    end = end_of(folder / STEP_RECORDS)
    try:
        last = int(json.loads(end.body).get("step", 0))
    except (
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # somebody changed the line: it counts nothing
        last = 0
    return end.sha256, max(0, step - last)


def weights_checksum(model: nn.Module) -> str:
    """A digest of the weights of a model that is not sharded, computed on their device."""
    return checksum(model.state_dict().items())


@dataclass(frozen=True)
class Recorder:
    """Writes the record of each step of a run; the main process writes, all take part.

    Args:
        folder: of the run.
        journal: of the main process; holds lines that cannot be written yet.
        runtime: this process among its peers.
        model: unwrapped.
        positions: of this process's samples in a global batch.
        batch_size: of the global batch.
    """

    folder: Path
    journal: Journal
    runtime: Runtime
    model: nn.Module
    positions: range
    batch_size: int

    def start(self, step: int, facts: Mapping[str, Any], checkpoint: str = "") -> None:
        """Record what a start of the run computes with, before its first step, and cut the marks of later
        steps.

        Args:
            step: finished steps.
            facts: recipe, data, device, versions.
            checkpoint: digest of the checkpoint that was loaded; "" for the start weights.
        """
        if not self.runtime.is_main:
            return
        before, unrecorded = end_of_steps(self.folder, step)
        own: dict[str, Any] = {"format": FORMAT, "batch_size": self.batch_size}
        own |= {"before": before, "unrecorded": unrecorded, "checkpoint": checkpoint}
        own |= {} if is_sharded(self.model) else {"weights": weights_checksum(self.model)}
        self.journal.append(self.folder / STEP_RECORDS, {"kind": START, "step": step, **own, **facts})
        with suppress(OSError):
            self._cut_marks(step)

    def add(self, step: int, result: Result, batches: Sequence[Batch], *, weights: bool) -> None:
        """Record a step; `weights`: with a digest of the weights after it."""
        model = self.model if weights and self.runtime.is_main and not is_sharded(self.model) else None
        record = describe_step(self.runtime, step, result, batches, self.positions, self.batch_size, model)
        if self.runtime.is_main:
            # A full disk: the journal holds the line, which says that the marks are lost.
            lost = {} if self._write_marks(step, record.marks) else {"trace": ""}
            self.journal.append(self.folder / STEP_RECORDS, record.fields | lost)

    def _cut_marks(self, step: int) -> None:
        path, size = self.folder / TRACE, 2 * (self.batch_size + sum(1 for _ in self.model.parameters()))
        header = read_marks_header(path)
        descriptor = no_links(str(path), os.O_RDWR | os.O_CREAT)
        try:
            if header is None or header.size != size or header.first > step:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _HEADER.pack(_MAGIC, size, 0, step), 0)
            else:
                os.ftruncate(descriptor, min(os.fstat(descriptor).st_size, header.begin(step + 1)))
        finally:
            os.close(descriptor)

    def _write_marks(self, step: int, marks: np.ndarray) -> bool:
        """Write the marks of a step; returns whether all of them are in the file."""
        header = read_marks_header(self.folder / TRACE)
        if header is None or header.size < marks.nbytes:
            return False
        try:
            descriptor = no_links(str(self.folder / TRACE), os.O_RDWR)
        except OSError:
            return False
        try:
            return os.pwrite(descriptor, marks.tobytes(), header.begin(step)) == marks.nbytes
        except OSError:
            return False
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class MarksHeader:
    """The first bytes of trace.bin: bytes of a step's marks, and finished steps before the first one."""

    size: int
    first: int

    def begin(self, step: int) -> int:
        """Where the marks of a step begin."""
        return _HEADER.size + (step - 1 - self.first) * self.size


def read_marks_header(path: Path) -> MarksHeader | None:
    """The header of trace.bin; None where there is none."""
    try:
        with open_regular(path, error=CheckpointError) as file:
            magic, size, _, first = _HEADER.unpack(file.read(_HEADER.size))
    except (CheckpointError, OSError, struct.error):
        return None
    return MarksHeader(size, first) if magic.rstrip(b"\0") == _MAGIC and 0 < size < 2**31 else None


def read_marks(path: Path, fields: Mapping[str, Any], count: int) -> np.ndarray | None:
    """The marks of a step, `count` of them; None where trace.bin does not hold those that its line names."""
    header = read_marks_header(path)
    if header is None or int(fields["step"]) <= header.first or 2 * count > header.size:
        return None
    try:
        with open_regular(path, error=CheckpointError) as file:
            file.seek(header.begin(int(fields["step"])))
            content = file.read(2 * count)
    except (CheckpointError, OSError, OverflowError):  # a step that lies beyond any file
        return None
    return np.frombuffer(content, "<u2") if f"{zlib.crc32(content):08x}" == fields.get("trace") else None
