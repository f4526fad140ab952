"""Reading steps.jsonl: what was recorded of the starts and of the steps of a training."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vitctl.engine.run_files import STEP_RECORDS
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
    """A start of a training as it was recorded."""

    model_config = ConfigDict(strict=True, extra="allow")

    step: int = Field(ge=0, le=MOST_STEPS)
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

    @property
    def depends_on_processes(self) -> bool:
        """Whether another number of processes gives other bits: without lanes the order in which gradients are added does."""
        return self.processes > 1 and not self.lanes


class Gap(NamedTuple):
    """Steps without a record, `first` to `last`; `at_start`: a start follows them, so that they may be of a run without a record."""

    first: int
    last: int
    at_start: bool


@dataclass(frozen=True)
class Steps:
    """The record of a training.

    Args:
        chain: of its file.
        starts: in order.
        by_step: each step; of one that was recorded twice the last.
        after: digest of a line -> finished steps at it.
        gaps: between the records.
        disorder: number of the first line, from 1, whose step is not later than the one before; 0 where there is none.
    """

    chain: Chain
    starts: list[StartLine]
    by_step: dict[int, StepLine]
    after: dict[str, int]
    gaps: list[Gap]
    disorder: int

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
    return Steps(chain, found.starts, found.by_step, found.after, found.gaps, found.disorder)


@dataclass
class _Reading:
    """The records of a file so far."""

    path: Path
    starts: list[StartLine] = field(default_factory=list)
    by_step: dict[int, StepLine] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    disorder: int = 0
    last: int = 0

    def take(self, line: Line) -> None:
        record = _parsed(line, self.path)
        is_start = isinstance(record, StartLine)
        begin = self.last + (not is_start)
        if record.step < begin:
            self.disorder = self.disorder or line.number
        elif record.step > begin:
            self.gaps.append(Gap(self.last + 1, record.step - (not is_start), is_start))
        self.last = max(self.last, record.step)
        self.after[line.sha256] = record.step
        if isinstance(record, StartLine):
            self.starts.append(record)
        else:
            self.by_step[record.step] = record


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
        raise CheckpointError(f"{path}, line {line.number}: has no link to the line before; it was changed or added")
    fields: Mapping[str, Any] = json.loads(line.body)
    try:
        return (StartLine if fields.get("kind") == START else StepLine).model_validate(fields)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_input=False)[0]["loc"])) or "its value"
        raise CheckpointError(
            f"{path}, line {line.number}: is no record of a step ({where[:80]}); it was changed"
        ) from None
