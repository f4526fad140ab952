"""Reads the model configuration from the header of a weights file, without tensors.

Our own files need no torch.
"""

import math
import os
from pathlib import Path
from typing import Any

from vitctl.errors import CheckpointError
from vitctl.system.bounds import TENSORS
from vitctl.system.files import open_regular, parse_json

OWN_KEY = "vitctl"  # of our JSON in the metadata of a safetensors file
_MAX_NUMBER = 2**53
_MAX_BYTES = 100 * 2**20  # the bound of safetensors itself


def safetensors_header(path: Path) -> dict[str, Any] | None:
    """The JSON at the start of a safetensors file; None where the file is of another kind, or missing.

    Raises:
        CheckpointError: the file is shorter or longer than its header says, or the header describes no
            tensors.
    """
    if not path.is_file():
        return None
    with open_regular(path, error=CheckpointError) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if file.read(1) != b"{" or length > min(size - 8, _MAX_BYTES):
            return None
        text = b"{" + file.read(length - 1)
    try:
        header = parse_json(text, path, error=CheckpointError)
    except CheckpointError:
        return None
    metadata, entries = (
        header.get("__metadata__", {}),
        [header[name] for name in header if name != "__metadata__"],
    )
    if not isinstance(metadata, dict) or not all(map(_is_tensor, entries)):
        raise CheckpointError(
            f"{path}: damaged safetensors file (its header describes no tensors); copy it again"
        )
    if len(entries) > TENSORS.limit:
        raise CheckpointError(f"{path}: {len(entries):,} tensors, should be at most {TENSORS}")
    if 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0) != size:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file ({size} bytes); copy it again")
    return dict(header)


def _is_tensor(entry: Any) -> bool:
    """Whether an entry of a header has a shape, and two places in the file."""
    if not isinstance(entry, dict):
        return False
    shape, places = entry.get("shape"), entry.get("data_offsets")
    numbers = (
        [*shape, *places]
        if isinstance(shape, list) and isinstance(places, list) and len(places) == 2
        else [-1]
    )
    whole = all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers)
    return whole and math.prod(numbers[:-2]) < _MAX_NUMBER
