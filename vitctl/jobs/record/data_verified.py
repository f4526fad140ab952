"""`data_verified` of results: the shards behind a result are verified against their digests. A score needs all
of them; a training records their state.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitctl.data.source.verification import Verification, Verified
from vitctl.data.source.views import Source
from vitctl.engine.journal import Journal
from vitctl.engine.runtime import Runtime
from vitctl.errors import DataError

_PATIENCE = 5.0  # seconds that a finished training waits for the last shards
WHOLE = {"data_verified": "whole"}  # of results whose every image was verified by `check_whole`


def verify(runtime: Runtime, run_dir: Path, *sources: Source | None) -> Verification:
    """Start to verify the shards of some sources against their digests; the processes of the run share the
    work.

    Args:
        runtime, run_dir: of the job.
        sources: those that are scored first; None is ignored.
    """
    stored = [source for source in sources if source is not None]
    return Verification(stored, run_dir, part=runtime.rank, num_parts=runtime.num_processes)


def check_whole(begun: Verification, runtime: Runtime, *sources: Source) -> None:
    """Refuse a score unless every byte behind it is verified; all processes call this after the images were
    decoded.

    Args:
        begun: to which the sources were added before their images were decoded.
        runtime: of the job.
        sources: that are scored; without any, all of `begun`.

    Raises:
        DataError: a shard does not match its index, changed while it was read, or could not be verified.
    """
    begun.wait(*sources)
    runtime.wait()
    begun.complete(*sources)
    problem = not_whole(begun.found(*sources))
    if runtime.sum([float(bool(problem))])[0]:
        raise DataError(problem or "another process could not verify the shards behind this score")


def not_whole(found: Verified) -> str:
    """Return why images cannot be scored, "" where every byte of their shards was verified."""
    if found.damaged:
        return (
            f"{_first(found.damaged)}; a score must be of exactly the images of its digest: copy the file "
            f"again, or make the shards again; `vitctl data check` finds all problems"
        )
    if found.state != "whole":
        return (
            f"{1 - found.share:.1%} of the bytes behind this score could not be verified against their "
            f"digests; check permissions, set data.cache_gib above 0 for remote shards, then run again"
        )
    return ""


def verified(begun: Verification, runtime: Runtime, journal: Journal, train_on: Source) -> dict[str, Any]:
    """For the provenance of a training: `data_verified`, a `DataVerified`, with `data_damaged` where shards
    are or were damaged.

    Args:
        begun: result of `verify`.
        runtime, journal: of the job.
        train_on: the training images; those that are scored are whole, see `check_whole`.
    """
    begun.finish(_PATIENCE)
    runtime.wait()
    found = begun.found(train_on)
    if damaged := [*found.damaged, *found.damaged_before]:
        text = f"{_first(damaged)}; the result records data_verified = damaged"
        journal.write("warning", step=0, text=text)
        return {"data_verified": "damaged", "data_damaged": damaged}
    if found.state != "whole":
        text = f"{found.share:.1%} of the bytes of the training shards were verified against their digests; the result records it"
        journal.write("data", step=0, text=text)
    return {"data_verified": found.state}


def _first(problems: Sequence[str]) -> str:
    return f"{problems[0]} (and {len(problems) - 1} more)" if len(problems) > 1 else problems[0]
