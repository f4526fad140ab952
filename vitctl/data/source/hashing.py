"""The background process that verifies a job's shards: `python -I hashing.py RECORDS PARENT`.

It imports only the standard library. It reads lines of [path, size, sha256, whether it is a cached copy] from
standard input and appends a record for each file; a damaged cached copy is deleted. It is a separate process
and not a thread, because the job forks loader workers, which is not safe in a process with threads. It runs
at low priority (nice), and ends with its parent. The parent starts it with signals blocked.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 4 * 2**20
_NICE = 10


def hash_file(
    path: str, num_bytes: int, sha256: str, alive: Callable[[], None] = lambda: None
) -> dict[str, object]:
    """Verify a file against its size and digest; `alive` is called every few MiB.

    Returns:
        path and sha256 as given, `inode`, `mtime_ns` and `ctime_ns` before it was read, and `problem`: a
            message, "" if the file is intact.
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
        record["problem"] = (
            f"checksum mismatch: index has {sha256[:12]}..., file has {found.hexdigest()[:12]}...; "
            "the file changed after it was indexed"
        )
    return record


def _no_links(path: str, flags: int) -> int:
    """Open like `vitctl.system.files.no_links`, which this file cannot import."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def main() -> None:
    """Verify the files listed on standard input, until all are done or the parent has died."""
    os.nice(_NICE)
    parent = int(sys.argv[2])  # os.getppid() could already return another process

    def alive() -> None:
        if os.getppid() != parent:
            raise SystemExit

    files = [json.loads(line) for line in sys.stdin]
    with open(sys.argv[1], "a", encoding="utf-8", opener=_no_links) as records:
        records.write("\n")  # ends an incomplete line of an earlier process
        for path, num_bytes, sha256, is_cached in files:
            alive()
            record = hash_file(path, num_bytes, sha256, alive)
            if record["problem"] and is_cached:
                if not os.path.exists(path):  # evicted from the cache because no space was left: not damage
                    continue
                with suppress(OSError):
                    os.unlink(path)
            records.write(json.dumps(record) + "\n")
            records.flush()
            if record["problem"]:
                with suppress(OSError):  # the terminal is closed; the problem is in the record
                    print(f"warning: {path}: {record['problem']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with suppress(OSError):  # a record cannot be written: the job verifies what has none
        main()
