"""Files on disk: written atomically, and read within limits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.system import files
from vitctl.system.files import atomic_write, write_text
from vitctl.system.text import escaped_json

_JSON_BYTES = 16 * 2**20


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Atomic write: `write` fills a temporary file, which is flushed and renamed to `path`; return `path`."""
    with atomic_write(path) as aside:
        write(aside)
    return path


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the rights that the umask gives: the library's own are for the user
    alone.
    """
    path.touch()
    rights = path.stat().st_mode & 0o777
    save_file(tensors, path, metadata)
    path.chmod(rights)


def write_json(path: Path, value: dict[str, Any]) -> Path:
    """Write `value` as indented JSON, whole or not at all; equal values give equal bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return write_text(path, escaped_json(text) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one when there is no such file.

    Raises CheckpointError.
    """
    if not path.is_file():
        return {}
    value = files.read_json(path, _JSON_BYTES, error=CheckpointError)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
