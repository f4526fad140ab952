"""Choices that a run stores, so that it resumes with the same ones: micro_batch.json, and kernels.json of
earlier releases.
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitctl.errors import CheckpointError
from vitctl.system.files import read_json

_MOST_BYTES = 2**16


class MicroBatch(BaseModel):
    """The micro-batch that fits into memory, and the setting in which it was measured."""

    model_config = ConfigDict(strict=True)

    share: int = Field(ge=1, le=10**9)
    device: str = Field(max_length=500)
    precision: str = Field(max_length=50)
    micro_batch: int = Field(ge=1, le=10**9)


class Kernels(BaseModel):
    """What computes the attention product and the linear layers."""

    model_config = ConfigDict(strict=True)

    attention: Literal["fused", "math"]
    linear: Literal["torch", "onednn"]


M = TypeVar("M", bound=BaseModel)


def read_kept(path: Path, model: type[M]) -> M:
    """The choice that an earlier start of the run stored.

    Raises:
        CheckpointError: the file cannot be read, or is invalid.
    """
    try:
        value: Any = read_json(path, _MOST_BYTES, error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete it to choose again") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_input=False)[0]["loc"])) or "its value"
        raise CheckpointError(f"{path}: {where} is invalid; delete the file to choose again") from None
