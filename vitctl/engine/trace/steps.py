"""Reading steps.jsonl: what was recorded of the starts and steps of a training, and what its checkpoints say of
these records.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vitctl.engine.checkpoint.files import SavedCheckpoint
from vitctl.engine.journal import LOG, parse_records
from vitctl.engine.run_files import LOG_HEAD, STATE, STEP_RECORDS, STEPS_HEAD, UNRECORDED, step_of
from vitctl.engine.trace.chain import Chain, Line, read_chain
from vitctl.errors import CheckpointError

START = "start"  # kind of the records of starts; records of steps have none
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
        """The loss, grad_norm or lr; NaN if it is not recorded."""
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
    """A start of a training as it was recorded: the machine, and how it computes. `weights` is their digest."""

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
    attention: str = Field("", max_length=50)
    linear: str = Field("", max_length=50)
    compile: bool | None = None
    checkpoint_blocks: bool | None = None
    lanes: int = Field(0, ge=0, le=10**6)
    draws: bool = False
    versions: dict[str, str] = Field(default_factory=dict, max_length=100)


@dataclass(frozen=True)
class Steps:
    """The record of a training.

    Args:
        chain: the lines of its file.
        starts: in order.
        by_step: each step; the last record of a step that was recorded twice.
        gaps: (first, last) of steps without a record.
        problem: the first line that cannot follow those before it; "" if there is none.
    """

    chain: Chain
    starts: list[StartLine]
    by_step: dict[int, StepLine]
    gaps: list[tuple[int, int]]
    problem: str

    @property
    def last(self) -> int:
        """The last step that has a record; 0 if none has."""
        return max(self.by_step, default=0)


def read_steps(folder: Path) -> Steps | None:
    """The record of the training in a folder; None if there is none.

    Raises:
        CheckpointError: a line is not a record of a step or a start.
    """
    path = folder / STEP_RECORDS
    if not os.path.lexists(path):
        return None
    starts: list[StartLine] = []
    by_step: dict[int, StepLine] = {}
    gaps: list[tuple[int, int]] = []
    problem, last = "", 0

    def take(line: Line) -> None:
        nonlocal problem, last
        record = _parsed(line, path)
        is_step = isinstance(record, StepLine)
        if record.step < last + is_step:
            problem = problem or f"{path}, line {line.number}: a second record of step {record.step}"
        if record.step > last + is_step:
            gaps.append((last + 1, record.step - is_step))
        last = max(last, record.step)
        if isinstance(record, StepLine):
            by_step[record.step] = record
        else:
            starts.append(record)

    chain = read_chain(path, take)
    return Steps(chain, starts, by_step, gaps, problem)


def _parsed(line: Line, path: Path) -> StepLine | StartLine:
    fields: Mapping[str, Any] = json.loads(line.body)
    try:
        return (StartLine if fields.get("kind") == START else StepLine).model_validate(fields)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_input=False)[0]["loc"])) or "its value"
        raise CheckpointError(
            f"{path}, line {line.number}: not a record of a step ({where[:80]}); the file was modified"
        ) from None


class LoggedEnds(NamedTuple):
    """The lines of log.jsonl, and the digests of the checkpoints that it names, by step."""

    chain: Chain
    checkpoints: Mapping[int, str]

    @property
    def broken_at(self) -> int:
        """Number of the first line that does not follow the line before; 0 if all do."""
        return self.chain.broken_at


def read_logged_ends(folder: Path) -> LoggedEnds:
    """What log.jsonl in a folder says of checkpoints; empty if there is no log.

    Raises LaunchError if it is not a file.
    """
    checkpoints: dict[int, str] = {}

    def take(line: Line) -> None:
        if b'"checkpoint"' in line.body:
            for record in parse_records(line.body.decode(errors="replace")):
                if record.get("kind") == "checkpoint" and "digest" in record:
                    checkpoints[record.get("step", 0)] = str(record["digest"])

    path = folder / LOG
    chain = read_chain(path, take) if os.path.lexists(path) else Chain()
    return LoggedEnds(chain, checkpoints)


def record_problem(saved: SavedCheckpoint, steps: Steps | None, log: LoggedEnds, weights: str = "") -> str:
    """Return why the records beside a checkpoint are not those that it was saved with; "" if they are.

    Args:
        saved: the checkpoint.
        steps: the record of the steps; None if there is none.
        log: what the log says of checkpoints.
        weights: digest of the checkpoint's weights, see `weights_checksum`; "" to skip them.
    """
    state, step = saved.state, saved.step
    if step_of(saved.folder) not in (None, step):
        return f"{STATE} says step {step}"
    if head := state.get(STEPS_HEAD, ""):
        if steps is None:
            return f"was saved with a record of its steps, and {STEP_RECORDS} is gone"
        if steps.chain.broken_at:
            return f"{STEP_RECORDS}, line {steps.chain.broken_at}, does not follow the line before"
        if head not in steps.chain.links:
            return f"{STEP_RECORDS} has no line with the digest that it was saved with ({head[:16]})"
    if (end := state.get(LOG_HEAD, "")) and end not in log.chain.links:
        return f"{LOG} has no line with the digest that it was saved with ({end[:16]})"
    if log.checkpoints.get(step, saved.digest) != saved.digest:
        return f"{LOG} names another checkpoint of step {step}"
    line = steps.by_step.get(step) if steps is not None else None
    if weights and line is not None and line.weights and line.weights != weights:
        return f"its weights are not those that {STEP_RECORDS} has after step {step}"
    return ""


def not_named(saved: SavedCheckpoint) -> str:
    """The fields that a checkpoint of an earlier vitctl lacks: the ends of its records; "" if it has all."""
    return ", ".join(name for name in (STEPS_HEAD, UNRECORDED, LOG_HEAD) if name not in saved.state)
