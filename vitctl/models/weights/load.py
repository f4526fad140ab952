"""Weights in: from our own file, safetensors with configuration and metadata inside, and from other programs'
files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitctl.errors import CheckpointError, VitctlError
from vitctl.models.build import build, check_state
from vitctl.models.configs import Config
from vitctl.models.variants import from_dict, to_dict, variant
from vitctl.models.weights import google, huggingface, timm, torchvision
from vitctl.models.weights.containers import kind_of, read_shapes, read_tensors
from vitctl.models.weights.download import fetch as download
from vitctl.models.weights.files import save_tensors, write_whole
from vitctl.models.weights.formats import Beside, Described, Format
from vitctl.models.weights.header import OWN_KEY
from vitctl.models.weights.meta import check_meta
from vitctl.models.weights.rules import Tensors, listed, rules_for, to_ours
from vitctl.models.weights.sources import Fetch, locate
from vitctl.system.text import one_line

FORMAT = "vitctl/1"
# A file belongs to the first format that claims it; the hybrid's tensors include a ViT's.
_FOREIGN: dict[str, Format] = {
    "google-hybrid": google.HYBRID,
    "google-bit": google.BIT,
    "google-vit": google.VIT,
    "timm": timm.FORMAT,
    "hf": huggingface.FORMAT,
    "torchvision": torchvision.FORMAT,
}
# The sizes that a model's name stands for.
_NAMED_FIELDS = ("patch_size", "hidden_size", "depth", "mlp_size", "num_heads", "stage_depths", "width")


@dataclass(frozen=True)
class Weights:
    """What a weights file holds: the model it fits, tensors on the CPU, free metadata (`mean`, `class_names`
    ...).
    """

    config: Config
    state: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def has_head(self) -> bool:
        """Whether there is a trained head; released ImageNet-21k files hold one of zeros, which predicts
        nothing.
        """
        return self.config.num_classes > 0 and self.meta.get("head") != "zero"

    @cached_property
    def digest(self) -> str:
        """Of `state`, which is read once for it: see `weights_digest`."""
        return weights_digest(self.state)


def save_weights(
    path: Path, model_or_state: nn.Module | Mapping[str, Tensor], config: Config, meta: Mapping[str, Any]
) -> Path:
    """Write `path` whole or not at all, and return it.

    `meta` is JSON-able. Equal weights, configuration and metadata give files equal byte by byte.
    """
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
    header = {"format": FORMAT, "config": to_dict(config), "meta": dict(meta)}
    # One key, because safetensors stores several in no fixed order, and equal weights must give equal files.
    metadata = {OWN_KEY: json.dumps(header, sort_keys=True, allow_nan=False)}
    return write_whole(path, lambda aside: save_tensors(tensors, aside, metadata))


def read_weights(
    source: str | Path, *, model: str | None = None, num_heads: int | None = None, fetch: Fetch = download
) -> Weights:
    """Read weights of any format, detecting what they are from the file itself.

    The numerics and the pre-processing of the program that made them come along, in `config` and in `meta`:
    `mean`, `std`, `image_size`, `eval_method`, `eval_resize`, `resample`, `position_resize`, `format`, and
    `class_names` where they are known. `meta["head"]` is "zero" where all weights of the head are 0.

    Args:
        source: a file, a folder, an https address, `hf://organisation/name[/file]` or `gs://bucket/path`.
        model: a name such as "H/14" for what shapes cannot tell (the number of heads); its sizes must be the
            file's.
        num_heads: the number of heads alone, instead of a name.
        fetch: gets the file behind an https address.

    Raises CheckpointError: there is no such file, it is damaged, its tensors make no model that we know or
    are no numbers, or what is stored beside them makes no sense. Raises RecipeError: `model` is no name of a
    model.
    """
    named = variant(model) if model else None
    path = locate(source, fetch)
    metadata = _metadata(path) if kind_of(path) == "safetensors" else {}
    ours = OWN_KEY in metadata
    weights = (
        _read_ours(path, metadata[OWN_KEY])
        if ours
        else _read_foreign(path, getattr(named, "num_heads", num_heads))
    )
    differing = [
        f"{name} {getattr(weights.config, name, 'none')} instead of {getattr(named, name)}"
        for name in _NAMED_FIELDS
        if hasattr(named, name) and getattr(named, name) != getattr(weights.config, name, None)
    ]
    if differing:
        raise CheckpointError(f"{path}: not a {model}, it has {', '.join(differing)}")
    try:
        check_meta(weights.meta, weights.config)
        check_numbers(weights.state)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return weights


def check_numbers(state: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError where a tensor holds NaN or an infinity, as after a training that diverged."""
    if odd := [name for name in sorted(state) if not state[name].is_floating_point()]:
        raise CheckpointError(
            f"{one_line(odd[0])} holds {str(state[odd[0]].dtype).removeprefix('torch.')}, should hold "
            f"numbers with fractions"
        )
    wrong = [name for name in sorted(state) if not _is_finite(state[name])]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(state)} tensors hold NaN or infinities ({listed(wrong)}): the training "
            f"diverged, or the file is "
            "damaged; take an earlier checkpoint"
        )


def _is_finite(tensor: Tensor) -> bool:
    """One pass without memory of the tensor's size: NaN and infinities reach the extremes."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(
        bool(extreme.float().isfinite()) for extreme in tensor.aminmax()
    )  # float32 is what it is computed in


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 (hex) over the names, dtypes, shapes and bytes of all tensors, in the order of their
    names.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_ours(path: Path, text: str) -> Weights:
    """What the header claims is compared with the tensors before anything of the claimed size is made."""
    header, state = _header(path, text), read_tensors(path)
    try:
        weights = Weights(from_dict(header["config"]), state, header["meta"])
        if (depth := getattr(weights.config, "depth", 0)) > len(weights.state):
            raise CheckpointError(f"{len(weights.state)} tensors are no model of depth {depth}")
        check_state(weights.state, build(weights.config, device="meta").state_dict())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return weights


def foreign_config(path: Path, model: str | None = None) -> Config:
    """The configuration of the model that a file of another program fits, from the shapes of its tensors
    alone.

    Raises CheckpointError, as `read_weights` does.
    """
    num_heads = getattr(variant(model), "num_heads", None) if model else None
    return _foreign(path, num_heads, read_shapes(path)).config


def _read_foreign(path: Path, num_heads: int | None) -> Weights:
    found = _foreign(path, num_heads, read_tensors(path))
    if "head.weight" in found.state and not found.state["head.weight"].any():
        found.meta["head"] = "zero"
    return found


def _foreign(path: Path, num_heads: int | None, tensors: Tensors) -> Weights:
    try:
        format_name, tensors = _recognise(tensors)
        found = _FOREIGN[format_name]
        described = _describe(found, tensors, Beside.of(path, num_heads))
        model = build(described.config, device="meta").state_dict()
        table = found.table(getattr(described.config, "num_heads", 1))
        state = to_ours(tensors, rules_for(table, model), model)
    except VitctlError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Weights(described.config, state, described.meta | {"format": format_name})


def _describe(found: Format, tensors: Tensors, beside: Beside) -> Described:
    try:
        return found.describe(found.view(tensors), tensors, beside)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Only what people write by hand can be of the wrong type: the JSON files.
        raise CheckpointError(
            f"the JSON files beside it describe no model ({one_line(str(error))})"
        ) from error


def _recognise(tensors: Tensors) -> tuple[str, Tensors]:
    """Return the name of the format and the tensors as it spells them."""
    for name, found in _FOREIGN.items():
        tidy = found.tidy(tensors)
        if found.claims(tidy):
            return name, tidy
    known = ", ".join(sorted({found.title for found in _FOREIGN.values()}))
    raise CheckpointError(f"tensors of no model that is known ({known}); it holds {listed(list(tensors))}")


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: damaged or truncated safetensors file ({one_line(str(error))}); copy it again"
        ) from error


def _header(path: Path, text: str) -> dict[str, Any]:
    """Return our JSON out of the safetensors metadata."""
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its vitctl metadata is not JSON ({one_line(str(error))})") from error
    stored_format = header.get("format") if isinstance(header, dict) else None
    if stored_format != FORMAT:
        raise CheckpointError(f"{path}: format {stored_format!r}, this vitctl reads {FORMAT!r}")
    stored: dict[str, Any] = header
    if not all(isinstance(stored.get(key), dict) for key in ("config", "meta")):
        raise CheckpointError(f"{path}: its vitctl metadata lacks config or meta")
    return stored
