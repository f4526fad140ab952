"""log.jsonl as `verify` reads it: what its links prove, and the records that count."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.engine.evaluation import Score
from vitctl.engine.journal import LOG, Record, parse_records, read_records
from vitctl.engine.trace.chain import QUIET, Chain, Line, read_chain
from vitctl.engine.trace.steps import Steps, kind_of, same_number
from vitctl.errors import LaunchError
from vitctl.jobs.verification.finding import EARLIER, Finding, differs, ok, unchecked

_ONCE = ("train", "evaluate")  # kinds that a training logs once for each step


@dataclass(frozen=True)
class Log:
    """The log of a training.

    Args:
        path: of the file.
        chain: of its lines.
        linked: records of the linked lines.
        before: records of lines without a link, which an earlier vitctl wrote.
    """

    path: Path
    chain: Chain
    linked: Sequence[Record]
    before: Sequence[Record]

    @property
    def is_linked(self) -> bool:
        """Whether every line is linked: this vitctl wrote the whole log."""
        return bool(self.chain.links) and not self.chain.num_before

    def evaluations(self, labels: Any = None) -> tuple[dict[int, Record], bool]:
        """The evaluations by step, and whether they are linked: lines without a link count only where no other line has a score.

        Args:
            labels: the images' set of labels; records that name another are left out.
        """
        for records in (self.linked, self.before):
            found = {}
            for record in records:
                if record.get("labels") in (None, labels) and (scores := Score.by_step([record])):
                    found[next(iter(scores))] = record
            if found:
                return found, records is self.linked
        return {}, True

    def of_kind(self, kind: str) -> list[Record]:
        """The linked records of a kind; where the log has no linked line, those without a link."""
        return [one for one in (self.linked if self.chain.links else self.before) if one.get("kind") == kind]


def read_log(folder: Path) -> Log | None:
    """The log in a folder; None where there is none.

    Raises:
        LaunchError: it is no file, or cannot be read.
    """
    path = folder / LOG
    if not os.path.lexists(path):
        return None
    linked: list[Record] = []
    before: list[Record] = []

    def take(line: Line) -> None:
        (linked if line.sha256 else before).extend(parse_records(line.body.decode(errors="replace")))

    return Log(path, read_chain(path, kind_of, take), linked, before)


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
        return unchecked("log", f"its lines are not chained: {EARLIER}")
    if problem := _unlinked_problem(log, steps) or _repeated(log.linked):
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
    before = f", {chain.num_before} before them of an earlier vitctl" if chain.num_before else ""
    same = f"; numbers of {compared:,} steps as in steps.jsonl" if compared else ""
    return ok("log", f"{len(chain.links):,} lines, each follows the one before{before}{torn(chain)}{same}")


def chain_problem(path: Path, chain: Chain, heads: Mapping[str, Any]) -> str:
    """What is wrong with the lines of a file, and with its end; "" where nothing is."""
    if chain.broken_at:
        return f"{path}, line {chain.broken_at}: does not follow the line before; one of the two was changed, added or removed"
    if chain.torn_at:
        return f"{path}, line {chain.torn_at}: is no record, and no start follows it as after a crash; it was changed or added"
    head = heads.get(path.name)
    if head is None:
        return (
            f"{path}: the result does not name its last line; the result was changed" if heads and chain.links else ""
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


def _unlinked_problem(log: Log, steps: Steps | None) -> str:
    """A number in a line without a link that no earlier vitctl can have written: of a step after the first linked start."""
    begin = next((one.get("step", 0) for one in log.linked if one.get("kind") == "resume"), 0)
    if steps is not None and steps.starts:
        begin = steps.starts[0].step
    elif all(kind in QUIET for kind in log.chain.kinds):  # a finished run that was not allowed to go on
        return ""
    late = next((one for one in log.before if one.get("kind") not in QUIET and one.get("step", 0) > begin), None)
    if late is None:
        return ""
    what = f"a record of step {late['step']} has no link"
    return f"{what}, and every line from step {begin} on has one; it was added or changed"


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
