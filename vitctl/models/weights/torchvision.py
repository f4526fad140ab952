"""torchvision's Vision Transformers: a state dict and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.layouts import (
    Beside,
    Json,
    Table,
    Tensors,
    View,
    WeightsLayout,
    block,
    entry,
    pair,
    renamed,
    vit_shape,
)
from vitctl.models.weights.meta import IMAGENET

NORM_EPS = 1e-6
_LAYER = "encoder.layers.encoder_layer_{i}"
# Names in the oldest published files -> today's.
_TODAY = {r"\.mlp\.linear_1\.": ".mlp.0.", r"\.mlp\.linear_2\.": ".mlp.3."}

TABLE: Table = {
    "class_token": entry("class_token"),
    "position_embedding": entry("encoder.pos_embedding"),
    **pair("patch_embedding", "conv_proj"),
    **block(_LAYER, "ln_1", "self_attention.out_proj", "ln_2", ("mlp.0",), "mlp.3"),
    "blocks.{i}.attention.qkv.weight": entry(f"{_LAYER}.self_attention.in_proj_weight"),
    "blocks.{i}.attention.qkv.bias": entry(f"{_LAYER}.self_attention.in_proj_bias"),
    **pair("norm", "encoder.ln"),
    **pair("pre_logits", "heads.pre_logits"),
    **pair("head", "heads.head"),
}


def _describe(
    row: WeightsLayout, view: View, _tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    shape = vit_shape(view, beside.num_heads, None)
    swag = {"eval_resize": 1, "resample": "bicubic_antialias"} if shape["image_size"] != 224 else {}
    usual = {"eval_resize": 224 / 242} if (shape["hidden_size"], shape["patch_size"]) == (1024, 16) else {}
    row = replace(row, assumed={**row.assumed, **usual})
    return row.vit(shape, {"num_heads": beside.num_heads, **swag}, beside)


def _lacks(config: ViTConfig) -> tuple[tuple[object, str], ...]:
    size, patch = config.image_size, config.patch_size
    return (
        (config.gelu != "erf", "its GELU is exact and these weights were trained with the tanh form"),
        (not config.num_classes, "it always has a head"),
        (size % patch, f"image_size {size} has to be a multiple of patch_size {patch} there"),
    )


def arguments(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of torchvision's class; `norm_layer` is given by its number, as `norm_eps`."""
    return {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_layers": config.depth,
        "num_heads": config.num_heads,
        "hidden_dim": config.hidden_size,
        "mlp_dim": config.mlp_size,
        "num_classes": config.num_classes,
        **({"representation_size": config.representation_size} if config.representation_size else {}),
        "norm_eps": config.norm_eps,
    }


def _notes(config: ViTConfig, meta: Json) -> Iterator[str]:
    given = arguments(config)
    eps = given.pop("norm_eps")
    shown = [f"{key}={value}" for key, value in given.items()]
    if eps != NORM_EPS:
        shown.append(f"norm_layer=functools.partial(torch.nn.LayerNorm, eps={eps:g})")
    yield f"torchvision.models.VisionTransformer({', '.join(shown)})"
    if meta:
        yield "a torchvision state dict has no place for class names and pre-processing"


# All published files use ImageNet's mean and std. At 224 pixels there are three presets: resize 256 or 242
# and bilinear, 224 and bicubic (SWAG); at other sizes only SWAG's.
LAYOUT = WeightsLayout(
    name="torchvision",
    title="torchvision",
    mark="conv_proj.weight",
    table=lambda _num_heads: TABLE,
    describe=_describe,
    tidy=lambda tensors: renamed(tensors, _TODAY),
    documented={
        **IMAGENET,
        "gelu": "erf",
        "norm_eps": NORM_EPS,
        "position_resize": "bicubic_aligned",
        "eval_method": "torchvision",
    },
    assumed={
        "num_heads": "hidden size / 64",
        "eval_resize": 224 / 256,
        "resample": "bilinear_antialias",
    },
    lacks=_lacks,
    holds={"gelu": ("erf",)},
    notes=_notes,
)
