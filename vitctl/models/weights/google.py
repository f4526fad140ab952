"""The authors' `.npz` files: ViT, AugReg, hybrids, and the ResNets of BiT."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, HybridConfig, ResNetConfig, ViTConfig
from vitctl.models.weights.layouts import (
    CONV,
    DENSE,
    SQUASH,
    Beside,
    Json,
    MemoryLayout,
    Table,
    Tensors,
    View,
    WeightsLayout,
    classes,
    entry,
    needed,
    renamed,
    stored_meta,
    vit_shape,
)
from vitctl.models.weights.meta import HALF

# Numerics of the authors' code that no tensor shows. Paper: Appendix A; their LayerNorm, GELU and GroupNorm.
NUMERICS: dict[str, Any] = {"gelu": "tanh", "norm_eps": 1e-6}
NUM_GROUPS = 32
_NUM_CLASSES_I21K = 21843
_FINE_TUNED_SIZE = 384  # B.1.1, when neither the file's name nor the grid of patches says otherwise
_BIT_FINE_TUNED_SIZE = 480  # BiT's rule for ImageNet
# Spellings of other generations of Flax -> of the published files.
_PUBLISHED = {
    "/MultiHeadDotProductAttention_0/": "/MultiHeadDotProductAttention_1/",
    "/MlpBlock_0/": "/MlpBlock_3/",
    "/LayerNorm_1/": "/LayerNorm_2/",
    r"/standardized_conv2d_\d+/": "/standardized_conv2d/",
}
_NORM = r"(^|/)(gn\d|gn_root|gn_proj|group_norm)/"


def vit_table(num_heads: int) -> Table:
    block = "Transformer/encoderblock_{i}"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    parts = ("query", "key", "value")
    # The authors have one axis for heads and one for each head's channels.
    split_weight = MemoryLayout(
        lambda t: _turned(t.flatten(1)), lambda t: torch.unflatten(_turned(t), 1, (num_heads, -1))
    )
    split_bias = MemoryLayout(lambda t: t.flatten(), lambda t: torch.unflatten(t, 0, (num_heads, -1)))
    merged = MemoryLayout(
        lambda t: _turned(t.flatten(0, 1)), lambda t: torch.unflatten(_turned(t), 0, (num_heads, -1))
    )
    return {
        "class_token": entry("cls"),
        "position_embedding": entry("Transformer/posembed_input/pos_embedding"),
        **_weight_and_bias("patch_embedding", "embedding", CONV),
        **_scale_and_bias("blocks.{i}.norm1", f"{block}/LayerNorm_0"),
        "blocks.{i}.attention.qkv.weight": entry(
            *(f"{attention}/{part}/kernel" for part in parts), layout=split_weight
        ),
        "blocks.{i}.attention.qkv.bias": entry(
            *(f"{attention}/{part}/bias" for part in parts), layout=split_bias
        ),
        "blocks.{i}.attention.out.weight": entry(f"{attention}/out/kernel", layout=merged),
        "blocks.{i}.attention.out.bias": entry(f"{attention}/out/bias"),
        **_scale_and_bias("blocks.{i}.norm2", f"{block}/LayerNorm_2"),
        **_weight_and_bias("blocks.{i}.mlp.fc1", f"{block}/MlpBlock_3/Dense_0", DENSE),
        **_weight_and_bias("blocks.{i}.mlp.fc2", f"{block}/MlpBlock_3/Dense_1", DENSE),
        **_scale_and_bias("norm", "Transformer/encoder_norm"),
        **_weight_and_bias("pre_logits", "pre_logits", DENSE),
        **_weight_and_bias("head", "head", DENSE),
    }


def hybrid_table(num_heads: int) -> Table:
    ours, theirs = "backbone.stages.{i}.{j}", "block{i1}/unit{j1}"
    table = vit_table(num_heads) | _scale_and_bias("backbone.root.norm", "gn_root")
    table["backbone.root.conv.weight"] = entry("conv_root/kernel", layout=CONV)
    for conv, norm, suffix in (
        *((f"conv{n}", f"norm{n}", n) for n in "123"),
        ("projection", "projection_norm", "_proj"),
    ):
        conv_name = f"conv{suffix}"
        table[f"{ours}.{conv}.weight"] = entry(f"{theirs}/{conv_name}/kernel", layout=CONV)
        table |= _scale_and_bias(f"{ours}.{norm}", f"{theirs}/gn{suffix}")
    return table


def bit_table(_num_heads: int) -> Table:
    ours, theirs = "backbone.stages.{i}.{j}", "resnet/block{i1}/unit{j1:02d}"
    kernel = "standardized_conv2d/kernel"
    head = MemoryLayout(
        lambda t: _turned(t.flatten(0, 2)), lambda t: torch.unflatten(_turned(t), 0, (1, 1, -1))
    )  # a 1x1 convolution
    table = {
        "backbone.root.conv.weight": entry(f"resnet/root_block/{kernel}", layout=CONV),
        f"{ours}.projection.weight": entry(f"{theirs}/a/proj/{kernel}", layout=CONV),
        "head.weight": entry("resnet/head/conv2d/kernel", layout=head),
        "head.bias": entry("resnet/head/conv2d/bias"),
    }
    norms = {"norm": "resnet/group_norm"}
    for number, letter in zip("123", "abc", strict=True):
        table[f"{ours}.conv{number}.weight"] = entry(f"{theirs}/{letter}/{kernel}", layout=CONV)
        norms[f"{ours}.norm{number}"] = f"{theirs}/{letter}/group_norm"
    return table | {
        f"{norm}.{part}": entry(f"{group_norm}/{name}")
        for norm, group_norm in norms.items()
        for part, name in (("weight", "gamma"), ("bias", "beta"))
    }


def tidy(tensors: Tensors) -> Tensors:
    """Unify all spellings: wrappers, Flax generations, norms of shape [1, 1, 1, C]."""
    for wrapper in ("opt/target/", "params/"):
        if any(name.startswith(wrapper) for name in tensors):  # the rest is the optimizer's
            tensors = {
                name.removeprefix(wrapper): t for name, t in tensors.items() if name.startswith(wrapper)
            }
    found = renamed(tensors, _PUBLISHED)
    for name, tensor in found.items():
        if re.search(_NORM, name) and tensor.dim() == 4 and tensor.shape[:3] == (1, 1, 1):
            found[name] = tensor.flatten()
    return found


def _describe_vit(
    row: WeightsLayout, view: View, tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    shape = vit_shape(view, _num_heads(tensors), _named_size(beside) or _FINE_TUNED_SIZE)
    return _with_meta(row, ViTConfig(**row.held(shape), **NUMERICS))


def _describe_hybrid(
    row: WeightsLayout, view: View, tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    stage_depths = _stage_depths(tensors, r"block(\d+)/unit(\d+)/conv1/kernel")
    shape = vit_shape(view, _num_heads(tensors), None)
    stride = 4 * 2 ** max(0, len(stage_depths) - 1)  # of the backbone: the first stage keeps the root's size
    map_size = shape.pop("image_size")
    config = HybridConfig(
        **row.held(shape),
        **NUMERICS,
        stage_depths=stage_depths,
        width=len(needed(view, "backbone.root.conv.weight", 4)),
        image_size=224 if shape["position_embedding"] == "none" else map_size * stride,
    )
    named = replace(config, image_size=_named_size(beside) or config.image_size)
    return _with_meta(row, named if named.grid == config.grid else config)


def _describe_bit(
    row: WeightsLayout, view: View, tensors: Tensors, beside: Beside
) -> tuple[Config, dict[str, Any]]:
    config = ResNetConfig(
        stage_depths=_stage_depths(tensors, r"resnet/block(\d+)/unit(\d+)/a/standardized_conv2d/kernel"),
        width=len(needed(view, "backbone.root.conv.weight", 4)),
        version="v2",
        image_size=_BIT_FINE_TUNED_SIZE if "ILSVRC2012" in beside.name else 224,
        num_classes=classes(view),
    )
    return _with_meta(row, config)


def _with_meta(row: WeightsLayout, config: Config) -> tuple[Config, dict[str, Any]]:
    """Add the authors' pre-processing: a square for fine-tuned models, a centre crop for ImageNet-21k."""
    cut: dict[str, Any] = {"eval_method": "square", "eval_resize": SQUASH}
    if config.num_classes == _NUM_CLASSES_I21K:
        cut = {"eval_method": "shorter_side", "eval_resize": 7 / 8}
    return config, stored_meta(config, row.settle(cut, Beside()))


def _num_heads(tensors: Tensors) -> int:
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    kernel = tensors.get(name)
    if kernel is None or kernel.dim() != 3:
        raise CheckpointError(f"{name} [hidden_size, heads, channels] is missing or of another shape")
    return kernel.shape[1]


def _stage_depths(tensors: Tensors, pattern: str) -> tuple[int, ...]:
    depths: dict[int, int] = {}
    for match in filter(None, (re.fullmatch(pattern, name) for name in tensors)):
        depths[int(match[1])] = max(depths.get(int(match[1]), 0), int(match[2]))
    return tuple(depths[stage] for stage in sorted(depths))


def _named_size(beside: Beside) -> int | None:
    match = re.search(r"res_(\d{1,4})\b", beside.name)
    return int(match[1]) if match else None


def _lacks(config: Config) -> Iterator[tuple[object, str]]:
    if isinstance(config, ViTConfig):
        yield (
            {name: getattr(config, name) for name in NUMERICS} != NUMERICS,
            f"the authors' code has a {NUMERICS['gelu']} GELU and norm_eps {NUMERICS['norm_eps']:g}, these "
            f"weights were trained with {config.gelu} and {config.norm_eps:g}",
        )
    if isinstance(config, HybridConfig | ResNetConfig):
        groups = config.num_groups
        yield groups != NUM_GROUPS, f"num_groups is {NUM_GROUPS} there, not {groups}"
    if isinstance(config, ResNetConfig):
        yield config.version != "v2", "ResNets were published as v2 only"


def _notes(_config: Config, meta: Json) -> Iterator[str]:
    if meta.get("class_names") or any(tuple(meta.get(name, HALF)) != HALF for name in ("mean", "std")):
        yield "the .npz has no place for class names and pre-processing"


def _turned(matrix: Tensor) -> Tensor:
    return matrix.permute(1, 0)


def _weight_and_bias(ours: str, theirs: str, layout: MemoryLayout) -> Table:
    return {
        f"{ours}.weight": entry(f"{theirs}/kernel", layout=layout),
        f"{ours}.bias": entry(f"{theirs}/bias"),
    }


def _scale_and_bias(ours: str, theirs: str) -> Table:
    return {f"{ours}.weight": entry(f"{theirs}/scale"), f"{ours}.bias": entry(f"{theirs}/bias")}


# vit_jax, AugReg and BiT: one code base, one value range. The crop depends on the head.
VIT = WeightsLayout(
    name="google-vit",
    title="Google ViT",
    container="npz",
    mark="embedding/kernel",
    table=vit_table,
    describe=_describe_vit,
    tidy=tidy,
    documented={"mean": HALF, "std": HALF, "resample": "bilinear", "position_resize": "zoom"},
    lacks=_lacks,
    holds={"classifier": ("gap",), "position_embedding": ("none",), "gelu": ("erf",)},
    notes=_notes,
)
HYBRID = replace(
    VIT,
    name="google-hybrid",
    of=HybridConfig,
    title="Google hybrid",
    mark="conv_root/kernel",
    table=hybrid_table,
    describe=_describe_hybrid,
)
BIT = replace(
    VIT,
    name="google-bit",
    of=ResNetConfig,
    title="Google BiT",
    mark="resnet/root_block/standardized_conv2d/kernel",
    table=bit_table,
    describe=_describe_bit,
)
