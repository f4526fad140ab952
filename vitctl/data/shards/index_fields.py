"""The schema of `index.json`. The file is untrusted, so it is validated as a whole before it is used."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vitctl.data.shards.tables import LABELS, SAMPLES, has_table_digests
from vitctl.system.text import breaks_line

INDEX_FILE = "index.json"
_MAX_INT = 2**53  # the largest integer that every JSON parser reads exactly
_MAX_LABELS = 10**6
# Surrogates are allowed where they stand for a byte that is not UTF-8.
_NOT_A_FILE_NAME = re.compile(r"^\.{0,2}$|[\0/\ud800-\udc7f\udd00-\udfff]")


def _file_name(name: str) -> str:
    if _NOT_A_FILE_NAME.search(name) or breaks_line(name):
        raise ValueError("not the name of a file beside the index")
    return name


class _Shard(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, Field(max_length=255), AfterValidator(_file_name)]
    num_samples: int = Field(ge=0, le=_MAX_INT)
    num_bytes: int = Field(ge=0, le=_MAX_INT)
    sha256: str = Field(max_length=64)
    url: str = Field("", max_length=4096)


class _Members(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    image: str = ""
    label: str = ""


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)

    class_names: list[str] = Field(min_length=1)
    source: str
    num_samples: int = Field(ge=1, le=_MAX_INT)
    shards: list[_Shard] = Field(min_length=1)
    members: _Members = _Members()
    max_labels: int = Field(1, ge=1, le=_MAX_LABELS)


_SHOULD = {
    "class_names": "class_names should be a list of names",
    "source": "source should be a string",
    "num_samples": "num_samples should be a whole number above 0",
    "shards": "shards should be a list of {name, num_samples, num_bytes, sha256}, each beside the index",
    "members": "members should name the extensions of image and label",
    "max_labels": f"max_labels should be a whole number from 1 to {_MAX_LABELS:,}",
}


def field_problems(fields: dict[str, Any]) -> list[str]:
    """The problems of an index, one message per field; empty where it is valid."""
    try:
        index = _Index.model_validate(fields)
    except ValidationError as error:
        wrong = {problem["loc"][0] for problem in error.errors(include_input=False, include_url=False)}
        return [text for name, text in _SHOULD.items() if name in wrong]
    total = sum(shard.num_samples for shard in index.shards)
    problems = (
        []
        if index.num_samples == total
        else [f"num_samples is {index.num_samples}, the shards sum to {total}"]
    )
    wanted = {SAMPLES, LABELS} if "max_labels" in fields else {SAMPLES}
    if "tables" in fields and not has_table_digests(fields["tables"], wanted):
        problems.append(f"tables should hold num_bytes and sha256 of {' and '.join(sorted(wanted))}")
    return problems
