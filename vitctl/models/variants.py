"""What a Vision Transformer is made of: its configuration, and the table of named sizes. Imports no torch."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from vitctl.errors import CheckpointError, RecipeError

_CHOICES = {"classifier": ("token", "gap"), "position_embedding": ("learned", "none"), "gelu": ("tanh", "erf")}
_POSITIVE = ("patch_size", "hidden_size", "depth", "mlp_size", "num_heads", "image_size")
_NOT_NEGATIVE = ("num_classes", "representation_size")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that decides the shape and the numerics of a `VisionTransformer`.

    Sizes are in pixels (`image_size`, `patch_size`) or channels. `num_classes` 0 means no head: the logits are the
    representation. `representation_size` 0 means no tanh layer before the head. `gelu` is `tanh` in the authors'
    code and `erf` in torchvision's and timm's weights.

    Raises RecipeError, naming every problem in one line.
    Paper: Section 3.1, Table 1
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
    position_embedding: Literal["learned", "none"] = "learned"
    dropout: float = 0.0
    head_bias: float = 0.0
    gelu: Literal["tanh", "erf"] = "tanh"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        problems = list(_value_problems(self)) or list(_fit_problems(self))
        if problems:
            raise RecipeError(f"model: {'; '.join(problems)}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches. Pixels beyond the last whole patch are dropped (a VALID convolution)."""
        side = self.image_size // self.patch_size
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


VARIANTS: dict[str, dict[str, int]] = {
    # AugReg's two small models.
    "Ti": {"hidden_size": 192, "depth": 12, "mlp_size": 768, "num_heads": 3},
    "S": {"hidden_size": 384, "depth": 12, "mlp_size": 1536, "num_heads": 6},
    # Section 4.3: Base with every hidden size halved. The paper does not print its heads; 6 keeps 64 channels each.
    "b": {"hidden_size": 384, "depth": 12, "mlp_size": 1536, "num_heads": 6},
    # Table 1.
    "B": {"hidden_size": 768, "depth": 12, "mlp_size": 3072, "num_heads": 12},
    "L": {"hidden_size": 1024, "depth": 24, "mlp_size": 4096, "num_heads": 16},
    "H": {"hidden_size": 1280, "depth": 32, "mlp_size": 5120, "num_heads": 16},
}
_USUAL_PATCHES = (8, 14, 16, 32)


def variant(name: str, **overrides: Any) -> ViTConfig:
    """Return the configuration that `name` stands for: size and patch, as in `B/16` or `ViT-H/14`, case-sensitive.

    Every other field keeps its default unless `overrides` names it. Raises RecipeError.
    Paper: Table 1
    """
    match = re.fullmatch(r"(?:ViT-)?([A-Za-z]+)/([1-9][0-9]{0,3})", name)
    if match is None or match[1] not in VARIANTS:
        known = [f"{size}/{patch}" for size in VARIANTS for patch in _USUAL_PATCHES]
        raise RecipeError(
            f"unknown model {name!r}{_did_you_mean(name.removeprefix('ViT-'), known)}: "
            f"a model is size/patch, such as B/16, and the sizes are {', '.join(VARIANTS)}"
        )
    known = [field.name for field in fields(ViTConfig)]
    for key in overrides:
        if key not in known:
            raise RecipeError(f"model {name}: unknown field {key!r}{_did_you_mean(key, known)}")
    return ViTConfig(**{"patch_size": int(match[2]), **VARIANTS[match[1]], **overrides})


_FAMILIES = {"vit": ViTConfig}


def to_dict(config: ViTConfig) -> dict[str, Any]:
    """Return `config` as a JSON-able dictionary whose `family` says what kind of model it describes."""
    family = next(name for name, kind in _FAMILIES.items() if type(config) is kind)
    return {"family": family, **asdict(config)}


def from_dict(stored: Mapping[str, Any]) -> ViTConfig:
    """Return the configuration that `to_dict` stored. Raises CheckpointError on anything missing, unknown or wrong."""
    family = stored.get("family")
    kind = _FAMILIES.get(family) if isinstance(family, str) else None
    if kind is None:
        raise CheckpointError(f"stored model: unknown family {family!r}, known are {', '.join(_FAMILIES)}")
    values = {key: value for key, value in stored.items() if key != "family"}
    if unknown := sorted(values.keys() - {field.name for field in fields(kind)}):
        raise CheckpointError(f"stored model: unknown keys {', '.join(unknown)}; a newer vitctl may have written them")
    if missing := sorted({field.name for field in fields(kind)} - values.keys()):
        raise CheckpointError(f"stored model: missing keys {', '.join(missing)}")
    try:
        return kind(**values)
    except RecipeError as error:
        raise CheckpointError(f"stored {error}") from error


def _value_problems(config: ViTConfig) -> Iterator[str]:
    """Fields that are wrong by themselves."""
    for name in _POSITIVE + _NOT_NEGATIVE:
        value, least = getattr(config, name), 1 if name in _POSITIVE else 0
        if type(value) is not int or value < least:
            yield f"{name} must be a whole number of at least {least}, not {value!r}"
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            yield f"{name} must be one of {', '.join(choices)}, not {getattr(config, name)!r}"
    for name in ("dropout", "head_bias", "norm_eps"):
        value = getattr(config, name)
        if type(value) not in (int, float) or not math.isfinite(value):
            yield f"{name} must be a finite number, not {value!r}"


def _fit_problems(config: ViTConfig) -> Iterator[str]:
    """Fields that do not fit together, or lie out of range."""
    if config.hidden_size % config.num_heads:
        yield f"hidden_size {config.hidden_size} is not a multiple of num_heads {config.num_heads}"
    if config.patch_size > config.image_size:
        yield f"patch_size {config.patch_size} is larger than image_size {config.image_size}"
    if not 0 <= config.dropout < 1:
        yield f"dropout must lie in [0, 1), not {config.dropout}"
    if not config.norm_eps > 0:
        yield f"norm_eps must be positive, not {config.norm_eps}"


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
