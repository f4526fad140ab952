"""Weights out, into the file or folder that another program reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitctl.errors import CheckpointError
from vitctl.models.configs import Config, HybridConfig, ResNetConfig
from vitctl.models.weights import google, huggingface, timm, torchvision
from vitctl.models.weights.files import save_tensors, write_json, write_whole
from vitctl.models.weights.formats import Format
from vitctl.models.weights.load import Weights, save_weights
from vitctl.models.weights.rules import Tensors, rules_for, to_theirs
from vitctl.models.weights.sources import FILE_NAMES

Target = str
_FORMATS = {"timm": timm.FORMAT, "hf": huggingface.FORMAT, "torchvision": torchvision.FORMAT}
_FILE_NAMES = {"safetensors": FILE_NAMES[0], "npz": "model.npz"}


@dataclass(frozen=True)
class Written:
    """The files, the weights first, and what a reader has to know."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def write_weights(weights: Weights, path: str | Path, to: Target) -> Written:
    """Write `weights` for another program, each file whole or not at all.

    Args:
        weights: of any model; their numbers are moved, never changed.
        path: a file that ends as the format does (.npz for google, else .safetensors), or a folder, which is
            made and also receives the program's JSON files. `hf` is always a folder.
        to: "safetensors" is our own format.

    Returns the files, and notes such as the arguments that the other program needs to compute the same.
    Raises CheckpointError in one line when the format cannot hold the model.
    """
    path = Path(path)
    if to == "safetensors":
        path = _target(path, ".safetensors")
        return Written((save_weights(path, weights.state, weights.config, weights.meta),), ())
    if to != "google" and to not in _FORMATS:
        raise CheckpointError(
            f"{path}: unknown format {to!r}, known are safetensors, google, {', '.join(_FORMATS)}"
        )
    target = _FORMATS.get(to) or _google(weights.config)
    if problems := [*target.misfits(weights.config), *_narrow(target, weights.state)]:
        raise CheckpointError(f"{path}: {target.title} cannot hold this model: {'; '.join(problems)}")
    suffix = f".{target.container}"
    if to == "hf" and path.suffix == suffix:
        raise CheckpointError(
            f"{path}: {target.title} is a folder with several files; give the name of a folder"
        )
    table = target.table(getattr(weights.config, "num_heads", 1))
    try:
        tensors = to_theirs(weights.state, rules_for(table, weights.state))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {target.title} cannot hold this model: {error}") from error
    sidecars = {} if path.suffix == suffix else target.sidecars(weights.config, weights.meta)
    file = _target(path, suffix)
    files = [
        _write(file, tensors, target),
        *(write_json(file.parent / name, sidecars[name]) for name in sidecars),
    ]
    return Written(tuple(files), tuple(target.notes(weights.config, weights.meta)))


def _google(config: Config) -> Format:
    if isinstance(config, ResNetConfig):
        return google.BIT
    return google.HYBRID if isinstance(config, HybridConfig) else google.VIT


def _narrow(target: Format, state: Tensors) -> Iterator[str]:
    if target.container == "npz" and any(tensor.dtype == torch.bfloat16 for tensor in state.values()):
        yield "NumPy has no bfloat16; convert the weights to float32 first"


def _target(path: Path, suffix: str) -> Path:
    """Return the file to write, after making the folder that it goes to."""
    file = path if path.suffix == suffix else path / _FILE_NAMES[suffix[1:]]
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _write(file: Path, tensors: Tensors, target: Format) -> Path:
    if target.container == "npz":
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        return write_whole(file, lambda aside: _save_npz(aside, arrays))
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return write_whole(file, lambda aside: save_tensors(tensors, aside, {"format": "pt"}))


def _save_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:  # given a path, NumPy would add its own suffix
        np.savez(file, **arrays)  # type: ignore[arg-type]
