"""timm's Vision Transformers: a state dict, and the `config.json` of its hub folders.

Three classes of timm hold our networks: `VisionTransformer`, `Eva` (rotary positions, no bias of keys) and
`Beit` (relative position biases). Their files differ in spelling: `tidy` unifies them, `_spell` reverts it.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from vitctl.errors import CheckpointError, refuse
from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.download import CONFIG
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
    check_own,
    check_sizes,
    entry,
    pair,
    renamed,
    stacked,
    vit_shape,
)
from vitctl.models.weights.meta import CLIP, HALF, IMAGENET

NORM_EPS = 1e-6
LARGER_EPS = 1e-5  # of CLIP and DINOv3
_GELU: dict[str, Literal["tanh", "erf", "quick"]] = {
    "gelu": "erf",
    "gelu_erf": "erf",
    "gelu_tanh": "tanh",
    "quick_gelu": "quick",
}
# Pattern in an architecture's name -> numerics that neither tensors nor config.json show.
_PECULIAR: dict[str, dict[str, Any]] = {
    r"^test_vit$": {"num_heads": 2},
    r"^vit_base_patch16_gap_224$": {"num_heads": 16},
    r"patch32_siglip|(so400m|giantopt)_patch16_siglip|large_patch16_siglip_(gap_)?512": {
        "act_layer": "gelu_tanh"
    },
    r"quickgelu": {"act_layer": "quick_gelu"},
    r"^vit_.*(_clip_|_dinov3|_lingbot)": {"norm_eps": LARGER_EPS},
    r"_dinov3|_lingbot": {"rotary": "dinov3"},
    r"^eva02_|_rope_reg": {"rotary": "eva"},
}
# Features that vitctl lacks, by a pattern in the architecture's name, or by a tensor.
_FOREIGN_NAMES = {
    r"_rpn_|enormous": "norms after its branches",
    r"_pe_|_rope_(mixed_|ape_)?\d|_sapiens": "rotary positions by a rule of its own",
}
_FOREIGN_TENSORS = {
    "blocks.0.attn.norm.weight": "a norm inside attention",
    "blocks.0.attn.q_norm.weight": "norms of queries and keys",
    "blocks.0.attn.lambda_q1": "differential attention",
    "blocks.0.attns.0.attn.proj.weight": "parallel branches",
    "blocks.0.in_proj.weight": "parallel branches",
    "patch_embed.norm.weight": "a norm of its patches",
    "rope.freqs": "learned rotary positions",
    "dist_token": "a distillation token",
}
_ROUNDED_UP = 3  # half of such a margin, by 4, comes before an even number
_WHOLE_FROM = 384  # pixels: timm's configurations of larger images keep the whole image
# Pattern in a name -> hidden size, depth, MLP size and heads; the first match counts.
_SIZES: dict[str, tuple[int, int, int, int]] = {
    r"^eva02_tiny_": (192, 12, 512, 3),
    r"^eva02_small_": (384, 12, 1024, 6),
    r"^eva02_base_": (768, 12, 2048, 12),
    r"^eva02_large_": (1024, 24, 2730, 16),
    r"_36x1_": (384, 36, 1536, 6),
    r"_base_patch\d+_plus_": (896, 12, 3584, 14),
    r"_tiny_patch": (192, 12, 768, 3),
    r"_small_(plus_)?patch": (384, 12, 1536, 6),
    r"_medium_patch": (512, 12, 2048, 8),
    r"_base_patch16_gap_": (768, 12, 3072, 16),
    r"_base_patch": (768, 12, 3072, 12),
    r"_large_patch": (1024, 24, 4096, 16),
    r"_huge_plus_patch": (1280, 32, 5120, 20),
    r"_huge_patch": (1280, 32, 5120, 16),
    r"_giant_patch\d+_(reg\d_)?(dinov2|tipsv2|lingbot)": (1536, 40, 4096, 24),
    r"_giant_patch\d+_(?!radio|sapiens)": (1408, 40, 6144, 16),
    r"_giantopt_patch": (1536, 40, 6144, 16),
    r"_gigantic_patch": (1664, 48, 8192, 16),
    r"_so400m_patch": (1152, 27, 4304, 16),
    r"_7b_patch": (4096, 40, 8192, 32),
}
_FIELDS = ("hidden_size", "depth", "mlp_size", "num_heads", "patch_size")
# timm's arguments -> the ViT fields for which they override the name.
_ARGUMENTS = {
    "embed_dim": "hidden_size",
    "depth": "depth",
    "num_heads": "num_heads",
    "patch_size": "patch_size",
}
# Published names by family. The first one in a family accepts every size as an argument.
_NAMES: dict[str, tuple[str, ...]] = {
    "plain": (
        *("vit_base_patch16_224", "vit_base_patch8_224", "vit_base_patch32_224", "vit_tiny_patch16_224"),
        *("vit_small_patch8_224", "vit_small_patch16_224", "vit_small_patch32_224"),
        *("vit_large_patch16_224", "vit_large_patch32_224", "vit_huge_patch14_224"),
    ),
    "clip": (
        *("vit_base_patch16_clip_224", "vit_base_patch32_clip_224", "vit_large_patch14_clip_224"),
        *("vit_huge_patch14_clip_224", "vit_giant_patch14_clip_224", "vit_gigantic_patch14_clip_224"),
    ),
    "siglip": (
        *("vit_base_patch16_siglip_224", "vit_base_patch32_siglip_256", "vit_large_patch16_siglip_256"),
        *("vit_so400m_patch14_siglip_224", "vit_so400m_patch16_siglip_256"),
        "vit_giantopt_patch16_siglip_256",
    ),
    "dinov2": tuple(f"vit_{size}_patch14_{{registers}}dinov2" for size in ("base", "small", "large")),
    "deit3": (
        *("deit3_base_patch16_224", "deit3_small_patch16_224", "deit3_medium_patch16_224"),
        *("deit3_large_patch16_224", "deit3_huge_patch14_224"),
    ),
    "swiglu": ("vit_giant_patch14_{registers}dinov2",),
    "dinov3": tuple(f"vit_{size}_patch16_dinov3{{biases}}" for size in ("small", "base", "large")),
    "dinov3 swiglu": (
        *("vit_small_plus_patch16_dinov3{biases}", "vit_huge_plus_patch16_dinov3{biases}"),
        "vit_7b_patch16_dinov3",
    ),
    "eva": (
        *("eva02_base_patch14_448", "eva02_tiny_patch14_336", "eva02_small_patch14_336"),
        "eva02_large_patch14_448",
    ),
    "beit": ("beitv2_base_patch16_224", "beitv2_large_patch16_224"),
}
_EVA, _BEIT = ("dinov3", "dinov3 swiglu", "eva"), "beit"
# The defaults of `VisionTransformer`.
_PLAIN = {
    "global_pool": "token", "init_values": None, "qkv_bias": True, "class_token": True,
    "no_embed_class": False, "pos_embed": "learn", "reg_tokens": 0, "pre_norm": False, "act_layer": "gelu",
}  # fmt: skip

TABLE: Table = {
    "class_token": entry("cls_token"),
    "registers": entry("reg_token"),
    "position_embedding": entry("pos_embed"),
    **pair("patch_embedding", "patch_embed.proj"),
    **pair("norm_pre", "norm_pre"),
    **block("blocks.{i}", "norm1", "attn.proj", "norm2", ("mlp.fc1",), "mlp.fc2"),
    **pair("blocks.{i}.attention.qkv", "blocks.{i}.attn.qkv"),
    "blocks.{i}.attention.qkv.query_bias": entry("blocks.{i}.attn.q_bias"),
    "blocks.{i}.attention.qkv.value_bias": entry("blocks.{i}.attn.v_bias"),
    "blocks.{i}.attention.relative_bias": entry("blocks.{i}.attn.relative_position_bias_table"),
    "blocks.{i}.scale1": entry("blocks.{i}.ls1.gamma"),
    **pair("blocks.{i}.mlp.norm", "blocks.{i}.mlp.norm"),
    "blocks.{i}.scale2": entry("blocks.{i}.ls2.gamma"),
    **pair("norm", "norm"),
    "pool.probe": entry("attn_pool.latent"),
    **pair("pool.qkv", "attn_pool.q", "attn_pool.kv", shares=(1, 2)),
    **pair("pool.out", "attn_pool.proj"),
    **pair("pool.norm", "attn_pool.norm"),
    **pair("pool.mlp.fc1", "attn_pool.mlp.fc1"),
    **pair("pool.mlp.fc2", "attn_pool.mlp.fc2"),
    **pair("pre_logits", "pre_logits.fc"),  # read from old files only
    **pair("head", "head"),
}
_QKV = tuple(f".attn.{letter}_proj.weight" for letter in "qkv")
_GATED = {kind: (f".mlp.fc1_g.{kind}", f".mlp.fc1_x.{kind}") for kind in ("weight", "bias")}


def tidy(tensors: Tensors) -> Tensors:
    """Bring the spellings of timm's three classes to that of `TABLE`."""
    spellings = {r"\.gamma_([12])$": r".ls\1.gamma", r"\.([qv])_proj\.bias$": r".\1_bias"}
    named = stacked(renamed(tensors, spellings), ".attn.qkv.weight", _QKV)
    for kind, parts in _GATED.items():
        named = stacked(named, f".mlp.fc1.{kind}", parts)
    return named


def _spell(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Bring the spelling of the table to that of timm's class for `config`."""
    spelt = dict(tensors)
    if config.registers and config.prefix_rows and "pos_embed" in spelt:
        # With registers timm has no position for the class token: it is part of the token.
        row, spelt["pos_embed"] = (part.clone() for part in spelt["pos_embed"].tensor_split([1], dim=1))
        spelt["cls_token"] = spelt["cls_token"] + row
    if structure(config) in (*_EVA, _BEIT):
        spelt = renamed(spelt, {r"\.ls([12])\.gamma$": r".gamma_\1"})
    if config.mlp_norm:
        spelt = _split(spelt, ".attn.qkv.weight", _QKV)
        spelt = renamed(spelt, {r"\.([qv])_bias$": r".\1_proj.bias"})
    if config.mlp_norm or _aligned(config):
        for kind, parts in _GATED.items():
            spelt = _split(spelt, f".mlp.fc1.{kind}", parts)
    return spelt


def _split(tensors: Tensors, whole: str, parts: tuple[str, ...]) -> Tensors:
    """Undo `stacked`, for parts of equal size."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        pieces = tensor.chunk(len(parts)) if name.endswith(whole) and "pool" not in name else ()
        stem = name.removesuffix(whole)
        found |= {stem + part: piece.clone() for part, piece in zip(parts, pieces, strict=False)} or {
            name: tensor
        }
    return found


_PRETRAINED = r"url|file|hf_hub_\w+|source|architecture|tag|custom_load|state_dict|test_\w+|min_input_size"
_PRETRAINED += r"|num_(classes|features)|label\w*_descriptions|pool_size|first_conv|classifier|license"
_PRETRAINED += r"|description|origin_url|paper_\w+|notes|model_args|vitctl|norm_eps|global_pool"
_TOLD = r"num_classes|mlp_ratio|qkv_(bias|fused)|class_token|no_embed_class|(num_)?reg_tokens|init_values"
_TOLD += (
    r"|pre_norm|(use_)?fc_norm|\w*drop(_path)?_rate|weight_init|fix_init|(dynamic|strict)_img_size|pos_embed"
)
_TOLD += r"|use_(abs_pos_emb|(shared_)?rel_pos_bias)|swiglu_(mlp|align_to)|scale_mlp|head_init_scale"
# The keys of config.json that are used. timm uses no others outside the two objects.
KEYS = Known(
    {
        "an object": ("model_args", "pretrained_cfg"),
        "a text": (
            *("architecture", "global_pool", "model_args.act_layer", "model_args.global_pool"),
            *("pretrained_cfg.crop_mode", "pretrained_cfg.interpolation"),
        ),
        "a list of texts": ("label_names", "pretrained_cfg.label_names", "pretrained_cfg.labels"),
        "a whole number above 0": ("model_args.num_heads", "model_args.embed_dim", "model_args.depth"),
        "a whole number above 0, or a list of two": ("model_args.img_size", "model_args.patch_size"),
        "a list of three whole numbers": ("pretrained_cfg.input_size",),
        "a number": ("norm_eps", "model_args.norm_eps"),
        "a number above 0": ("pretrained_cfg.crop_pct",),
        "true or false": ("model_args.use_rot_pos_emb", "pretrained_cfg.fixed_input_size"),
        "a list of three numbers": ("pretrained_cfg.mean",),
        "a list of three numbers above 0": ("pretrained_cfg.std",),
    },
    settled={
        **dict.fromkeys(("proj_bias", "final_norm"), (True,)),
        **dict.fromkeys(
            (
                "qk_norm", "scale_attn_norm", "scale_mlp_norm", "scale_attn_inner", "attn_only_layer_scale",
                "pool_include_prefix", "dynamic_img_pad", "use_post_norm", "use_pre_transformer_norm",
                "use_naflex",
            ),
            (False,),
        ),
        "in_chans": (3,),
        "label_offset": (0,),
        "attn_type": ("eva",),
    },
    harmless=rf"[^.]*|pretrained_cfg\.({_PRETRAINED})|model_args\.({_TOLD})",
)  # fmt: skip
# timm's defaults for pretrained_cfg.
_DEFAULTS: Json = {**IMAGENET, "interpolation": "bicubic", "crop_pct": 0.875}
# timm's crop_mode and our eval_method; "border" pads with the mean colour, as we do.
_METHODS = {"center": "torchvision", "squash": "square", "border": "letterbox"}


def _describe(
    row: WeightsLayout, view: View, tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    stated = beside.config if "architecture" in beside.config else {}
    if stated and not {"pretrained_cfg", "model_args"} & stated.keys():  # the form of old timm versions
        stated = {**stated, "pretrained_cfg": {key: stated[key] for key in stated if key != "label_names"}}
    config = checked(CONFIG, stated, KEYS)
    name, given = config.get("architecture", ""), config.get("model_args", {})
    args: dict[str, Any] = {}
    for pattern, values in _PECULIAR.items():
        args |= values if re.search(pattern, name) else {}
    args |= given
    own = (beside.config.get("vitctl") or {}).get("num_heads")
    if own and "num_heads" in given:
        check_own(CONFIG, "model_args.num_heads", given["num_heads"], own)
    _refuse(
        *(words for tensor, words in _FOREIGN_TENSORS.items() if tensor in tensors),
        *(words for pattern, words in _FOREIGN_NAMES.items() if re.search(pattern, name)),
    )
    pretrained = config.get("pretrained_cfg", {})
    by_offset = view("blocks.0.attention.relative_bias")
    num_heads = beside.num_heads or args.get("num_heads") or (by_offset is not None and by_offset.shape[-1])
    shown, size = _side("input_size", pretrained.get("input_size", [0])[1:]), args.get("img_size")
    size = _side("img_size", size or shown)
    if "img_size" in args and pretrained.get("fixed_input_size"):
        shown = size
    shape = vit_shape(view, num_heads or None, size)
    told = {} if by_offset is None else {"num_heads": by_offset.shape[-1]}  # otherwise no tensor shows them
    _check_size(name, given, {key: value for key, value in shape.items() if key != "num_heads"} | told)
    shape["norm_at"] = "pooled" if "fc_norm.weight" in tensors else "tokens"
    shape["rotary"] = args.get("rotary", "none") if config else _likely_rotary(shape)
    if not args.get("use_rot_pos_emb", True):
        shape["rotary"] = "none"
    if not config:
        _refuse(*_unlikely(shape))
    pool = args.get("global_pool") or config.get("global_pool")
    shape["classifier"] = _classifier(shape, pool)
    activation = args.get("act_layer", "gelu")
    if activation not in _GELU:
        raise CheckpointError("config.json", f"act_layer {activation!r}, known are {', '.join(_GELU)}")
    recorded = _recorded(pretrained) | {"num_heads": num_heads or None, "image_size": shown or None}
    if config:
        recorded["gelu"] = _GELU[activation]
        recorded["norm_eps"] = config.get("norm_eps", args.get("norm_eps", NORM_EPS))
        recorded["position_resize"] = "bicubic_antialias"  # timm's rule
    elif shape["mlp"] == "swiglu":
        recorded["gelu"] = "erf"  # it has none
    if pool or shape["classifier"] in ("gap", "attention"):
        recorded["classifier"] = shape["classifier"]
    assumed = {**row.assumed, **(_likely(shape) if row.name == "timm" else {})}
    if shape["image_size"] >= _WHOLE_FROM and assumed["eval_resize"] != SQUASH:
        assumed["eval_resize"] = 1
    names = config.get("label_names") or pretrained.get("label_names") or pretrained.get("labels") or ()
    described, meta = replace(row, assumed=assumed).vit(shape, recorded, beside, names)
    margin = meta["eval_resize"] - meta["image_size"]
    if meta["eval_method"] == "square" and margin > 0 and margin % 4 == _ROUNDED_UP:
        del meta["eval_method"]
        meta["unsupported"] = (
            f"{CONFIG}: timm crops {meta['image_size']} of {meta['eval_resize']} squashed pixels, and rounds "
            f"the margin up; --set data.eval_method=square rounds it down"
        )
    return described, meta


def _check_size(name: str, given: Json, shape: Json) -> None:
    """Check config.json against the tensors, by architecture name or arguments. Raises CheckpointError."""
    stated = {key: _side(key, value) for key, value in given.items() if key in _ARGUMENTS}
    check_sizes(CONFIG, stated, shape, _ARGUMENTS)
    named = named_size(name)
    if "mlp_ratio" in given or "embed_dim" in given:
        named.pop("mlp_size", None)
    free = {field for key, field in _ARGUMENTS.items() if key in given}
    of_name = {f"{name}'s {field}": field for field in named if field not in free}
    check_sizes(CONFIG, {key: named[field] for key, field in of_name.items()}, shape, of_name)


def _refuse(*words: str) -> None:
    if words:
        raise CheckpointError(f"a model with {words[0]} is not supported")


def _likely_rotary(shape: Json) -> str:
    """Return the rotary rule of timm's networks of this shape."""
    has_no_table, has_token = shape["position_embedding"] == "none", shape["classifier"] == "token"
    rules = (
        ("none", shape["qkv_bias"] == "qkv" or shape["position_embedding"] == "relative_bias"),
        ("none", has_no_table and not shape["registers"]),
        ("dinov3", has_no_table and has_token),
        ("eva", has_no_table or shape["mlp"] == "swiglu"),
        ("none", True),
    )
    return next(rule for rule, is_likely in rules if is_likely)


def _unlikely(shape: Json) -> Iterator[str]:
    """Yield features of timm's networks of this shape that no tensor shows."""
    plain = shape["rotary"] == "none" and shape["position_embedding"] != "relative_bias"
    norms_after = shape["qkv_bias"] == "none" and not shape["layer_scale"] and shape["norm_at"] == "pooled"
    signs = (
        (
            (shape["hidden_size"], shape["depth"]) == (1792, 64) or (plain and norms_after),
            _FOREIGN_NAMES[r"_rpn_|enormous"],
        ),
        (
            plain and shape["position_embedding"] == "none" and shape["layer_scale"],
            "no positions but, by its other tensors, rotary ones",
        ),
        (shape["norm_pre"] and shape["classifier"] == "attention", "rotary positions after a first norm"),
    )
    return (words for is_there, words in signs if is_there)


def _classifier(shape: Json, pool: str | None) -> str:
    """Return our word for timm's `global_pool`, or the usual one if it is not recorded."""
    found = shape["classifier"]
    known = {"attention": {"map": "attention"}, "gap": {"avg": "gap"}}.get(
        found, {"token": "token", "avg": "patches"}
    )
    if found == "attention" and shape["registers"]:
        _refuse("attention pooling that leaves out registers")
    if pool is None:
        return "patches" if found == "token" and shape["norm_at"] == "pooled" else str(found)
    if pool not in known:
        raise CheckpointError(
            "config.json", f"global_pool {pool!r} does not go with its tensors, known are {', '.join(known)}"
        )
    return known[pool]


def _likely(shape: Json) -> Json:
    """Return what timm's networks of this shape usually have, of what no tensor shows."""
    squashed = {"eval_method": "square", "eval_resize": SQUASH}
    later = (
        shape["layer_scale"] or shape["norm_at"] == "pooled" or shape["position_embedding"] == "relative_bias"
    )
    usual: tuple[tuple[object, Json], ...] = (
        (shape["norm_pre"], {**CLIP, "norm_eps": LARGER_EPS, "eval_resize": 1}),
        (shape["classifier"] == "attention", {"gelu": "tanh", **squashed}),
        (shape["rotary"] == "dinov3", {**IMAGENET, "norm_eps": LARGER_EPS, "eval_resize": 1}),
        (shape["rotary"] == "eva", {**CLIP, **squashed}),
        (later, IMAGENET),
        (True, {}),
    )
    return next(values for is_such, values in usual if is_such)


def _side(key: str, size: int | list[int]) -> int:
    """Return the side of a square image or patch: timm writes a number, or height and width."""
    sides = (size if isinstance(size, list) else [size]) or [0]
    if len(set(sides)) != 1:
        raise CheckpointError("config.json", f"{key} {size} is not square, which is not supported")
    return sides[0]


def _recorded(pretrained: Json) -> dict[str, Any]:
    pretrained = {**(_DEFAULTS if pretrained else {}), **pretrained}
    mode, share = pretrained.get("crop_mode") or "center", pretrained.get("crop_pct")
    known, where = ", ".join(_METHODS), "config.json"
    refuse(
        CheckpointError,
        (mode not in _METHODS, where, f"crop_mode {mode!r} is not supported, known are {known}"),
        (
            mode == "border" and (share or 1) != 1,
            where,
            f"crop_mode 'border' with crop_pct {share} is not supported, only 1",
        ),
    )
    interpolation = pretrained.get("interpolation")
    return {
        "mean": pretrained.get("mean"),
        "std": pretrained.get("std"),
        "eval_method": _METHODS[mode] if pretrained else None,
        "eval_resize": SQUASH if mode != "center" and (share or 1) >= 1 else share,
        "eval_share": share,
        "resample": RESAMPLE.get(interpolation, interpolation) if interpolation else None,
    }


def _lacks(config: ViTConfig) -> tuple[tuple[object, str], ...]:
    family, gated, pooling = structure(config), config.mlp == "swiglu", config.classifier == "attention"
    other = family in (*_EVA, _BEIT)
    return (
        (
            config.representation_size,
            "it has no pre-logits layer; fine-tune first, or write with no pre-logits",
        ),
        (
            config.norm_pre == config.patch_bias,
            "its norm before the blocks goes with patches without a bias, and the other way round",
        ),
        (
            pooling and (config.registers or gated or other),
            "its attention pooling goes with neither registers, SwiGLU, rotary positions nor relative ones",
        ),
        (
            other and ((config.gelu != "erf" and not gated) or config.norm_pre or config.qkv_bias == "qkv"),
            "with rotary or relative positions it has an exact GELU, no first norm and no bias of keys",
        ),
        (
            family == _BEIT and (gated or not config.has_class_token),
            "its class with relative positions has a class token and no SwiGLU",
        ),
    )


def _notes(config: ViTConfig, _meta: Json) -> Iterator[str]:
    architecture, is_published = _architecture(config)
    arguments = {"img_size": config.image_size, "num_classes": config.num_classes} | _switches(config)
    if not is_published:
        arguments = _sizes(config) | arguments
    shown = [f"{key}={value!r}" for key, value in arguments.items()]
    if config.norm_eps != _family_eps(config):
        shown.append(f"norm_layer=partial(torch.nn.LayerNorm, eps={config.norm_eps:g})")
    yield f"timm.create_model({architecture!r}, checkpoint_path=FILE, {', '.join(shown)})"
    if config.registers and config.prefix_rows and config.position_embedding == "learned":
        yield "the class token's position is now part of the class token"


def structure(config: ViTConfig) -> str:
    """Return the row of `_NAMES` for a network: the first whose sign it has."""
    gated = config.mlp == "swiglu"
    signs = (
        (_BEIT, config.position_embedding == "relative_bias"),
        ("dinov3 swiglu", config.rotary == "dinov3" and gated),
        ("dinov3", config.rotary == "dinov3"),
        ("eva", config.rotary == "eva" or config.qkv_bias == "qv" or config.mlp_norm),
        ("swiglu", gated),
        ("clip", config.norm_pre or config.norm_eps == LARGER_EPS),
        ("siglip", config.classifier == "attention"),
        ("dinov2", config.registers or (config.layer_scale and config.position_class_row)),
        ("deit3", config.layer_scale),
        ("plain", True),
    )
    return next(name for name, is_there in signs if is_there)


def _family_eps(config: ViTConfig) -> float:
    return LARGER_EPS if structure(config) in ("clip", "dinov3", "dinov3 swiglu") else NORM_EPS


def _architecture(config: ViTConfig) -> tuple[str, bool]:
    """Return timm's name, and whether it also determines the sizes of `config`."""
    names = _NAMES[structure(config)]
    registers = f"reg{config.registers}_" if config.registers == 4 else ""
    biases = "_qkvb" if config.qkv_bias == "qv" else ""
    quick = ("_clip_", "_clip_quickgelu_") if config.gelu == "quick" else ("", "")
    published = [
        name.format(registers=registers, biases=biases).replace(quick[0], quick[1]) for name in names
    ]
    size = {field: getattr(config, field) for field in _FIELDS}
    found = next((name for name in published if named_size(name) == size), "")
    return found or names[0].format(registers="", biases=""), bool(found)


def named_size(name: str) -> dict[str, Any]:
    """Return the fields of a ViT that the name of an architecture stands for, as far as it is known."""
    patch = re.search(r"_patch(\d+)_", name)
    sizes = next((sizes for pattern, sizes in _SIZES.items() if re.search(pattern, name)), ())
    return dict(zip(_FIELDS, (*sizes, int(patch[1])), strict=True)) if patch and sizes else {}


def _aligned(config: ViTConfig) -> bool:
    """Return whether timm's DINOv3 keeps gate and hidden of this SwiGLU in two matrices."""
    return structure(config) == "dinov3 swiglu" and config.mlp_size % 8 == 0


def _sizes(config: ViTConfig) -> dict[str, Any]:
    inner = config.mlp_size * (1 + (structure(config) == "swiglu"))  # there, gate and hidden count together
    ratio = inner / config.hidden_size
    if int(config.hidden_size * ratio) != inner:  # timm rounds down
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
    """Return the arguments of timm's classes that change the maths, without defaults for a plain network."""
    family, is_pooled = structure(config), config.norm_at == "pooled"
    learned, apart = config.position_embedding == "learned", config.registers or not config.position_class_row
    pool = {"token": "token", "attention": "map"}.get(config.classifier, "avg")
    switches: dict[str, Any] = {"global_pool": pool, "init_values": config.layer_scale or None}
    switches["qkv_bias"] = config.qkv_bias != "none"
    if family == _BEIT:
        return switches | {"use_fc_norm": is_pooled}
    switches |= {"class_token": config.has_class_token, "no_embed_class": bool(apart)}
    if family in _EVA:
        return switches | {
            "num_reg_tokens": config.registers,
            "use_abs_pos_emb": learned,
            "use_rot_pos_emb": config.rotary != "none",
            "use_fc_norm": is_pooled,
            "qkv_fused": not config.mlp_norm,
            "swiglu_mlp": config.mlp == "swiglu",
            "swiglu_align_to": 8 if _aligned(config) else 0,
            "scale_mlp": config.mlp_norm,
        }
    switches |= {"fc_norm": is_pooled, "pos_embed": "learn" if learned else "none"}
    switches |= {"reg_tokens": config.registers, "pre_norm": config.norm_pre}
    if family != "swiglu":
        switches["act_layer"] = next(theirs for theirs, ours in _GELU.items() if ours == config.gelu)
    defaults = _PLAIN | {"fc_norm": pool == "avg"} if family == "plain" else {}
    return {key: value for key, value in switches.items() if key not in defaults or defaults[key] != value}


def _sidecars(config: ViTConfig, meta: Json) -> dict[str, dict[str, Any]]:
    size = meta.get("image_size", config.image_size)
    method = meta.get("eval_method", "square")
    modes = {ours: theirs for theirs, ours in _METHODS.items()}
    # A position table fixes the size that is scored; other networks accept any.
    built = size if config.position_embedding != "none" else config.image_size
    resize = size if method in ("square", "letterbox") else meta.get("eval_resize") or size
    share = size / resize
    if math.floor(size / share) != resize:  # timm rounds down
        share = math.nextafter(share, 0)
    backwards = {ours: theirs for theirs, ours in RESAMPLE.items()}
    switches = _switches(config)
    pretrained = {
        "mean": meta.get("mean", HALF),
        "std": meta.get("std", HALF),
        "input_size": [3, size, size],
        "fixed_input_size": built == size,
        "interpolation": backwards.get(meta.get("resample", ""), "bilinear"),
        "crop_mode": modes.get(method, "center"),
        "crop_pct": share,
        "num_classes": config.num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    described = {
        "architecture": _architecture(config)[0],
        "num_classes": config.num_classes,
        "num_features": config.hidden_size,
        "global_pool": switches.get("global_pool", "token"),
        "model_args": _sizes(config) | {"img_size": built} | switches,
        "pretrained_cfg": pretrained,
        **({"label_names": list(meta["class_names"])} if meta.get("class_names") else {}),
        # timm has no field for it, but reading it back must not lose it.
        **({} if config.norm_eps == _family_eps(config) else {"norm_eps": config.norm_eps}),
    }
    return {CONFIG: described}


# timm records a network's numerics in config.json, partly by the architecture's name. Assumed are its
# defaults for Vision Transformers, and the values of the families in `_likely`.
LAYOUT = WeightsLayout(
    name="timm",
    title="timm",
    mark="patch_embed.proj.weight",
    absent="fc_norm.weight",
    table=lambda _num_heads: TABLE,
    describe=_describe,
    tidy=tidy,
    spell=_spell,
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
    lacks=_lacks,
    holds={
        "classifier": ("gap", "patches", "attention"),
        "position_embedding": ("none", "relative_bias"),
        "gelu": ("erf", "quick"),
        **dict.fromkeys(
            (
                "norm_pre", "patch_bias", "position_class_row", "registers", "layer_scale", "mlp", "mlp_norm",
                "qkv_bias", "rotary",
            ),
            (bool,),
        ),
    },
    notes=_notes,
    sidecars=_sidecars,
)  # fmt: skip
POOLED_TABLE = {**TABLE, **pair("norm", "fc_norm")}
POOLED = replace(
    LAYOUT,
    mark="fc_norm.weight",
    absent="",
    table=lambda _num_heads: POOLED_TABLE,
    holds={**LAYOUT.holds, "norm_at": ("pooled",)},
)
