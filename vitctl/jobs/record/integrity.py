"""Verification of the shards behind a result against their digests: complete, in part, or failed."""

from pathlib import Path
from typing import Any

from vitctl.data.source.integrity import Verification
from vitctl.data.source.read import Source
from vitctl.engine.distributed.runtime import Runtime
from vitctl.engine.journal import Journal
from vitctl.errors import DataError

_PATIENCE = 5.0  # seconds that a finished training waits for the last shards


def verify(runtime: Runtime, run_dir: Path, *sources: Source | None) -> Verification:
    """Start to verify the shards of some sources against their digests; the processes of the run share the work.

    Args:
        runtime, run_dir: of the job.
        sources: None is ignored.
    """
    stored = [source for source in sources if source is not None]
    return Verification(stored, run_dir, part=runtime.rank, num_parts=runtime.num_processes)


def are_whole(begun: Verification, runtime: Runtime) -> bool:
    """Whether all shards match their index, also after they were read; waits for all processes."""
    begun.finish(None)
    runtime.wait()
    found = begun.found()
    return not (found.damaged or found.num_unread)


def verified(begun: Verification, runtime: Runtime, journal: Journal, *, is_score: bool) -> dict[str, Any]:
    """For the provenance: `data_verified` is true, the share of the bytes that was verified, or false with `data_damaged`.

    Args:
        begun: result of `verify`.
        runtime, journal: of the job.
        is_score: a score waits until everything is verified, and is refused where a shard is damaged; a training does not wait.

    Raises:
        DataError: a shard behind a score does not match its index, changed while it was read, or could not be read.
    """
    if begun.is_empty:
        return {}
    begun.finish(None if is_score else _PATIENCE)
    runtime.wait()
    found = begun.found()
    if found.damaged:
        more = f" (and {len(found.damaged) - 1} more)" if len(found.damaged) > 1 else ""
        if is_score:
            raise DataError(
                f"{found.damaged[0]}{more}; a score must be of exactly the images of its digest: copy the file again, "
                "or make the shards again; `vitctl data check` finds all problems"
            )
        journal.write("warning", step=0, text=f"{found.damaged[0]}{more}; the result says data_verified = false")
        return {"data_verified": False, "data_damaged": list(found.damaged)}
    if is_score and found.num_unread:
        raise DataError(
            f"{found.num_unread} shard(s) behind this score could not be verified against their digests; check permissions, then run again"
        )
    if found.share < 1:
        text = f"{found.share:.1%} of the bytes of the shards were verified against their digests; the result says so"
        journal.write("data", step=0, text=text)
    return {"data_verified": True if found.share == 1 else round(found.share, 4)}
