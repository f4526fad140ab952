"""Reads what other processes of a run log, for the process that shows progress on the screen."""

import os
from contextlib import suppress
from pathlib import Path

from vitctl.engine.journal import Record, Report, parse_records, read_run_json
from vitctl.errors import VitctlError


class Follower:
    """Passes the records that other processes append to a log to `report`, each once, and their current
    state.
    """

    def __init__(self, path: Path, report: Report, now: Path | None = None) -> None:
        self.path, self.report, self.now_file = path, report, now
        self.last_now: Record = {}
        self.offset = 0
        self.inode = -1
        self.seen = set[
            int
            # hashes of lines that were there before, or are reported; time stamps do not help, since clocks can
            # be set back
        ]()
        with suppress(OSError):
            self._new_lines()

    def poll(self) -> None:
        """Report what is new since the last poll.

        A file that cannot be read, or a line that is no record, is ignored.
        """
        with suppress(OSError, AttributeError):
            self._follow_log()
        if self.now_file is None:
            return
        with suppress(OSError, ValueError, RecursionError, VitctlError):
            record = read_run_json(self.now_file)
            if isinstance(record, dict) and record != self.last_now and record.get("kind") == "now":
                self.last_now = record
                self.report(record)

    def _follow_log(self) -> None:
        for record in parse_records("\n".join(line.decode(errors="replace") for line in self._new_lines())):
            self.report(record)

    def _new_lines(self) -> list[bytes]:
        """Whole lines that are new since the last poll.

        A log that was truncated is a new file with old lines.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.inode, self.offset = status.st_ino, 0
                file.seek(self.offset)
                lines = file.read()
        except FileNotFoundError:
            return []
        whole = lines[: lines.rfind(b"\n") + 1]
        self.offset += len(whole)
        new = [line for line in whole.split(b"\n") if line and hash(line) not in self.seen]
        self.seen.update(map(hash, new))
        return new
