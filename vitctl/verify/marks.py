"""trace.bin against the checksums in steps.jsonl, without a replay."""

import os
import zlib
from pathlib import Path

from vitctl.engine.run_files import TRACE
from vitctl.engine.trace.recorder import read_marks_header
from vitctl.engine.trace.steps import Steps
from vitctl.errors import CheckpointError
from vitctl.system.files import open_regular
from vitctl.verify.finding import Finding, differs, ok, unchecked


def check_marks(folder: Path, steps: Steps) -> Finding:
    """Whether the marks of every step in trace.bin have the CRC-32 that its line names: one pass, a step in
    memory.

    Args:
        folder: of the training.
        steps: its record.
    """
    path = folder / TRACE
    header = read_marks_header(path)
    if header is None:
        return unchecked(
            "trace", f"{path}: missing, or not of vitctl; a replay then names no image and no parameter"
        )
    missing: list[int] = []
    compared = 0
    with open_regular(path, error=CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        for step in sorted(steps.by_step):
            if step <= header.first or header.begin(step) >= size or not steps.by_step[step].trace:
                missing.append(step)
                continue
            file.seek(header.begin(step))
            content = file.read(header.size)
            if _holds(content, steps.by_step[step].trace):
                compared += 1
            elif not any(content):  # a full disk leaves a hole
                missing.append(step)
            else:
                return differs("trace", f"{path}: the marks of step {step} are not those that its line names")
    if missing:
        num = (
            f"those of step {missing[0]}"
            if len(missing) == 1
            else f"those of {len(missing):,} steps, the first is {missing[0]}"
        )
        return unchecked("trace", f"{path}: {num}: missing; {_marks(compared)} as their lines name them")
    return ok("trace", f"trace.bin: {_marks(compared)} as their lines name them")


def _marks(count: int) -> str:
    return f"marks of {count:,} step{'s' * (count != 1)}"


def _holds(content: bytes, crc: str) -> bool:
    """Whether these are the marks of that CRC-32; a parameter without a gradient has none, which leaves zeros
    at the end.
    """
    shortest = len(content.rstrip(b"\0"))
    shortest += shortest % 2
    return any(f"{zlib.crc32(content[:size]):08x}" == crc for size in range(len(content), shortest - 1, -2))
