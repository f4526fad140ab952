"""The weights file of vitctl: safetensors that carry their own configuration, pre-processing and class names."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitctl.errors import CheckpointError
from vitctl.models.variants import ViTConfig, from_dict, to_dict

FILE_NAME = "model.safetensors"
FORMAT = "vitctl/1"
# One key, because safetensors stores several in no fixed order, and equal weights must give equal files.
_METADATA_KEY = "vitctl"


@dataclass(frozen=True)
class Weights:
    """What a weights file holds: the model it fits, tensors on the CPU, free metadata (`mean`, `class_names` ...)."""

    config: ViTConfig
    state: dict[str, Tensor]
    meta: dict[str, Any]


def save_weights(
    path: str | Path, model_or_state: nn.Module | Mapping[str, Tensor], config: ViTConfig, meta: Mapping[str, Any]
) -> Path:
    """Write `path` whole or not at all, and return the file; a folder receives `model.safetensors`.

    `meta` is JSON-able. Equal weights, configuration and metadata give files equal byte by byte.
    """
    path = _weights_file(path)
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
    header = {"format": FORMAT, "config": to_dict(config), "meta": dict(meta)}
    metadata = {_METADATA_KEY: json.dumps(header, sort_keys=True, allow_nan=False)}
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, aside, metadata)
        _flush(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    _flush(path.parent)
    return path


def load_weights(path: str | Path) -> Weights:
    """Read a weights file, or the one inside a folder. Raises CheckpointError, saying what the file is instead."""
    path = _weights_file(path)
    _refuse_foreign(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = _header(path, file.metadata() or {})
            state = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file ({error}); copy it again") from error
    try:
        return Weights(from_dict(header["config"]), state, header["meta"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 (hex) over the names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _weights_file(path: str | Path) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return our JSON out of the safetensors metadata."""
    if _METADATA_KEY not in metadata:
        raise CheckpointError(f"{path}: a safetensors file without vitctl metadata, so the model it fits is not known")
    try:
        header = json.loads(metadata[_METADATA_KEY])
    except ValueError as error:
        raise CheckpointError(f"{path}: its vitctl metadata is not JSON ({error})") from error
    stored_format = header.get("format") if isinstance(header, dict) else None
    if stored_format != FORMAT:
        raise CheckpointError(f"{path}: format {stored_format!r}, this vitctl reads {FORMAT!r}")
    if not all(isinstance(header.get(key), dict) for key in ("config", "meta")):
        raise CheckpointError(f"{path}: its vitctl metadata lacks config or meta")
    return header


# How files that are not safetensors begin, and what to tell their owner.
_FOREIGN = {
    rb"\s*<": "a web page, not weights; the download link was wrong or needs a login",
    rb"version https://git-lfs": "a Git LFS pointer, not weights; fetch the file itself with `git lfs pull`",
    rb"PK\x03\x04|\x80[\x02-\x05]": "a pickle or zip archive, never opened because it can run code; "
    "where you trust it, convert it with torch.load(..., weights_only=True) and safetensors.torch.save_file",
    rb"": "not a safetensors file",
}


def _refuse_foreign(path: Path) -> None:
    """Raise CheckpointError unless the file begins like a whole safetensors file, naming the common mistakes."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such weights file; give a .safetensors file or a folder with {FILE_NAME}")
    with path.open("rb") as file:
        start, size = file.read(256), path.stat().st_size
    # The first eight bytes are the header's length and may look like anything, so the brace is what counts.
    if start[8:9] != b"{":
        raise CheckpointError(f"{path}: {next(words for begin, words in _FOREIGN.items() if re.match(begin, start))}")
    needed = 8 + int.from_bytes(start[:8], "little")
    if needed > size:
        raise CheckpointError(f"{path}: truncated, its header alone takes {needed} bytes of {size}; copy it again")


def _flush(path: Path) -> None:
    """Make what was written to a file or a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
