"""open_clip's and OpenAI's CLIP: only the image tower is read, from a file of both towers or of one.

A timm tower inside open_clip (SigLIP) has timm's names after a prefix, and is read as timm's.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.download import CONFIG, OPEN_CLIP
from vitctl.models.weights.huggingface import BARE_TABLE, BARE_TOKEN, CLIP_REMARK, GELU, KEYS
from vitctl.models.weights.json_keys import Known, checked
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
    contradiction,
    entry,
    pair,
    renamed,
    vit_shape,
)
from vitctl.models.weights.meta import CLIP

NORM_EPS = 1e-5
_TRUNK = "visual.trunk."
_LAYER = "visual.transformer.resblocks.{i}"
_TOWER = "model_cfg.vision_cfg"
# The keys of open_clip_config.json that are used, and the ViT fields that the tensors show.
_KEYS = Known(
    {
        "an object": (
            "model_cfg", _TOWER, f"{_TOWER}.act_kwargs", f"{_TOWER}.norm_kwargs", "preprocess_cfg",
        ),
        "a whole number above 0": tuple(
            f"{_TOWER}.{key}" for key in ("width", "head_width", "image_size", "patch_size", "layers")
        ),
        "a number": (f"{_TOWER}.norm_kwargs.eps",),
        "true or false": ("model_cfg.quick_gelu", f"{_TOWER}.no_ln_pre", f"{_TOWER}.final_ln_after_pool"),
        "a text": (
            f"{_TOWER}.timm_model_name", f"{_TOWER}.timm_pool", f"{_TOWER}.pool_type",
            f"{_TOWER}.act_kwargs.approximate", "preprocess_cfg.resize_mode", "preprocess_cfg.interpolation",
        ),
        "a list of three numbers": ("preprocess_cfg.mean",),
        "a list of three numbers above 0": ("preprocess_cfg.std",),
    },
    settled={
        **dict.fromkeys(
            (
                "attentional_pool", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner",
                "scale_attn", "scale_fc", "input_patchnorm", "global_average_pool",
            ),
            (False,),
        ),
        "block_type": ("default",),
        "mode": ("RGB",),
    },
    # The position table is a tensor, however it was initialised; the size is that of the tower.
    harmless=r"(?!model_cfg\.|preprocess_cfg\.).*"
    r"|model_cfg\.(embed_dim|text_cfg|multimodal_cfg|custom_text|cast_dtype"
    r"|output_dict|nonscalar_logit_scale|init_logit_\w+)|preprocess_cfg\.(size|fill_color)"
    r"|model_cfg\.vision_cfg\.(mlp_ratio|ls_init_value|patch_dropout|attn_pooler_\w+"
    r"|pos_embed_type|output_tokens"
    r"|timm_(model_pretrained|proj|proj_bias|drop|drop_path))",
)  # fmt: skip
_SIZES = {"width": "hidden_size", "layers": "depth", "patch_size": "patch_size"}
# Resize mode -> our method, and the share of the side that the crop keeps.
_RESIZING = {"shortest": ("torchvision", 1.0), "squash": ("square", SQUASH)}
_OF_TIMM = {"torchvision": "center", "square": "squash"}
_POOLS = {"tok": "token", "avg": "patches"}

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


def without_trunk(tensors: Tensors, beside: Beside) -> tuple[Tensors, Beside]:
    """Return a timm tower inside open_clip, and its configuration, as timm's; others unchanged."""
    trunk = {name.removeprefix(_TRUNK): tensor for name, tensor in tensors.items() if name.startswith(_TRUNK)}
    if not trunk:
        return tensors, beside
    whole = checked(OPEN_CLIP, beside.open_clip, _KEYS)
    ours, images = whole.get("model_cfg", {}).get("vision_cfg", {}), whole.get("preprocess_cfg", {})
    if "timm_model_name" in ours:
        method, _ = _resizing(images)
        described = {
            "architecture": ours["timm_model_name"],
            "global_pool": ours.get("timm_pool") or None,
            "pretrained_cfg": {
                **{name: images.get(name, list(CLIP[name])) for name in CLIP},
                "input_size": [3, *[ours.get("image_size", 224)] * 2],
                "crop_pct": 1.0,
                "crop_mode": _OF_TIMM[method],
                "interpolation": _interpolation(images),
            },
        }
        beside = replace(beside, config=described)
    # The head projects to the features that images and texts share.
    return {name: tensor for name, tensor in trunk.items() if not name.startswith("head.")}, beside


def _tidy(tensors: Tensors) -> Tensors:
    """Keep only the image tower without its projection, with the prefix of a file of both towers."""
    bare = "class_embedding" in tensors and "conv1.weight" in tensors
    return renamed(tensors, {"^": "visual."} if bare else {}, dropped=r"^(?!visual\.)|^visual\.proj$")


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
    method, share = _resizing(images)
    pool = ours.get("pool_type", "tok")
    if pool not in _POOLS or ours.get("no_ln_pre", False) == shape["norm_pre"]:
        words = "pool_type is neither 'tok' nor 'avg', or no_ln_pre is not that of the tensors"
        raise contradiction(OPEN_CLIP, words)
    shape |= {
        "classifier": _POOLS[pool],
        "norm_at": "pooled" if ours.get("final_ln_after_pool") else "tokens",
    }
    tanh = ours.get("act_kwargs", {}).get("approximate") == "tanh"
    activation = "quick_gelu" if model.get("quick_gelu") else "gelu_pytorch_tanh" if tanh else "gelu"
    if not model:  # transformers' configuration of the same weights may be next to them
        activation = tower.get("hidden_act", "quick_gelu")
    recorded = {
        "num_heads": heads,
        "gelu": GELU.get(activation) if model or tower else None,
        "mean": images.get("mean"),
        "std": images.get("std"),
        "eval_method": method if images else None,
        "eval_resize": share if images else None,
        "resample": RESAMPLE[_interpolation(images)] if images else None,
        "norm_eps": ours.get("norm_kwargs", {}).get("eps"),
    }
    described, meta = row.vit(shape, recorded, beside)
    return described, meta | {"remarks": [CLIP_REMARK, *meta.get("remarks", ())]}


def _resizing(images: Json) -> tuple[str, float]:
    mode = images.get("resize_mode") or "shortest"
    if mode not in _RESIZING:
        raise CheckpointError(
            OPEN_CLIP, f"resize_mode {mode!r} is not supported, known are {', '.join(_RESIZING)}"
        )
    return _RESIZING[mode]


def _interpolation(images: Json) -> str:
    """Return timm's word for the interpolation; open_clip uses bicubic for "random"."""
    word = images.get("interpolation") or "bicubic"
    if word not in ("bicubic", "bilinear", "random"):
        raise CheckpointError(OPEN_CLIP, f"interpolation {word!r}, known are bicubic, bilinear and random")
    return "bilinear" if word == "bilinear" else "bicubic"


def _notes(_config: ViTConfig, _meta: Json) -> Iterator[str]:
    yield "the image tower of open_clip.create_model(...), without its projection"


# Tensors do not distinguish quick GELU (OpenAI, MetaCLIP, DFN) from GELU (LAION, DataComp): open_clip's
# default is assumed.
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
    holds={"classifier": ("patches",), "norm_at": ("pooled",)},
    needs={"gelu": ("erf", "quick", "tanh"), "norm_pre": (bool,), "patch_bias": (False,)},
    notes=_notes,
)
