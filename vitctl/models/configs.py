"""Model configurations: one frozen dataclass for each family. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vitctl.errors import RecipeError

# One table for all families: the least and the most of each whole number, and the words that a field may
# hold. The most is some ten times what any published model has: a file that claims more is damaged or
# hostile.
_BOUNDS = {
    "patch_size": (1, 4096), "hidden_size": (1, 2**16), "depth": (1, 1000), "mlp_size": (1, 2**18), "num_heads": (1, 2**12),
    "image_size": (1, 2**14), "width": (1, 2**13), "num_groups": (1, 2**13), "num_classes": (0, 2**24),
    "representation_size": (0, 2**16),
}  # fmt: skip
_MAX_UNITS = 1000  # of a stage
_CHOICES = {
    "classifier": ("token", "gap"),
    "position_embedding": ("learned", "none", "2d", "relative"),
    "position_at": ("stem", "every_layer", "every_layer_shared"),
    "gelu": ("tanh", "erf"),
    "version": ("v1", "v2"),
    "target": ("mean_color", "downsized", "pixels"),
}
_NUMBERS = ("dropout", "drop_path", "head_bias", "norm_eps")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that decides the shape and the numerics of a `VisionTransformer`.

    Sizes are in pixels (`image_size`, `patch_size`) or channels. `num_classes` 0 means no head: the logits
    are the representation. `representation_size` 0 means no tanh layer before the head. `position_embedding`
    and `position_at` are the rows and columns of Table 8; `none` and `relative` exist at the stem alone.
    `drop_path` is the chance of dropping the last block's branches, and grows linearly from 0 at the first.
    `gelu` is `tanh` in the authors' code and `erf` in torchvision's and timm's weights.

    Raises RecipeError, naming every problem in one line.
    Paper: Section 3.1, Table 1, Appendix D.4
    """

    patch_size: int
    hidden_size: int
    depth: int
    mlp_size: int
    num_heads: int
    image_size: int = 224
    num_classes: int = 1000
    classifier: Literal["token", "gap"] = "token"
    representation_size: int = 0
    position_embedding: Literal["learned", "none", "2d", "relative"] = "learned"
    position_at: Literal["stem", "every_layer", "every_layer_shared"] = "stem"
    dropout: float = 0.0
    drop_path: float = 0.0
    head_bias: float = 0.0
    gelu: Literal["tanh", "erf"] = "tanh"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check(self)

    @property
    def map_size(self) -> int:
        """Side of the square map that is cut into patches: here the image itself."""
        return self.image_size

    @property
    def map_channels(self) -> int:
        """Channels of the map that is cut into patches."""
        return 3

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches.

        What lies beyond the last whole patch is dropped (a VALID convolution).
        """
        side = self.map_size // self.patch_size
        return side, side

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: 1 class token, or 0 when the classifier averages the patches."""
        return 1 if self.classifier == "token" else 0

    @property
    def num_tokens(self) -> int:
        """Length of the sequence that the encoder sees."""
        rows, columns = self.grid
        return self.prefix_tokens + rows * columns

    @property
    def feature_size(self) -> int:
        """Width of the representation that feeds the head."""
        return self.representation_size or self.hidden_size

    def misfits(self) -> Iterator[str]:
        """Fields that do not fit together, or lie out of range."""
        if self.hidden_size % self.num_heads:
            yield f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
        if self.patch_size > self.map_size:
            map_name = "image_size" if self.map_channels == 3 else "the backbone's output,"
            yield f"patch_size {self.patch_size} is larger than {map_name} {self.map_size}"
        for name in ("dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name} must lie in [0, 1), not {getattr(self, name)}"
        if not self.norm_eps > 0:
            yield f"norm_eps must be positive, not {self.norm_eps}"
        if self.position_embedding in ("none", "relative") and self.position_at != "stem":
            yield f"position_embedding {self.position_embedding!r} adds nothing to the tokens: position_at must be stem"
        if self.position_embedding == "2d" and self.hidden_size % 2:
            yield f"position_embedding '2d' halves hidden_size, and {self.hidden_size} is odd"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ViTConfig):
    """A ViT over the feature map of a ResNet (V1). `patch_size` is in positions of that map.

    `stage_depths` are the units of each stage, none for the root alone; `width` is the root's number of
    channels, and `num_groups` that of every GroupNorm.

    Raises RecipeError, naming every problem in one line.
    Paper: Sections 3.1 and 4.1
    """

    stage_depths: tuple[int, ...]
    width: int = 64
    num_groups: int = 32

    @property
    def map_size(self) -> int:
        """Side of the backbone's output."""
        return sides(self.image_size, len(self.stage_depths))[-1]

    @property
    def map_channels(self) -> int:
        """Channels of the backbone's output."""
        return channels(self.width, len(self.stage_depths))

    def misfits(self) -> Iterator[str]:
        """Fields that do not fit together, or lie out of range."""
        yield from super().misfits()
        yield from _backbone_misfits(self.width, self.num_groups)


@dataclass(frozen=True, kw_only=True)
class AxialConfig(ViTConfig):
    """An Axial-ViT: every block attends within rows, then within columns, of a grid that has no class token.

    Raises RecipeError, naming every problem in one line.
    Paper: Appendix D.6
    """

    classifier: Literal["token", "gap"] = "gap"

    def misfits(self) -> Iterator[str]:
        """Fields that do not fit together, or lie out of range."""
        yield from super().misfits()
        if self.classifier != "gap":
            yield "an axial model has no class token: classifier must be gap"
        if self.position_embedding == "relative":
            yield "an axial model has no single sequence of tokens: position_embedding cannot be relative"


@dataclass(frozen=True, kw_only=True)
class MaskedPatchConfig(ViTConfig):
    """A ViT that predicts what its corrupted patches looked like: `target` says which of the three ways.

    Raises RecipeError, naming every problem in one line.
    Paper: Appendix B.1.2
    """

    num_classes: int = 0
    target: Literal["mean_color", "downsized", "pixels"] = "mean_color"

    @property
    def patch_outputs(self) -> int:
        """Numbers predicted for each patch."""
        return {"mean_color": 8**3, "downsized": 16 * 8**3, "pixels": 3 * self.patch_size**2}[self.target]

    def misfits(self) -> Iterator[str]:
        """Fields that do not fit together, or lie out of range."""
        yield from super().misfits()
        if self.num_classes or self.representation_size:
            yield "masked patch prediction has no classes: num_classes and representation_size must be 0"
        if self.target == "downsized" and self.patch_size % 4:
            yield f"target 'downsized' cuts patches 4x4, and patch_size {self.patch_size} is not a multiple of 4"


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """A BiT ResNet: GroupNorm and standardised convolutions. `v1` norms after each convolution, `v2` before.

    `stage_depths` are the units of each stage; `width` is the root's number of channels, 64 times the factor
    that names carry; `num_groups` is that of every GroupNorm.

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
        """Width of the representation that feeds the head."""
        return channels(self.width, len(self.stage_depths))

    def misfits(self) -> Iterator[str]:
        """Fields that do not fit together."""
        if not self.stage_depths:
            yield "stage_depths must name at least one stage"
        yield from _backbone_misfits(self.width, self.num_groups)


@dataclass(frozen=True, kw_only=True)
class AxialResNetConfig(ResNetConfig):
    """A ResNet whose 3x3 convolutions are row and column attention with `num_heads` heads.

    Raises RecipeError, naming every problem in one line.
    Paper: Appendix D.6
    """

    num_heads: int = 8

    def misfits(self) -> Iterator[str]:
        """Fields that do not fit together."""
        yield from super().misfits()
        if self.version != "v1":
            yield f"an axial ResNet is v1, not {self.version}"
        if self.width % (2 * self.num_heads):
            yield f"width {self.width} is not a multiple of twice num_heads {self.num_heads}"


Config = ViTConfig | ResNetConfig


@dataclass(frozen=True)
class UnitShape:
    """One bottleneck unit of a backbone: channels before and inside, stride, and the side of the map it
    receives.
    """

    inputs: int
    middle: int
    stride: int
    side: int

    @property
    def outputs(self) -> int:
        """Channels after the unit."""
        return 4 * self.middle

    @property
    def projected(self) -> bool:
        """Whether the shortcut needs a convolution to fit."""
        return self.stride > 1 or self.inputs != self.outputs


def spares_tokens(config: "ViTConfig") -> bool:
    """Return whether the last block computes the class token alone, because nothing else is read."""
    reads_all = isinstance(config, MaskedPatchConfig) or config.classifier != "token"
    return not reads_all and config.position_embedding != "relative"


def stages(config: "HybridConfig | ResNetConfig") -> list[list[UnitShape]]:
    """Return every unit of a backbone. The first unit of each stage but the first one halves the map."""
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
    """Return the side of a backbone's map after the root, then after each stage: each halving rounds up.

    The root halves twice, the first stage keeps the size, every other one halves.
    """
    root = -(-image_size // 4)
    return [root] + [-(-root // 2**index) for index in range(num_stages)]


def channels(width: int, num_stages: int) -> int:
    """Return the channels of a backbone's map after `num_stages` stages of bottleneck units."""
    return 2 * width * 2**num_stages if num_stages else width


def _check(config: Config) -> None:
    if problems := list(_value_problems(config)) or list(config.misfits()):
        raise RecipeError(f"model: {'; '.join(problems)}")


def _value_problems(config: Config) -> Iterator[str]:
    """Fields that are wrong by themselves."""
    values: dict[str, Any] = vars(config)
    for name, value in values.items():
        if name in _BOUNDS and not _is_within(value, *_BOUNDS[name]):
            yield f"{name} must be a whole number from {_BOUNDS[name][0]} to {_BOUNDS[name][1]:,}, not {_shown(value)}"
        if name in _CHOICES and not (isinstance(value, str) and value in _CHOICES[name]):
            yield f"{name} must be one of {', '.join(_CHOICES[name])}, not {_shown(value)}"
        if name in _NUMBERS and (type(value) not in (int, float) or not math.isfinite(value)):
            yield f"{name} must be a finite number, not {_shown(value)}"
        if name == "stage_depths" and not _is_stages(value):
            yield f"stage_depths must be a few whole numbers of at least 1, such as (3, 4, 6, 3), not {_shown(value)}"


def _is_within(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_stages(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= 8
        and all(_is_within(units, 1, _MAX_UNITS) for units in value)
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _backbone_misfits(width: int, num_groups: int) -> Iterator[str]:
    if width % num_groups:
        yield f"width {width} is not a multiple of num_groups {num_groups}"
