"""Weights files: safetensors, NumPy archives and PyTorch files, read as tensors, never code."""

import math
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitctl.errors import CheckpointError, refuse
from vitctl.models.weights.header import (
    INDEX,
    begins_of,
    bounded,
    metadata_of,
    parts_of,
    shards_of,
)
from vitctl.models.weights.later import Later, now
from vitctl.models.weights.layouts import Tensors, listed
from vitctl.system import files, limits
from vitctl.system.files import restore_mode
from vitctl.system.text import one_line

Kind = Literal["safetensors", "npz", "torch"]
# Errors of the libraries' readers, NumPy's header parser and unpacking for damaged files.
_DAMAGE = (
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
    SyntaxError,
    TokenError,
    TypeError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
)
_JSON_BYTES = 16 * 2**20
_MAX_NUMBER = 2**53  # of a shape
_ZEROS_BYTES = 256 * 2**20  # for a new head's zeros, which compress to nothing
# First bytes of files that are not weights -> the message.
_NOT_WEIGHTS = {
    rb"\s*<": "a web page, not weights; the download link was wrong or needs a login",
    rb"version https://git-lfs": "a Git LFS pointer, not weights; fetch the file itself with `git lfs pull`",
    rb"": "not a safetensors file, and neither an .npz archive nor a torch state dict; give weights, such as "
    "model.safetensors",
}
# Keys or prefixes of the weights, and of their average, in training checkpoints. Lightning's average is
# state_dict, next to current_model_state.
_RAW = ("current_model_state", "state_dict", "model_state_dict", "model", "module", "_orig_mod")
_AVERAGED = (
    "state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema_model",
    "averaged_model", "ema",
)  # fmt: skip
ONE_SET = "--weights {which}: there is only one set of weights; omit --weights"


class _Ignored:
    """Placeholder for pickled objects other than tensors; accepts anything and does nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


# Program arguments with paths and NumPy numbers. Any other class is refused by name.
_IGNORED: list[Any] = [
    (_Ignored, f"{module}.{name}")
    for name, modules in {
        "Namespace": ("argparse",),
        "PosixPath": ("pathlib", "pathlib._local"),
        "WindowsPath": ("pathlib", "pathlib._local"),
        "multiarray.scalar": ("numpy.core", "numpy._core"),
        "dtype": ("numpy",),
        "encode": ("_codecs",),  # the bytes of a number
    }.items()
    for module in modules
]


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the umask's permissions, not the library's owner-only ones."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(tensors, path, metadata)
    restore_mode(path, mode)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one if there is no such file. Raises CheckpointError."""
    if not path.is_file():
        return {}
    value = files.read_json(path, _JSON_BYTES, error=CheckpointError)
    if not isinstance(value, dict):
        raise CheckpointError(path, "should be a JSON object, such as {}", "fix or delete it")
    return value


def kind_of(path: Path) -> Kind:
    """Return the kind of file from its content. Raises CheckpointError, naming what it is instead."""
    if not path.is_file():
        raise CheckpointError(
            path, "no such weights file", "give a .safetensors file or a folder with model.safetensors"
        )
    with path.open("rb") as file:
        start = file.read(256)
    size = path.stat().st_size
    if size > limits.WEIGHTS:
        raise CheckpointError(path, f"{size:,} bytes, should be at most {limits.WEIGHTS:,}")
    # The first eight bytes are the header's length and may look like anything, so the brace is what counts.
    if start[8:9] == b"{":
        return "safetensors"
    if start.startswith(b"PK\x03\x04"):
        return _kind_of_zip(path, size)
    if re.match(rb"\x80[\x02-\x05]", start):
        return "torch"
    raise CheckpointError(
        path, next(words for begin, words in _NOT_WEIGHTS.items() if re.match(begin, start))
    )


def _kind_of_zip(path: Path, size: int) -> Kind:
    with _whole(path, "archive"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    claimed, names = sum(member.file_size for member in members), [member.filename for member in members]
    refuse(
        CheckpointError,
        (
            claimed > min(limits.WEIGHTS, size * limits.WEIGHTS_GROWTH + _ZEROS_BYTES),
            path,
            f"declares {claimed:,} bytes, too many for its size; at most {limits.WEIGHTS:,}, and "
            f"{limits.WEIGHTS_GROWTH:,} times its size, are opened",
        ),
        (
            any(name.endswith("/archive_format") for name in names),
            path,
            "a torch.export program, which computes by itself",
            "give the weights that it was made of, or an .onnx file",
        ),
    )
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    if any(name.endswith("/data.pkl") for name in names):
        return "torch"
    raise CheckpointError(
        path, f"this archive contains no weights, only {one_line(listed(names)) or 'no files'}"
    )


@contextmanager
def _whole(path: Path, what: str) -> Iterator[None]:
    """Convert library errors about a damaged file into a one-line CheckpointError."""
    try:
        yield
    except _DAMAGE as error:
        if "pickle" in str(error):
            raise CheckpointError(
                path, "holds Python objects, never opened because they can run code"
            ) from error
        raise CheckpointError(
            path, f"damaged or truncated {what} ({one_line(str(error))})", "copy it again"
        ) from error


def read_tensors(path: Path) -> Tensors:
    """Return every tensor of the file by name, on the CPU.

    In a training checkpoint, names begin with that of their set, see `one_set`. An index stands for the files
    that it lists, a part of sharded weights for all parts. Raises CheckpointError if the file is damaged, or
    holds more than plain tensors.
    """
    return _all(path, _read)


def read_shapes(path: Path) -> Tensors:
    """Return the tensors as meta tensors, from the headers of the file; errors as in `read_tensors`."""
    return _all(path, _shapes)


def read_later(path: Path) -> Tensors:
    """Return the tensors lazily, see `Later`; only torch's format before 1.6 is read at once."""
    return _all(path, _later)


def _all(path: Path, read: Callable[[Path], Tensors]) -> Tensors:
    if path.name.endswith(INDEX):
        return _of_parts(path, read)
    found = _joined(path, shards, read) if (shards := shards_of(path)) else read(path)
    if not found:
        raise CheckpointError(path, "holds no tensors")
    return found


def one_set(tensors: Tensors, which: str = "") -> tuple[Tensors, str, bool]:
    """Return one set of tensors of another program's file, without the prefix of all names.

    `which` is "ema", "model", or "" for the averaged ones if there are any, as in timm. The other results
    are the chosen set in words, "" without a choice, and whether it is averaged. Raises CheckpointError if
    the file has no such weights.
    """
    said, is_averaged = "", False
    while True:
        sets = dict[str, Tensors]()
        for name, tensor in tensors.items():
            head, dot, rest = name.partition(".")
            if name != "n_averaged":  # of torch's AveragedModel
                sets.setdefault(head if dot else f".{name}", {})[rest] = tensor
        raw, averaged = _keys(sets)
        if not sets or sets.keys() - {raw, averaged}:
            break
        if averaged and not (which == "model" and raw):
            taken, kind, other = averaged, "averaged", "model"
        else:
            taken, kind, other = raw, "raw", "ema"
        if averaged:
            is_averaged = kind == "averaged"
            said = f"the {kind} weights ({taken}) of the file are taken"
            said += f"; --weights {other} takes the others" if raw else ""
        tensors = sets[taken]
    if which and which != ("ema" if is_averaged else "model" if said else ""):
        raise CheckpointError(ONE_SET.format(which=which))
    return tensors, said, is_averaged


def _keys(found: Mapping[str, Any]) -> tuple[str, str]:
    """Return a checkpoint's keys of the weights and of their average, "" for each that it lacks."""
    raw = next((key for key in _RAW if key in found), "")
    usual = "state_dict" if raw == _RAW[0] else ""
    return raw, next((key for key in (usual, *_AVERAGED) if found.get(key)), "")


def _joined(path: Path, shards: list[Path], read: Callable[[Path], Tensors]) -> Tensors:
    """Concatenate the rows of each tensor over the parts, in order."""
    found: dict[str, list[Tensor]] = {}
    for shard in bounded(path, shards):
        begins = begins_of(shard)
        for name, tensor in read(shard).items():
            rows = found.setdefault(name, [])
            place = [sum(map(len, rows)), *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            if begins.get(name) != {"saved_offsets": place} or (rows and not place):
                raise CheckpointError(
                    shard, f"{one_line(name)} does not follow the part before", "copy all parts again"
                )
            rows.append(tensor)
    with _whole(path, "sharded weights"):
        return {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in found.items()}


def _of_parts(index: Path, read: Callable[[Path], Tensors]) -> Tensors:
    parts, found = parts_of(index), dict[str, Tensor]()
    for part in bounded(index, (index.parent / name for name in parts)):
        tensors = read(part)
        if odd := sorted(tensors.keys() ^ parts[part.name]):
            raise CheckpointError(
                part, f"its tensors are not those that {index.name} lists ({listed(odd)})", "copy all again"
            )
        found |= tensors
    return found


def _read(path: Path) -> Tensors:
    return {"safetensors": _read_safetensors, "npz": _read_npz, "torch": _read_torch}[kind_of(path)](path)


def _shapes(path: Path) -> Tensors:
    read = {"safetensors": _read_safetensors, "npz": _npz_shapes, "torch": _read_torch}[kind_of(path)]
    return {name: tensor.to("meta") for name, tensor in read(path).items()}  # files are mapped, not read


def _later(path: Path) -> Tensors:
    kind, before = kind_of(path), _version(path)
    if kind == "torch" and not zipfile.is_zipfile(path):
        return _read_torch(path)

    def numbers(name: str, rows: slice) -> Any:
        if _version(path) != before:
            raise CheckpointError(path, "changed while it was read", "start again")
        with _whole(path, f"{kind} file"):
            # Opened each time: a lasting mapping would count as memory of the process.
            if kind == "safetensors":
                with safe_open(path, framework="pt", device="cpu") as file:
                    part = file.get_slice(name)
                    return part[rows] if part.get_shape() else file.get_tensor(name)
            if kind == "npz":
                with np.load(path, allow_pickle=False) as archive:
                    return now(_tensor(path, name, archive[name]), rows)
            return now(_read_torch(path)[name], rows)

    return {name: Later.of(shape, partial(numbers, name)) for name, shape in _shapes(path).items()}


def _version(path: Path) -> tuple[int, int, int]:
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


def _read_safetensors(path: Path) -> Tensors:
    metadata_of(path)  # it is whole, and has not too many tensors
    with _whole(path, "safetensors file"), safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}


def _npz_shapes(path: Path) -> Tensors:
    shapes, format_ = {}, np.lib.format
    with _whole(path, ".npz archive"), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                is_first = format_.read_magic(member) == (1, 0)
                read = format_.read_array_header_1_0 if is_first else format_.read_array_header_2_0
                shape, _, dtype = read(member)
            count = math.prod(shape)
            is_cut = not dtype.hasobject and count * dtype.itemsize > info.file_size
            if is_cut or count >= _MAX_NUMBER or any(not 0 <= side < _MAX_NUMBER for side in shape):
                raise ValueError(f"{one_line(info.filename)} has the shape {shape}")
            name, one = info.filename.removesuffix(".npy"), np.empty(0, "f4" if dtype.hasobject else dtype)
            shapes[name] = torch.empty(shape, dtype=_tensor(path, name, one).dtype, device="meta")
    return shapes


def _read_npz(path: Path) -> Tensors:
    _npz_shapes(path)
    with _whole(path, ".npz archive"), np.load(path, allow_pickle=False) as archive:
        return {name: _tensor(path, name, archive[name]) for name in archive.files}


def _tensor(path: Path, name: str, array: np.ndarray) -> Tensor:
    """Return the array as a tensor; NumPy stores bfloat16, which it does not know, as two raw bytes."""
    if array.dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    if array.dtype.kind not in "biuf":
        raise CheckpointError(path, f"{name} holds {array.dtype}, not numbers")
    return torch.from_numpy(array)


def _read_torch(path: Path) -> Tensors:
    try:
        # It warns about dialects that it then refuses.
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(_IGNORED):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        met = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise CheckpointError(
            path,
            "a pickle that is truncated or holds more than tensors"
            + (f" ({met[1]})" if met else "")
            + "; never opened because it can run code",
            "convert it to safetensors with the library that wrote it (safetensors.torch.save_file of its "
            "state_dict)",
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # its unpickler and zip reader raise a dozen types for damaged files
        raise CheckpointError(path, "damaged or truncated torch file", "copy it again") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(path, f"holds a {type(found).__name__}, not a state dict of tensors")
    found = _flat(found, depth=4)
    if strangers := [str(name) for name, value in found.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            path, f"not a plain state dict, these are not tensors: {one_line(listed(strangers))}"
        )
    return found


def _flat(found: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    """Return a checkpoint's tensors, or those of the sets inside it, by dotted names.

    `depth` limits recursion: a pickle may contain itself.
    """
    plain = {str(name): value for name, value in found.items()}
    inside = {
        name: value
        for name, value in plain.items()
        if isinstance(value, Mapping)
        and (
            name not in _AVERAGED
            or any(_keys(value))
            or all(isinstance(one, Tensor) for one in value.values())
        )
    }
    sets = [key for key in _keys(inside) if key] if depth else []
    return {
        f"{key}.{name}": value for key in sets for name, value in _flat(inside[key], depth - 1).items()
    } or ({} if sets else plain)
