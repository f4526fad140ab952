"""The process beside a job that reads shards and holds them against their digests: `python -I hashing.py RECORDS PARENT`.

It imports the standard library alone. It reads lines of [path, size, sha256, whether it is a copy in the cache] and appends a line
for each file; a copy that is damaged is removed. It is a process of
its own, because loaders are forked off the job, beside whose threads that is not safe; it steps back behind all others, and ends
with its parent.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 4 * 2**20
_NICE = 10
# Sent to the whole group; the job decides. They are those of vitctl.system.signals, which is not to be imported here.
IGNORED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGINT,
    signal.SIGUSR2,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGXCPU,
    signal.SIGALRM,
    signal.SIGVTALRM,
)


def hash_file(path: str, num_bytes: int, sha256: str, alive: Callable[[], None] = lambda: None) -> dict[str, object]:
    """Read a file whole.

    Args:
        path: of the file.
        num_bytes, sha256: that it should have.
        alive: called every few MiB.

    Returns:
        path, sha256 as given, `inode`, `mtime_ns` and `ctime_ns` before it was read, and `problem`: what is wrong in words, "" when
        nothing is.
    """
    record: dict[str, object] = {
        "path": path,
        "sha256": sha256,
        "inode": 0,
        "mtime_ns": 0,
        "ctime_ns": 0,
        "problem": "",
    }
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            record |= {"inode": status.st_ino, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
            found, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK))
            while count := file.readinto(buffer):
                found.update(buffer[:count])
                size += count
                alive()
    except OSError as error:
        return record | {"problem": f"cannot be read ({error.strerror})"}
    if (size, found.hexdigest()) != (num_bytes, sha256):
        record["problem"] = f"sha256 is {found.hexdigest()[:12]}..., its index says {sha256[:12]}...; it changed since"
    return record


def _no_links(path: str, flags: int) -> int:
    """As `vitctl.system.files.no_links`, which this file cannot import: it runs alone."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def main() -> None:
    """Hash the files that standard input names, until all are done or the parent is gone."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    parent = int(sys.argv[2])  # asked for here it could be another already

    def alive() -> None:
        if os.getppid() != parent:
            raise SystemExit

    files = [json.loads(line) for line in sys.stdin]
    with open(sys.argv[1], "a", encoding="utf-8", opener=_no_links) as records:
        records.write("\n")  # ends a line that an earlier process left torn
        for path, num_bytes, sha256, is_kept in files:
            alive()
            record = hash_file(path, num_bytes, sha256, alive)
            if record["problem"] and is_kept:
                if not os.path.exists(path):  # dropped for want of room, which is no damage
                    continue
                with suppress(OSError):
                    os.unlink(path)
            records.write(json.dumps(record) + "\n")
            records.flush()
            if record["problem"]:
                with suppress(OSError):  # a screen that is gone; the record says it
                    print(f"warning: {path}: {record['problem']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
