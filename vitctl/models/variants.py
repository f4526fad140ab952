"""Configurations of networks, and the named rows of the paper."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from vitctl.errors import CheckpointError, RecipeError, refuse
from vitctl.system.text import nearest, one_line

# One table for all families: the range of each integer, and the words that a field may hold. Maxima are
# about ten times those of any published model: a file that claims more is damaged or hostile.
BOUNDS = {
    "patch_size": (1, 4096), "hidden_size": (1, 2**16), "depth": (1, 1000), "mlp_size": (1, 2**18),
    "num_heads": (1, 2**12),
    "image_size": (1, 2**14), "width": (1, 2**13), "num_groups": (1, 2**13), "num_classes": (0, 2**24),
    "representation_size": (0, 2**16), "registers": (0, 256), "token_blocks": (1, 1000),
}  # fmt: skip
CHOICES = {
    "classifier": ("token", "gap", "patches", "token_patches", "attention"),
    "position_embedding": ("learned", "none", "2d", "relative", "relative_bias", "sincos"),
    "position_at": ("stem", "every_layer", "every_layer_shared"),
    "gelu": ("tanh", "erf", "quick"),
    "mlp": ("gelu", "swiglu"),
    "qkv_bias": ("qkv", "qv", "none"),
    "rotary": ("none", "dinov3", "eva"),
    "norm_at": ("tokens", "pooled"),
    "version": ("v1", "v2"),
    "target": ("mean_color", "downsized", "pixels"),
}
_NUMBERS = ("dropout", "drop_path", "head_bias", "norm_eps", "layer_scale", "rotary_rescale")
_SWITCHES = ("position_class_row", "mlp_norm", "norm_pre", "patch_bias")
WITH_CLASS_TOKEN = ("token", "patches", "token_patches")
Misfits = tuple[tuple[object, str], ...]  # whether a problem is there, in words


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that decides the shape and the numerics of a `VisionTransformer`.

    Sizes are in pixels (`image_size`, `patch_size`) or channels. `num_classes` 0 means no head: the logits
    are the representation. `representation_size` 0 means no tanh layer before the head. `position_embedding`
    and `position_at` are the rows and columns of Table 8; `none` and `relative` exist at the stem alone.
    `drop_path` is the chance of dropping the last block's branches, and grows linearly from 0 at the first.
    `gelu` is `tanh` in the authors' code and `erf` in torchvision's and timm's weights.

    The fields after `norm_eps` belong to later networks; they default to the paper's. `classifier`: `patches`
    averages the patches next to a class token, `token_patches` joins both, `attention` is SigLIP's pooling
    head. The last `token_blocks` blocks each give their class token, after the last norm; these are joined.
    `norm_at`: the last norm comes before the pooling or after it. `registers` are tokens without a
    position. `layer_scale` is the initial scale of each branch, 0 for none. `mlp_size` of a `swiglu` is that
    of its gate. `rotary` rotates queries and keys of patches, by DINOv3's rule or EVA-02's; in training all
    coordinates are multiplied by one number from [1 / `rotary_rescale`, `rotary_rescale`].

    Raises RecipeError, naming every problem in one line.
    Paper: Section 3.1, Table 1, Appendix D.4. Source: DINOv2, DINOv3, SigLIP, CLIP, DeiT III, BEiT v2, EVA-02
    """

    patch_size: int
    hidden_size: int
    depth: int
    mlp_size: int
    num_heads: int
    image_size: int = 224
    num_classes: int = 1000
    classifier: Literal["token", "gap", "patches", "token_patches", "attention"] = "token"
    representation_size: int = 0
    position_embedding: Literal["learned", "none", "2d", "relative", "relative_bias", "sincos"] = "learned"
    position_at: Literal["stem", "every_layer", "every_layer_shared"] = "stem"
    dropout: float = 0.0
    drop_path: float = 0.0
    head_bias: float = 0.0
    gelu: Literal["tanh", "erf", "quick"] = "tanh"
    norm_eps: float = 1e-6
    norm_at: Literal["tokens", "pooled"] = "tokens"
    norm_pre: bool = False
    patch_bias: bool = True
    position_class_row: bool = True
    registers: int = 0
    layer_scale: float = 0.0
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_norm: bool = False
    qkv_bias: Literal["qkv", "qv", "none"] = "qkv"
    rotary: Literal["none", "dinov3", "eva"] = "none"
    rotary_rescale: float = 1.0
    token_blocks: int = 1

    def __post_init__(self) -> None:
        _check(self)

    @property
    def map_size(self) -> int:
        """Side of the square map that is cut into patches: here the image itself."""
        return self.image_size

    @property
    def map_channels(self) -> int:
        return 3

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches, without any partial patches (a VALID convolution)."""
        side = self.map_size // self.patch_size
        return side, side

    @property
    def has_class_token(self) -> bool:
        return self.classifier in WITH_CLASS_TOKEN

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: the class token, if any, and the registers."""
        return self.has_class_token + self.registers

    @property
    def prefix_rows(self) -> int:
        """Rows of the position table before the patches' rows: 1 if the class token has a position."""
        return int(self.has_class_token and self.position_class_row)

    @property
    def num_tokens(self) -> int:
        rows, columns = self.grid
        return self.prefix_tokens + rows * columns

    @property
    def feature_size(self) -> int:
        """Width of the representation that feeds the head."""
        return self.representation_size or self.pooled_size

    @property
    def pooled_size(self) -> int:
        return self.hidden_size * (self.token_blocks + (self.classifier == "token_patches"))

    def misfits(self) -> Misfits:
        """Return what does not fit together, or is out of range: whether it is there, in words."""
        position, head_width = self.position_embedding, self.hidden_size // self.num_heads
        map_name = "image_size" if self.map_channels == 3 else "the backbone's output,"
        joins = self.classifier in ("token", "token_patches") and self.norm_at == "tokens"
        return (
            (
                self.hidden_size % self.num_heads,
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}",
            ),
            (
                self.patch_size > self.map_size,
                f"patch_size {self.patch_size} is larger than {map_name} {self.map_size}",
            ),
            (not 0 <= self.dropout < 1, f"dropout must lie in [0, 1), not {self.dropout}"),
            (not 0 <= self.drop_path < 1, f"drop_path must lie in [0, 1), not {self.drop_path}"),
            (not self.norm_eps > 0, f"norm_eps must be positive, not {self.norm_eps}"),
            (
                position not in ("learned", "2d") and self.position_at != "stem",
                f"position_embedding {position!r} has no table to add in every layer: "
                "position_at must be stem",
            ),
            (
                position == "2d" and self.hidden_size % 2,
                f"position_embedding '2d' halves hidden_size, and {self.hidden_size} is odd",
            ),
            (
                position == "sincos" and self.hidden_size % 4,
                f"position_embedding 'sincos' needs a hidden_size that 4 divides, not {self.hidden_size}",
            ),
            (
                position == "relative_bias" and self.registers,
                "position_embedding 'relative_bias' has no rows for registers",
            ),
            (
                self.rotary != "none" and head_width % 4,
                f"rotary {self.rotary!r} needs heads whose width 4 divides",
            ),
            (
                self.rotary_rescale < 1 or (self.rotary_rescale > 1 and self.rotary == "none"),
                f"rotary_rescale {self.rotary_rescale:g} must be 1 or, with rotary, more",
            ),
            (self.layer_scale < 0, f"layer_scale must be 0 or more, not {self.layer_scale}"),
            (self.mlp_norm and self.mlp == "gelu", "mlp_norm is of mlp 'swiglu'"),
            (
                self.norm_at == "pooled" and self.classifier in ("token_patches", "attention"),
                f"norm_at 'pooled' does not go with classifier {self.classifier!r}",
            ),
            (
                self.token_blocks > (self.depth if joins else 1),
                f"token_blocks {self.token_blocks} needs as many blocks, and a head that reads class tokens",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ViTConfig):
    """A ViT over the feature map of a ResNet (V1). `patch_size` is in positions of that map.

    `stage_depths` lists the units of each stage, empty for the root alone; `width` is the root's number of
    channels, and `num_groups` applies to every GroupNorm.

    Raises RecipeError, naming every problem in one line.
    Paper: Sections 3.1 and 4.1
    """

    stage_depths: tuple[int, ...]
    width: int = 64
    num_groups: int = 32

    @property
    def map_size(self) -> int:
        return sides(self.image_size, len(self.stage_depths))[-1]

    @property
    def map_channels(self) -> int:
        return channels(self.width, len(self.stage_depths))

    def misfits(self) -> Misfits:
        return (*super().misfits(), _groups_misfit(self.width, self.num_groups))


@dataclass(frozen=True, kw_only=True)
class AxialConfig(ViTConfig):
    """An Axial-ViT: every block attends within rows, then within columns, of a grid without class token.

    Raises RecipeError, naming every problem in one line.
    Paper: Appendix D.6
    """

    classifier: Literal["token", "gap", "patches", "token_patches", "attention"] = "gap"

    def misfits(self) -> Misfits:
        return (
            *super().misfits(),
            (self.classifier != "gap", "an axial model has no class token: classifier must be gap"),
            (
                self.position_embedding.startswith("relative") or self.rotary != "none" or self.registers,
                "an axial model has no single sequence of tokens: no relative positions, rotary or registers",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class MaskedPatchConfig(ViTConfig):
    """A ViT that predicts its corrupted patches; `target` chooses one of three representations.

    Raises RecipeError, naming every problem in one line.
    Paper: Appendix B.1.2
    """

    num_classes: int = 0
    target: Literal["mean_color", "downsized", "pixels"] = "mean_color"

    @property
    def patch_outputs(self) -> int:
        return {"mean_color": 8**3, "downsized": 16 * 8**3, "pixels": 3 * self.patch_size**2}[self.target]

    def misfits(self) -> Misfits:
        return (
            *super().misfits(),
            (
                self.num_classes or self.representation_size,
                "masked patch prediction has no classes: num_classes and representation_size must be 0",
            ),
            (
                self.norm_at == "pooled" or self.classifier == "attention",
                "masked patch prediction pools nothing: norm_at must be tokens, and classifier token or gap",
            ),
            (
                self.target == "downsized" and self.patch_size % 4,
                f"target 'downsized' cuts patches 4x4, and patch_size {self.patch_size} is not a multiple "
                "of 4",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """A BiT ResNet: GroupNorm and standardised convolutions. `v1` norms after each convolution, `v2` before.

    `stage_depths` lists the units of each stage; `width` is the root's number of channels, 64 times the
    factor in names; `num_groups` applies to every GroupNorm.

    Raises RecipeError, naming every problem in one line.
    Paper: Section 4.1
    """

    stage_depths: tuple[int, ...]
    width: int = 64
    version: Literal["v1", "v2"] = "v1"
    num_groups: int = 32
    image_size: int = 224
    num_classes: int = 1000
    head_bias: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def feature_size(self) -> int:
        return channels(self.width, len(self.stage_depths))

    def misfits(self) -> Misfits:
        return (
            (not self.stage_depths, "stage_depths must name at least one stage"),
            _groups_misfit(self.width, self.num_groups),
        )


@dataclass(frozen=True, kw_only=True)
class AxialResNetConfig(ResNetConfig):
    """A ResNet whose 3x3 convolutions are row and column attention with `num_heads` heads.

    Raises RecipeError, naming every problem in one line.
    Paper: Appendix D.6
    """

    num_heads: int = 8

    def misfits(self) -> Misfits:
        return (
            *super().misfits(),
            (self.version != "v1", f"an axial ResNet is v1, not {self.version}"),
            (
                self.width % (2 * self.num_heads),
                f"width {self.width} is not a multiple of twice num_heads {self.num_heads}",
            ),
        )


Config = ViTConfig | ResNetConfig

# Newer than the first weights files.
LATER_FIELDS = (
    "norm_at", "norm_pre", "patch_bias", "position_class_row", "registers", "layer_scale", "mlp", "mlp_norm",
    "qkv_bias", "rotary", "rotary_rescale", "token_blocks",
)  # fmt: skip


@dataclass(frozen=True)
class UnitShape:
    """A bottleneck unit of a backbone: channels before and inside, stride, and side of its input map."""

    inputs: int
    middle: int
    stride: int
    side: int

    @property
    def outputs(self) -> int:
        return 4 * self.middle

    @property
    def projected(self) -> bool:
        return self.stride > 1 or self.inputs != self.outputs


Recomputed = int | Literal["attention"]  # one in so many blocks, 0: none


def is_checkpointed(index: int, recomputed: Recomputed) -> bool:
    """Return whether all inner values of a block are recomputed."""
    return recomputed != "attention" and recomputed > 0 and index % recomputed == 0


def check_recomputed(config: "Config", recomputed: Recomputed) -> None:
    """Raise RecipeError if there is no attention to recompute."""
    if recomputed == "attention" and not isinstance(config, ViTConfig):
        raise RecipeError(
            "machine.checkpoint_blocks = 'attention' is for Transformers, this network is of the "
            f"family {family(config)!r}",
            fix="set a number of blocks, such as 1",
        )


def skips_unused_tokens(config: "ViTConfig") -> bool:
    """Return whether the last block computes only the class token, because nothing else is read."""
    reads_all = isinstance(config, MaskedPatchConfig) or config.classifier != "token"
    return not reads_all and not config.position_embedding.startswith("relative")


def unseen_pixels(config: "Config", image_size: int = 0) -> list[str]:
    """Return a warning if the image size is not a multiple of the patch size, as in the paper's H/14/384."""
    if not isinstance(config, ViTConfig) or config.map_channels != 3:
        return []
    size, patch = image_size or config.image_size, config.patch_size
    seen = size - size % patch
    if seen == size:
        return []
    return [
        f"image size {size} is not a multiple of the patch size {patch}: the last {size - seen} rows and "
        f"columns of pixels are "
        f"not used; {seen} or {seen + patch} would use all"
    ]


def stages(config: "HybridConfig | ResNetConfig") -> list[list[UnitShape]]:
    """Return the units of a backbone by stage. The first unit of each stage but the first halves the map."""
    found, inputs = [], config.width
    side = sides(config.image_size, 0)[0]
    for index, depth in enumerate(config.stage_depths):
        middle, stage = config.width * 2**index, []
        for unit in range(depth):
            stage.append(UnitShape(inputs, middle, stride=2 if index and not unit else 1, side=side))
            inputs, side = 4 * middle, -(-side // stage[-1].stride)
        found.append(stage)
    return found


def sides(image_size: int, num_stages: int) -> list[int]:
    """Return the side of a backbone's map after the root, then after each stage.

    The root halves twice, and every stage but the first halves; halving rounds up.
    """
    root = -(-image_size // 4)
    return [root] + [-(-root // 2**index) for index in range(num_stages)]


def channels(width: int, num_stages: int) -> int:
    """Return the channels of a backbone's map after `num_stages` stages of bottleneck units."""
    return 2 * width * 2**num_stages if num_stages else width


def _check(config: Config) -> None:
    problems = list(_value_problems(config))
    if problems := problems or [words for is_there, words in config.misfits() if is_there]:
        raise RecipeError("model", "; ".join(problems))


def _value_problems(config: Config) -> Iterator[str]:
    values: dict[str, Any] = vars(config)
    for name, value in values.items():
        least, most = BOUNDS.get(name, (0, 0))
        is_count, is_number = type(value) is int, type(value) in (int, float)
        choices = CHOICES.get(name, ())
        should_be = (
            (
                name in BOUNDS and not (is_count and least <= value <= most),
                f"a whole number from {least} to {most:,}",
            ),
            (name in CHOICES and value not in choices, f"one of {', '.join(choices)}"),
            (name in _SWITCHES and type(value) is not bool, "true or false"),
            (name in _NUMBERS and not (is_number and math.isfinite(value)), "a finite number"),
            (
                name == "stage_depths" and not _are_stages(value),
                "a few whole numbers of at least 1, such as (3, 4, 6, 3)",
            ),
        )
        for is_wrong, words in should_be:
            if is_wrong:
                yield f"{name} must be {words}, not {_shown(value)}"


def _are_stages(value: Any) -> bool:
    is_short = isinstance(value, tuple) and len(value) <= 8
    return is_short and all(type(units) is int and 1 <= units <= 1000 for units in value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _groups_misfit(width: int, num_groups: int) -> tuple[object, str]:
    return width % num_groups, f"width {width} is not a multiple of num_groups {num_groups}"


VARIANTS: dict[str, dict[str, int]] = {
    # The two small models of AugReg.
    "Ti": {"hidden_size": 192, "depth": 12, "mlp_size": 768, "num_heads": 3},
    "S": {"hidden_size": 384, "depth": 12, "mlp_size": 1536, "num_heads": 6},
    # Section 4.3: Base with every hidden size halved. The paper does not print its heads; 6 keeps 64 channels
    # each.
    "b": {"hidden_size": 384, "depth": 12, "mlp_size": 1536, "num_heads": 6},
    # Table 1.
    "B": {"hidden_size": 768, "depth": 12, "mlp_size": 3072, "num_heads": 12},
    "L": {"hidden_size": 1024, "depth": 24, "mlp_size": 4096, "num_heads": 16},
    "H": {"hidden_size": 1280, "depth": 32, "mlp_size": 5120, "num_heads": 16},
}
HALVED = "b"  # only at patch 32, as in the paper: elsewhere it is a typing error

# Section 4.1: /16 moves the units of stage 4 into stage 3. `patch_size` is in positions of the feature map,
# so the number in a name is the stride of the tokens, except in R+Ti/16, whose name AugReg gave: 8x8 patches
# at stride 4.
HYBRIDS: dict[str, dict[str, Any]] = {
    "R50+B/32": {**VARIANTS["B"], "stage_depths": (3, 4, 6, 3), "patch_size": 1},
    "R50+B/16": {**VARIANTS["B"], "stage_depths": (3, 4, 9), "patch_size": 1},
    "R50+L/32": {**VARIANTS["L"], "stage_depths": (3, 4, 6, 3), "patch_size": 1},
    "R50+L/16": {**VARIANTS["L"], "stage_depths": (3, 4, 9), "patch_size": 1},
    "R26+S/32": {**VARIANTS["S"], "stage_depths": (2, 2, 2, 2), "patch_size": 1},
    "R26+B/32": {**VARIANTS["B"], "stage_depths": (2, 2, 2, 2), "patch_size": 1},
    "R+Ti/16": {**VARIANTS["Ti"], "stage_depths": (), "patch_size": 8},
}

# BiT: a name is R<depth>x<width factor>, and the factor multiplies 64 channels.
RESNETS: dict[str, dict[str, Any]] = {
    "R50x1": {"stage_depths": (3, 4, 6, 3), "width": 64},
    "R50x2": {"stage_depths": (3, 4, 6, 3), "width": 128},
    "R50x3": {"stage_depths": (3, 4, 6, 3), "width": 192},
    "R101x1": {"stage_depths": (3, 4, 23, 3), "width": 64},
    "R101x3": {"stage_depths": (3, 4, 23, 3), "width": 192},
    "R152x1": {"stage_depths": (3, 8, 36, 3), "width": 64},
    "R152x2": {"stage_depths": (3, 8, 36, 3), "width": 128},
    "R152x4": {"stage_depths": (3, 8, 36, 3), "width": 256},
    "R200x3": {"stage_depths": (3, 24, 36, 3), "width": 192},
}
AXIAL_RESNETS = {"AxialR50": RESNETS["R50x1"]}

_FAMILIES: dict[str, type[Config]] = {
    "vit": ViTConfig,
    "hybrid": HybridConfig,
    "axial": AxialConfig,
    "masked_patch": MaskedPatchConfig,
    "resnet": ResNetConfig,
    "axial_resnet": AxialResNetConfig,
}


def names() -> list[str]:
    """Return the names of the models that the paper or its followers used; `variant` takes any patch size."""
    plain = [f"{size}/{patch}" for size in VARIANTS if size != HALVED for patch in (8, 14, 16, 32)]
    return [*plain, f"{HALVED}/32", *HYBRIDS, *RESNETS, "Axial-B/32", "Axial-B/16", *AXIAL_RESNETS]


def variant(name: str, **overrides: Any) -> Config:
    """Return the configuration for a case-sensitive `name`: one of `names()`, or a size at any patch.

    `ViT-` in a name, as in `ViT-B/16` or `R50+ViT-B/32`, changes nothing. `overrides` replace fields.
    Raises RecipeError. Paper: Table 1, Section 4.1, Appendix D.6
    """
    kind, row = _row(name)
    known = [field.name for field in fields(kind)]
    for key in overrides:
        if key not in known:
            raise RecipeError(f"model {name}", f"unknown field {key!r}{_did_you_mean(key, known)}")
    values: dict[str, Any] = {**row, **overrides}
    return kind(**values)


def _row(name: str) -> tuple[type[Config], Mapping[str, Any]]:
    """Return the family of `name` and the fields that the name decides."""
    short = name.replace("ViT-", "")
    tables = ((HybridConfig, HYBRIDS), (ResNetConfig, RESNETS), (AxialResNetConfig, AXIAL_RESNETS))
    for kind, table in tables:
        if short in table:
            return kind, table[short]
    match = re.fullmatch(r"(Axial-)?([A-Za-z]+)/([1-9][0-9]{0,3})", short)
    if match and match[2] in VARIANTS and (match[2] != HALVED or match[3] == "32"):
        return (AxialConfig if match[1] else ViTConfig), {"patch_size": int(match[3]), **VARIANTS[match[2]]}
    raise RecipeError(
        f"unknown model {name!r}{_did_you_mean(short, names())}",
        "a model is size/patch, such as B/16 or Axial-B/16, with the sizes "
        f"{', '.join(size for size in VARIANTS if size != HALVED)}; or {HALVED}/32, half of B/32; "
        f"or one of {', '.join([*HYBRIDS, *RESNETS, *AXIAL_RESNETS])}",
    )


# `lora.targets` -> a layer of a Transformer's block, and the part of its rows.
LORA_TARGETS: dict[str, tuple[str, int]] = {
    "q": ("attention.qkv", 0),
    "k": ("attention.qkv", 1),
    "v": ("attention.qkv", 2),
    "out": ("attention.out", 0),
    "fc1": ("mlp.fc1", 0),
    "fc2": ("mlp.fc2", 0),
}


def check_lora(config: Config, blocks: Iterable[int]) -> None:
    """Raise RecipeError if a network has no layers for adapters, or lacks the `blocks`."""
    if not isinstance(config, ViTConfig) or type(config) not in (ViTConfig, HybridConfig):
        raise RecipeError(
            "[lora] is for Vision Transformers and hybrids, these weights are of the family "
            f"{family(config)!r}",
            fix="leave it out",
        )
    if odd := [number for number in blocks if number >= config.depth]:
        raise RecipeError(f"lora.blocks names {odd[0]}, the network has the blocks 0 to {config.depth - 1}")


def downstream(
    config: Config,
    *,
    num_classes: int,
    image_size: int,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    rotary_rescale: float = 1.0,
) -> Config:
    """Return the network that fine-tunes `config`: the same body under a linear layer for `num_classes`.

    A masked patch model becomes a plain one. Raises RecipeError if dropout or stochastic depth is requested
    from a family without it. Paper: Section 3.2, Appendix B.1.1
    """
    changes: dict[str, Any] = {"num_classes": num_classes, "image_size": image_size, "head_bias": 0.0}
    if isinstance(config, ResNetConfig):
        refuse(
            RecipeError,
            (dropout, "model", "a ResNet has no dropout", f"set dropout = 0 (now {dropout})"),
            (drop_path, "model", "a ResNet has no drop_path", f"set drop_path = 0 (now {drop_path})"),
            (rotary_rescale > 1, "model", "a ResNet has no rotary positions", "leave out rotary_rescale"),
        )
        return replace(config, **changes)
    changes |= {"representation_size": 0, "dropout": dropout, "drop_path": drop_path}
    changes["rotary_rescale"] = rotary_rescale
    if isinstance(config, MaskedPatchConfig):
        body: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(ViTConfig)}
        return ViTConfig(**{**body, **changes})
    return replace(config, **changes)


def with_classifier(config: Config, classifier: str) -> Config:
    """Return the same body with another pooling and no head. Raises RecipeError without such tokens."""
    if not classifier or classifier == getattr(config, "classifier", None):
        return config
    if not isinstance(config, ViTConfig):
        raise RecipeError("weights.classifier is for Vision Transformers", fix="leave it out")
    wants_token = classifier in WITH_CLASS_TOKEN
    if wants_token != config.has_class_token or classifier == "attention":
        known = (config.classifier, *(WITH_CLASS_TOKEN if config.has_class_token else ("gap",)))
        raise RecipeError(
            f"weights.classifier = {classifier!r} does not go with these weights, whose classifier is "
            f"{config.classifier!r}; known for them: {', '.join(dict.fromkeys(known))}"
        )
    changes: dict[str, Any] = {"classifier": classifier, "num_classes": 0, "representation_size": 0}
    return replace(config, **changes)


def with_fresh_norm(config: Config) -> Config:
    """Return the same body whose norm is behind the mean of its patches. Raises RecipeError where there is
    no such mean.
    """
    if not isinstance(config, ViTConfig) or config.classifier not in ("gap", "patches"):
        has = f"that of these weights is {getattr(config, 'classifier', 'of a ResNet')!r}"
        raise RecipeError(
            f"finetune.fresh_norm = true needs the mean of the patches before the head, and {has}",
            fix="set weights.classifier = 'patches', or leave fresh_norm out",
        )
    return replace(config, norm_at="pooled")


def with_blocks(config: Config, blocks: Iterable[int]) -> Config:
    """Return the headless body that joins the last blocks' class tokens and the mean of the patches.

    The number of class tokens is max(`blocks`), at most all. A network without a class token after the last
    norm stays as it is, and so does any without `blocks`. Source: DINOv2 (code)
    """
    reads_token = isinstance(config, ViTConfig) and config.has_class_token and config.norm_at == "tokens"
    if not isinstance(config, ViTConfig) or not reads_token or not (most := max(blocks, default=0)):
        return config
    changes: dict[str, Any] = {"classifier": "token_patches", "token_blocks": min(most, config.depth)}
    return replace(downstream(config, num_classes=0, image_size=config.image_size), **changes)


def to_dict(config: Config) -> dict[str, Any]:
    """Return `config` as a JSON-able dictionary with its `family`.

    A later field at its default is left out, so that files and digests of earlier networks do not change.
    """
    values = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in fields(config)
        if (value := getattr(config, field.name)) != field.default or field.name not in LATER_FIELDS
    }
    return {"family": family(config), **values}


def family(config: Config) -> str:
    return next(name for name, kind in _FAMILIES.items() if type(config) is kind)


def from_dict(stored: Mapping[str, Any]) -> Config:
    """Return the configuration that `to_dict` stored; fields newer than the file keep their defaults.

    Raises CheckpointError on anything missing, unknown or wrong.
    """
    name = stored.get("family")
    kind = _FAMILIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise CheckpointError("stored model", f"unknown family {name!r}, known are {', '.join(_FAMILIES)}")
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in stored.items() if key != "family"
    }
    unknown = one_line(", ".join(sorted(values.keys() - {field.name for field in fields(kind)})))
    required = {field.name for field in fields(kind) if field.default is MISSING}
    missing = ", ".join(sorted(required - values.keys()))
    newer = f"unknown keys {unknown}; a newer vitctl may have written them"
    refuse(
        CheckpointError,
        (unknown, "stored model", newer),
        (missing, "stored model", f"missing keys {missing}"),
    )
    try:
        return kind(**values)
    except RecipeError as error:
        raise CheckpointError(f"stored {error}") from error


def _did_you_mean(word: str, known: list[str]) -> str:
    plain = {_plain(name): name for name in known}
    close = [_plain(word)] if _plain(word) in plain else nearest(_plain(word), plain, 1)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""


def _plain(name: str) -> str:
    """Return a name without case, signs and the word ViT: people write b/16, B16, vit_b_16."""
    return re.sub(r"[^a-z0-9.]", "", name.lower()).removeprefix("vit")
