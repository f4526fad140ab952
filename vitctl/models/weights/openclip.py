"""open_clip's and OpenAI's CLIP: the image tower alone is read, from a file of both towers or of one.

A tower of timm inside open_clip (SigLIP) has timm's names behind a prefix, and is read as timm's.
"""

from collections.abc import Iterator
from typing import Any

from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.download import CONFIG, OPEN_CLIP
from vitctl.models.weights.huggingface import BARE_TABLE, BARE_TOKEN, CLIP_REMARK, GELU, KEYS
from vitctl.models.weights.json_keys import Keys, checked
from vitctl.models.weights.layouts import (
    RESAMPLE,
    SQUASH,
    Beside,
    Json,
    Table,
    Tensors,
    View,
    WeightsLayout,
    block,
    check_sizes,
    entry,
    pair,
    vit_misfits,
    vit_shape,
)
from vitctl.models.weights.meta import CLIP

NORM_EPS = 1e-5
_TRUNK = "visual.trunk."
_LAYER = "visual.transformer.resblocks.{i}"
# What is used of open_clip_config.json, and the fields of a ViT that the tensors tell.
_KEYS: Keys = {
    "an object": ("model_cfg", "model_cfg.vision_cfg", "preprocess_cfg"),
    "a whole number above 0": tuple(
        f"model_cfg.vision_cfg.{key}" for key in ("width", "head_width", "image_size", "patch_size", "layers")
    ),
    "true or false": ("model_cfg.quick_gelu",),
    "a text": ("preprocess_cfg.resize_mode", "preprocess_cfg.interpolation"),
    "a list of three numbers": ("preprocess_cfg.mean",),
    "a list of three numbers above 0": ("preprocess_cfg.std",),
}
_SIZES = {"width": "hidden_size", "layers": "depth", "patch_size": "patch_size"}
# How images are resized: the method, and the share of the side that the crop keeps.
_RESIZING = {"shortest": ("torchvision", 1.0), "squash": ("square", SQUASH)}

TABLE: Table = {
    "class_token": entry("visual.class_embedding", layout=BARE_TOKEN),
    "position_embedding": entry("visual.positional_embedding", layout=BARE_TABLE),
    "patch_embedding.weight": entry("visual.conv1.weight"),
    **pair("norm_pre", "visual.ln_pre"),
    **block(_LAYER, "ln_1", "attn.out_proj", "ln_2", ("mlp.c_fc",), "mlp.c_proj"),
    "blocks.{i}.attention.qkv.weight": entry(f"{_LAYER}.attn.in_proj_weight"),
    "blocks.{i}.attention.qkv.bias": entry(f"{_LAYER}.attn.in_proj_bias"),
    **pair("norm", "visual.ln_post"),
}


def without_trunk(tensors: Tensors) -> Tensors:
    """Return the tensors of a timm tower inside open_clip by timm's names; others as they are."""
    trunk = {name.removeprefix(_TRUNK): tensor for name, tensor in tensors.items() if name.startswith(_TRUNK)}
    return trunk or tensors


def _tidy(tensors: Tensors) -> Tensors:
    """Leave the image tower, without its projection, with the prefix of a file of both towers."""
    bare = "class_embedding" in tensors and "conv1.weight" in tensors
    named = {f"visual.{name}": tensor for name, tensor in tensors.items()} if bare else tensors
    return {
        name: tensor for name, tensor in named.items() if name.startswith("visual.") and name != "visual.proj"
    }


def _describe(
    row: WeightsLayout, view: View, _tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    whole = checked(OPEN_CLIP, beside.open_clip, _KEYS)
    model, tower = whole.get("model_cfg", {}), checked(CONFIG, beside.config, KEYS).get("vision_config", {})
    ours, images = model.get("vision_cfg") or {}, whole.get("preprocess_cfg", {})
    heads = beside.num_heads or tower.get("num_attention_heads")
    if "width" in ours:
        heads = beside.num_heads or ours["width"] // ours.get("head_width", 64)
    shape = vit_shape(view, heads, ours.get("image_size") or tower.get("image_size"))
    check_sizes(OPEN_CLIP, ours, shape, _SIZES)
    mode = images.get("resize_mode") or "shortest"
    if mode not in _RESIZING:
        raise CheckpointError(
            f"{OPEN_CLIP}: resize_mode {mode!r} is not supported, known are {', '.join(_RESIZING)}"
        )
    method, share = _RESIZING[mode] if images else (None, None)
    activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    if not model:  # transformers' configuration of the same weights may lie beside them
        activation = tower.get("hidden_act", "quick_gelu")
    interpolation = images.get("interpolation", "")
    recorded = {
        "num_heads": heads,
        "gelu": GELU.get(activation) if model or tower else None,
        "mean": images.get("mean"),
        "std": images.get("std"),
        "eval_method": method,
        "eval_resize": share,
        "resample": RESAMPLE.get(interpolation, interpolation) or None,
    }
    described, meta = row.vit(shape, recorded, beside)
    return described, meta | {"remarks": [CLIP_REMARK]}


def _notes(_config: ViTConfig, _meta: Json) -> Iterator[str]:
    yield "the image tower of open_clip.create_model(...), without its projection"


# Tensors do not tell quick GELU (OpenAI, MetaCLIP, DFN) from GELU (LAION, DataComp): open_clip's own default
# is assumed.
LAYOUT = WeightsLayout(
    name="openclip",
    title="open_clip",
    mark="visual.class_embedding",
    table=lambda _num_heads: TABLE,
    describe=_describe,
    tidy=_tidy,
    documented={"norm_eps": NORM_EPS, "position_resize": "bicubic_antialias"},
    assumed={
        **CLIP,
        "gelu": "erf",
        "num_heads": "hidden size / 64",
        "eval_method": "torchvision",
        "eval_resize": 1.0,
        "resample": "bicubic_antialias",
    },
    misfits=vit_misfits,
    needs={"gelu": ("erf", "quick"), "norm_pre": (True,), "patch_bias": (False,)},
    notes=_notes,
)
