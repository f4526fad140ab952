"""Open files: how many a process keeps, and that there is room for those of its loader processes."""

import os
import resource
import sys

from vitctl.errors import LaunchError

# What may be opened beside, and the queues, the watch and the batches in flight of a worker.
_FILES, _FILES_A_WORKER = 12, 6
_OPEN_SHARDS = 64


def open_files(limit: int) -> int:
    """How many of `limit` descriptors a process may keep open for shards, so that batches can still be handed over."""
    return _OPEN_SHARDS if limit == resource.RLIM_INFINITY else max(4, min(_OPEN_SHARDS, limit // 8))


def have_files(num_workers: int) -> None:
    """See that there are descriptors for so many workers, whose batches travel as such; without one, a batch would be lost.

    Raises:
        LaunchError: the limit cannot be raised so far.
    """
    if not num_workers or sys.platform != "linux":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + _FILES + _FILES_A_WORKER * num_workers + open_files(soft)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{num_workers} loader workers need {needed} open files, the limit is {hard}; raise it (ulimit -n {needed}), "
            "or lower machine.workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
