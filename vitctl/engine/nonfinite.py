"""Updates that are skipped because loss or gradient is not finite: counted, and logged so that they can be
reproduced.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitctl.engine.distributed.sharding import local
from vitctl.engine.step import Result
from vitctl.errors import VitctlError

SKIPPED = "skipped.jsonl"
MAX_IN_A_ROW = 10


@dataclass
class Counts:
    """Counters of a run, stored in its checkpoints."""

    num_bad: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0

    def add(self, result: Result) -> None:
        """Count one update."""
        self.num_bad += result.num_bad
        self.num_skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0


def in_words(result: Result) -> str:
    """The numbers of an update as text."""
    return f"loss {result.loss:g}, gradient norm {result.grad_norm:g}, learning rate {result.lr:g}"


def record(step: int, rank: int, result: Result, model: nn.Module, keys: list[str]) -> dict[str, Any]:
    """A line of skipped.jsonl. Numbers are strings, since JSON has no infinity; norms of weights are of this
    process's shards.

    On a GPU they may be those after one more update: the numbers of a step are read while the next one is
    computed.

    Args:
        step: finished steps, this one included.
        rank: of this process.
        result: of the update.
        model: unwrapped.
        keys: of the samples of this process's share of the batch.
    """
    norms = [] if result.gradient is None else result.gradient.tolist()
    return {
        "step": step,
        "rank": rank,
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "lr": str(result.lr),
        "keys": keys,
        "gradient_norms": {name: str(norm) for name, norm in zip(result.parameters, norms, strict=True)},
        "weight_norms": {name: str(float(local(p.detach()).norm())) for name, p in model.named_parameters()},
    }


def check_bound(step: int, counts: Counts, result: Result, where: Path) -> None:
    """Stop a run that makes no progress.

    Raises:
        VitctlError: too many updates in a row were skipped.
    """
    if counts.skipped_in_a_row >= MAX_IN_A_ROW:
        raise VitctlError(
            f"step {step}: the last {MAX_IN_A_ROW} updates were not finite ({in_words(result)}) and were "
            f"skipped, training "
            f"stopped; {where} has norms and sample keys; lower optimizer.lr, set optimizer.clip_norm, or "
            f"lengthen "
            "schedule.warmup_steps"
        )


def check_share(steps: int, counts: Counts, where: Path) -> None:
    """Fail a finished run that skipped more than half of its updates: its weights are not the result of its
    recipe.

    Raises:
        VitctlError: more than half of the updates were skipped.
    """
    if 2 * counts.num_skipped > steps:
        raise VitctlError(
            f"{counts.num_skipped} of {steps} updates were not finite and were skipped: this is not the "
            f"training that the recipe describes, so no result was written; {where} has norms and sample "
            f"keys; lower optimizer.lr, set "
            f"optimizer.clip_norm, "
            "or lengthen schedule.warmup_steps"
        )
