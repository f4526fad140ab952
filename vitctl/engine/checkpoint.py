"""Checkpoints: safetensors and JSON, written to a temporary folder, flushed and renamed.

Digests tell whether a checkpoint is complete. If the model is sharded, each process of one replica writes a
part, in the format of torch.distributed.checkpoint, and the first process completes the checkpoint. What a
checkpoint holds is in `RunState`, and `RunState.load` loads it.

Checkpoints are saved in the background: the state is copied to host memory and written to disk while training
continues. Weights, averages and the optimizer's state change only in the optimizer step, so the copy overlaps
with the next forward and backward pass; training waits only for the rest of it.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from vitctl.engine.journal import (
    ADAPTERS,
    AVERAGE,
    LOG,
    LOG_HEAD,
    MODEL,
    OPTIMIZER,
    RECORDS,
    STARTED,
    STATE,
    STEPS_HEAD,
    TORN,
    Journal,
    begins,
    end_of,
    json_digest,
    logged_checkpoints,
    name_of,
    no_permission,
    step_folder,
    step_folders,
    step_of,
    tensors_file,
    write_run_json,
)
from vitctl.engine.optimizer import Average, optimizer_tensors
from vitctl.engine.sharding import full, held, is_part, like, read_held, word_sum
from vitctl.engine.store import ALONE, Peers, Sender
from vitctl.errors import CheckpointError, VitctlError, os_code
from vitctl.models.blocks import trainable
from vitctl.models.lora import stored
from vitctl.models.weights.containers import read_tensors, save_tensors
from vitctl.models.weights.header import SHARDING, part_file
from vitctl.models.weights.weights_file import own_metadata
from vitctl.system import limits
from vitctl.system.files import flush, free_bytes, parse_json, write_text
from vitctl.system.text import bytes_text, one_line

FORMAT, PARTS_FORMAT = "vitctl-checkpoint/1", "vitctl-checkpoint/2"  # in one piece; in parts
WORDS = "words"  # key of a part's `word_sum` in state.json


@dataclass(frozen=True)
class SavedCheckpoint:
    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def digest(self) -> str:
        """SHA-256 of its state, which covers every byte of its other files."""
        return json_digest(self.state)

    @property
    def is_in_parts(self) -> bool:
        return bool(self.state["format"] == PARTS_FORMAT)

    def files(self, name: str) -> list[Path]:
        """Return the files of its model, average or optimizer: one file, all parts, or none."""
        return [self.folder / file for file in sorted(self.state["files"]) if name_of(file) == name]

    def tensors(self, name: str, like: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Tensor]:
        """Return the tensors of its model, average or optimizer on the CPU; empty if there is no such file.

        If `like` has sharded tensors, return this process's parts; see `read_held`.
        """
        # Reading a FIFO or a device would never end.
        files = [file for file in self.files(name) if file.is_file()]
        if files and any(map(is_part, like.values())):
            return read_held(files, like)
        return read_tensors(files[0]) if self.is_in_parts and files else load_file(files[0]) if files else {}


def save_checkpoint(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    config: Any,
    meta: dict[str, Any],
    state: dict[str, Any],
    peers: Peers = ALONE,
    rows: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    problem: str = "",
) -> Path:
    """Write `root/step_XXXXXXXX` atomically.

    Peers call this together. The first completes the checkpoint once all have written, flushed and hashed
    their parts.

    Args:
        tensors: by file (model, average if any, optimizer) and name; of a part, what this process holds.
        config, meta: of the model, stored inside the weights files.
        state: what else a resume needs; JSON.
        rows: of a part, the first row of each tensor.
        problem: why this process has nothing to write; fails the save on every process.

    Raises:
        CheckpointError: this step has a complete checkpoint, which is never replaced.
        OSError, CheckpointError: writing failed; the same on every process.
    """
    final = step_folder(root, step)
    aside, files, code = root / f".{final.name}.new", dict[str, Any](), 0
    if peers.part == 0:
        shutil.rmtree(aside, ignore_errors=True)
    peers.exchange("")  # the first process has removed leftovers
    try:
        if problem:
            raise CheckpointError(problem)
        if peers.part == 0 and final.exists() and _is_whole(final):
            raise CheckpointError(
                final,
                "already exists and is complete; it is never replaced: move it, or choose another folder",
            )
        aside.mkdir(parents=True, exist_ok=True)
        for name in sorted({OPTIMIZER, *tensors}):
            own = {key: one.detach().cpu().contiguous() for key, one in sorted(tensors.get(name, {}).items())}
            path, record = aside / tensors_file(name), dict[str, Any]()
            about: dict[str, Any] = own_metadata(config, meta) if name in (MODEL, AVERAGE) else {}
            if peers.count:
                path = aside / part_file(name, peers.part + 1, peers.count)
                held_rows = [(key, one, rows[name][key]) for key, one in own.items()]
                for key, one, row in held_rows:
                    about[key] = {"saved_offsets": [row, *[0] * one.dim()][: one.dim()]}
                about = {SHARDING: json.dumps(about, sort_keys=True)}
                record = {WORDS: word_sum((f"{name} {key}", one, row) for key, one, row in held_rows)}
            save_tensors(own, path, about or None)
            flush(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path), **record}
    except Exception as error:  # any error: the others wait for this process
        problem, code = _reason(error), os_code(error)
    said = [json.loads(text) for text in peers.exchange(json.dumps([problem[:500], code, files]))]
    try:
        for problem, code, of_peer in said:
            if problem:
                raise OSError(code, problem) if code > 0 else CheckpointError(problem)
            files |= of_peer
        if peers.part == 0:
            kind = PARTS_FORMAT if peers.count else FORMAT
            recorded = {"format": kind, "step": step, **state, "files": files}
            write_run_json(aside / STATE, {**recorded, "sha256": json_digest(recorded)})
            flush(aside)
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            flush(root)
    except BaseException:  # a partial checkpoint would keep a full disk full
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def newest_checkpoint(
    root: Path, *, by_size: bool = False, share: tuple[int, int] = (0, 1)
) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return the newest complete checkpoint, and one line for each newer one that is incomplete.

    `by_size` and `share` as for `read_checkpoint`.

    Raises:
        CheckpointError: a checkpoint may not be read; falling back to an older one would lose steps.
    """
    problems: list[str] = []
    try:
        for folder in sorted(step_folders(root), reverse=True):
            try:
                return read_checkpoint(folder, by_size=by_size, share=share), problems
            except CheckpointError as error:
                problems.append(str(error))
    except PermissionError as error:
        raise no_permission(error) from None
    return None, problems


def newest_name(root: Path) -> str:
    """Return the name of the newest checkpoint folder, complete or not; "" if there is none."""
    return max((path.name for path in step_folders(root)), default="")


def set_aside_after(root: Path, step: int) -> None:
    """Rename the incomplete checkpoints of later steps, and remove temporary folders left by crashes."""
    remove_folders(path for path in root.glob(".step_*") if path.is_dir())
    for folder in step_folders(root):
        if (step_of(folder) or 0) > step:
            aside = folder.with_name(f"{TORN}{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def is_set_aside(folder: Path) -> bool:
    """Return whether a folder is a checkpoint that was set aside; these are never deleted."""
    return folder.name.startswith(TORN)


def read_checkpoint(
    folder: Path, *, by_size: bool = False, share: tuple[int, int] = (0, 1), only: str = ""
) -> SavedCheckpoint:
    """Check one checkpoint against the sizes and digests recorded when it was written.

    Args:
        by_size: check only the sizes of tensor files, for a caller that will read them all.
        share: (index, count) of this process among those that verify the parts of a sharded run.
        only: check only the files of the model, its average or the optimizer.

    Raises:
        CheckpointError: a file is missing, unreadable or has changed.
        PermissionError: there is no permission to read it.
    """
    state = read_state(folder)
    if state.pop("sha256", None) != json_digest(state):
        raise CheckpointError(folder, f"damaged checkpoint: {STATE} changed since it was written")
    for name, recorded in state["files"].items():
        if only not in ("", name_of(name)):
            continue
        number = re.search(r"-(\d{5})-of-", name)
        is_of_others = number is not None and (int(number[1]) - 1) % share[1] != share[0]
        if not _matches_record(folder / name, recorded, by_size or is_of_others):
            raise CheckpointError(
                folder, f"damaged checkpoint: {name} is missing or changed since it was written"
            )
    return SavedCheckpoint(folder, state)


MOVE_IT = "copy the files of this run back, or move the folder out of the run to use it by itself"


def foreign(saved: SavedCheckpoint, named: Mapping[str, str]) -> str:
    """Return why a checkpoint does not belong to the run in whose folder it is; "" if nothing contradicts it.

    `named`: digests by folder name, from the run's result.
    """
    step, end, run = saved.step, saved.state.get(LOG_HEAD), saved.folder.parent.parent
    if saved.folder.name != (own := step_folder(saved.folder.parent, step).name):
        return f"{STATE} says step {step}, so its name should be {own}"
    if named.get(saved.folder.name, saved.digest) != saved.digest:
        return "is not the checkpoint that the result names; it was replaced"
    if logged_checkpoints(run).get(step, saved.digest) != saved.digest:
        return f"{LOG} names another checkpoint of step {step}"
    if end and os.path.lexists(run / LOG) and not begins(run / LOG, end):
        return (
            f"{LOG} is not the one that it was saved with: one of the two was changed, or is of another run"
        )
    return ""


class _File(BaseModel):
    model_config = ConfigDict(strict=True)

    bytes: int = Field(ge=0, le=2**53)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _State(BaseModel):
    """The required fields of state.json; jobs may add others."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: str = Field(max_length=100)
    step: int = Field(ge=0, le=10**12)
    files: dict[Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")], _File] = Field(max_length=100_000)
    num_bad: int = Field(0, ge=0, le=2**53)
    num_skipped: int = Field(0, ge=0, le=2**53)
    skipped_in_a_row: int = Field(0, ge=0, le=2**53)
    steps_head: str = Field("", max_length=100)
    log_head: str = Field("", max_length=100)
    computed_on: dict[str, str | int] = Field(default_factory=dict, max_length=20)


def read_state(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's state.json after checking its format and required fields; reads no other file.

    Raises:
        CheckpointError: it is missing, incomplete, or in another format.
        PermissionError: there is no permission to read it.
    """
    path = folder / STATE
    torn = CheckpointError(folder, f"damaged checkpoint: {STATE} is missing or truncated")
    try:
        if not path.is_file():
            raise torn
        with path.open("rb") as file:
            state = parse_json(file.read(limits.RUN_FILE), path, error=CheckpointError)
    except PermissionError:
        raise
    except (OSError, CheckpointError):
        raise torn from None
    is_known = isinstance(state, dict) and state.get("format") in (FORMAT, PARTS_FORMAT)
    if isinstance(state, dict) and isinstance(state.get("files"), dict) and not is_known:
        said = one_line(str(state.get("format"))[:100])
        raise CheckpointError(folder, f"{STATE} says '{said}', this vitctl reads {FORMAT!r}")
    try:
        _State.model_validate(state)
    except ValidationError:
        raise torn from None
    return dict(state)


def _is_whole(folder: Path) -> bool:
    try:
        return bool(read_checkpoint(folder))
    except CheckpointError:
        return False


def _matches_record(path: Path, recorded: Mapping[str, Any], by_size: bool) -> bool:
    try:
        right_size = path.is_file() and path.stat().st_size == recorded["bytes"]
        return right_size and (by_size or _sha256(path) == recorded["sha256"])
    except PermissionError:
        raise
    except (
        OSError,
        KeyError,
        TypeError,
    ):  # a disk reports lost blocks only on reading
        return False


def keep(root: Path, *, last: int, best: int, scores: Mapping[int, float], coming: int | None = None) -> bool:
    """Delete temporary folders of crashes and old checkpoints. Return whether a checkpoint was deleted.

    Kept are the `last` newest, the `best` with the highest `scores` (by step), those from which a run
    started, the newest on disk, and `coming`, a step about to be saved.
    """
    folders = {step: path for path in step_folders(root) if (step := step_of(path)) is not None}
    steps = sorted({*folders, *(() if coming is None else (coming,))})
    ranked = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
    kept = {*steps[-last:], *(ranked[-best:] if best else ()), *sorted(folders)[-1:]}
    kept |= {step for step, path in folders.items() if has_started_a_run(path)}
    to_delete = [path for step, path in folders.items() if step not in kept]
    remove_folders(to_delete)
    remove_folders(path for path in root.glob(".step_*") if path.is_dir())
    return bool(to_delete)


def mark_start(folder: Path) -> None:
    """Mark a checkpoint as the start of another run, which rereads it; a read-only folder stays unmarked."""
    with suppress(OSError):
        write_text(folder / STARTED, "")


def has_started_a_run(folder: Path) -> bool:
    """Return whether a run started from this checkpoint; training never deletes such checkpoints."""
    return (folder / STARTED).exists()


def remove_folders(paths: Iterable[Path]) -> None:
    """Delete checkpoint folders, renaming each first so that a partly deleted one never looks complete."""
    for path in paths:
        to_delete = path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.old"))
        shutil.rmtree(to_delete, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Snapshot = dict[str, dict[str, Tensor]]
Copy = tuple[Snapshot, list[torch.cuda.Event]]  # and, if a GPU copies, the events to wait for
RETRY_SECONDS = 10.0  # between two attempts on a full disk
SPARE_BYTES = 2**16  # kept free for the logs
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Saver:
    """Writes the checkpoints of one process, one at a time, and keeps the `last` and the `best`.

    `config` and `meta` of the model are stored inside the weights files. `journal`, of the first peer,
    records each save and its duration.
    """

    root: Path
    config: Any
    meta: dict[str, Any]
    last: int
    best: int
    journal: Journal
    peers: Peers = ALONE
    sender: Sender | None = None  # copies each checkpoint to the store
    _buffers: Snapshot = field(default_factory=dict)
    _rows: dict[str, dict[str, int]] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _copied: threading.Event = field(default_factory=threading.Event)
    _stall: float = 0.0  # seconds that the save held training up
    _waiting_since: float | None = None
    _problem: str = ""
    _stop_waiting: threading.Event = field(default_factory=threading.Event)  # set: give up on a full disk

    def __post_init__(self) -> None:
        self._copied.set()

    def start(
        self,
        step: int,
        parts: Iterable[tuple[str, str, Tensor]],
        state: Mapping[str, Any],
        scores: Any,
    ) -> None:
        """Start copying and writing in the background; `wait_for_copy` returns when the tensors may change.

        `parts` are (file, name, tensor); `scores`, step -> accuracy, choose the best checkpoints.
        """
        began = time.perf_counter()
        copy = partial(self._copy, list(parts))
        self._stall, self._waiting_since = time.perf_counter() - began, None
        records = {name: self.root.parent / name for name in RECORDS}
        sizes = {name: path.stat().st_size if path.is_file() else 0 for name, path in records.items()}
        self._thread = threading.Thread(
            target=self._save, args=(step, copy, dict(state), sizes, dict(scores)), daemon=True
        )
        self._stop_waiting.clear()
        self._copied.clear()
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Wait until tensors may change; on a GPU, until the copies are queued ahead of any change."""
        if not self._copied.is_set():
            self._waiting_since = time.perf_counter()
            self._copied.wait()

    def finish(self) -> str:
        """Wait for the write in progress, but not for disk space. Return the problem, or "" if saved."""
        if self._thread is not None:
            self._stop_waiting.set()
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, ""
        return problem

    def keep(self, scores: Mapping[int, float]) -> None:
        """Delete old checkpoints beyond `last` and `best`. A failure is a warning."""
        try:
            keep(self.root, last=self.last, best=self.best, scores=scores)
        except OSError as error:
            self.journal.write(
                "warning", step=0, text=f"{self.root}: old checkpoints stay ({error.strerror})"
            )

    def _save(
        self,
        step: int,
        copy: Callable[[], Copy],
        state: dict[str, Any],
        sizes: Mapping[str, int],
        scores: dict[int, float],
    ) -> None:
        snapshot, devices, problem = dict[str, Any](), list[Any](), ""
        try:
            snapshot, devices = copy()
        except Exception as error:  # out of memory
            problem = _reason(error)
        finally:
            if self._waiting_since is not None:
                self._stall += time.perf_counter() - self._waiting_since
            self._copied.set()
        for copied in devices:
            copied.synchronize()
        write = partial(self._write_behind_records, step, state, sizes, tensors=snapshot, problem=problem)
        is_written = False
        if self.peers.part == 0:
            is_written = self._write(step, write, snapshot, scores)
        else:
            with suppress(Exception):  # the first process reports the problem
                is_written = bool(write())
        if self.sender is not None:
            self.sender.add(step, is_written=is_written)

    def _copy(self, parts: Sequence[tuple[str, str, Tensor]]) -> Copy:
        """Copy the tensors to reused buffers; from a GPU asynchronously, done at the returned events."""
        for _, _, whole in parts:
            if whole.device.type == "cuda":  # a thread begins with GPU 0, and pinned memory would open it
                torch.cuda.set_device(whole.device)
                break
        snapshot: Snapshot = {}
        devices: set[torch.device] = set()
        for part, name, whole in parts:
            tensor, row = held(whole)
            of_file = snapshot.setdefault(part, {})  # written even if this process holds none of it
            if self.peers.count and (not tensor.numel() or (self.peers.part and not is_part(whole))):
                continue  # tensors that are not sharded belong to the first part
            self._rows.setdefault(part, {})[name] = row
            buffer = self._buffers.setdefault(part, {}).get(name)
            if buffer is None:
                pinned = tensor.device.type == "cuda"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                self._buffers[part][name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=True)
            of_file[name] = buffer
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
        return snapshot, [torch.cuda.current_stream(device).record_event() for device in devices]

    def _write(
        self, step: int, write: Callable[[], Path], snapshot: Snapshot, scores: dict[int, float]
    ) -> bool:
        began = time.perf_counter()
        num_bytes = sum(tensor.nbytes for tensors in snapshot.values() for tensor in tensors.values())
        num_bytes *= max(1, self.peers.count)
        path = self._try_write(step, write, num_bytes, scores)
        if path is None:
            return False
        self._problem = ""
        self.keep(scores)
        times = {"seconds": round(time.perf_counter() - began, 3), "stall_seconds": round(self._stall, 4)}
        digest = {}
        with suppress(VitctlError, OSError):  # it may have been removed meanwhile
            digest = {"digest": read_state(path)["sha256"]}
        self.journal.write("checkpoint", step=step, path=str(path), **digest, **times)
        return True

    def _write_behind_records(
        self, step: int, state: dict[str, Any], sizes: Mapping[str, int], **given: Any
    ) -> Path:
        """Flush the records that a checkpoint names before writing it, so that a power failure keeps both."""
        for key, name in zip((LOG_HEAD, STEPS_HEAD), RECORDS, strict=True):
            if (self.root.parent / name).is_file():
                flush(self.root.parent / name)
            state[key] = end_of(self.root.parent / name, sizes[name])
        given |= {"state": state, "peers": self.peers, "rows": self._rows}
        return save_checkpoint(self.root, step, config=self.config, meta=self.meta, **given)

    def _try_write(
        self, step: int, write: Callable[[], Path], num_bytes: int, scores: Mapping[int, float]
    ) -> Path | None:
        """Write a checkpoint; on a full disk delete old ones, then retry. On failure set `_problem`."""
        while True:
            has_room = _free_bytes(self.root) >= num_bytes + SPARE_BYTES
            if not has_room and self._delete_old(step, scores):
                continue
            reason, is_full = os.strerror(errno.ENOSPC), True
            if has_room or self.peers.count:
                try:
                    return write()
                except (
                    Exception
                ) as error:  # any error: this thread would lose it, and the step would count as saved
                    reason, is_full = _reason(error), os_code(error) in _FULL
                is_full = is_full and not self.peers.count  # peers try again at the next save
                if is_full and self._delete_old(step, scores):  # a quota, which disk_usage does not include
                    continue
            self._fail(step, reason)
            if not is_full or self._stop_waiting.wait(RETRY_SECONDS):
                return None

    def _fail(self, step: int, reason: str) -> None:
        if not self._problem:
            self._problem = f"step {step} could not be saved in {self.root} ({reason})"
            self.journal.write("warning", step=step, text=f"{self._problem}; {self.earlier}")

    @property
    def earlier(self) -> str:
        """What is there beside a checkpoint that could not be saved."""
        return "earlier checkpoints are complete" if newest_name(self.root) else "there is no earlier one"

    def _delete_old(self, step: int, scores: Mapping[int, float]) -> bool:
        """Delete checkpoints that will not be kept once `step` is saved. Return whether there were any."""
        with suppress(OSError):
            return keep(self.root, last=self.last, best=self.best, scores=scores, coming=step)
        return False


def _free_bytes(root: Path) -> float:
    return free_bytes(next(path for path in (root, *root.absolute().parents) if path.exists()))


def _reason(error: Exception) -> str:
    if (code := os_code(error)) > 0:
        return os.strerror(code)
    if isinstance(error, SafetensorError | OSError | CheckpointError):
        return str(error)
    if isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error)):
        return "another process did not answer"  # which reports the cause
    return f"{type(error).__name__}: {error}"


def parts(
    model: nn.Module, average: Average | None, optimizer: Optimizer
) -> Iterable[tuple[str, str, Tensor]]:
    """Yield all tensors of a training as (file, name, tensor); sharded tensors stay sharded.

    Adapters are yielded both merged into the weights and separately; all processes must then iterate.
    """
    states = {MODEL: model.state_dict()}
    states |= {} if average is None else {AVERAGE: states[MODEL] | average.tensors}
    for part, state in states.items():
        for is_adapter, name, tensor in stored(model, state, full, like):
            yield ADAPTERS[part] if is_adapter else part, name, tensor
    for name, tensor in optimizer_tensors(optimizer, model).items():
        yield OPTIMIZER, name, tensor


def check_space(root: Path, model: nn.Module, average: Average | None, *, slots: int, kept: int) -> None:
    """Check before the first save that the disk has room for all kept checkpoints and the one being written.

    The folder's checkpoints count as written, except those never deleted. `slots` are the numbers that the
    optimizer keeps per weight.

    Raises:
        CheckpointError: there is not enough space.
    """
    weights = sum([tensor.nbytes for tensor in model.state_dict().values()])
    of_optimizer = slots * sum([parameter.nbytes for parameter in trainable(model).values()])
    one = weights * (1 if average is None else 2) + of_optimizer
    there = sum(
        path.stat().st_size for path in root.rglob("*") if path.is_file() and not is_set_aside(path.parent)
    )
    free = _free_bytes(root)
    if free + there < one * (kept + 1):
        raise CheckpointError(
            root,
            f"{bytes_text(free)} is free, but the checkpoints of this run need "
            f"{bytes_text(one * (kept + 1) - there)} more ({kept} kept and one being written, "
            f"{bytes_text(one)} each)",
            "free some space, choose another folder with --out, or lower checkpoint.keep_last or keep_best",
        )
