"""Safetensors headers, vitctl's JSON in them, and the index of weights in several files.

Reads no tensor and imports no torch.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, variant
from vitctl.models.weights.meta import compared_names
from vitctl.system import limits
from vitctl.system.files import inside, open_regular, parse_json, read_json
from vitctl.system.text import one_line

FORMAT = "vitctl/1"
OWN_KEY = "vitctl"  # key of vitctl's JSON in safetensors metadata
# torch.distributed.checkpoint's metadata key in a part of sharded weights: a JSON object, tensor -> where in
# the tensor the part begins. Our JSON is inside it, because safetensors does not keep the order of keys.
SHARDING = "DCP_SHARDING_INFO"
INDEX = ".index.json"  # suffix of the file that lists the parts of weights
_INDEX_BYTES, _MAX_PARTS, _ENDINGS = 16 * 2**20, 1000, (".safetensors", ".bin")


# The sizes that a model's name determines.
_NAMED_FIELDS = ("patch_size", "hidden_size", "depth", "mlp_size", "num_heads", "stage_depths", "width")


def check_named(config: Config, model: str) -> None:
    """Raise CheckpointError if weights are not of this model, RecipeError if it is unknown; "" allows all."""
    named = variant(model) if model else None
    differing = [
        f"{name} {getattr(config, name, 'none')} instead of {getattr(named, name)}"
        for name in _NAMED_FIELDS
        if hasattr(named, name) and getattr(named, name) != getattr(config, name, None)
    ]
    if differing:
        raise CheckpointError(f"not a {model}, it has {', '.join(differing)}")


def own_header(path: Path) -> dict[str, Any] | None:
    """Return vitctl's JSON in a safetensors file (`config` and `meta`), or None for another program's.

    Raises CheckpointError if the JSON is damaged, or of another version.
    """
    text = metadata_of(path).get(OWN_KEY) or begins_of(path).get(OWN_KEY)
    if text is None:
        return None
    try:
        header: Any = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(path, f"its vitctl metadata is not JSON ({one_line(str(error))})") from error
    stored_format = header.get("format") if isinstance(header, dict) else None
    if stored_format != FORMAT:
        raise CheckpointError(path, f"format {stored_format!r}, this vitctl reads {FORMAT!r}")
    if not all(isinstance(header.get(key), dict) for key in ("config", "meta")):
        raise CheckpointError(path, "its vitctl metadata lacks config or meta")
    header["meta"] |= compared_names(header["meta"].get("class_names"))
    return dict(header)


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty if the file is of another kind, or missing.

    Raises CheckpointError if it is damaged, or has too many tensors.
    """
    if not path.is_file():
        return {}
    with open_regular(path, error=CheckpointError) as file:
        if file.read(9)[8:] != b"{":  # after the header's length
            return {}
    try:
        with safe_open(path, framework="numpy") as tensors:
            metadata, count = tensors.metadata() or {}, len(tensors.keys())
    except SafetensorError as error:
        text = f"damaged or truncated safetensors file ({one_line(str(error))})"
        raise CheckpointError(path, text, "copy it again") from None
    if count > limits.TENSORS:
        raise CheckpointError(path, f"{count:,} tensors, should be at most {limits.TENSORS:,}")
    return dict(metadata)


def part_file(name: str, number: int, count: int) -> str:
    """Return the file name of a part of sharded weights, counted from 1."""
    return f"{name}-{number:05d}-of-{count:05d}.safetensors"


def begins_of(path: Path) -> dict[str, Any]:
    """Return where the tensors of a part of sharded weights begin, by name; empty for another file."""
    begins = parse_json(metadata_of(path).get(SHARDING, "{}").encode(), path, error=CheckpointError)
    if not isinstance(begins, dict):
        raise CheckpointError(path, f"its {SHARDING} should be a JSON object", "copy it again")
    return begins


def shards_of(path: Path) -> list[Path]:
    """Return all parts of a part's sharded weights, in order; empty for another file.

    Raises CheckpointError if its metadata is damaged, or its name does not say which part it is.
    """
    if not begins_of(path):
        return []
    if not (name := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", path.name)):
        raise CheckpointError(path, "a part of sharded weights", "restore its name, NAME-00001-of-00004")
    return [path.with_name(part_file(name[1], number + 1, int(name[2]))) for number in range(int(name[2]))]


def parts_of(index: Path) -> dict[str, set[str]]:
    """Return an index's parts: name of a file next to it -> its tensors.

    Raises CheckpointError if the index lists no parts, too many, or files in other folders.
    """
    content = read_json(index, _INDEX_BYTES, error=CheckpointError)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(part, str) for part in named.values()):
        raise CheckpointError(index, "weight_map should be an object of tensors and names of files")
    parts: dict[str, set[str]] = {}
    for name, part in named.items():
        parts.setdefault(part, set()).add(name)
    for part in parts:
        inside(index.parent, part, error=CheckpointError, where=index)
        if not part.endswith(_ENDINGS):
            raise CheckpointError(index, f"{one_line(part)} should end as {' or '.join(_ENDINGS)}")
    if len(named) > limits.TENSORS or len(parts) > _MAX_PARTS:
        raise CheckpointError(
            index,
            f"{len(named):,} tensors in {len(parts):,} files, should be at most "
            f"{limits.TENSORS:,} in {_MAX_PARTS:,} files",
        )
    return parts


def bounded(index: Path, parts: Iterable[Path]) -> Iterator[Path]:
    """Yield the parts within the size limit of weights. Raises CheckpointError, also for a missing part."""
    total = 0
    for part in parts:
        if not part.is_file():
            raise CheckpointError(part, f"missing, but {index.name} needs it", "copy all parts")
        total += part.stat().st_size
        if total > limits.WEIGHTS:
            raise CheckpointError(index, f"its parts are larger than {limits.WEIGHTS:,} together")
        yield part
