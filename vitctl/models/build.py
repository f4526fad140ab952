"""Models with weights from a configuration: fresh, stored, or a stored body under a new head."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitctl.errors import CheckpointError
from vitctl.models import axial, masked_patch, resnet, vit
from vitctl.models.blocks import Generator
from vitctl.models.positions import CLASS_ROWS, Grid
from vitctl.models.resnet import ResNet
from vitctl.models.variants import (
    AxialConfig,
    AxialResNetConfig,
    Config,
    HybridConfig,
    MaskedPatchConfig,
    ResNetConfig,
    ViTConfig,
    family,
)
from vitctl.models.vit import VisionTransformer
from vitctl.models.weights.layouts import mismatches, refuse
from vitctl.system.text import count_text

Model = VisionTransformer | ResNet

# Family -> its module, and the function that draws its weights.
_FAMILIES: dict[type[Config], tuple[Callable[[Any], Model], Callable[[Any, Generator], None]]] = {
    ViTConfig: (VisionTransformer, vit.initialise),
    HybridConfig: (vit.HybridTransformer, vit.initialise),
    AxialConfig: (axial.AxialTransformer, vit.initialise),
    MaskedPatchConfig: (masked_patch.MaskedPatchTransformer, masked_patch.initialise),
    ResNetConfig: (ResNet, resnet.initialise),
    AxialResNetConfig: (axial.axial_resnet, axial.initialise_axial_resnet),
}

# Fields that fine-tuning may change. Any other field decides what the weights mean.
_FREE_IN_TRANSFER = {
    "image_size", "num_classes", "representation_size", "dropout", "drop_path", "head_bias", "layer_scale",
    "rotary_rescale",
}  # fmt: skip


@overload
def build(
    config: ViTConfig,
    *,
    seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> VisionTransformer: ...
@overload
def build(
    config: ResNetConfig,
    *,
    seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> ResNet: ...
def build(
    config: Config,
    *,
    seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Model:
    """Return a freshly initialised model, in training mode.

    The weights depend on `seed` alone: every dtype, device and processor gets the same numbers, up to
    rounding. Without a seed only zeros and ones are set, for a model whose other weights are loaded next:
    drawing those of L/16 takes a second. On the `meta` device the model has shapes and no weights.
    """
    module, initialise = _FAMILIES[type(config)]
    with torch.device("meta"):
        model = module(config)
    model.to(dtype)
    if torch.device(device).type != "meta":
        # `to_empty` would import sympy, for most of a second.
        model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        )
        initialise(model, None if seed is None else np.random.default_rng(seed))
    return model


class _Held(TorchFunctionMode):
    """Redirects writes to meta parameters, or to views of them, to (rows held, number of the first)."""

    def __init__(self, parts: Mapping[int, tuple[Tensor, int]]) -> None:
        super().__init__()
        self._parts = parts
        self.drawn = hashlib.sha256()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (Tensor.copy_, Tensor.fill_, Tensor.zero_):
            return function(*args, **(kwargs or {}))
        written, *values = args
        whole = written if written._base is None else written._base
        part, row = self._parts[id(whole)]
        first = written.storage_offset() - row * math.prod(whole.shape[1:])
        low, high = max(first, 0), min(first + written.numel(), part.numel())
        if isinstance(values[0] if values else None, Tensor):
            self.drawn.update(values[0].numpy().data)
            values = [values[0].flatten()[low - first : high - first]]
        if low < high:
            function(part.view(-1)[low:high], *values)
        return written


def draw_parts(config: Config, seed: int, parts: Mapping[str, tuple[Tensor, int]]) -> str:
    """Draw the weights that `build` draws, one tensor at a time; return a digest of all that was drawn.

    `parts` are rows of each parameter, written in place, and the number of the first.
    """
    blank = build(config, device="meta")
    held = _Held({id(weight): parts[name] for name, weight in blank.named_parameters()})
    with held:
        _FAMILIES[type(config)][1](blank, np.random.default_rng(seed))
    return held.drawn.hexdigest()


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into `model`, casting to its dtype. Raises CheckpointError with every mismatch."""
    check_state(state, model.state_dict())
    model.load_state_dict(state)


def check_state(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check names and shapes against a model's, on any device. Raises CheckpointError with every mismatch."""
    refuse("the weights do not fit the model", mismatches(state, own, "the model has"))


def resized(
    model: Model, source_config: Config, source_state: Mapping[str, Tensor], method: str = "zoom"
) -> tuple[dict[str, Tensor], list[str]]:
    """Return `source_state` with positions resized for `model`, and log lines about it.

    Tables added to tokens are interpolated over the grid by `method`; those of rows and columns, and the
    offsets of axial attention, linearly along their axis. Raises CheckpointError for relative positions in
    raster order, which cannot be moved to another grid. Paper: Section 3.2
    """
    state, wanted = dict(source_state), model.state_dict()
    if isinstance(source_config, ViTConfig) and isinstance(model.config, ViTConfig):
        return _resized_grid(state, source_config, model.config, method)
    lines = []
    moved = [name for name in state if name.endswith("relative_position") and name in wanted]
    for name in moved:
        state[name] = resize_axis(state[name][None], len(wanted[name]))[0]
    if moved and source_config.image_size != model.config.image_size:
        lines = [f"relative positions of {len(moved)} attentions resized along their axes (linear)"]
    return state, lines


def transferred(
    model: Model,
    source_config: Config,
    source_state: Mapping[str, Tensor],
    *,
    method: str = "zoom",
    keeps_head: bool = False,
    fresh_norm: bool = False,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return a trained body for fine-tuning under the fresh head of `model`, and log lines about it.

    The source's head and pre-logits are dropped, unless `keeps_head`: it then has the same classes and no
    pre-logits. With `fresh_norm` its last norm goes too. Its positions are resized when the grids
    differ. A masked
    patch model gives its body to a plain one. Returns also lines for the log, saying what was done. Raises
    CheckpointError when bodies differ, or weights are missing, unexpected or of the wrong shape. Paper:
    Section 3.2, Appendix B.1.1
    """
    target = model.config
    kinds = [family(config).replace("masked_patch", "vit") for config in (source_config, target)]
    differing = [] if kinds[0] == kinds[1] else [f"family is {kinds[0]!r}, the model is {kinds[1]!r}"]
    differing += [
        f"{name} is {getattr(source_config, name)!r}, the model has {getattr(target, name)!r}"
        for name in (field.name for field in fields(target) if hasattr(source_config, field.name))
        if name not in _FREE_IN_TRANSFER and getattr(source_config, name) != getattr(target, name)
    ]
    refuse("the weights belong to another model", {"configuration": differing})
    dropped = ("head.", "pre_logits.", "mask_embedding", *(("norm.",) if fresh_norm else ()))
    body = {name: tensor for name, tensor in source_state.items() if not name.startswith(dropped)}
    body, lines = resized(model, source_config, body, method)
    said = "stored head kept" if keeps_head else _head_line(source_state, target)
    lines = [f"body: {count_text(len(body), 'tensor')} loaded", *lines, said]
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(dropped)}
    if keeps_head:
        body |= {name: tensor for name, tensor in source_state.items() if name.startswith(dropped)}
    check_state(fresh | body, model.state_dict())
    return body, lines


def transfer(model: Model, config: Config, state: Mapping[str, Tensor], **how: Any) -> list[str]:
    """Load the result of `transferred` into `model`, and return its lines."""
    body, lines = transferred(model, config, state, **how)
    model.load_state_dict(body, strict=False)  # the head is `model`'s
    return lines


def _resized_grid(
    state: dict[str, Tensor], source: ViTConfig, target: ViTConfig, method: str
) -> tuple[dict[str, Tensor], list[str]]:
    old, new = ("x".join(map(str, config.grid)) for config in (source, target))
    if source.position_embedding in ("none", "sincos"):
        return state, []
    if source.position_embedding == "relative_bias":
        for name in [name for name in state if name.endswith(".relative_bias")]:
            state[name] = resize_offset_bias(state[name], source.grid, target.grid, method)
        rule = "bilinear" if method == "bilinear" else "linear"
        return state, [f"relative position biases {old} " + ("kept" if old == new else f"-> {new} ({rule})")]
    if source.position_embedding == "relative":
        if old != new:
            raise CheckpointError(
                f"relative positions of a {old} grid do not fit {new}: keep image_size {source.image_size}"
            )
        return state, [f"relative positions {old} kept"]
    if source.position_embedding == "2d":
        for name, length in zip(("position_rows", "position_columns"), target.grid, strict=True):
            if name in state:
                state[name] = resize_axis(state[name], length)
    elif "position_embedding" in state:
        table = state["position_embedding"]
        state["position_embedding"] = resize_position_embedding(
            table, source.grid, target.grid, source.prefix_rows, method
        )
    said = "linear along each axis" if source.position_embedding == "2d" else _method(method)[1]
    return state, [f"position embedding {old} " + ("kept" if old == new else f"-> {new} ({said})")]


def _head_line(source_state: Mapping[str, Tensor], target: Config) -> str:
    words = {"head.weight": "head", "pre_logits.weight": "pre-logits", "mask_embedding": "mask embedding"}
    dropped = [word for name, word in words.items() if name in source_state]
    fresh = ["new pre-logits"] if isinstance(target, ViTConfig) and target.representation_size else []
    fresh.append(
        f"new zero head with {count_text(target.num_classes, 'class', 'classes')}"
        if target.num_classes
        else "no new head"
    )
    return ", ".join([f"{' and '.join(dropped)} dropped" if dropped else "no head to drop", *fresh])


def resize_offset_bias(table: Tensor, old_grid: Grid, new_grid: Grid, method: str = "zoom") -> Tensor:
    """Return a table of relative position biases for another grid; the class token keeps its three rows.

    An offset of one patch keeps its meaning: the old offsets are spaced geometrically to span the new
    ones, and each new one is interpolated linearly between them, as in timm; the authors interpolate
    cubically. `bilinear` is transformers' rule, without aligned corners; every other method means ours.
    The table changes from `[num_offsets(old_grid), H]` to `[num_offsets(new_grid), H]`.

    Source: BEiT, run_class_finetuning.py
    """
    if old_grid == new_grid:
        return table
    if method == "bilinear":
        sides = (tuple(2 * side - 1 for side in grid) for grid in (old_grid, new_grid))
        old, new = sides
        image = torch.unflatten(table[:-CLASS_ROWS].T, 1, old)[None].double()  # [1, H, rows, columns]
        resized = F.interpolate(image, size=new, **_method(method)[0])[0].flatten(1).T
    else:
        by_row, by_column = (_spread(old, new) for old, new in zip(old_grid, new_grid, strict=True))
        spans = (by_row.shape[1], by_column.shape[1])
        offsets = torch.unflatten(table[:-CLASS_ROWS].double(), 0, spans)  # [rows, columns, H]
        on_device = (by_row.to(table.device), by_column.to(table.device))
        resized = torch.einsum("ir,jc,rch->ijh", *on_device, offsets).flatten(0, 1)
    return torch.cat([resized.to(table.dtype), table[-CLASS_ROWS:]])


def _spread(old: int, new: int) -> Tensor:
    """Return the share of each old offset in each new one along an axis, `[2 new - 1, 2 old - 1]`."""
    low, high = 1.01, 1.5  # ratio of successive steps
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if sum(ratio**step for step in range(old - 1)) > new - 1 else (ratio, high)
    steps = torch.tensor([ratio**step for step in range(old - 1)], dtype=torch.float64, device="cpu").cumsum(
        0
    )
    place = torch.cat([-steps.flip(0), steps.new_zeros(1), steps])
    wanted = torch.arange(1 - new, new, dtype=torch.float64, device="cpu")
    right = torch.searchsorted(place, wanted).clamp(max=len(place) - 1)
    left = (right - 1).clamp(min=0)
    share = ((wanted - place[left]) / (place[right] - place[left])).clamp(0, 1).nan_to_num(1)[:, None]
    return share * F.one_hot(right, len(place)) + (1 - share) * F.one_hot(left, len(place))


def resize_position_embedding(
    table: Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int, method: str = "zoom"
) -> Tensor:
    """Interpolate a learned table for another resolution; prefix tokens keep their rows.

    Args:
        table: `[L, prefix_tokens + rows * columns, D]`, patches in row-major order; L is 1, or one table per
            layer.
        old_grid, new_grid: rows and columns of patches.
        prefix_tokens: tokens before the patches (1 with a class token).
        method: `zoom`, bilinear with aligned corners, is `scipy.ndimage.zoom(order=1)` of the authors' code;
            `bicubic` is Hugging Face's, `bicubic_aligned` torchvision's, `bicubic_antialias` timm's, and
            `bicubic_offset` DINOv2's without registers, whose scale counts a tenth of a patch too many.

    Returns `[L, prefix_tokens + new rows * new columns, D]` in the dtype of `table`. Raises CheckpointError
    if the old grid is not square, the table does not fit it, or the method is unknown. Paper: Section 3.2
    """
    rows, columns = old_grid
    if rows != columns:
        raise CheckpointError(
            "position embedding", f"the stored grid is {rows}x{columns}, only square ones are resized"
        )
    expected = prefix_tokens + rows * columns
    if table.dim() != 3 or table.shape[1] != expected:
        raise CheckpointError(
            "position embedding",
            f"shape {list(table.shape)} does not fit a {rows}x{columns} grid with {prefix_tokens} "
            f"prefix tokens, which needs [layers, {expected}, hidden_size]",
        )
    if old_grid == new_grid:
        return table
    prefix, patches = torch.split(table, [prefix_tokens, rows * columns], dim=1)
    image = torch.unflatten(patches, 1, (rows, columns)).permute(0, 3, 1, 2)  # [L, D, rows, columns]
    size: dict[str, Any] = {"size": new_grid}
    if method == "bicubic_offset":
        size = {"scale_factor": tuple((new + 0.1) / old for old, new in zip(old_grid, new_grid, strict=True))}
    resized = F.interpolate(image.double(), **size, **_method(method)[0]).to(table.dtype)
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)


def resize_axis(table: Tensor, new_length: int) -> Tensor:
    """Interpolate tables `[L, n, D]` linearly along one axis, keeping both ends, to `[L, new_length, D]`.

    The rule is ours. It suits rows, columns, and relative offsets along one axis, where offset 0 stays in
    the middle; it does not suit offsets in raster order.
    """
    resized = F.interpolate(
        table.double().transpose(1, 2), size=new_length, mode="linear", align_corners=True
    )
    return resized.transpose(1, 2).to(table.dtype)


# Arguments for torch, and the method in words.
_METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "zoom": ({"mode": "bilinear", "align_corners": True}, "bilinear, corners aligned"),
    "bicubic": ({"mode": "bicubic", "align_corners": False}, "bicubic"),
    "bicubic_offset": ({"mode": "bicubic", "align_corners": False}, "bicubic, scaled by (new + 0.1) / old"),
    "bicubic_aligned": ({"mode": "bicubic", "align_corners": True}, "bicubic, corners aligned"),
    "bicubic_antialias": (
        {"mode": "bicubic", "align_corners": False, "antialias": True},
        "bicubic, antialiased",
    ),
    "bilinear": ({"mode": "bilinear", "align_corners": False}, "bilinear"),
}


def _method(name: str) -> tuple[dict[str, Any], str]:
    """Return a row of `_METHODS`. Raises CheckpointError for an unknown name."""
    if name not in _METHODS:
        raise CheckpointError(
            "position embedding", f"unknown resize method {name!r}, known are {', '.join(_METHODS)}"
        )
    return _METHODS[name]
