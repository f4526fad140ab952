"""A run's files: their names, log.jsonl, and digests of its records. Imports no torch.

log.jsonl and steps.jsonl only grow. A checkpoint and a result record how they ended: the number of bytes, and
their SHA-256. A line that a crash truncated stays, and is not a record.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vitctl.errors import CheckpointError, LaunchError
from vitctl.system import limits
from vitctl.system.files import (
    lock,
    no_links,
    open_regular,
    read_bytes,
    read_json,
    write_bytes,
    write_json,
    write_text,
)
from vitctl.system.text import count_text, escaped_json

RECIPE, RESULT, CHECKPOINTS = "recipe.toml", "result.json", "checkpoints"
# One line per step, and marks of its samples and gradients.
STEP_RECORDS, TRACE = "steps.jsonl", "trace.bin"
LINE_BYTES, MARKS_BYTES = 320, 64 * 2**20  # of a step in steps.jsonl, and of trace.bin at most
MOST_STEPS = 10**12  # of a record, or named by a result
# A checkpoint's tensor files: NAME.safetensors, or NAME-00001-of-00004.safetensors and so on for a sharded
# run. The average and the adapters are optional.
MODEL, AVERAGE, OPTIMIZER = "model", "ema", "optimizer"
ADAPTERS = {MODEL: "lora", AVERAGE: "lora_ema"}  # already merged into those weights
TENSOR_FILES = (MODEL, OPTIMIZER, AVERAGE, *ADAPTERS.values())
STATE = "state.json"
# Keys of state.json: how steps.jsonl and log.jsonl ended, see `end_of`, and what decides the last bits.
STEPS_HEAD, LOG_HEAD, COMPUTED_ON = "steps_head", "log_head", "computed_on"
STEPS, TORN = "step_*", "torn_"  # checkpoints, and the start of the name of one that was set aside
STARTED = "start_of_a_run"  # a file in a checkpoint that training never deletes
ALLOWED, ENVIRONMENT, LAUNCH = "allowed.json", "env.json", "launch.txt"
# Copied by `keep_records`; the last one marks the copy as complete.
BEFORE, _KEPT = ".before", (ALLOWED, ENVIRONMENT, LAUNCH, RESULT, RECIPE)
# Reserved names: no option may write to these files in the run's folder.
RUN_FILES = (
    *(RECIPE, RESULT, STEP_RECORDS, TRACE, ALLOWED, "log.jsonl", "skipped.jsonl", "bad_samples.jsonl"),
    *(ENVIRONMENT, LAUNCH, "micro_batch.json", "job.sbatch"),
    *("per_class.csv", "confusion.csv", "thresholds.csv", "suspects.csv"),
)
FEATURES = "features"  # representations cached by `fewshot`, next to the runs that share them


def tensors_file(name: str) -> str:
    return f"{name}.safetensors"


def name_of(file: str) -> str:
    """Return which tensors a checkpoint file, or a part of one, holds: the model, average or optimizer."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", file)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return a checkpoint folder's tensor files by name; of a sharded run, the first parts."""
    return {name_of(path.name): path for path in sorted(folder.glob(tensors_file("*")), reverse=True)}


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for another folder."""
    return int(folder.name[5:]) if re.fullmatch(r"step_[0-9]+", folder.name) else None


def run_of(folder: Path) -> Path:
    """Return the run folder that contains a training; a run may have several."""
    return next((path for path in (folder, *folder.parents) if (path / RECIPE).is_file()), folder)


def no_permission(error: PermissionError) -> CheckpointError:
    """Return the error for unreadable files of a run: falling back to older files would lose steps."""
    return CheckpointError(
        error.filename, "permission denied", "fix its permissions, or remove it to continue without it"
    )


def step_folders(root: Path) -> list[Path]:
    """Return the checkpoint folders; unlike a glob, fail if the folder may not be read."""
    return [path for path in root.iterdir() if path.name.startswith("step_")] if root.is_dir() else []


def end_of(path: Path, size: int | None = None) -> str:
    """Return "BYTES:SHA256" of a file, or of its first `size` bytes; "" if there is no file."""
    if not os.path.lexists(path):
        return ""
    digest, num_read = hashlib.sha256(), 0
    with open_regular(path, error=LaunchError) as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        while part := file.read(min(size - num_read, 2**20)):
            digest.update(part)
            num_read += len(part)
    return f"{num_read}:{digest.hexdigest()}"


def begins(path: Path, end: str) -> bool:
    """Return whether a file starts with the bytes that `end` describes; any file, for an early `end`."""
    size, names_bytes, _ = end.partition(":")
    if not names_bytes:
        return path.is_file()
    return path.is_file() and size.isdecimal() and end_of(path, int(size)) == end


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield a file's lines without their newlines, skipping lines that are too long."""
    most, inside = limits.LOG_LINE, False
    with open_regular(path, error=LaunchError) as file:
        while line := file.readline(most):
            ends = line.endswith(b"\n")
            if not inside and (ends or len(line) < most):
                yield line.removesuffix(b"\n")
            inside = not ends


LOG = "log.jsonl"
CHANGED = "the recipe was changed on purpose"  # the start of that warning
RECORDS = (LOG, STEP_RECORDS)  # checkpoints and results record how these end
WATCH_SECONDS = 5.0
SHOW_SECONDS = 1.0
MOST_HELD = 20_000  # records held in memory for a file that cannot be written

Record = dict[str, Any]
Report = Callable[[Record], None]
B = TypeVar("B", bound=Sized)
# Optional fields that must be numbers, and their limits: dates and chart axes are computed from them.
_MOST_SECONDS, _MOST = 1e11, 1e300
_NUMBERS = {
    "time": _MOST_SECONDS,
    **dict.fromkeys(
        ("step", "total_steps", "samples", "epoch", "accuracy", "correct", "total", "shots"), _MOST
    ),
    **dict.fromkeys(("num_bad", "num_skipped", "done", "images_per_second"), _MOST),
}
_CURVES = ("loss", "lr", "grad_norm", "data_wait", "mfu")  # may also be unknown, NaN or infinite


def silent(_record: Record) -> None:
    """Ignore a record: the report that shows nothing."""


def never_raising(
    report: Callable[..., None], log: Path | None, what: str = "progress cannot be shown any more"
) -> Callable[..., None]:
    """Return `report` without its errors, which must not end the run; the first is logged as a warning."""
    was_reported = log is None

    def show(record: Record, **named: Any) -> None:
        nonlocal was_reported
        try:
            report(record, **named)
        except Exception as error:
            if was_reported or log is None:
                return
            was_reported = True
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            said = {
                "step": record.get("step", named.get("step", 0)),
                "text": f"{what} ({reason}); the run continues",
            }
            with suppress(OSError):
                append_record(log, _stamped("warning", said))

    return show


# Numbers that JSON lacks, by the strings that represent them.
_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as standard JSON; NaN and infinities become "NaN", "Infinity" and "-Infinity"."""
    encoded = json.loads(json.dumps(value, ensure_ascii=False), parse_constant=str)
    return escaped_json(json.dumps(encoded, indent=indent, ensure_ascii=False))


def parse_json_text(text: str) -> Any:
    """Parse the result of `json_text`, or unquoted NaN and Infinity from older files. Raises ValueError."""
    return with_infinities(json.loads(text))


def with_infinities(value: Any) -> Any:
    """Replace the strings "NaN", "Infinity" and "-Infinity" in a JSON value by numbers."""
    if isinstance(value, str):
        return _NO_NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {key: with_infinities(item) for key, item in value.items()}
    return [with_infinities(item) for item in value] if isinstance(value, list) else value


def write_run_json(path: Path, value: Any) -> None:
    """Write a value as indented `json_text`, as `write_text` does."""
    write_text(path, json_text(value, indent=2) + "\n")


def read_run_json(path: Path) -> Any:
    """Read what `write_run_json` wrote.

    Raises:
        FileNotFoundError, LaunchError, ValueError: it is missing, not a regular file, or not JSON.
    """
    os.stat(path)
    try:
        return parse_json_text(read_bytes(path, limits.RUN_FILE, error=LaunchError).decode())
    except RecursionError:
        raise ValueError("too deep") from None


def append_record(path: Path, record: Record) -> None:
    """Append one record in a single write, so that processes may share a file; end a torn line first.

    Raises OSError; a part of the line may have been written.
    """
    line = json_text(record).encode(errors="backslashreplace")  # names that are not UTF-8 stay JSON
    descriptor = no_links(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        start = b"\n" if _is_torn(descriptor) else b""
        lock(descriptor, waits=True)  # without file locks, only one process may write
        line = start + line + b"\n"
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _is_torn(descriptor: int) -> bool:
    """Return whether the last line is incomplete; one that another process is writing gets time to end."""
    for _ in range(20):
        size = os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return False
        time.sleep(0.005)
    return True


def read_records(path: Path) -> list[Record]:
    """Return all complete records, skipping truncated lines and lines that are not records.

    Raises:
        LaunchError: the path is not a file, or cannot be read.
    """
    if not os.path.lexists(path):
        return []
    lines = (line.decode(errors="replace") for line in whole_lines(path))
    return [record for line in lines if (record := _parse_record(line)) is not None]


def parse_records(text: str) -> list[Record]:
    return [record for line in text.split("\n") if (record := _parse_record(line)) is not None]


def _parse_record(line: str) -> Record | None:
    """Return a line's record: an object whose kind is text and whose counts are numbers. Else None."""
    try:
        value = parse_json_text(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("kind", ""), str):
        return None
    numbers = all(_is_number(value[name], most) for name, most in _NUMBERS.items() if name in value)
    curves = all(
        value[name] is None or _is_number(value[name], _MOST) or _is_not_finite(value[name])
        for name in _CURVES
        if name in value
    )
    return value if numbers and curves else None


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and abs(value) <= most


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def logged_checkpoints(folder: Path) -> dict[int, str]:
    """Return step -> digest of the checkpoints that a folder's log.jsonl names."""
    records = read_records(folder / LOG)
    return {
        record.get("step", 0): str(record["digest"])
        for record in records
        if record.get("kind") == "checkpoint" and "digest" in record
    }


def cut_after(path: Path, step: int) -> None:
    """Drop the records of steps after `step`, which a resumed run writes again; keep incomplete lines."""
    if not path.exists():
        return

    def is_kept(line: bytes) -> bool:
        record = _parse_record(line.decode(errors="replace"))
        return record is None or bool(record.get("step", 0) <= step)

    text = b"".join(line + b"\n" for line in whole_lines(path) if is_kept(line))
    if text != path.read_bytes():  # a process that follows the log would reread a new file
        write_bytes(path, text)


class Journal:
    """Writes records to a run's log.jsonl and passes them to the progress display.

    A log that cannot be written does not stop the run: there is one warning, and records are written later.
    Beyond MOST_HELD held records the oldest are dropped, and counted. A None `path` writes nothing (all
    processes but the first).
    """

    def __init__(self, path: Path | None, report: Report = silent) -> None:
        self.path = path
        self.report = report
        self.num_lost = 0
        self._held: dict[Path, deque[Record]] = {}
        self._is_failing = False
        self._lock = threading.Lock()  # the thread that writes a checkpoint logs too
        self.last_shown = -SHOW_SECONDS

    def show_progress(self, *, at_once: bool = False, **values: Any) -> None:
        """Send the current state to the progress display, at most once a second unless `at_once`; not logged.

        `values` are a training step; or `what`, `done` and `total` of a pass over images; or `text`, what
        the run is waiting for.
        """
        now = time.monotonic()
        if self.path is not None and (at_once or now - self.last_shown >= SHOW_SECONDS):
            self.last_shown = now
            self.report(_stamped("now", values))

    def write(self, kind: str, **values: Any) -> None:
        """Log one record of this kind, with `time` added (seconds since 1970)."""
        if self.path is not None:
            record = _stamped(kind, values)
            self.append(self.path, record)
            self.report(record)

    def say(self, kind: str, *texts: str) -> None:
        """Log a record with step 0 for each text that is not empty."""
        for text in filter(None, texts):
            self.write(kind, step=0, text=text)

    def watch(self, batches: Iterable[B], what: str, num_images: int, num_processes: int) -> Iterator[B]:
        """Yield the same batches, all of one length, with a progress record every few seconds.

        `num_images` is over all processes, which have equally many batches.
        """
        done, last_written = 0, time.monotonic()
        for batch in batches:
            yield batch
            done += len(batch) * num_processes
            self.show_progress(what=what, done=min(done, num_images), total=num_images)
            if time.monotonic() - last_written > WATCH_SECONDS and done < num_images:
                last_written = time.monotonic()
                self.write("progress", step=0, what=what, done=done, total=num_images)

    def append(self, path: Path, record: Record) -> None:
        """Append to the log or a file next to it, creating the folder again if it is missing.

        Records that cannot be written are held in memory, and written before the next one.
        """
        with self._lock:
            held = self._held.setdefault(path, deque())
            held.append(record)
            if len(held) > MOST_HELD:
                held.popleft()
                self.num_lost += 1
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                while held:
                    append_record(path, held[0])
                    held.popleft()
            except OSError as error:
                first, self._is_failing = not self._is_failing, True
                text = (
                    f"{path}: cannot be written ({error.strerror}); the run continues, "
                    "and keeps its records in memory until it can"
                )
            else:
                first, self._is_failing = False, any(self._held.values())
        if first:
            self.report(_stamped("warning", {"step": record.get("step", 0), "text": text}))
        if self.num_lost and path == self.path and not held:
            lost, self.num_lost = self.num_lost, 0
            text = f"lost {count_text(lost, 'record')} before this one, which could not be written"
            self.write("warning", step=record.get("step", 0), text=text)


def _stamped(kind: str, values: Record) -> Record:
    return {"kind": kind, **values, "time": round(time.time(), 3)}


def json_digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def allow(run_dir: Path, keys: Sequence[str]) -> None:
    """Record in RUN/allowed.json what may differ at the next resume: `data`, `weights` or recipe keys.

    A change that was allowed once needs no --allow when the run resumes from the same checkpoint again.
    """
    if keys or (run_dir / ALLOWED).exists():
        write_json(run_dir / ALLOWED, read_allowed(run_dir) | {"now": list(keys)})


def read_allowed(run_dir: Path) -> dict[str, list[str]]:
    if not (run_dir / ALLOWED).exists():
        return {"now": [], "before": [], "said": []}
    fields = read_json(run_dir / ALLOWED, limits.RUN_FILE, error=CheckpointError)
    if not isinstance(fields, dict) or not all(
        isinstance(fields.get(name), list) for name in ("now", "before")
    ):
        raise CheckpointError(run_dir / ALLOWED, "damaged, or not written by --allow", "remove it")
    return {"said": [], **fields}


def keep_records(run_dir: Path) -> None:
    """Copy the files that describe a trained run, so that `put_back` can undo a launch that is refused."""
    if not (run_dir / BEFORE / RECIPE).exists():  # kept already by a launch that was killed
        (run_dir / BEFORE).mkdir(exist_ok=True)
        _copy_records(run_dir, run_dir / BEFORE)


def put_back(run_dir: Path) -> None:
    """Restore what `keep_records` copied."""
    if (run_dir / BEFORE / RECIPE).exists():
        _copy_records(run_dir / BEFORE, run_dir)
        records_agreed(run_dir)


def records_agreed(run_dir: Path) -> None:
    """Drop the copies of `keep_records`: the launch was accepted."""
    (run_dir / BEFORE / RECIPE).unlink(missing_ok=True)  # first: without it the others are ignored
    shutil.rmtree(run_dir / BEFORE, ignore_errors=True)


def _copy_records(source: Path, to: Path) -> None:
    for name in _KEPT:
        if (source / name).exists():
            write_bytes(to / name, (source / name).read_bytes())
        elif name != RESULT:  # a run without one gets the refused launch's, with the reason
            (to / name).unlink(missing_ok=True)
