"""Names of what lies in a run folder and in its checkpoints, for all that look for them. Imports no torch."""

import re
from pathlib import Path

from vitctl.errors import CheckpointError

RECIPE, RESULT, CHECKPOINTS = "recipe.toml", "result.json", "checkpoints"
STEP_RECORDS, TRACE = (
    "steps.jsonl",
    "trace.bin",
)  # a chained line of each step, and digests of its samples and gradients
# A checkpoint's files of tensors, each NAME.safetensors; no average where there is none.
MODEL, AVERAGE, OPTIMIZER = "model", "ema", "optimizer"
STATE = "state.json"
# In state.json: digests of the last lines of steps.jsonl and log.jsonl, and the steps before it that have no
# record.
STEPS_HEAD, LOG_HEAD, UNRECORDED = "steps_head", "log_head", "unrecorded"
STEPS = "step_*"
FEATURES = "features"  # beside the runs that share them: representations that `fewshot` kept


def tensors_file(name: str) -> str:
    """Of a checkpoint: the file of its model, average or optimizer."""
    return f"{name}.safetensors"


def step_folder(root: Path, step: int) -> Path:
    """Of the checkpoint of a step."""
    return root / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """That a checkpoint's folder is named after; None for another folder."""
    return int(folder.name[5:]) if re.fullmatch(r"step_[0-9]+", folder.name) else None


def no_permission(error: PermissionError) -> CheckpointError:
    """For what cannot be read of a run: one that used older files, or started from zero, would lose steps."""
    return CheckpointError(
        f"{error.filename}: permission denied; fix its permissions, or remove it to continue without it"
    )


def step_folders(root: Path) -> list[Path]:
    """The checkpoint folders; a glob would find none where the folder may not be read."""
    return [path for path in root.iterdir() if path.name.startswith("step_")] if root.is_dir() else []
