"""timm's Vision Transformers: a state dict, and the `config.json` of its hub folders."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.download import CONFIG
from vitctl.models.weights.layouts import (
    SQUASH,
    Beside,
    Json,
    Table,
    Tensors,
    View,
    WeightsLayout,
    entry,
    pair,
    vit_misfits,
    vit_shape,
)
from vitctl.models.weights.meta import HALF

NORM_EPS = 1e-6
_GELU: dict[str, Literal["tanh", "erf"]] = {"gelu": "erf", "gelu_erf": "erf", "gelu_tanh": "tanh"}
_RESAMPLE = {"bilinear": "bilinear_antialias", "bicubic": "bicubic_antialias"}
# timm's names for the sizes that it knows: hidden size, depth, MLP size, heads; and the patches of each.
_ARCHITECTURES = {
    (192, 12, 768, 3): ("tiny", (16,)),
    (384, 12, 1536, 6): ("small", (8, 16, 32)),
    (768, 12, 3072, 12): ("base", (8, 16, 32)),
    (1024, 24, 4096, 16): ("large", (16, 32)),
    (1280, 32, 5120, 16): ("huge", (14,)),
}
# Architectures whose tensors look like any other's, and which compute something else than these tell.
_PECULIAR: dict[str, dict[str, Any]] = {
    "test_vit": {"num_heads": 2},
    "vit_base_patch16_gap_224": {"num_heads": 16},
    "vit_base_patch32_siglip_gap_256": {"act_layer": "gelu_tanh"},
    "vit_large_patch16_siglip_gap_512": {"act_layer": "gelu_tanh"},
    "vit_so400m_patch16_siglip_gap_256": {"act_layer": "gelu_tanh"},
    "vit_so400m_patch16_siglip_gap_384": {"act_layer": "gelu_tanh"},
    "vit_so400m_patch16_siglip_gap_512": {"act_layer": "gelu_tanh"},
    "vit_giantopt_patch16_siglip_gap_256": {"act_layer": "gelu_tanh"},
    "vit_giantopt_patch16_siglip_gap_384": {"act_layer": "gelu_tanh"},
}
_WHOLE_FROM = 384  # pixels: timm's configurations of larger images keep the whole image
_ANY_ARCHITECTURE = "vit_base_patch16_224"  # it takes every size as an argument

TABLE: Table = {
    "class_token": entry("cls_token"),
    "position_embedding": entry("pos_embed"),
    **pair("patch_embedding", "patch_embed.proj"),
    **pair("blocks.{i}.norm1", "blocks.{i}.norm1"),
    **pair("blocks.{i}.attention.qkv", "blocks.{i}.attn.qkv"),
    **pair("blocks.{i}.attention.out", "blocks.{i}.attn.proj"),
    **pair("blocks.{i}.norm2", "blocks.{i}.norm2"),
    **pair("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    **pair("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    **pair("norm", "norm"),
    **pair("pre_logits", "pre_logits.fc"),  # read from old files only
    **pair("head", "head"),
}

# timm's crop_mode and our eval_method; "border" pads with the mean colour, as we do.
_METHODS = {"center": "torchvision", "squash": "square", "border": "letterbox"}


def _describe(
    row: WeightsLayout, view: View, _tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    config = beside.config if "architecture" in beside.config else {}
    args = {**_PECULIAR.get(config.get("architecture", ""), {}), **(config.get("model_args") or {})}
    pretrained = config.get("pretrained_cfg") or {}
    num_heads = beside.num_heads or args.get("num_heads")
    size = _side(args.get("img_size") or (pretrained.get("input_size") or [0, 0])[-1])
    shape = vit_shape(view, num_heads, size)
    if shape["classifier"] == "token" and config.get("global_pool", "token") != "token":
        raise CheckpointError(
            f"config.json: global_pool {config['global_pool']!r} beside a class token is not supported"
        )
    activation = args.get("act_layer", "gelu")
    if activation not in _GELU:
        raise CheckpointError(f"config.json: act_layer {activation!r}, known are {', '.join(_GELU)}")
    recorded = _recorded(pretrained) | {"num_heads": num_heads}
    if config:
        recorded |= {"gelu": _GELU[activation], "norm_eps": config.get("norm_eps", NORM_EPS)}
        recorded["position_resize"] = "bicubic_antialias"  # timm's rule
    if config or shape["classifier"] == "gap":
        recorded["classifier"] = shape["classifier"]
    if shape["image_size"] >= _WHOLE_FROM:
        row = replace(row, assumed={**row.assumed, "eval_resize": 1})
    names = config.get("label_names") or pretrained.get("label_names") or ()
    return row.vit(shape, recorded, beside, names)


def _side(size: int | list[int]) -> int:
    """Return the side of a square image: timm writes a number, or height and width."""
    sides = size if isinstance(size, list) else [size]
    if len(set(sides)) != 1:
        raise CheckpointError(f"config.json: img_size {size} is not square, which is not supported")
    return sides[0]


def _recorded(pretrained: Json) -> dict[str, Any]:
    """Return what timm's pretrained_cfg records, by our names."""
    mode, share = pretrained.get("crop_mode") or "center", pretrained.get("crop_pct")
    if mode not in _METHODS:
        raise CheckpointError(
            f"config.json: crop_mode {mode!r} is not supported, known are {', '.join(_METHODS)}"
        )
    if mode == "border" and (share or 1) != 1:
        raise CheckpointError(
            f"config.json: crop_mode 'border' with crop_pct {share} is not supported, only 1"
        )
    interpolation = pretrained.get("interpolation")
    return {
        "mean": pretrained.get("mean"),
        "std": pretrained.get("std"),
        "eval_method": _METHODS[mode] if pretrained else None,
        "eval_resize": SQUASH if mode != "center" and (share or 1) >= 1 else share,
        "eval_share": share,
        "resample": _RESAMPLE.get(interpolation, interpolation) if interpolation else None,
    }


def _misfits(row: WeightsLayout, config: Config) -> Iterator[str]:
    yield from vit_misfits(row, config)
    if isinstance(config, ViTConfig) and config.representation_size:
        yield "it has no pre-logits layer; fine-tune first, or write with no pre-logits"


def _notes(config: ViTConfig, _meta: Json) -> Iterator[str]:
    architecture = _architecture(config)
    arguments = {"img_size": config.image_size, "num_classes": config.num_classes} | _switches(config)
    if architecture == _ANY_ARCHITECTURE:
        arguments = _sizes(config) | arguments
    shown = [f"{key}={value!r}" for key, value in arguments.items()]
    if config.norm_eps != NORM_EPS:
        shown.append(f"norm_layer=partial(torch.nn.LayerNorm, eps={config.norm_eps:g})")
    yield f"timm.create_model({architecture!r}, checkpoint_path=FILE, {', '.join(shown)})"


def _architecture(config: ViTConfig) -> str:
    size = (config.hidden_size, config.depth, config.mlp_size, config.num_heads)
    name, patches = _ARCHITECTURES.get(size, ("", ()))
    return f"vit_{name}_patch{config.patch_size}_224" if config.patch_size in patches else _ANY_ARCHITECTURE


def _sizes(config: ViTConfig) -> dict[str, Any]:
    ratio = config.mlp_size / config.hidden_size
    if int(config.hidden_size * ratio) != config.mlp_size:  # timm rounds down
        ratio = math.nextafter(ratio, math.inf)
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "embed_dim": config.hidden_size,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": ratio,
    }


def _switches(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of timm's models that change the maths where it differs from timm's default."""
    switches: dict[str, Any] = {} if config.gelu == "erf" else {"act_layer": "gelu_tanh"}
    if config.classifier == "gap":
        switches |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    if config.position_embedding == "none":
        switches["pos_embed"] = "none"
    return switches


def _sidecars(config: ViTConfig, meta: Json) -> dict[str, dict[str, Any]]:
    size = config.image_size
    method = meta.get("eval_method", "square")
    modes = {ours: theirs for theirs, ours in _METHODS.items()}
    resize = size if method in ("square", "letterbox") else meta.get("eval_resize") or size
    share = size / resize
    if math.floor(size / share) != resize:  # timm rounds down
        share = math.nextafter(share, 0)
    backwards = {ours: theirs for theirs, ours in _RESAMPLE.items()}
    pretrained = {
        "mean": meta.get("mean", HALF),
        "std": meta.get("std", HALF),
        "input_size": [3, size, size],
        "fixed_input_size": True,
        "interpolation": backwards.get(meta.get("resample", ""), "bilinear"),
        "crop_mode": modes.get(method, "center"),
        "crop_pct": share,
        "num_classes": config.num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    described = {
        "architecture": _architecture(config),
        "num_classes": config.num_classes,
        "num_features": config.hidden_size,
        "global_pool": "avg" if config.classifier == "gap" else "token",
        "model_args": _sizes(config) | _switches(config),
        "pretrained_cfg": pretrained,
        **({"label_names": list(meta["class_names"])} if meta.get("class_names") else {}),
        # timm has no field for it, but the way back must not lose it.
        **({} if config.norm_eps == NORM_EPS else {"norm_eps": config.norm_eps}),
    }
    return {CONFIG: described}


# Also the authors' files of MAE, DINO and DeiT, which were trained with ImageNet's mean and std. Assumed are
# timm's defaults for Vision Transformers.
LAYOUT = WeightsLayout(
    name="timm",
    title="timm",
    mark="patch_embed.proj.weight",
    table=lambda _num_heads: TABLE,
    describe=_describe,
    documented={},
    assumed={
        "mean": HALF,
        "std": HALF,
        "gelu": "erf",
        "norm_eps": NORM_EPS,
        "position_resize": "bicubic_antialias",
        "classifier": "token",
        "num_heads": "hidden size / 64",
        "eval_method": "torchvision",  # timm's transforms are torchvision's
        "eval_resize": 0.9,
        "resample": "bicubic_antialias",
    },
    misfits=_misfits,
    holds={"classifier": ("gap",), "position_embedding": ("none",), "gelu": ("erf",)},
    notes=_notes,
    sidecars=_sidecars,
)
