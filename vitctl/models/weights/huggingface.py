"""Hugging Face's folders of weights, configuration and pre-processing, with transformers' names and numerics.

Families: ViT, ViTMAE, DINOv2, DINOv3, SigLIP, CLIP and BEiT. A `_Family` is what transformers knows of one;
`LAYOUTS` has a row for each way in which it stores tensors.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from vitctl.errors import CheckpointError, refuse
from vitctl.models.variants import WITH_CLASS_TOKEN, Config, ViTConfig
from vitctl.models.weights.download import CONFIG, PREPROCESSOR
from vitctl.models.weights.json_keys import Keys, Known, checked
from vitctl.models.weights.layouts import (
    RESAMPLE,
    SQUASH,
    Beside,
    Json,
    MemoryLayout,
    Table,
    Tensors,
    View,
    WeightsLayout,
    block,
    check_own,
    check_sizes,
    contradiction,
    entry,
    pair,
    renamed,
    stacked,
    vit_shape,
)
from vitctl.models.weights.licence import USUALLY_DINOV3
from vitctl.models.weights.meta import CLIP, HALF, IMAGENET
from vitctl.system.text import one_line

NORM_EPS = 1e-12  # of transformers' ViT, ViTMAE and BEiT
# The form that we write comes first.
GELU = {
    "gelu": "erf",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "quick_gelu": "quick",
}
_ACTIVATION = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
_RESAMPLE = dict(enumerate(RESAMPLE.values()))  # by Pillow's numbers
_NOT_OF_TRANSFORMERS = ("eval_method", "eval_resize", "resample", "position_resize")  # an export records them
_QKV = ("query", "key", "value")
_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")  # of DINOv2 and DINOv3
_PLAIN_MLP, _GATED_MLP = ("mlp.fc1", "mlp.fc2"), ("mlp.weights_in", "mlp.weights_out")  # of DINOv2
# In memory transformers 5 names modules differently than in its files; a state dict saved by hand has these
# names. This order also works backwards.
_ATTENTION_IN_MEMORY = {
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
}
_IN_MEMORY = {
    ".layers.": ".encoder.layer.",
    **_ATTENTION_IN_MEMORY,
    ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.",
}
# A token or a table without the batch dimension.
BARE_TOKEN = MemoryLayout(lambda theirs: theirs.reshape(1, 1, -1), lambda ours: ours.flatten())
BARE_TABLE = MemoryLayout(lambda theirs: theirs[None], lambda ours: ours[0])
_ROPE_THETA = 100.0
CLIP_REMARK = (
    "the feature is the class token after the last norm, without the projection that follows in CLIP"
)
# Keys of config.json -> the ViT field that the tensors show.
_SIZES = {
    "num_hidden_layers": "depth",
    "hidden_size": "hidden_size",
    "intermediate_size": "mlp_size",
    "patch_size": "patch_size",
    "num_register_tokens": "registers",
}
_USED: Keys = {
    "a whole number": ("num_register_tokens",),
    "a whole number above 0": (
        *(name for name in _SIZES if name != "num_register_tokens"), "image_size", "num_attention_heads",
    ),
    "a number": (
        "layer_norm_eps", "pos_embed_rescale", "hidden_dropout_prob", "layer_scale_init_value",
    ),
    "true or false": ("query_bias", "use_relative_position_bias", "vision_use_head"),
    "a text": ("model_type", "hidden_act", "classifier"),
    "a list of texts": ("architectures",),
    "an object of class numbers and names": ("id2label",),
}  # fmt: skip
# A model of images and texts has a vision_config, old files also a copy that takes precedence.
_TOWER_CONFIGS = ("vision_config", "vision_config_dict")
# Keys of every configuration of transformers 3 to 5, most of them of text generation, and of these families.
_HARMLESS = (
    r"_.*|architectures|auto_map|(torch_)?dtype|transformers.*|label2id|num_labels|problem_type"
    r"|license.*|vitctl"
    r"|(use_)?return_dict.*|output_\w+|torchscript|use_bfloat16|use_cache|tf_legacy_loss|tie_\w+"
    r"|finetuning_task"
    r"|task_specific_params|tokenizer_class|prefix|\w+_token_id|(max|min)_length|(begin_)?suppress_tokens"
    r"|bad_words_ids|do_sample|early_stopping|num_beams|num_beam_groups|num_return_sequences|\w+_penalty"
    r"|(encoder_)?no_repeat_ngram_size|temperature|top_[kp]|typical_p|remove_invalid_values"
    r"|is_encoder_decoder"
    r"|cross_attention_hidden_size|chunk_size_feed_forward|text_config(_dict)?|projection_dim"
    r"|logit_scale_init_value"
    r"|initializer_\w+|\w*dropout\w*|drop_path_rate|layerscale_value|encoder_stride|pooler_output_size"
    r"|(qkv|key|value|proj|mlp)_bias|mlp_ratio"
    r"|use_(swiglu_ffn|gated_mlp|mask_token|mean_pooling|auxiliary_head)"
    r"|use_(absolute_position_embeddings|shared_relative_position_bias)|decoder_\w+|mask_ratio|norm_pix_loss"
    r"|pos_embed_(shift|jitter)|apply_layernorm|reshape_hidden_states|stage_names|out_(features|indices)"
    r"|vocab_size|pool_scales|auxiliary_\w+|semantic_loss_ignore_index|add_fpn"
)
# The keys of config.json that are used.
KEYS = Known(
    {
        "an object": _TOWER_CONFIGS,
        **{
            kind: (*keys, *(f"{tower}.{key}" for tower in _TOWER_CONFIGS for key in keys))
            for kind, keys in _USED.items()
        },
    },
    settled={
        "num_channels": (3,),
        "rope_theta": (_ROPE_THETA,),
        "pooler_act": ("tanh",),
        "pruned_heads": ({},),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    harmless=rf"((vision_config|vision_config_dict)\.)?({_HARMLESS})",
)
_PROCESSOR_KEYS = Known(
    {
        "a list of three numbers": ("image_mean",),
        "a list of three numbers above 0": ("image_std",),
        "a whole number": ("resample",),
        "a whole number above 0, or an object of them": ("size", "crop_size", "pad_size"),
        "true or false": (
            "do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_pad", "default_to_square",
        ),
        "a number above 0": ("rescale_factor", "crop_pct"),
        "a text": ("image_processor_type", "feature_extractor_type"),
    },
    settled={"do_flip_channel_order": (False,)},
    # Photographs are decoded to RGB.
    harmless=r"_.*|do_convert_rgb|(do_)?reduce_labels|processor_class|auto_map|(input_)?data_format|device"
    r"|return_tensors"
    r"|disable_grouping|image_seq_length|model_input_names",
)  # fmt: skip
# Defaults of image processor classes for preprocessor_config.json, by the first part of their names. An int
# is the side of a square, or of the shorter edge.
_PLAIN: Json = {
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3,
    "image_mean": HALF, "image_std": HALF, "size": {"height": 224, "width": 224}, "default_to_square": True,
}  # fmt: skip
_CROPPED: Json = {**_PLAIN, "do_center_crop": True, "crop_size": 224}
_OPENAI: Json = {"image_mean": CLIP["mean"], "image_std": CLIP["std"], "size": {"shortest_edge": 224}}
_PROCESSORS: Mapping[str, Json] = {
    "ViT": {**_PLAIN, "resample": 2},
    "DeiT": {**_CROPPED, "size": {"height": 256, "width": 256}},
    "Beit": {**_PLAIN, "crop_size": 224},
    "Bit": {**_CROPPED, **_OPENAI, "default_to_square": False},
    "CLIP": {**_CROPPED, **_OPENAI, "default_to_square": False},
    "Siglip": {**_PLAIN, "default_to_square": False},
    "ConvNext": {
        **_PLAIN, "size": {"shortest_edge": 384}, "crop_pct": 224 / 256, "default_to_square": False,
    },
    "DINOv3ViT": {
        **_PLAIN, "resample": 2, "image_mean": IMAGENET["mean"], "image_std": IMAGENET["std"],
    },
}  # fmt: skip
# Its flags, and the keys that each needs.
_NEEDED = {
    "do_resize": ("size", "resample"), "do_rescale": ("rescale_factor",), "do_center_crop": ("crop_size",),
    "do_normalize": ("image_mean", "image_std"),
}  # fmt: skip
_ROUNDING = 1e-6
_WHOLE_FROM = 384  # pixels: ConvNext's processor squashes larger images, and crops smaller ones
# Fields that no tensor shows, with a single value in a layout.
_UNTOLD = ("classifier", "norm_at", "rotary")
_MEANS = {
    "gap": "the mean",
    "patches": "the mean of the patches",
    "token_patches": "the class token beside the mean of the patches",
}
# Tensors of the text tower and the projections in a model of images and texts.
_TEXT = r"^text_model\.|^logit_(scale|bias)$|^(visual|text)_projection\.|\.position_ids$"
# Pre-trained BEiTs share one table, and predict visual words.
_SHARED_BIAS = "beit.encoder.relative_position_bias.relative_position_bias_table"
_BIAS = "beit.encoder.layer.{i}.attention.attention.relative_position_bias.relative_position_bias_table"
_BEIT_IN_MEMORY = {
    ".shared_position_bias.": ".encoder.relative_position_bias.",
    r"(layer\.\d+)\.relative_position_bias\.": r"\1.attention.attention.relative_position_bias.",
    r"^layernorm\.": "beit.layernorm.",
}


def _classic(
    body: str, norms: tuple[str, str], inner: str, outer: str, scales: tuple[str, str], last: str
) -> Table:
    """Return the table of a body with BERT's names."""
    layer = f"{body}.encoder.layer.{{i}}"
    attention = f"{layer}.attention.attention"
    return {
        "class_token": entry(f"{body}.embeddings.cls_token"),
        "registers": entry(f"{body}.embeddings.register_tokens"),
        "position_embedding": entry(f"{body}.embeddings.position_embeddings"),
        **pair("patch_embedding", f"{body}.embeddings.patch_embeddings.projection"),
        **block(layer, norms[0], "attention.output.dense", norms[1], (inner,), outer),
        **pair("blocks.{i}.attention.qkv", *(f"{attention}.{part}" for part in _QKV)),
        "blocks.{i}.attention.qkv.query_bias": entry(f"{attention}.query.bias"),
        "blocks.{i}.attention.qkv.value_bias": entry(f"{attention}.value.bias"),
        "blocks.{i}.attention.relative_bias": entry(
            f"{attention}.relative_position_bias.relative_position_bias_table"
        ),
        "blocks.{i}.scale1": entry(f"{layer}.{scales[0]}"),
        "blocks.{i}.scale2": entry(f"{layer}.{scales[1]}"),
        **pair("norm", f"{body}.{last}"),
        **pair("head", "classifier"),
    }


def _bert(body: str, last: str) -> Table:
    norms, scales = ("layernorm_before", "layernorm_after"), ("lambda_1", "lambda_2")
    return {
        **_classic(body, norms, "intermediate.dense", "output.dense", scales, last),
        **pair("pre_logits", f"{body}.pooler.dense"),
    }


def _dinov2(body: str, inner: str, outer: str) -> Table:
    return _classic(body, ("norm1", "norm2"), inner, outer, _SCALES, "layernorm")


def _dinov3(*inner: str) -> Table:
    layer = "layer.{i}"
    return {
        "class_token": entry("embeddings.cls_token"),
        "registers": entry("embeddings.register_tokens"),
        **pair("patch_embedding", "embeddings.patch_embeddings"),
        **block(layer, "norm1", "attention.o_proj", "norm2", inner, "mlp.down_proj"),
        "blocks.{i}.attention.qkv.weight": entry(
            *(f"{layer}.attention.{part}_proj.weight" for part in "qkv")
        ),
        "blocks.{i}.attention.qkv.query_bias": entry(f"{layer}.attention.q_proj.bias"),
        "blocks.{i}.attention.qkv.value_bias": entry(f"{layer}.attention.v_proj.bias"),
        "blocks.{i}.scale1": entry(f"{layer}.{_SCALES[0]}"),
        "blocks.{i}.scale2": entry(f"{layer}.{_SCALES[1]}"),
        **pair("norm", "norm"),
    }


_TOWER, _TOWER_LAYER = "vision_model", "vision_model.encoder.layers.{i}"
# SigLIP's and CLIP's image towers.
_TOWERS: Table = {
    "class_token": entry(f"{_TOWER}.embeddings.class_embedding", layout=BARE_TOKEN),
    "position_embedding": entry(f"{_TOWER}.embeddings.position_embedding.weight", layout=BARE_TABLE),
    **pair("patch_embedding", f"{_TOWER}.embeddings.patch_embedding"),
    **pair("norm_pre", f"{_TOWER}.pre_layrnorm"),  # spelt so
    **block(_TOWER_LAYER, "layer_norm1", "self_attn.out_proj", "layer_norm2", ("mlp.fc1",), "mlp.fc2"),
    **pair("blocks.{i}.attention.qkv", *(f"{_TOWER_LAYER}.self_attn.{part}_proj" for part in "qkv")),
    **pair("norm", f"{_TOWER}.post_layernorm"),
    "pool.probe": entry(f"{_TOWER}.head.probe"),
    "pool.qkv.weight": entry(f"{_TOWER}.head.attention.in_proj_weight"),
    "pool.qkv.bias": entry(f"{_TOWER}.head.attention.in_proj_bias"),
    **pair("pool.out", f"{_TOWER}.head.attention.out_proj"),
    **pair("pool.norm", f"{_TOWER}.head.layernorm"),
    **pair("pool.mlp.fc1", f"{_TOWER}.head.mlp.fc1"),
    **pair("pool.mlp.fc2", f"{_TOWER}.head.mlp.fc2"),
    **pair("head", "classifier"),
}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A family in transformers, with its defaults for what config.json leaves out.

    Args:
        title: for messages.
        types: `model_type` of config.json; the first one is written.
        processor: image processor assumed if preprocessor_config.json names none.
        prefix: of a body's tensors in files of its class with a head; "" without one.
        body, with_head: names of its classes; "" if no class with a head computes what we compute.
        pools: the classifier of `with_head`.
        assumes: whether a body may also be meant with a classifier other than the class token.
        act, eps, heads: defaults of config.json.
        weights_eps: of the published weights, assumed without config.json.
        colours, share, resample: assumed pre-processing; `share` of the side is left by the crop.
        crops: whether a size is that of the shorter side before a crop, if the processor does not say.
        spellings: patterns of names in memory -> names in files.
        dropped: tensors that a classifier never uses.
        own: config.json keys in addition to the common ones.
        fill: tensors that its class needs and we lack.
        remarks: shown on reading.
    """

    title: str
    types: tuple[str, ...]
    processor: str
    prefix: str
    body: str
    with_head: str = ""
    pools: str = "token"
    assumes: bool = False
    act: str = "gelu"
    eps: float = NORM_EPS
    heads: int = 12
    weights_eps: float
    colours: Json = field(default_factory=lambda: {"mean": HALF, "std": HALF})
    share: float = SQUASH
    resample: str = "bicubic_antialias"
    crops: bool = False
    position_resize: str = "bicubic"
    spellings: Mapping[str, str] = field(default_factory=dict)
    dropped: str = r"mask_token$|\.relative_position_index$|^lm_head\."
    own: Callable[[ViTConfig], dict[str, Any]] = lambda _config: {}
    fill: Callable[[Any], Tensors] = lambda _config: {}
    remarks: tuple[str, ...] = ()


def _ratio(config: ViTConfig) -> int:
    """Return the integer ratio that gives our MLP's size in transformers' DINOv2, 0 without one."""
    width, gated = config.hidden_size, config.mlp == "swiglu"
    sizes = {(-(-int(width * k * 2 / 3) // 8) * 8 if gated else width * k): k for k in range(64, 0, -1)}
    return sizes.get(config.mlp_size, 0)


_VIT = _Family(
    title="Hugging Face ViT",
    types=("vit", "vit_mae"),
    processor="ViT",
    prefix="vit",
    body="ViTModel",
    with_head="ViTForImageClassification",
    weights_eps=NORM_EPS,
    resample="bilinear_antialias",
    spellings=_IN_MEMORY,
    dropped=r"mask_token$|^decoder\.",
    own=lambda config: (
        {"qkv_bias": True}
        | ({"pooler_output_size": config.representation_size} if config.representation_size else {})
    ),
)
_DINOV2 = _Family(
    title="Hugging Face DINOv2",
    types=("dinov2",),
    processor="Bit",
    prefix="dinov2",
    body="Dinov2Model",
    with_head="Dinov2ForImageClassification",
    pools="token_patches",
    assumes=True,
    eps=1e-6,
    weights_eps=1e-6,
    colours=IMAGENET,
    share=224 / 256,
    crops=True,
    spellings={**_ATTENTION_IN_MEMORY, ".mlp.down_proj.": ".mlp.weights_out."},
    own=lambda config: {
        "mlp_ratio": _ratio(config),
        "use_swiglu_ffn": config.mlp == "swiglu",
        "layerscale_value": config.layer_scale,
        **({"num_register_tokens": config.registers} if config.registers else {"use_mask_token": False}),
    },
)
_DINOV2_REGISTERS = replace(
    _DINOV2,
    title="Hugging Face DINOv2 with registers",
    types=("dinov2_with_registers",),
    prefix="dinov2_with_registers",
    body="Dinov2WithRegistersModel",
    with_head="Dinov2WithRegistersForImageClassification",
    position_resize="bicubic_antialias",
    fill=lambda config: {"dinov2_with_registers.embeddings.mask_token": torch.zeros(1, config.hidden_size)},
)
_DINOV3 = _Family(
    title="Hugging Face DINOv3",
    types=("dinov3_vit",),
    processor="DINOv3ViT",
    prefix="",
    body="DINOv3ViTModel",
    assumes=True,
    eps=1e-5,
    heads=6,
    weights_eps=1e-5,
    colours=IMAGENET,
    resample="bilinear_antialias",
    spellings={r"^model\.": ""},
    own=lambda config: {
        "use_gated_mlp": config.mlp == "swiglu",
        **({"hidden_act": "silu"} if config.mlp == "swiglu" else {}),
        "layerscale_value": config.layer_scale,
        "num_register_tokens": config.registers,
        "query_bias": config.qkv_bias == "qv",
        "key_bias": False,
        "value_bias": config.qkv_bias == "qv",
        "rope_theta": _ROPE_THETA,
        "pos_embed_rescale": config.rotary_rescale if config.rotary_rescale > 1 else None,
    },
    fill=lambda config: {
        "embeddings.mask_token": torch.zeros(1, 1, config.hidden_size),
        **({} if config.registers else {"embeddings.register_tokens": torch.zeros(1, 0, config.hidden_size)}),
    },
    remarks=(
        "transformers' image processor brings colours to 0 .. 1 before it resizes, vitctl after: they differ "
        "by rounding",
        USUALLY_DINOV3,
    ),
)
_SIGLIP = _Family(
    title="Hugging Face SigLIP",
    types=("siglip_vision_model", "siglip"),
    processor="Siglip",
    prefix="vision_model",
    body="SiglipVisionModel",
    with_head="SiglipForImageClassification",
    pools="gap",
    act="gelu_pytorch_tanh",
    eps=1e-6,
    weights_eps=1e-6,
    dropped=_TEXT,
    own=lambda config: {"vision_use_head": config.classifier == "attention"},
)
_CLIP = _Family(
    title="Hugging Face CLIP",
    types=("clip_vision_model", "clip"),
    processor="CLIP",
    prefix="vision_model",
    body="CLIPVisionModel",
    act="quick_gelu",
    eps=1e-5,
    weights_eps=1e-5,
    colours=CLIP,
    share=1.0,
    crops=True,
    dropped=_TEXT,
    remarks=(CLIP_REMARK,),
)
_BEIT = _Family(
    title="Hugging Face BEiT",
    types=("beit",),
    processor="Beit",
    prefix="beit",
    body="BeitModel",
    with_head="BeitForImageClassification",
    pools="patches",
    weights_eps=1e-6,
    colours=IMAGENET,
    position_resize="bilinear",
    spellings={**_IN_MEMORY, **_BEIT_IN_MEMORY},
    own=lambda config: {
        "use_relative_position_bias": True,
        "use_mean_pooling": config.norm_at == "pooled",
        "layer_scale_init_value": config.layer_scale,
    },
)


def in_memory(name: str) -> str:
    """Return transformers 5's name in memory for a name in a ViT's files."""
    for here, in_files in _IN_MEMORY.items():
        name = name.replace(in_files, here)
    return name


def _tidy(family: _Family, tensors: Tensors) -> Tensors:
    """Prefix a bare body like a classifier's, and spell every name as in files."""
    bare = family.prefix and any(name.startswith("embeddings.") for name in tensors)
    spellings = {**({"^": f"{family.prefix}."} if bare else {}), **family.spellings}
    named = renamed({name: one for name, one in tensors.items() if one.numel()}, spellings, family.dropped)
    if family is _SIGLIP and "classifier.weight" in named:  # its classifier averages the tokens
        named = {name: named[name] for name in named if not name.startswith("vision_model.head.")}
    both = any(".attention.relative_position_bias." in name for name in named)
    if _SHARED_BIAS in named and both:
        raise CheckpointError("tables of positions both shared and in each layer are not supported")
    if shared := {name: named.pop(name) for name in list(named) if name == _SHARED_BIAS}:
        depth = sum(name.endswith(".layernorm_before.weight") for name in named)
        places = (_BIAS.format(i=index) for index in range(depth))
        named |= {place: tensor for place in places for tensor in shared.values()}
    for kind in ("weight", "bias") if family.prefix.startswith("dinov2") else ():
        parts = (f".mlp.gate_proj.{kind}", f".mlp.up_proj.{kind}")
        named = stacked(named, f".mlp.weights_in.{kind}", parts)
    return named


def _check_shape(family: _Family, config: Json, shape: Json) -> None:
    of_ratio = family.prefix.startswith("dinov2")  # it does not state intermediate_size
    sizes = {name: ours for name, ours in _SIZES.items() if not of_ratio or ours != "mlp_size"}
    check_sizes(CONFIG, config, shape, sizes)
    scaled = family in (_DINOV2, _DINOV2_REGISTERS, _DINOV3) or config.get("layer_scale_init_value", 0) > 0
    biased = family is _BEIT or (family is _DINOV3 and config.get("query_bias", True))
    lacking = {
        "a class token": family is not _SIGLIP and shape["classifier"] == "gap",
        "LayerScale": scaled and not shape["layer_scale"],
        "biases of queries and values": biased and shape["qkv_bias"] == "none",
        "relative position biases": config.get("use_relative_position_bias", False)
        and shape["position_embedding"] != "relative_bias",
        "attention pooling": family is _SIGLIP
        and config.get("vision_use_head", True)
        and not shape["num_classes"]
        and shape["classifier"] != "attention",
        "a classifier": "ForImageClassification" in str(config.get("architectures", ""))
        and not shape["num_classes"],
    }
    for part in (name for name, absent in lacking.items() if absent):
        raise contradiction(CONFIG, f"it describes {part}, and the tensors have none")


def _describe(
    family: _Family, row: WeightsLayout, view: View, _tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    kind, patches = beside.config.get("model_type") or family.types[0], view("patch_embedding.weight")
    known = " or ".join(map(repr, family.types))
    refuse(
        CheckpointError,
        (
            patches is not None and patches.dim() == 2,
            "its images have any aspect ratio (NaFlex), which is not supported",
            "",
            "use weights of a fixed size",
        ),
        (kind not in family.types, CONFIG, f"model_type {one_line(repr(kind))}, only {known} is read"),
    )
    whole = checked(CONFIG, beside.config, KEYS)
    config = dict(whole)
    for tower in _TOWER_CONFIGS:
        config |= whole.get(tower, {})
    bias = view("blocks.0.attention.relative_bias")
    told = None if bias is None else bias.shape[1]
    heads = (
        told or beside.num_heads or config.get("num_attention_heads") or (family.heads if config else None)
    )
    own = whole.get("vitctl", {})
    if "model_type" in whole and (outside := config.get("num_attention_heads", family.heads)):
        check_own(CONFIG, "num_attention_heads", outside, own.get("num_heads", outside))
    shape = vit_shape(view, heads, config.get("image_size"))
    if config:
        _check_shape(family, config, shape)
    if shape["num_classes"] and not family.with_head:
        raise CheckpointError(
            "CLIPForImageClassification averages patches that no norm has seen, which is not supported",
            fix="use the tower without classifier.*",
        )
    gated = family is _DINOV3 and shape["mlp"] == "swiglu"
    known_acts = {"silu": "erf"} if gated else GELU
    activation = config.get("hidden_act", family.act)
    if (config or not gated) and activation not in known_acts:
        raise CheckpointError("config.json", f"hidden_act {activation!r}, known are {', '.join(known_acts)}")
    only = {name: values[0] for name, values in row.needs.items() if len(values) == 1 and name in _UNTOLD}
    stated = family.pools if shape["num_classes"] else config.get("classifier")
    shape |= ({"classifier": stated} if stated else {}) | only
    recorded, unsupported = _recorded(beside.preprocessor, family)
    recorded |= {"num_heads": heads, "classifier": stated}
    if config:
        recorded["norm_eps"] = config.get("layer_norm_eps", family.eps)
        recorded["gelu"] = known_acts[activation]
    if "mae" in config.get("model_type", ""):
        row = replace(row, assumed={**row.assumed, **IMAGENET})
    more: dict[str, Any] = {"dropout": config.get("hidden_dropout_prob", 0.0)}
    if family is _DINOV3:
        more["rotary_rescale"] = beside.config.get("pos_embed_rescale", 2.0) or 1.0  # null: none
    names = _class_names(whole.get("id2label", {}), shape["num_classes"])
    described, meta = row.vit(shape, recorded, beside, names, **more)
    ours = own.get("preprocessing", {})
    if recorded.get("resample") and "resample" in ours:
        check_own(PREPROCESSOR, "resample", recorded["resample"], _RESAMPLE[_filter(ours["resample"])])
    meta |= {name: ours[name] for name in _NOT_OF_TRANSFORMERS if name in ours}
    if unsupported and "eval_method" not in ours:
        del meta["eval_method"]
        meta["unsupported"] = unsupported
    remarks = [*family.remarks, *meta.get("remarks", ())]
    return described, meta | ({"remarks": remarks} if remarks else {})


def _filter(resample: str | None) -> int:
    """Return Pillow's number of the filter that is written for ours."""
    other = 3 if str(resample).startswith("bicubic") else 2
    return next((number for number, ours in _RESAMPLE.items() if ours == resample), other)


def _recorded(file: Json, family: _Family) -> tuple[dict[str, Any], str]:
    """Return what preprocessor_config.json records, by our names and by the rules of its class.

    The text is the error for jobs that score, "" if vitctl can resize images as the processor does.
    """
    if not file:
        return {}, ""
    stated = checked(PREPROCESSOR, file, _PROCESSOR_KEYS)
    name = stated.get("image_processor_type", stated.get("feature_extractor_type", family.processor))
    kind = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)
    if kind not in _PROCESSORS:
        raise CheckpointError(
            PREPROCESSOR,
            f"{one_line(name)} is not supported, known are the image processors of "
            f"{', '.join(_PROCESSORS)}; in a folder without this file its values are assumed, and "
            "listed",
        )
    # As there, null is not the default: a flag is then false, and a value that a flag uses is required.
    flags = {key: False for key, value in file.items() if value is None and key in _NEEDED}
    processor = {**_PROCESSORS[kind], **stated, **flags}
    for flag, keys in _NEEDED.items():
        if lacking := [key for key in keys if processor.get(flag) and file.get(key, "") is None]:
            raise CheckpointError(
                PREPROCESSOR,
                f"{lacking[0]} is null, which transformers refuses with {flag}",
                f"write a value, or remove the key for the default of {name}",
            )
    # The network receives (scale * level - mean) / std, our colours are level / 255.
    unit: float = 255 * (processor["rescale_factor"] if processor["do_rescale"] else 1)
    unit = 1.0 if abs(unit - 1) < _ROUNDING else unit
    is_normal, number = processor["do_normalize"], processor["resample"]
    found: dict[str, Any] = {
        "mean": [value / unit if is_normal else 0.0 for value in processor["image_mean"]],
        "std": [(value if is_normal else 1.0) / unit for value in processor["image_std"]],
        "resample": _RESAMPLE.get(number, f"filter {number} of Pillow"),
    }
    method, side = _edges(processor["size"], is_square=processor["default_to_square"])
    is_cropped, by_share = bool(processor.get("do_center_crop")), kind == "ConvNext"
    how, kept = _edges(processor.get("crop_size")) if is_cropped else ("square", side)
    share: float = processor["crop_pct"] if by_share else kept / (side or 1)
    padded = processor.get("pad_size") if processor.get("do_pad") else None
    followed = {
        "do_resize": processor["do_resize"],
        "size": method == "transformers" if by_share else bool(method),
        "crop_size": how == "square" and (kept == side if by_share else share <= 1),
        "crop_pct": not by_share or share <= 1,
        "do_center_crop": is_cropped or by_share or method != "transformers",
        "pad_size": padded is None or _edges(padded) == ("square", kept),
    }
    if odd := [key for key, fits in followed.items() if not fits]:
        found |= {"eval_method": "square", "eval_resize": SQUASH}
        return found, (
            f"{PREPROCESSOR}: {odd[0]} is {json.dumps(processor.get(odd[0]))}, which vitctl cannot do; "
            f"choose how images are resized with --set data.eval_method=square, or shorter_side, "
            f"transformers or letterbox"
        )
    if by_share and side >= _WHOLE_FROM:
        method, share = "square", 1.0
    elif by_share:
        found["eval_share"] = share
    elif share < 1 and math.floor(kept / share) != side:
        share = math.nextafter(share, 0)
    whole = method == "square" and share >= 1
    return found | {
        "image_size": kept,
        "eval_method": method,
        "eval_resize": SQUASH if whole else share,
    }, ""


def _edges(size: Any, *, is_square: bool = True) -> tuple[str, int]:
    """Return our resize method and side for transformers' size; "" and 0 if there is none."""
    match size:
        case int():
            return ("square" if is_square else "transformers"), size
        case {"height": int(height), "width": width} if len(size) == 2 and height == width:
            return "square", height
        case {"shortest_edge": int(side)} if len(size) == 1:
            return "transformers", side
    return "", 0


def _class_names(id2label: Json, num_classes: int) -> list[str]:
    """Return class names in order, empty if they are only numbered, or raise CheckpointError."""
    numbered = sorted((int(number), name) for number, name in id2label.items())
    if num_classes and numbered and [number for number, _ in numbered] != list(range(num_classes)):
        raise CheckpointError(
            CONFIG,
            f"id2label names {len(numbered)} classes, numbered {numbered[0][0]} to "
            f"{numbered[-1][0]}, and the head has those from 0 to {num_classes - 1}",
            "correct its numbers",
        )
    invented = all(name == f"LABEL_{number}" for number, name in numbered)
    return [] if invented else [name for _, name in numbered]


def _lacks(family: _Family, config: ViTConfig) -> tuple[tuple[object, str], ...]:
    return (
        (
            config.representation_size and (config.num_classes or family is not _VIT),
            "its classifier has no pre-logits layer, only the model without a head has one (the pooler)",
        ),
        (
            family.prefix.startswith("dinov2") and not _ratio(config),
            f"its MLP has a multiple of the width, not {config.mlp_size} for {config.hidden_size}",
        ),
        (
            config.num_classes and (not family.with_head or config.classifier != family.pools),
            f"no class of transformers puts a head on its classifier {config.classifier!r}; write it to timm "
            f"or safetensors",
        ),
    )


def _notes(family: _Family, config: ViTConfig, meta: Json) -> Iterator[str]:
    pooler = "" if family is not _VIT or config.representation_size else ", add_pooling_layer=False"
    if config.num_classes:
        yield f"transformers.{family.with_head}.from_pretrained(folder)"
    else:
        yield f"transformers.{family.body}.from_pretrained(folder{pooler})"
        if words := _MEANS.get(config.classifier if config.norm_at == "tokens" else ""):
            yield f"the feature of these weights is {words} of last_hidden_state, not pooler_output"
    if meta.get("eval_method", "square") != "square":
        whole = meta["eval_method"] == "letterbox"
        expected = "the whole image padded to a square" if whole else "the shorter side and a centre crop"
        yield f"its image processor squashes images to a square, these weights expect {expected}"


def _sidecars(family: _Family, config: ViTConfig, meta: Json) -> dict[str, dict[str, Any]]:
    names = meta.get("class_names") or [f"LABEL_{index}" for index in range(config.num_classes)]
    described = {
        "architectures": [family.with_head if config.num_classes else family.body],
        "model_type": family.types[0],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_size,
        "hidden_act": _ACTIVATION[config.gelu],
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": 3,
        **family.own(config),
    }
    if family is _SIGLIP and config.num_classes:  # transformers' configuration of both towers
        described = {"architectures": described["architectures"], "model_type": family.types[1],
                     "vision_config": described | {"model_type": family.types[0]}}  # fmt: skip
    described |= {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        # transformers has no field for it, but reading it back must not lose it.
        **({"classifier": config.classifier} if family.assumes and not config.num_classes else {}),
    }
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": dict.fromkeys(("height", "width"), meta.get("image_size", config.image_size)),
        "do_center_crop": False,
        "resample": _filter(meta.get("resample")),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(meta.get("mean", HALF)),
        "image_std": list(meta.get("std", HALF)),
    }
    return {CONFIG: described, PREPROCESSOR: processor}


def _layout(family: _Family, table: Table, mark: str, absent: str = "", **needs: Any) -> WeightsLayout:
    return WeightsLayout(
        name="hf",
        title=family.title,
        mark=mark,
        absent=absent,
        table=lambda _num_heads: table,
        describe=partial(_describe, family),
        tidy=partial(_tidy, family),
        spell=lambda tensors, config: tensors | family.fill(config),
        documented={"position_resize": family.position_resize},
        assumed={
            **family.colours,
            "gelu": GELU[family.act],
            "norm_eps": family.weights_eps,
            "num_heads": "hidden size / 64",
            "eval_method": "transformers" if family.crops else "square",
            "eval_resize": family.share,
            "resample": family.resample,
            **({"classifier": "token"} if family.assumes else {}),
        },
        lacks=partial(_lacks, family),
        needs={"gelu": tuple(_ACTIVATION), **needs},
        notes=partial(_notes, family),
        sidecars=partial(_sidecars, family),
    )


TABLE = _bert("vit", "layernorm")
LAYOUT = _layout(_VIT, TABLE, "vit.encoder.layer.0.layernorm_before.weight")
# A file belongs to the first row whose mark it has. gelu and norm_eps are in config.json, the rest in
# preprocessor_config.json; transformers' or the published weights' values are assumed.
_POOLED = "beit.pooler.layernorm.weight"
_DINOV2_NEEDS: dict[str, Any] = {"classifier": WITH_CLASS_TOKEN, "layer_scale": (True,)}
_DINOV3_NEEDS: dict[str, Any] = {
    **_DINOV2_NEEDS, "registers": (bool,), "position_embedding": ("none",), "rotary": ("dinov3",),
    "qkv_bias": ("qv", "none"),
}  # fmt: skip
_BEIT_NEEDS: dict[str, Any] = {
    "layer_scale": (True,),
    "position_embedding": ("relative_bias",),
    "qkv_bias": ("qv",),
}
LAYOUTS = (
    _layout(
        _DINOV2,
        _dinov2("dinov2", *_PLAIN_MLP),
        "dinov2.encoder.layer.0.mlp.fc1.weight",
        "dinov2.embeddings.register_tokens",
        mlp=("gelu",),
        **_DINOV2_NEEDS,
    ),
    _layout(
        _DINOV2,
        _dinov2("dinov2", *_GATED_MLP),
        "dinov2.encoder.layer.0.mlp.weights_in.weight",
        "dinov2.embeddings.register_tokens",
        mlp=("swiglu",),
        **_DINOV2_NEEDS,
    ),
    _layout(
        _DINOV2_REGISTERS,
        _dinov2("dinov2_with_registers", *_PLAIN_MLP),
        "dinov2_with_registers.encoder.layer.0.mlp.fc1.weight",
        registers=(True,),
        mlp=("gelu",),
        **_DINOV2_NEEDS,
    ),
    _layout(
        _DINOV2_REGISTERS,
        _dinov2("dinov2_with_registers", *_GATED_MLP),
        "dinov2_with_registers.encoder.layer.0.mlp.weights_in.weight",
        registers=(True,),
        mlp=("swiglu",),
        **_DINOV2_NEEDS,
    ),
    _layout(
        _DINOV3,
        _dinov3("mlp.up_proj"),
        "layer.0.mlp.up_proj.weight",
        "layer.0.mlp.gate_proj.weight",
        mlp=("gelu",),
        **_DINOV3_NEEDS,
    ),
    _layout(
        _DINOV3,
        _dinov3("mlp.gate_proj", "mlp.up_proj"),
        "layer.0.mlp.gate_proj.weight",
        mlp=("swiglu",),
        **_DINOV3_NEEDS,
    ),
    _layout(_CLIP, _TOWERS, "vision_model.pre_layrnorm.weight", norm_pre=(True,), patch_bias=(False,)),
    _layout(_SIGLIP, _TOWERS, "vision_model.post_layernorm.weight", classifier=("attention", "gap")),
    _layout(
        _BEIT,
        _bert("beit", "pooler.layernorm"),
        _POOLED,
        classifier=("patches",),
        norm_at=("pooled",),
        **_BEIT_NEEDS,
    ),
    _layout(
        replace(_BEIT, pools="token"),
        _bert("beit", "layernorm"),
        "beit.encoder.layer.0.lambda_1",
        _POOLED,
        classifier=("token",),
        norm_at=("tokens",),
        **_BEIT_NEEDS,
    ),
    LAYOUT,
)
