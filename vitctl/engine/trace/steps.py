"""Reading steps.jsonl: what was recorded of the starts and of the steps of a training."""

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vitctl.engine.checkpoint.files import SavedCheckpoint
from vitctl.engine.journal import LOG, parse_records
from vitctl.engine.run_files import LOG_HEAD, STATE, STEP_RECORDS, STEPS_HEAD, UNRECORDED, step_of
from vitctl.engine.trace.chain import Chain, Line, read_chain
from vitctl.errors import CheckpointError

START = "start"  # kind of the records of starts; those of steps have none
MOST_STEPS = 10**12


def _number(text: str) -> str:
    try:
        float.fromhex(text)
    except OverflowError:
        raise ValueError("too large") from None
    return text


class StepLine(BaseModel):
    """A step as it was recorded; see `recorder.describe_step`."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=1, le=MOST_STEPS)
    bits: dict[str, Annotated[str, AfterValidator(_number)]] = Field(max_length=10)
    batch: dict[str, str] = Field(max_length=10)
    gradient: str = Field(max_length=100)
    trace: str = Field(max_length=100)
    weights: str = Field("", max_length=100)
    skipped: bool = False

    def number(self, name: str) -> float:
        """The loss, grad_norm or lr; NaN where none is recorded."""
        return float.fromhex(self.bits.get(name, "nan"))


class ImagesLine(BaseModel):
    """The images of a training as they were recorded."""

    model_config = ConfigDict(strict=True)

    sha256: str = Field(max_length=100)
    num_images: int = Field(ge=0, le=10**15)
    class_names: str = Field(max_length=100)


class MadeOf(BaseModel):
    """What a training is made of, as `Identity` describes it."""

    model_config = ConfigDict(strict=True)

    images: dict[str, ImagesLine] = Field(default_factory=dict, max_length=10)
    weights: str = Field("", max_length=100)
    recipe: dict[str, str] = Field(default_factory=dict, max_length=10_000)
    computation: dict[str, str | int | bool | dict[str, str]] = Field(default_factory=dict, max_length=100)


class StartLine(BaseModel):
    """A start of a training as it was recorded.

    `before` is the digest of the line before it ("" at the beginning of the record), `unrecorded` the number
    of steps before it that have no record, `checkpoint` the digest of the checkpoint that it loaded ("" for
    the start weights), `weights` that of the weights.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    step: int = Field(ge=0, le=MOST_STEPS)
    before: str | None = Field(None, max_length=100)  # None: recorded before starts named it
    unrecorded: int = Field(0, ge=0, le=MOST_STEPS)
    checkpoint: str = Field("", max_length=100)
    batch_size: int = Field(ge=1, le=10**9)
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
    attention: str = Field("", max_length=50)
    linear: str = Field("", max_length=50)
    compile: bool | None = None
    checkpoint_blocks: bool | None = None
    lanes: int = Field(0, ge=0, le=10**6)
    draws: bool = False
    versions: dict[str, str] = Field(default_factory=dict, max_length=100)


class Gap(NamedTuple):
    """Steps without a record, `first` to `last`; `is_told`: the start that follows them says so."""

    first: int
    last: int
    is_told: bool


@dataclass(frozen=True)
class Steps:
    """The record of a training.

    Args:
        chain: of its file.
        starts: in order.
        by_step: each step; of one that was recorded twice the last.
        after: digest of a line -> finished steps at it.
        gaps: between the records.
        problem: the first line that cannot follow those before it; "" where there is none.
    """

    chain: Chain
    starts: list[StartLine]
    by_step: dict[int, StepLine]
    after: dict[str, int]
    gaps: list[Gap]
    problem: str

    @property
    def last(self) -> int:
        """The last step that has a record; 0 where none has."""
        return max(self.by_step, default=0)

    def start_of(self, step: int) -> StartLine:
        """The start of the process that made a step. Raises CheckpointError where none is recorded."""
        found = [start for start in self.starts if start.step < step]
        if not found:
            raise CheckpointError(f"{STEP_RECORDS}: no start is recorded before step {step}")
        return found[-1]

    def starts_of(self, first: int, last: int) -> list[StartLine]:
        """The starts of the processes that made some steps, `first` to `last`, in order."""
        return [self.start_of(first), *(start for start in self.starts if first <= start.step < last)]


def read_steps(folder: Path) -> Steps | None:
    """The record of the training in a folder; None where there is none.

    Raises:
        CheckpointError: a line is no record of a step or a start.
    """
    path = folder / STEP_RECORDS
    if not os.path.lexists(path):
        return None
    found = _Reading(path)
    chain = read_chain(path, kind_of, found.take)
    return Steps(chain, found.starts, found.by_step, found.after, found.gaps, found.problem)


class LoggedEnds(NamedTuple):
    """The digests of the lines of log.jsonl, and those of the checkpoints that it names, by step."""

    lines: Collection[str]
    checkpoints: Mapping[int, str]
    broken_at: int = 0  # number of the first line that does not follow the one before


def read_logged_ends(folder: Path) -> LoggedEnds:
    """What log.jsonl in a folder says of checkpoints; nothing where there is no log.

    Raises LaunchError where it is no file.
    """
    checkpoints: dict[int, str] = {}

    def take(line: Line) -> None:
        if b'"checkpoint"' in line.body:
            for record in parse_records(line.body.decode(errors="replace")):
                if record.get("kind") == "checkpoint" and "digest" in record:
                    checkpoints[record.get("step", 0)] = str(record["digest"])

    path = folder / LOG
    if not os.path.lexists(path):
        return LoggedEnds((), checkpoints)
    chain = read_chain(path, kind_of, take)
    return LoggedEnds(chain.links, checkpoints, chain.broken_at)


def record_problem(saved: SavedCheckpoint, steps: Steps | None, log: LoggedEnds, weights: str = "") -> str:
    """Return why the records beside a checkpoint are not those that it was saved with; "" where they are.

    Args:
        saved: the checkpoint.
        steps: the record of the steps; None where there is none.
        log: what the log says of checkpoints.
        weights: digest of the weights in it, see `weights_checksum`; "": they are not compared.
    """
    state, step = saved.state, saved.step
    if step_of(saved.folder) not in (None, step):
        return f"{STATE} says step {step}"
    start = (
        next((one for one in reversed(steps.starts) if one.step < step), None) if steps is not None else None
    )
    if start is not None and start.before is not None and (unnamed := not_named(saved)):
        return f"{STATE} does not say {unnamed}; it was changed"
    at, head = 0, state.get(STEPS_HEAD, "")
    if head:
        if steps is None:
            return f"was saved with a record of its steps, and {STEP_RECORDS} is gone"
        if steps.chain.broken_at:
            return f"{STEP_RECORDS}, line {steps.chain.broken_at}, does not follow the line before"
        if head not in steps.after:
            return f"{STEP_RECORDS} has no line with the digest that it was saved with ({head[:16]})"
        at = steps.after[head]
    if (head or UNRECORDED in state) and at + state.get(UNRECORDED, 0) != step:
        return f"is of step {step}, and the record that it was saved with ends at step {at}"
    if (end := state.get(LOG_HEAD, "")) and end not in log.lines:
        return f"{LOG} has no line with the digest that it was saved with ({end[:16]})"
    if log.checkpoints.get(step, saved.digest) != saved.digest:
        return f"{LOG} names another checkpoint of step {step}"
    line = steps.by_step.get(step) if steps is not None else None
    if weights and line is not None and line.weights and line.weights != weights:
        return f"its weights are not those that {STEP_RECORDS} has after step {step}"
    return ""


def not_named(saved: SavedCheckpoint) -> str:
    """The ends of records that a checkpoint does not name, as one saved before they were; "" where it names
    all.
    """
    return ", ".join(name for name in (STEPS_HEAD, UNRECORDED, LOG_HEAD) if name not in saved.state)


@dataclass
class _Reading:
    """The records of a file so far."""

    path: Path
    starts: list[StartLine] = field(default_factory=list)
    by_step: dict[int, StepLine] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    problem: str = ""
    last: int = 0
    end: str = ""

    def take(self, line: Line) -> None:
        record = _parsed(line, self.path)
        is_start = isinstance(record, StartLine)
        begin = self.last + (not is_start)
        text = self._start_problem(record) if isinstance(record, StartLine) else ""
        if not self.starts and not is_start:
            text = "a step before any start; lines were removed"
        if record.step < begin:
            text = "a second record of a step, or of an earlier one; it was added"
        elif record.step > begin:
            is_told = isinstance(record, StartLine) and record.unrecorded == record.step - self.last
            self.gaps.append(Gap(self.last + 1, record.step - (not is_start), is_told))
        if text and not self.problem:
            self.problem = f"{self.path}, line {line.number}: {text}"
        self.last, self.end = max(self.last, record.step), line.sha256
        self.after[line.sha256] = record.step
        if isinstance(record, StartLine):
            self.starts.append(record)
        else:
            self.by_step[record.step] = record

    def _start_problem(self, start: StartLine) -> str:
        """Why a start cannot follow the lines before it; "" where it can."""
        if start.before is None:
            return ""
        if start.before != self.end:
            return "this start names another line before it; lines were changed, added or removed"
        if bool(start.step) != bool(start.checkpoint):
            return f"this start is at step {start.step}, and names {'a' if start.checkpoint else 'no'} checkpoint"
        line = self.by_step.get(start.step)
        if line is not None and line.weights and start.weights and line.weights != start.weights:
            return f"this start loaded other weights than those after step {start.step}"
        return ""


def kind_of(body: bytes) -> str | None:
    """The kind of the record in a line, "" where it names none; None where it is no JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return str(value.get("kind", ""))[:100] if isinstance(value, dict) else None


def same_number(one: float, two: float) -> bool:
    """Equal, or both not a number."""
    return one == two or (math.isnan(one) and math.isnan(two))


def _parsed(line: Line, path: Path) -> StepLine | StartLine:
    if not line.sha256:
        raise CheckpointError(
            f"{path}, line {line.number}: has no link to the line before; it was changed or added"
        )
    fields: Mapping[str, Any] = json.loads(line.body)
    try:
        return (StartLine if fields.get("kind") == START else StepLine).model_validate(fields)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_input=False)[0]["loc"])) or "its value"
        raise CheckpointError(
            f"{path}, line {line.number}: is no record of a step ({where[:80]}); it was changed"
        ) from None
