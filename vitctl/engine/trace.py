"""The record of every step: a line in steps.jsonl, and 16-bit marks in trace.bin.

The marks are of a step's samples and gradients. The digests of a global batch do not depend on how it is
split over processes, micro-batches and workers: each sample gives a 64-bit word from its position in the
global batch and its value, and the digest is their sum modulo 2^64. They detect accidents and differences in
a replay; they are not cryptographic.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from vitctl.data.loader.batches import Batch
from vitctl.data.source.order import mix_words
from vitctl.engine.agreement import MadeOf, checksum
from vitctl.engine.checkpoint import SavedCheckpoint
from vitctl.engine.journal import (
    LOG,
    LOG_HEAD,
    MARKS_BYTES,
    MOST_STEPS,
    STATE,
    STEP_RECORDS,
    STEPS_HEAD,
    TRACE,
    Journal,
    begins,
    whole_lines,
)
from vitctl.engine.runtime import Runtime
from vitctl.engine.sharding import is_sharded
from vitctl.engine.update import Result
from vitctl.errors import CheckpointError
from vitctl.models.blocks import trainable
from vitctl.system.files import no_links, open_regular

FORMAT = "vitctl-steps/1"
# Digests of a batch, in causal order: sample numbers in the source, encoded images, uint8 images after
# augmentation and before mixing, labels.
PARTS = ("samples", "bytes", "pixels", "labels")

MARKED = 5  # steps whose marks are kept after each checkpoint, if not of all: `--replay any` repeats them
_SLOTS = 4  # 16-bit marks in a word
_HEADER = struct.Struct("<16sIIQ")
_MAGIC = b"vitctl-trace/1"


class BatchDigest(NamedTuple):
    """Digests of a global batch: uint64 `[4]`, in the order of `PARTS`, and a mark per sample, uint16."""

    parts: np.ndarray
    marks: np.ndarray


def batch_digest(
    runtime: Runtime, batches: Iterable[Batch], positions: range, batch_size: int
) -> BatchDigest:
    """Return the digests of a global batch; all processes call this together.

    `batches` have checksums; `positions` are those of their samples in the global batch, in order.
    """
    values = np.concatenate([_values(batch) for batch in batches])
    places = mix_words(np.arange(positions.start + 1, positions.stop + 1, dtype=np.uint64))
    parts = mix_words(mix_words(values) ^ places[:, None]).sum(axis=0, dtype=np.uint64)
    _, encoded, pixels, labels = values.T
    marks = np.zeros(-(-batch_size // _SLOTS) * _SLOTS, np.uint16)
    marks[positions.start : positions.stop] = _mark(mix_words(mix_words(encoded) ^ pixels) ^ labels)
    # Each mark comes from one process and is 0 on the others, so summing the words collects all marks.
    words = runtime.sum_words(np.concatenate((parts, marks.view(np.uint64))))
    return BatchDigest(words[: len(PARTS)], words[len(PARTS) :].view(np.uint16)[:batch_size])


def norm_marks(norms: np.ndarray) -> np.ndarray:
    """Return a 16-bit mark for each norm: float64 `[P]` to uint16 `[P]`."""
    return _mark(np.ascontiguousarray(norms, np.float64).view(np.uint64))


def _mark(words: np.ndarray) -> np.ndarray:
    return (mix_words(words) >> np.uint64(48)).astype(np.uint16)


def _values(batch: Batch) -> np.ndarray:
    assert batch.checksums is not None, "train_batches(..., checksums=True) computes them"
    labels = batch.labels.numpy().reshape(len(batch), -1).astype(np.uint64)
    folded = labels[:, 0]
    for column in labels.T[1:]:
        folded = mix_words(folded) ^ column
    columns = (batch.samples.numpy().astype(np.uint64), *batch.checksums.astype(np.uint64).T, folded)
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class StepRecord:
    """A step's fields in steps.jsonl, and uint16 marks: of the samples, then of each gradient's norm."""

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
    """Return the record of a step, counting this one; all processes call this together.

    `batches` have checksums; `weights` is the model after the step, or None to record no digest.
    """
    digest = batch_digest(runtime, batches, positions, batch_size)
    norms = np.zeros(0) if result.gradient is None else result.gradient.numpy()
    marks = np.concatenate((digest.marks, norm_marks(norms))).astype("<u2")
    bits = {name: float(getattr(result, name)).hex() for name in ("loss", "grad_norm", "lr")}
    norm_bytes = np.ascontiguousarray(norms, "<f8").tobytes()
    fields: dict[str, Any] = {
        "step": step,
        "bits": bits,
        "batch": {name: f"{word:016x}" for name, word in zip(PARTS, digest.parts.tolist(), strict=True)},
        "gradient": hashlib.sha256(norm_bytes).hexdigest()[:16],
        "trace": f"{zlib.crc32(marks.tobytes()):08x}",
    }
    if result.skipped:
        fields["skipped"] = True
    if weights is not None:
        fields["weights"] = weights_checksum(weights)
    return StepRecord(fields, marks)


def weights_checksum(model: nn.Module) -> str:
    """Return a digest of an unsharded model's weights, computed on their device."""
    return checksum(model.state_dict().items())


@dataclass(frozen=True)
class Recorder:
    """Writes the record of each step of a run; all processes call it, the main one writes.

    `journal` holds lines that cannot be written yet; `model` is unwrapped; `positions` are those of this
    process's samples in a global batch. `steps` are those of the run, and between two checkpoints.
    """

    folder: Path
    journal: Journal
    runtime: Runtime
    model: nn.Module
    positions: range
    batch_size: int
    steps: tuple[int, int] = (0, 0)

    def start(self, step: int, facts: Mapping[str, Any], checkpoint: str = "") -> None:
        """Record how a start of the run computes, before its first step, and cut the marks of later steps.

        `facts` are recipe, data, device and versions; `checkpoint` is the loaded one's digest or "".
        """
        if not self.runtime.is_main:
            return
        start: dict[str, Any] = {"format": FORMAT, "batch_size": self.batch_size, "checkpoint": checkpoint}
        start |= {} if is_sharded(self.model) else {"weights": weights_checksum(self.model)}
        self.journal.append(self.folder / STEP_RECORDS, {"kind": START, "step": step, **start, **facts})
        with suppress(OSError):
            self._cut_marks(step)

    def add(self, step: int, result: Result, batches: Sequence[Batch], *, weights: bool) -> None:
        """Record a step; all processes call this together."""
        model = self.model if weights and self.runtime.is_main and not is_sharded(self.model) else None
        record = describe_step(self.runtime, step, result, batches, self.positions, self.batch_size, model)
        if self.runtime.is_main:
            # On a full disk the journal holds the line, which records that the marks are lost.
            lost = {} if self._write_marks(step, record.marks) else {"trace": ""}
            self.journal.append(self.folder / STEP_RECORDS, record.fields | lost)

    def _cut_marks(self, step: int) -> None:
        path, size = self.folder / TRACE, 2 * (self.batch_size + len(trainable(self.model)))
        header = read_marks_header(path)
        with os.fdopen(no_links(str(path), os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
            if header is None or header.size != size or header.first > step:
                file.truncate(0)
                file.write(_HEADER.pack(_MAGIC, size, marks_every(size, *self.steps), step))
            else:
                file.truncate(min(os.fstat(file.fileno()).st_size, header.begin(step + 1)))

    def _write_marks(self, step: int, marks: np.ndarray) -> bool:
        """Write the marks of a step. Return whether all of them are in the file."""
        header = read_marks_header(self.folder / TRACE)
        if header is None or header.size < marks.nbytes or not header.keeps(step):
            return False
        try:
            with os.fdopen(no_links(str(self.folder / TRACE), os.O_RDWR), "r+b", buffering=0) as file:
                file.seek(header.begin(step))
                return file.write(marks.tobytes()) == marks.nbytes
        except OSError:
            return False


@dataclass(frozen=True)
class MarksHeader:
    """The header of trace.bin: bytes per step, finished steps before the first marks, and `marks_every`."""

    size: int
    first: int
    every: int = 0

    def keeps(self, step: int) -> bool:
        return not self.every or (step - 1) % self.every < MARKED

    def begin(self, step: int) -> int:
        return _HEADER.size + (self._before(step) - self._before(self.first + 1)) * self.size

    def _before(self, step: int) -> int:
        """Return how many steps before this one keep their marks."""
        rounds, rest = divmod(step - 1, self.every) if self.every else (0, step - 1)
        return MARKED * rounds + (min(rest, MARKED) if self.every else rest)


def marks_every(size: int, total_steps: int, every_steps: int) -> int:
    """Return after how many steps the next MARKED keep their marks, of `size` bytes; 0: all steps do.

    It is a multiple of `every_steps`, those between two checkpoints, and bounds trace.bin by MARKS_BYTES.
    """
    if total_steps * size <= MARKS_BYTES:
        return 0
    unit = max(1, every_steps)
    return unit * -(-MARKED * total_steps * size // (MARKS_BYTES * unit))


def read_marks_header(path: Path) -> MarksHeader | None:
    try:
        with open_regular(path, error=CheckpointError) as file:
            magic, size, every, first = _HEADER.unpack(file.read(_HEADER.size))
    except (CheckpointError, OSError, struct.error):
        return None
    return MarksHeader(size, first, every) if magic.rstrip(b"\0") == _MAGIC and 0 < size < 2**31 else None


def read_marks(path: Path, step: int, crc: str, count: int) -> np.ndarray | None:
    """Return the `count` marks of a step; None if trace.bin lacks those with the CRC-32 of its line."""
    header = read_marks_header(path)
    if header is None or step <= header.first or 2 * count > header.size or not header.keeps(step):
        return None
    try:
        with open_regular(path, error=CheckpointError) as file:
            file.seek(header.begin(step))
            content = file.read(2 * count)
    except (CheckpointError, OSError, OverflowError):  # OverflowError: an offset beyond any file
        return None
    return np.frombuffer(content, "<u2") if f"{zlib.crc32(content):08x}" == crc else None


START = "start"  # record kind of starts; steps have no kind


def _number(text: str) -> str:
    try:
        float.fromhex(text)
    except OverflowError:
        raise ValueError("too large") from None
    return text


class StepLine(BaseModel):
    """A step as recorded; see `describe_step`."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=1, le=MOST_STEPS)
    bits: dict[str, Annotated[str, AfterValidator(_number)]] = Field(max_length=10)
    batch: dict[str, str] = Field(max_length=10)
    gradient: str = Field(max_length=100)
    trace: str = Field(max_length=100)
    weights: str = Field("", max_length=100)
    skipped: bool = False

    def number(self, name: str) -> float:
        """Return the loss, grad_norm or lr; NaN if it is not recorded."""
        return float.fromhex(self.bits.get(name, "nan"))


class StartLine(BaseModel):
    """A start of a training as recorded: the machine, and how it computes. `weights` is a digest."""

    model_config = ConfigDict(strict=True, extra="allow")

    step: int = Field(ge=0, le=MOST_STEPS)
    made_of: MadeOf
    weights: str = Field("", max_length=100)
    recipe_file: str = Field("", max_length=100)
    precision: str = Field("", max_length=50)
    device: str = Field("", max_length=50)
    device_name: str = Field("", max_length=500)
    hardware: dict[str, str] = Field(default_factory=dict, max_length=100)
    processes: int = Field(1, ge=1, le=10**6)
    threads: int | None = Field(None, ge=1, le=10**5)
    micro_batch: int = Field(0, ge=0, le=10**9)
    attention: Annotated[str, AfterValidator(lambda name: "math" if name == "mixed" else name)] = Field(
        "", max_length=50
    )  # "mixed" was math in training
    linear: str = Field("torch", max_length=50)  # or oneDNN, before 0.1.0
    compile: bool | Annotated[str, Field(max_length=50)] | None = None  # a mode of torch
    deterministic: bool | None = None
    checkpoint_blocks: int | bool | Literal["attention"] | None = None  # a bool before it was a number
    lanes: int = Field(0, ge=0, le=10**6)
    draws: bool = False
    versions: dict[str, str] = Field(default_factory=dict, max_length=100)


@dataclass(frozen=True)
class Steps:
    """The record of a training: starts in order, the last line of each step, and (first, last) of gaps.

    All lines are valid. They are kept as text: a million of them are 0.4 GB, and as objects 3.
    """

    starts: list[StartLine]
    by_step: dict[int, bytes]
    gaps: list[tuple[int, int]]

    @property
    def last(self) -> int:
        """The last recorded step; 0 if there is none."""
        return max(self.by_step, default=0)

    def at(self, step: int) -> StepLine:
        """Return the record of a step that has one."""
        return StepLine.model_validate(json.loads(self.by_step[step]))


def read_steps(folder: Path) -> Steps | None:
    """Return the record of the training in a folder, or None; CheckpointError if a line is invalid."""
    path = folder / STEP_RECORDS
    if not os.path.lexists(path):
        return None
    steps, last = Steps([], {}, []), 0
    for number, line in enumerate(whole_lines(path), 1):
        record = _parsed(line, f"{path}, line {number}")
        if record is None:
            continue
        is_step = isinstance(record, StepLine)
        if record.step > last + is_step:
            steps.gaps.append((last + 1, record.step - is_step))
        last = max(last, record.step)
        if isinstance(record, StepLine):
            steps.by_step[record.step] = line
        else:
            steps.starts.append(record)
    return steps


def _parsed(line: bytes, where: str) -> StepLine | StartLine | None:
    """Return a line's record; None for a truncated line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    try:
        return (StartLine if fields.get("kind") == START else StepLine).model_validate(fields)
    except ValidationError as error:
        name = ".".join(map(str, error.errors(include_input=False)[0]["loc"])) or "its value"
        raise CheckpointError(where, f"not a record of a step ({name[:80]}); the file was modified") from None


def _weights_after(folder: Path, step: int) -> str:
    """Return the recorded digest of the weights after a step, or ""; no other line is parsed."""
    path, begin = folder / STEP_RECORDS, f'{{"step": {step}, '.encode()
    lines = [line for line in whole_lines(path) if line.startswith(begin)] if path.exists() else []
    record = _parsed(lines[-1], str(path)) if lines else None
    return record.weights if record is not None else ""


def record_problem(saved: SavedCheckpoint, weights: str = "") -> str:
    """Return why a run's records do not match its checkpoint; "" if they do. See also `foreign`.

    `weights` is the checkpoint's `weights_checksum`, or "" to skip them.
    """
    state, run = saved.state, saved.folder.parent.parent
    if lacking := sorted({STEPS_HEAD, LOG_HEAD} - state.keys()):
        return f"{STATE} does not say {', '.join(lacking)}"
    for name, end in ((LOG, state[LOG_HEAD]), (STEP_RECORDS, state[STEPS_HEAD])):
        if end and not begins(run / name, end):
            is_there = (run / name).exists()
            return f"{name} is {'not the one that it was saved with: it was changed' if is_there else 'gone'}"
    if weights and _weights_after(run, saved.step) not in ("", weights):
        return f"its weights are not those that {STEP_RECORDS} has after step {saved.step}"
    return ""
