"""log.jsonl as `verify` reads it: what its links prove, and the records that count."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.engine.evaluation import Score
from vitctl.engine.journal import LOG, Record, parse_records, read_records
from vitctl.engine.trace.chain import Chain, Line, read_chain
from vitctl.engine.trace.steps import Steps, kind_of, same_number
from vitctl.errors import LaunchError
from vitctl.verify.finding import Finding, differs, ok

_ONCE = ("train", "evaluate")  # kinds that a training logs once for each step


@dataclass(frozen=True)
class Log:
    """The log of a training.

    Args:
        path: of the file.
        chain: of its lines.
        records: of its lines.
    """

    path: Path
    chain: Chain
    records: Sequence[Record]

    def evaluations(self, labels: Any = None) -> dict[int, Record]:
        """The evaluations by step.

        Args:
            labels: the images' set of labels; records that name another are left out.
        """
        found = {}
        for record in self.records:
            if record.get("labels") in (None, labels) and (scores := Score.by_step([record])):
                found[next(iter(scores))] = record
        return found

    def of_kind(self, kind: str) -> list[Record]:
        """The records of a kind."""
        return [one for one in self.records if one.get("kind") == kind]


def read_log(folder: Path) -> Log | None:
    """The log in a folder; None where there is none.

    Raises:
        LaunchError: it is no file, or cannot be read.
    """
    path = folder / LOG
    if not os.path.lexists(path):
        return None
    records: list[Record] = []

    def take(line: Line) -> None:
        records.extend(parse_records(line.body.decode(errors="replace")))

    return Log(path, read_chain(path, kind_of, take), records)


def check_log(log: Log, steps: Steps | None, heads: Mapping[str, Any]) -> Finding:
    """Whether the log is whole, and agrees with the record of steps.

    Args:
        log: of a training.
        steps: its record of steps; None where there is none.
        heads: digests in its result; empty while there is none.
    """
    chain = log.chain
    if problem := chain_problem(log.path, chain, heads):
        return differs("log", problem)
    if not chain.links:
        return differs("log", f"{log.path}: is empty")
    if problem := _repeated(log.records):
        return differs("log", f"{log.path}: {problem}")
    compared = 0
    by_step = steps.by_step if steps is not None else {}
    for record in log.of_kind("train"):
        if line := by_step.get(record.get("step", 0)):
            for name in ("loss", "grad_norm", "lr"):
                if not same_number(line.number(name), float(record.get(name) or 0.0)):
                    text = f"{name} is {record.get(name)!r} in {LOG}, {line.number(name)!r} in steps.jsonl"
                    return differs("log", f"step {line.step}: {text}")
            compared += 1
    same = f"; numbers of {compared:,} steps as in steps.jsonl" if compared else ""
    return ok("log", f"{len(chain.links):,} lines, each follows the one before{torn(chain)}{same}")


def chain_problem(path: Path, chain: Chain, heads: Mapping[str, Any]) -> str:
    """What is wrong with the lines of a file, and with its end; "" where nothing is."""
    if chain.broken_at:
        return f"{path}, line {chain.broken_at}: does not follow the line before; one of the two was changed, added or removed"
    if chain.torn_at:
        return f"{path}, line {chain.torn_at}: is no record, and no start follows it as after a crash; it was changed or added"
    head = heads.get(path.name)
    if head is None:
        return (
            f"{path}: the result does not name its last line; the result was changed"
            if heads and chain.links
            else ""
        )
    if head not in chain.links:
        return f"{path}: has no line with the digest {str(head)[:16]} that the result names; its end was removed or changed"
    if later := chain.numbers_after(head):
        kind = f" of kind {later[0]!r}" if later[0] else " of a step"
        return f"{path}: {len(later)} records with numbers follow the line that the result names, the first{kind}; they were added"
    return ""


def torn(chain: Chain) -> str:
    """The number of incomplete lines, in words."""
    return f"; {chain.num_torn} incomplete, as a crash leaves them" if chain.num_torn else ""


def _repeated(records: Sequence[Record]) -> str:
    """A second record of a step of a training, or one of an earlier step."""
    last: dict[str, float] = {}
    if all(record.get("kind") != "train" for record in records):
        return ""
    for record in records:
        kind, step = str(record.get("kind", "")), record.get("step", 0)
        if kind in _ONCE and step <= last.get(kind, -1):
            return f"a record ({kind}) of step {step} follows that of step {last[kind]}; one of the two was added"
        last[kind] = step
    return ""


def readable_records(folder: Path) -> list[Record]:
    """The records of a folder's log; none where it cannot be read, which `check_records` tells."""
    try:
        return read_records(folder / LOG)
    except LaunchError:
        return []
