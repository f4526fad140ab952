"""Hugging Face's `ViTForImageClassification` and `ViTModel`: a folder of weights, configuration and
pre-processing.
"""

from collections.abc import Iterator
from typing import Any, Literal

from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.download import CONFIG, PREPROCESSOR
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

NORM_EPS = 1e-12
# What we write comes first for each form.
_GELU: dict[str, Literal["tanh", "erf"]] = {
    "gelu": "erf",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
}
_ACTIVATION = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}
_RESAMPLE = {2: "bilinear_antialias", 3: "bicubic_antialias"}  # Pillow's numbers
_NOT_OF_TRANSFORMERS = ("eval_method", "eval_resize", "resample", "position_resize")  # an export records them
_BODY = "vit."
_LAYER = "vit.encoder.layer.{i}"
# transformers 5 names modules otherwise in memory than in its files; a state dict saved by hand has these
# names. In this order they also lead back.
_IN_MEMORY = {
    "vit.layers.": "vit.encoder.layer.",
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
    ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.",
}

TABLE: Table = {
    "class_token": entry("vit.embeddings.cls_token"),
    "position_embedding": entry("vit.embeddings.position_embeddings"),
    **pair("patch_embedding", "vit.embeddings.patch_embeddings.projection"),
    **pair("blocks.{i}.norm1", f"{_LAYER}.layernorm_before"),
    **pair(
        "blocks.{i}.attention.qkv",
        *(f"{_LAYER}.attention.attention.{part}" for part in ("query", "key", "value")),
    ),
    **pair("blocks.{i}.attention.out", f"{_LAYER}.attention.output.dense"),
    **pair("blocks.{i}.norm2", f"{_LAYER}.layernorm_after"),
    **pair("blocks.{i}.mlp.fc1", f"{_LAYER}.intermediate.dense"),
    **pair("blocks.{i}.mlp.fc2", f"{_LAYER}.output.dense"),
    **pair("norm", "vit.layernorm"),
    **pair("pre_logits", "vit.pooler.dense"),
    **pair("head", "classifier"),
}


def in_memory(name: str) -> str:
    """Return the name that transformers 5 has in memory for one of its files."""
    for here, in_files in _IN_MEMORY.items():
        name = name.replace(in_files, here)
    return name


def _tidy(tensors: Tensors) -> Tensors:
    """Give a bare ViTModel the prefix of the classifier's body, and every name its spelling in files."""
    if "embeddings.patch_embeddings.projection.weight" in tensors:
        tensors = {_BODY + name: tensor for name, tensor in tensors.items()}
    named = {}
    for name, tensor in tensors.items():
        for pattern, spelling in _IN_MEMORY.items():
            name = name.replace(pattern, spelling)
        named[name] = tensor
    named.pop("vit.embeddings.mask_token", None)  # of masked image modelling, never used by a classifier
    return named


def _describe(
    row: WeightsLayout, view: View, _tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    config = beside.config
    if config.get("model_type", "vit") != "vit":
        raise CheckpointError(f"config.json: model_type {config['model_type']!r}, only 'vit' is read")
    activation = config.get("hidden_act", "gelu")
    if activation not in _GELU:
        raise CheckpointError(f"config.json: hidden_act {activation!r}, known are {', '.join(_GELU)}")
    if config.get("pooler_act", "tanh") != "tanh":
        raise CheckpointError(f"config.json: pooler_act {config['pooler_act']!r}, only 'tanh' is read")
    num_heads = beside.num_heads or config.get("num_attention_heads")
    shape = vit_shape(view, num_heads, config.get("image_size"))
    recorded = _recorded(beside.preprocessor) | {"num_heads": num_heads}
    if config:
        recorded |= {"gelu": _GELU[activation], "norm_eps": config.get("layer_norm_eps", NORM_EPS)}
    names, dropout = _class_names(config.get("id2label") or {}), config.get("hidden_dropout_prob", 0.0)
    described, meta = row.vit(shape, recorded, beside, names, dropout=dropout)
    ours = config.get("vitctl", {}).get("preprocessing", {})
    return described, meta | {name: ours[name] for name in _NOT_OF_TRANSFORMERS if name in ours}


def _recorded(processor: Json) -> dict[str, Any]:
    """Return what preprocessor_config.json records, by our names; ViT's image processor always squashes."""
    if not processor:
        return {}
    number = processor.get("resample")
    return {
        "mean": processor.get("image_mean"),
        "std": processor.get("image_std"),
        "eval_method": "square",
        "eval_resize": SQUASH,
        "resample": None if number is None else _RESAMPLE.get(number, f"pillow {number}"),
    }


def _class_names(id2label: Json) -> list[str]:
    """Return the names in the order of the classes, or none when they are only numbered."""
    numbered = sorted((int(number), name) for number, name in id2label.items())
    invented = all(name == f"LABEL_{number}" for number, name in numbered)
    return [] if invented else [name for _, name in numbered]


def _misfits(row: WeightsLayout, config: Config) -> Iterator[str]:
    yield from vit_misfits(row, config)
    if type(config) is ViTConfig and config.representation_size and config.num_classes:
        yield "its classifier has no pre-logits layer, only the model without a head has one (the pooler)"


def _notes(config: ViTConfig, meta: Json) -> Iterator[str]:
    if config.num_classes:
        yield "transformers.ViTForImageClassification.from_pretrained(folder)"
    else:
        pooler = "" if config.representation_size else ", add_pooling_layer=False"
        yield f"transformers.ViTModel.from_pretrained(folder{pooler})"
    if meta.get("eval_method", "square") != "square":
        whole = meta["eval_method"] == "letterbox"
        expected = "the whole image padded to a square" if whole else "the shorter side and a centre crop"
        yield f"its image processor squashes images to a square, these weights expect {expected}"


def _sidecars(config: ViTConfig, meta: Json) -> dict[str, dict[str, Any]]:
    names = meta.get("class_names") or [f"LABEL_{index}" for index in range(config.num_classes)]
    described = {
        "architectures": ["ViTForImageClassification" if config.num_classes else "ViTModel"],
        "model_type": "vit",
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
        "qkv_bias": True,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        **({"pooler_output_size": config.representation_size} if config.representation_size else {}),
    }
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 3 if str(meta.get("resample", "")).startswith("bicubic") else 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(meta.get("mean", HALF)),
        "image_std": list(meta.get("std", HALF)),
    }
    return {CONFIG: described, PREPROCESSOR: processor}


# config.json tells gelu and norm_eps, preprocessor_config.json the rest; assumed are the defaults of
# transformers.
LAYOUT = WeightsLayout(
    name="hf",
    title="Hugging Face ViT",
    mark="vit.embeddings.patch_embeddings.projection.weight",
    table=lambda _num_heads: TABLE,
    describe=_describe,
    tidy=_tidy,
    documented={"position_resize": "bicubic"},
    assumed={
        "mean": HALF,
        "std": HALF,
        "gelu": "erf",
        "norm_eps": NORM_EPS,
        "num_heads": "hidden size / 64",
        "eval_method": "square",
        "eval_resize": SQUASH,
        "resample": "bilinear_antialias",
    },
    misfits=_misfits,
    holds={"gelu": ("erf",)},
    notes=_notes,
    sidecars=_sidecars,
)
