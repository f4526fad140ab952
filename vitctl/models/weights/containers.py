"""Reads tensors from a file of any program. Files that could run code are never opened."""

import math
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.models.weights.header import safetensors_header
from vitctl.models.weights.rules import Tensors, listed
from vitctl.system.bounds import WEIGHTS, WEIGHTS_GROWTH
from vitctl.system.text import one_line

Kind = Literal["safetensors", "npz", "torch"]
# No published model comes near; a file that claims more is damaged or hostile.
# What NumPy's parser of headers, and the unpacking, say of damage.
_BAD_ARRAYS = (
    zipfile.BadZipFile,
    zlib.error,
    SyntaxError,
    TokenError,
    TypeError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
)
_MAX_SIDE = 2**53
_ZEROS_BYTES = 256 * 2**20  # of a new head, which shrink to nothing
# How files that are no weights begin, and what to tell their owner.
_NOT_WEIGHTS = {
    rb"\s*<": "a web page, not weights; the download link was wrong or needs a login",
    rb"version https://git-lfs": "a Git LFS pointer, not weights; fetch the file itself with `git lfs pull`",
    rb"": "not a safetensors file, and neither an .npz archive nor a torch state dict",
}
_PICKLE = rb"\x80[\x02-\x05]"
# Where training programs put the weights inside their checkpoints, and what they wrap around a model.
_INSIDE = ("state_dict", "model_state_dict", "model")
_WRAPPERS = ("module.", "_orig_mod.")
_MAX_WRAPPED = 4


def kind_of(path: Path) -> Kind:
    """Return what kind of file `path` is, from its content.

    Raises CheckpointError, saying what it is instead.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such weights file; give a .safetensors file or a folder with model.safetensors"
        )
    with path.open("rb") as file:
        start, size = file.read(256), path.stat().st_size
    if size > WEIGHTS.limit:
        raise CheckpointError(f"{path}: {size:,} bytes, should be at most {WEIGHTS}")
    # The first eight bytes are the header's length and may look like anything, so the brace is what counts.
    if start[8:9] == b"{":
        needed = 8 + int.from_bytes(start[:8], "little")
        if needed > size:
            raise CheckpointError(
                f"{path}: truncated, its header alone takes {needed} bytes of {size}; copy it again"
            )
        _whole_header(path)
        return "safetensors"
    if start.startswith(b"PK\x03\x04"):
        return _kind_of_zip(path)
    if re.match(_PICKLE, start):
        return "torch"
    raise CheckpointError(
        f"{path}: {next(words for begin, words in _NOT_WEIGHTS.items() if re.match(begin, start))}"
    )


def read_tensors(path: Path) -> Tensors:
    """Return every tensor of the file by its name, on the CPU, without what wrappers put in front of all
    names.

    Raises CheckpointError when the file is damaged, or holds more than plain tensors.
    """
    return _bare(
        path, {"safetensors": _read_safetensors, "npz": _read_npz, "torch": _read_torch}[kind_of(path)](path)
    )


def read_shapes(path: Path) -> Tensors:
    """The same tensors on the meta device: shapes and types without a number, from the headers of the file.

    Raises CheckpointError, as `read_tensors` does where a header shows what is wrong.
    """
    kind = kind_of(path)
    if kind == "torch":  # a zip archive is mapped, not read
        return {name: tensor.to("meta") for name, tensor in read_tensors(path).items()}
    shapes = _safetensors_shapes(path) if kind == "safetensors" else _npz_shapes(path)
    return _bare(path, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def _safetensors_shapes(path: Path) -> dict[str, list[int]]:
    return {name: entry["shape"] for name, entry in _whole_header(path).items() if name != "__metadata__"}


def _whole_header(path: Path) -> dict[str, Any]:
    header = safetensors_header(path)
    if header is None:
        raise CheckpointError(f"{path}: damaged or truncated safetensors file; copy it again")
    return header


def _npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    version = np.lib.format.read_magic(member)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, _ = read(member)
                    if any(not 0 <= side < _MAX_SIDE for side in shape) or math.prod(shape) >= _MAX_SIDE:
                        raise ValueError(f"{one_line(name)} has the shape {shape}")
                    shapes[name.removesuffix(".npy")] = shape
    except (*_BAD_ARRAYS, EOFError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged or truncated .npz archive ({one_line(str(error))}); copy it again"
        ) from error
    return shapes


def _bare(path: Path, tensors: Tensors) -> Tensors:
    """Without what wrappers put in front of all names."""
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _kind_of_zip(path: Path) -> Kind:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (*_BAD_ARRAYS, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged or truncated archive ({one_line(str(error))}); copy it again"
        ) from error
    claimed = sum(member.file_size for member in members)
    if claimed > min(WEIGHTS.limit, path.stat().st_size * WEIGHTS_GROWTH.limit + _ZEROS_BYTES):
        raise CheckpointError(
            f"{path}: claims to hold {claimed:,} bytes, more than a model of its size; not opened"
        )
    if members and all(member.filename.endswith(".npy") for member in members):
        return "npz"
    if any(member.filename.endswith("/data.pkl") for member in members):
        return "torch"
    names = listed([member.filename for member in members])
    raise CheckpointError(f"{path}: an archive without weights, it holds {one_line(names) or 'nothing'}")


def _read_safetensors(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: damaged or truncated safetensors file ({one_line(str(error))}); copy it again"
        ) from error


def _read_npz(path: Path) -> Tensors:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: _tensor(path, name, archive[name]) for name in archive.files}
    except (*_BAD_ARRAYS, EOFError, MemoryError, OSError, ValueError) as error:
        if "pickle" in str(error):
            raise CheckpointError(
                f"{path}: holds Python objects, never opened because they can run code"
            ) from error
        raise CheckpointError(
            f"{path}: damaged or truncated .npz archive ({one_line(str(error))}); copy it again"
        ) from error


def _tensor(path: Path, name: str, array: np.ndarray) -> Tensor:
    """Return the array as a tensor; NumPy stores bfloat16, which it does not know, as two raw bytes."""
    if array.dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    if array.dtype.kind not in "biuf":
        raise CheckpointError(f"{path}: {name} holds {array.dtype}, not numbers")
    return torch.from_numpy(array)


def _read_torch(path: Path) -> Tensors:
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of dialects that it then refuses
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: a pickle that holds more than plain tensors, or is cut short; never opened because it "
            f"can run "
            f"code; convert it to safetensors with the library that wrote it "
            f"(safetensors.torch.save_file of its "
            f"state_dict)"
        ) from error
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # its unpickler, its zip reader and what they call raise a dozen types for damaged files
        raise CheckpointError(f"{path}: damaged or truncated torch file; copy it again") from error
    for _ in range(_MAX_WRAPPED):  # a pickle may hold itself
        inside = next((key for key in _INSIDE if isinstance(found, Mapping) and _holds(found, key)), None)
        if inside is None:
            break
        found = found[inside]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not a state dict of tensors")
    if strangers := [str(name) for name, value in found.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{path}: not a plain state dict, these are no tensors: {one_line(listed(strangers))}"
        )
    return {str(name): tensor for name, tensor in found.items()}


def _holds(found: Mapping[object, object], key: str) -> bool:
    return isinstance(found.get(key), Mapping)
