"""What other processes of a run write down, handed to the one that has the screen."""

import os
from contextlib import suppress
from pathlib import Path

from vitctl.engine.journal import Record, Report, parse_lines, read_json
from vitctl.errors import VitctlError


class Follower:
    """Hands the records that other processes append to a log to `report`, each once, and what is under way."""

    def __init__(self, path: Path, report: Report, now: Path | None = None) -> None:
        self.path, self.report, self.now = path, report, now
        self.told: Record = {}
        self.partial_from = 0
        self.inode = -1
        self.known = set[
            int
        ]()  # lines that were there before, or are reported; clocks are set back, so times do not tell
        with suppress(OSError):
            self._new_lines()

    def poll(self) -> None:
        """Report what has come since the last poll; what cannot be read now, or is no record, does not end the run."""
        with suppress(OSError, AttributeError):
            self._follow_log()
        if self.now is None:
            return
        with suppress(OSError, ValueError, RecursionError, VitctlError):
            record = read_json(self.now)
            if isinstance(record, dict) and record != self.told and record.get("kind") == "now":
                self.told = record
                self.report(record)

    def _follow_log(self) -> None:
        for record in parse_lines("\n".join(line.decode(errors="replace") for line in self._new_lines())):
            self.report(record)

    def _new_lines(self) -> list[bytes]:
        """Whole lines that were not there at the last look. A log that was cut back is a new file of old lines."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.partial_from:
                    self.inode, self.partial_from = status.st_ino, 0
                file.seek(self.partial_from)
                lines = file.read()
        except FileNotFoundError:
            return []
        whole = lines[: lines.rfind(b"\n") + 1]
        self.partial_from += len(whole)
        new = [line for line in whole.split(b"\n") if line and hash(line) not in self.known]
        self.known.update(map(hash, new))
        return new
