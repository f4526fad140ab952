"""Checkpoints: safetensors and JSON, written to a temporary folder, flushed, renamed; digests tell which one
is complete.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from vitctl.engine.journal import json_digest, write_run_json
from vitctl.engine.run_files import (
    OPTIMIZER,
    STATE,
    no_permission,
    step_folder,
    step_folders,
    step_of,
    tensors_file,
)
from vitctl.errors import CheckpointError
from vitctl.models.weights.containers import save_tensors
from vitctl.models.weights.weights_file import save_weights
from vitctl.system.files import RUN_FILE, flush, parse_json
from vitctl.system.text import one_line

FORMAT = "vitctl-checkpoint/1"
_TORN = "torn_"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.state["step"])

    @property
    def digest(self) -> str:
        """SHA-256 of its state, which covers every byte of its other files."""
        return json_digest(self.state)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of its model, average or optimizer, on the CPU; none when it has no such file."""
        path = self.folder / tensors_file(name)
        return (
            load_file(path) if path.is_file() else {}
        )  # not a FIFO or a device, which would be read for ever


def save_checkpoint(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    config: Any,
    meta: dict[str, Any],
    state: dict[str, Any],
) -> Path:
    """Write `root/step_XXXXXXXX`, completely or not at all.

    Args:
        root: the run's checkpoints folder.
        step: finished steps.
        tensors: of the model, of its average if there is one, and of the optimizer, by their names; one file
            each.
        config, meta: of the model, kept inside the weights files.
        state: what else is needed to resume; JSON.

    Returns:
        the checkpoint's folder.

    Raises:
        CheckpointError: there is a complete checkpoint of this step, which is never replaced.
    """
    final = step_folder(root, step)
    if final.exists() and _is_whole(final):
        raise CheckpointError(
            f"{final}: already exists and is complete; it is never replaced: move it, or choose another "
            f"folder"
        )
    aside = root / f".{final.name}.{os.getpid()}"
    with _removed_on_error(aside):
        aside.mkdir(parents=True)
        for name in (part for part in tensors if part != OPTIMIZER):
            save_weights(aside / tensors_file(name), tensors[name], config, meta)
        file, state_of = aside / tensors_file(OPTIMIZER), tensors.get(OPTIMIZER, {})
        save_tensors({k: v.detach().cpu().contiguous() for k, v in state_of.items()}, file)
        flush(file)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(aside.iterdir())
        }
        recorded = {"format": FORMAT, "step": step, **state, "files": files}
        write_run_json(aside / STATE, {**recorded, "sha256": json_digest(recorded)})
        flush(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
    flush(root)
    return final


@contextmanager
def _removed_on_error(aside: Path) -> Iterator[None]:
    """A folder that is empty at first, and removed when the writing failed: half a checkpoint would keep a
    full disk full.
    """
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def newest_checkpoint(root: Path, *, by_size: bool = False) -> tuple[SavedCheckpoint | None, list[str]]:
    """The newest whole checkpoint, and one line for each newer one that is not whole; `by_size` as
    `read_checkpoint` takes it.

    Raises:
        CheckpointError: there is no permission to read one; a run that used an older one, or started from
            zero, would lose steps.
    """
    problems: list[str] = []
    try:
        for folder in sorted(step_folders(root), reverse=True):
            try:
                return read_checkpoint(folder, by_size=by_size), problems
            except CheckpointError as error:
                problems.append(str(error))
    except PermissionError as error:
        raise no_permission(error) from None
    return None, problems


def newest_name(root: Path) -> str:
    """The name of the newest checkpoint folder, whole or not; "" where there is none."""
    return max((path.name for path in step_folders(root)), default="")


def set_aside_after(root: Path, step: int) -> None:
    """Rename the checkpoints of later steps, none of them whole, so that neither budgets nor readers count
    them.

    Temporary folders that crashes left behind are removed.
    """
    remove_folders(path for path in root.glob(".step_*") if path.is_dir())
    for folder in step_folders(root):
        if (step_of(folder) or 0) > step:
            aside = folder.with_name(f"{_TORN}{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def is_set_aside(folder: Path) -> bool:
    """Whether a folder is a checkpoint that was set aside; none of them is ever deleted."""
    return folder.name.startswith(_TORN)


def read_checkpoint(folder: Path, *, by_size: bool = False) -> SavedCheckpoint:
    """Check one checkpoint against the sizes and digests that were noted when it was written.

    Args:
        folder: of the checkpoint.
        by_size: read none of its files of tensors; whoever loads them reads them all.

    Raises:
        CheckpointError: a file is missing, cannot be read or has changed since it was written.
        PermissionError: there is no permission to read it.
    """
    state = read_state(folder)
    if state.pop("sha256", None) != json_digest(state):
        raise CheckpointError(f"{folder}: not a whole checkpoint: {STATE} changed since it was written")
    for name, recorded in state["files"].items():
        if not _matches_record(folder / name, recorded, by_size):
            raise CheckpointError(
                f"{folder}: not a whole checkpoint: {name} is missing or changed since it was written"
            )
    return SavedCheckpoint(folder, state)


class _File(BaseModel):
    model_config = ConfigDict(strict=True)

    bytes: int = Field(ge=0, le=2**53)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _State(BaseModel):
    """The required fields of state.json; jobs may add others."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: str = Field(max_length=100)
    step: int = Field(ge=0, le=10**12)
    files: dict[Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")], _File] = Field(max_length=100)
    num_bad: int = Field(0, ge=0, le=2**53)
    num_skipped: int = Field(0, ge=0, le=2**53)
    skipped_in_a_row: int = Field(0, ge=0, le=2**53)
    steps_head: str = Field("", max_length=100)
    log_head: str = Field("", max_length=100)
    unrecorded: int = Field(0, ge=0, le=10**12)


def read_state(folder: Path) -> dict[str, Any]:
    """The state.json of a checkpoint, with its format and required fields checked; its other files are not
    read.

    Raises:
        CheckpointError: it is missing, incomplete, or of another format.
        PermissionError: there is no permission to read it.
    """
    path = folder / STATE
    torn = CheckpointError(f"{folder}: not a whole checkpoint: {STATE} is missing or truncated")
    try:
        if not path.is_file():
            raise torn
        with path.open("rb") as file:
            state = parse_json(file.read(RUN_FILE.limit), path, error=CheckpointError)
    except PermissionError:
        raise
    except (OSError, CheckpointError):
        raise torn from None
    if isinstance(state, dict) and isinstance(state.get("files"), dict) and state.get("format") != FORMAT:
        said = one_line(str(state.get("format"))[:100])
        raise CheckpointError(f"{folder}: {STATE} says '{said}', this vitctl reads {FORMAT!r}")
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
    ):  # a disk that lost blocks of the file reports it when they are read
        return False


def keep(root: Path, *, last: int, best: int, scores: Mapping[int, float], coming: int | None = None) -> bool:
    """Delete all checkpoints but the `last` newest and the `best` with the highest scores, and temporary
    folders of crashes.

    Args:
        root: the run's checkpoints folder.
        last, best: how many are kept.
        scores: step -> score.
        coming: a step that is about to be saved and counts as kept; the newest one on disk is never deleted.

    Returns:
        whether a checkpoint was deleted.
    """
    folders = {step: path for path in step_folders(root) if (step := step_of(path)) is not None}
    steps = sorted({*folders, *(() if coming is None else (coming,))})
    ranked = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
    kept = {*steps[-last:], *(ranked[-best:] if best else ()), *sorted(folders)[-1:]}
    to_delete = [path for step, path in folders.items() if step not in kept]
    remove_folders(to_delete)
    remove_folders(path for path in root.glob(".step_*") if path.is_dir())
    return bool(to_delete)


def remove_folders(paths: Iterable[Path]) -> None:
    """Delete folders of checkpoints: each is renamed first, so that half of one never looks like a whole one."""
    for path in paths:
        to_delete = path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.old"))
        shutil.rmtree(to_delete, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
