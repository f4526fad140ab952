"""Computing again where data or start weights are not at their place, as after a run was copied to another
machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitctl.engine.run_files import MODEL, tensors_file
from vitctl.engine.trace.replay import newest_before
from vitctl.engine.trace.steps import Steps
from vitctl.errors import CheckpointError, DataError, VitctlError
from vitctl.jobs.record.result import RunResult
from vitctl.jobs.record.runs import choose_weights
from vitctl.recipe.schema import Finetune, Pretrain, Vtab
from vitctl.verify.again import Again, replay, rescore
from vitctl.verify.finding import Finding, Progress, unproven


def replay_here(
    again: Again, steps: Steps, ranges: Sequence[tuple[int, int]], progress: Progress
) -> list[Finding]:
    """Replay what can be replayed with what is on this machine; the rest is not proven.

    Args:
        again, steps, ranges, progress: as `replay` takes them.
    """
    try:
        return replay(again, steps, ranges, progress)
    except VitctlError as error:
        if not _lacks_start_weights(again, error):
            return [_not_proven("replay", again, error)]
        without = error
    findings, others = [], [bounds for bounds in ranges if newest_before(again.folder, bounds[0]) is None]
    if others:
        words = ", ".join(f"{first} to {last}" for first, last in others)
        findings.append(
            unproven("replay", f"steps {words} begin with the start weights: {_elsewhere(again, without)}")
        )
    rest = [bounds for bounds in ranges if bounds not in others]
    if not rest:
        return findings
    saved = newest_before(again.folder, rest[0][0])
    assert saved is not None
    try:
        return [*findings, *replay(_built_from(again, saved.folder), steps, rest, progress)]
    except VitctlError as error:
        return [*findings, _not_proven("replay", again, error)]


def rescore_here(again: Again, result: RunResult | None) -> Finding:
    """Score again with what is on this machine; see `rescore`."""
    try:
        return rescore(again, result)
    except VitctlError as error:
        if not _lacks_start_weights(again, error):
            return _not_proven("score", again, error)
    try:
        return rescore(_built_from(again, choose_weights(again.folder)[0].parent), result)
    except VitctlError as error:
        return _not_proven("score", again, error)


def _lacks_start_weights(again: Again, error: VitctlError) -> bool:
    return (
        not again.reached
        and isinstance(error, CheckpointError)
        and isinstance(again.loaded.recipe, Finetune | Vtab)
    )


def _built_from(again: Again, checkpoint: Path) -> Again:
    """The same training; its network is that of a checkpoint, whose weights are loaded in any case."""
    return replace(
        again,
        scratch=again.scratch.with_name(f"{again.scratch.name}_built"),
        built_from=str(checkpoint / tensors_file(MODEL)),
    )


def _not_proven(what: str, again: Again, error: VitctlError) -> Finding:
    return unproven(what, _elsewhere(again, error))


def _elsewhere(again: Again, error: VitctlError) -> str:
    """An error, and the option that fixes it."""
    if isinstance(error, DataError):
        return f"{error}; --data SHARDS names another place"
    if (
        isinstance(error, CheckpointError)
        and not again.reached
        and not isinstance(again.loaded.recipe, Pretrain)
    ):
        return f"{error}; --from START names another place"
    return str(error)
