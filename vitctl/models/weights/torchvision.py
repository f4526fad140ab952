"""torchvision's Vision Transformers: a state dict and nothing else."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitctl.models.configs import Config, ViTConfig
from vitctl.models.weights.assumed import crop, settle, stored_meta
from vitctl.models.weights.formats import (
    Beside,
    Described,
    Format,
    Numerics,
    View,
    published_heads,
    vit_misfits,
    vit_shape,
)
from vitctl.models.weights.rules import Table, Tensors, entry, pair

NUMERICS = Numerics(gelu="erf", norm_eps=1e-6)
_LAYER = "encoder.layers.encoder_layer_{i}"

TABLE: Table = {
    "class_token": entry("class_token"),
    "position_embedding": entry("encoder.pos_embedding"),
    **pair("patch_embedding", "conv_proj"),
    **pair("blocks.{i}.norm1", f"{_LAYER}.ln_1"),
    "blocks.{i}.attention.qkv.weight": entry(f"{_LAYER}.self_attention.in_proj_weight"),
    "blocks.{i}.attention.qkv.bias": entry(f"{_LAYER}.self_attention.in_proj_bias"),
    **pair("blocks.{i}.attention.out", f"{_LAYER}.self_attention.out_proj"),
    **pair("blocks.{i}.norm2", f"{_LAYER}.ln_2"),
    **pair("blocks.{i}.mlp.fc1", f"{_LAYER}.mlp.0"),
    **pair("blocks.{i}.mlp.fc2", f"{_LAYER}.mlp.3"),
    **pair("norm", "encoder.ln"),
    **pair("pre_logits", "heads.pre_logits"),
    **pair("head", "heads.head"),
}


def _tidy(tensors: Tensors) -> Tensors:
    """Bring the MLP's names of the oldest published files to those of today."""
    renamed = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}
    return {_replaced(name, renamed): tensor for name, tensor in tensors.items()}


def _replaced(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        name = name.replace(old, new)
    return name


def _describe(view: View, _tensors: Tensors, beside: Beside) -> Described:
    shape = vit_shape(view, beside.num_heads, None)
    swag = {"eval_resize": crop(1), "resample": "bicubic_antialias"} if shape["image_size"] != 224 else {}
    values = settle("torchvision", {"num_heads": beside.num_heads or published_heads(shape), **swag})
    config = ViTConfig(**shape, gelu=values["gelu"], norm_eps=values["norm_eps"])
    return Described(config, stored_meta(config, values))


def _misfits(config: Config) -> Iterator[str]:
    yield from vit_misfits(config)
    if not isinstance(config, ViTConfig):
        return
    if config.gelu != "erf":
        yield "its GELU is exact and these weights were trained with the tanh form"
    if config.classifier != "token" or config.position_embedding != "learned":
        yield "it always has a class token and a learned position embedding"
    if not config.num_classes:
        yield "it always has a head"
    if config.image_size % config.patch_size:
        yield f"image_size {config.image_size} has to be a multiple of patch_size {config.patch_size} there"


def _notes(config: Config, meta: Mapping[str, Any]) -> Iterator[str]:
    assert isinstance(config, ViTConfig)
    arguments = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_layers": config.depth,
        "num_heads": config.num_heads,
        "hidden_dim": config.hidden_size,
        "mlp_dim": config.mlp_size,
        "num_classes": config.num_classes,
        **({"representation_size": config.representation_size} if config.representation_size else {}),
    }
    shown = [f"{key}={value}" for key, value in arguments.items()]
    if config.norm_eps != NUMERICS["norm_eps"]:
        shown.append(f"norm_layer=partial(torch.nn.LayerNorm, eps={config.norm_eps:g})")
    yield f"torchvision.models.VisionTransformer({', '.join(shown)})"
    if meta:
        yield "a torchvision state dict has no place for class names and pre-processing"


FORMAT = Format(
    "torchvision", "safetensors", ("conv_proj.weight",),
    _tidy, lambda _: TABLE, _describe, _misfits, _notes, lambda _config, _meta: {},
)  # fmt: skip
