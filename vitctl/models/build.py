"""From a configuration to a model with weights: fresh ones, stored ones, or a stored body under a new head."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor, nn

from vitctl.errors import CheckpointError
from vitctl.models.position import resize_position_embedding
from vitctl.models.variants import ViTConfig
from vitctl.models.vit import VisionTransformer, initialise

# What fine-tuning may change. A different value of any other field gives the same weights another meaning.
_FREE_IN_TRANSFER = {"image_size", "num_classes", "representation_size", "dropout", "head_bias"}
_LISTED = 3


def build(
    config: ViTConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> VisionTransformer:
    """Return a freshly initialised model, in training mode.

    The weights depend on `seed` alone: every dtype and device holds the same numbers, up to rounding. On the `meta`
    device the model has shapes and no weights.
    """
    with torch.device("meta"):
        model = VisionTransformer(config)
    model.to(dtype)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialise(model, torch.Generator().manual_seed(seed))
    return model


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into `model`, casting to its dtype. Raises one CheckpointError that groups every mismatch."""
    own = model.state_dict()
    problems = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "wrong shape": [
            f"{name} is {list(state[name].shape)}, the model has {list(tensor.shape)}"
            for name, tensor in own.items()
            if name in state and state[name].shape != tensor.shape
        ],
    }
    _refuse("the weights do not fit the model", problems)
    model.load_state_dict(state)


def transfer(
    model: VisionTransformer,
    source_config: ViTConfig,
    source_state: Mapping[str, Tensor],
    *,
    method: Literal["zoom"] = "zoom",
) -> list[str]:
    """Put a trained body under the fresh head of `model`, for fine-tuning.

    The source's head and pre-logits are dropped and the position embedding is resized when the grids differ.
    Returns lines for the log, saying what was done.
    Raises CheckpointError when bodies differ, or weights are missing, unexpected or of the wrong shape.
    Paper: Section 3.2, Appendix B.1.1
    """
    target = model.config
    differing = [
        f"{name} is {getattr(source_config, name)!r}, the model has {getattr(target, name)!r}"
        for name in (field.name for field in fields(target))
        if name not in _FREE_IN_TRANSFER and getattr(source_config, name) != getattr(target, name)
    ]
    _refuse("the weights belong to another model", {"configuration": differing})
    body = {name: tensor for name, tensor in source_state.items() if not _in_head(name)}
    lines = [f"body: {len(body)} tensors loaded"]
    if "position_embedding" in body and target.position_embedding == "learned":
        table = body["position_embedding"]
        body["position_embedding"] = resize_position_embedding(
            table, source_config.grid, target.grid, source_config.prefix_tokens, method
        )
        lines.append(_position_line(source_config, target))
    own_head = {name: tensor for name, tensor in model.state_dict().items() if _in_head(name)}
    load_state(model, body | own_head)
    return [*lines, _head_line(source_state, target)]


def _in_head(name: str) -> bool:
    return name.startswith(("head.", "pre_logits."))


def _refuse(heading: str, problems: Mapping[str, list[str]]) -> None:
    """Raise CheckpointError with one line for each kind of problem that occurs, showing the first few of each."""
    lines = [heading]
    for kind, found in problems.items():
        if found:
            more = f", and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            lines.append(f"  {kind}: {', '.join(found[:_LISTED])}{more}")
    if len(lines) > 1:
        raise CheckpointError("\n".join(lines))


def _position_line(source: ViTConfig, target: ViTConfig) -> str:
    old, new = ("x".join(map(str, config.grid)) for config in (source, target))
    return f"position embedding {old} " + ("kept" if old == new else f"-> {new} (bilinear, corners aligned)")


def _head_line(source_state: Mapping[str, Tensor], target: ViTConfig) -> str:
    words = {"head.weight": "head", "pre_logits.weight": "pre-logits"}
    dropped = [word for name, word in words.items() if name in source_state]
    fresh = ["new pre-logits"] if target.representation_size else []
    fresh.append(f"new zero head with {target.num_classes} classes" if target.num_classes else "no new head")
    return ", ".join([f"{' and '.join(dropped)} dropped" if dropped else "no head to drop", *fresh])
