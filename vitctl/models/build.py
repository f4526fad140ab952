"""From a configuration to a model with weights: fresh, stored, or a stored body under a new head."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.errors import CheckpointError
from vitctl.models import axial, masked_patch, resnet, vit
from vitctl.models.positions import resize_axis, resize_offset_bias, resize_position_embedding, say_method
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

# For each family: its module, and what draws its weights.
_FAMILIES: dict[type[Config], tuple[Callable[[Any], Model], Callable[[Any, np.random.Generator], None]]] = {
    ViTConfig: (VisionTransformer, vit.initialise),
    HybridConfig: (vit.HybridTransformer, vit.initialise),
    AxialConfig: (axial.AxialTransformer, vit.initialise),
    MaskedPatchConfig: (masked_patch.MaskedPatchTransformer, masked_patch.initialise),
    ResNetConfig: (ResNet, resnet.initialise),
    AxialResNetConfig: (axial.axial_resnet, axial.initialise_axial_resnet),
}

# What fine-tuning may change. A different value of any other field gives the same weights another meaning.
_FREE_IN_TRANSFER = {
    "image_size", "num_classes", "representation_size", "dropout", "drop_path", "head_bias", "layer_scale",
    "rotary_rescale",
}  # fmt: skip


@overload
def build(
    config: ViTConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> VisionTransformer: ...
@overload
def build(
    config: ResNetConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> ResNet: ...
def build(
    config: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Model:
    """Return a freshly initialised model, in training mode.

    The weights depend on `seed` alone: every dtype, device and processor holds the same numbers, up to
    rounding. On the `meta` device the model has shapes and no weights.
    """
    module, initialise = _FAMILIES[type(config)]
    with torch.device("meta"):
        model = module(config)
    model.to(dtype)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialise(model, np.random.default_rng(seed))
    return model


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into `model`, casting to its dtype.

    Raises one CheckpointError that groups every mismatch.
    """
    check_state(state, model.state_dict())
    model.load_state_dict(state)


def check_state(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Hold names and shapes against those of a model, on whatever device.

    Raises one CheckpointError that groups every mismatch.
    """
    refuse("the weights do not fit the model", mismatches(state, own, "the model has"))


def resized(
    model: Model, source_config: Config, source_state: Mapping[str, Tensor], method: str = "zoom"
) -> tuple[dict[str, Tensor], list[str]]:
    """Return `source_state` with its positions moved to the image size of `model`, and lines that say so.

    Tables added to tokens are interpolated over the grid by `method`; those of rows and columns, and the
    offsets of axial attention, linearly along their axis. Raises CheckpointError for relative positions in
    raster order: no rule moves them to another grid. Paper: Section 3.2
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


def transfer(
    model: Model,
    source_config: Config,
    source_state: Mapping[str, Tensor],
    *,
    method: str = "zoom",
    keeps_head: bool = False,
) -> list[str]:
    """Put a trained body under the fresh head of `model`, for fine-tuning.

    The source's head and pre-logits are dropped, unless `keeps_head`: it then has the same classes and no
    pre-logits. Its positions are resized when the grids differ. A masked
    patch model gives its body to a plain one. Returns lines for the log, saying what was done. Raises
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
    body = {name: tensor for name, tensor in source_state.items() if not _in_head(name)}
    body, lines = resized(model, source_config, body, method)
    head = source_state if keeps_head else model.state_dict()
    load_state(model, body | {name: tensor for name, tensor in head.items() if _in_head(name)})
    said = "stored head kept" if keeps_head else _head_line(source_state, target)
    return [f"body: {count_text(len(body), 'tensor')} loaded", *lines, said]


def _in_head(name: str) -> bool:
    return name.startswith(("head.", "pre_logits.", "mask_embedding"))


def _resized_grid(
    state: dict[str, Tensor], source: ViTConfig, target: ViTConfig, method: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Move the positions of a Transformer to the grid of `target`."""
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
    said = "linear along each axis" if source.position_embedding == "2d" else say_method(method)
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
