"""What a job leaves behind: RUN/result.json."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitctl.engine.journal import write_json
from vitctl.errors import CheckpointError

FILE = "result.json"


@dataclass(frozen=True)
class RunResult:
    """The outcome of a job.

    `status` is "done", "stopped" (by a signal, saved, can go on) or "failed"; `metrics` are the numbers, `provenance` what they
    belong to: digests of data and weights, split, resolution, recipe.
    """

    job: str
    status: str
    metrics: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    error: str = ""


def write_result(folder: Path, result: RunResult) -> RunResult:
    """Write RUN/result.json whole, and hand the result on."""
    write_json(folder / FILE, asdict(result))
    return result


def read_result(folder: Path) -> RunResult | None:
    """The result of a run folder; None while there is none.

    Raises:
        CheckpointError: the file is not a result.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return RunResult(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not a result of vitctl ({error}); delete it to run again") from None
