"""File descriptors: how many a process keeps open for shards, and the limit that its loader workers need."""

import os
import resource
import sys

from vitctl.errors import LaunchError

# Reserve of this process; then, for each worker, its queues, its sentinel and its batches in flight.
_FILES, _FILES_PER_WORKER = 12, 6
_OPEN_SHARDS = 64


def max_open_shards(limit: int) -> int:
    """How many shards a process may keep open when it may have `limit` descriptors.

    The rest is left for passing batches.
    """
    return _OPEN_SHARDS if limit == resource.RLIM_INFINITY else max(4, min(_OPEN_SHARDS, limit // 8))


def ensure_descriptors(num_workers: int) -> None:
    """Raise the soft limit on descriptors where `num_workers` need it. Workers pass batches as descriptors of
    shared memory.

    Raises:
        LaunchError: the hard limit is too low.
    """
    if not num_workers or sys.platform != "linux":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (
        len(os.listdir("/proc/self/fd")) + _FILES + _FILES_PER_WORKER * num_workers + max_open_shards(soft)
    )
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{num_workers} loader workers need {needed} open files, the limit is {hard}; raise it (ulimit "
            f"-n {needed}), "
            "or lower machine.workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
