"""The networks of the paper by name, and configurations as dictionaries for checkpoints. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.configs import (
    AxialConfig,
    AxialResNetConfig,
    Config,
    HybridConfig,
    MaskedPatchConfig,
    ResNetConfig,
    ViTConfig,
)
from vitctl.system.text import nearest, one_line

VARIANTS: dict[str, dict[str, int]] = {
    # AugReg's two small models.
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
HALVED = "b"  # only at patch 32, as in the paper: elsewhere it is a slip of the shift key
_USUAL_PATCHES = (8, 14, 16, 32)

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
    """Return the names of the models that the paper or its followers used; `variant` takes any patch size
    beside.
    """
    plain = [f"{size}/{patch}" for size in VARIANTS if size != HALVED for patch in _USUAL_PATCHES]
    return [*plain, f"{HALVED}/32", *HYBRIDS, *RESNETS, "Axial-B/32", "Axial-B/16", *AXIAL_RESNETS]


def variant(name: str, **overrides: Any) -> Config:
    """Return the configuration that `name` stands for, case-sensitive: one of `names()`, or a size at any
    patch.

    A `ViT-` inside, as in `ViT-B/16` or `R50+ViT-B/32`, changes nothing. Every other field keeps its default
    unless `overrides` names it. Raises RecipeError. Paper: Table 1, Section 4.1, Appendix D.6
    """
    kind, row = _row(name)
    known = [field.name for field in fields(kind)]
    for key in overrides:
        if key not in known:
            raise RecipeError(f"model {name}: unknown field {key!r}{_did_you_mean(key, known)}")
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
        f"unknown model {name!r}{_did_you_mean(short, names())}: a model is size/patch, such as B/16 or "
        f"Axial-B/16, "
        f"with the sizes {', '.join(size for size in VARIANTS if size != HALVED)}; or {HALVED}/32, half of "
        f"B/32; or one of "
        f"{', '.join([*HYBRIDS, *RESNETS, *AXIAL_RESNETS])}"
    )


def downstream(
    config: Config, *, num_classes: int, image_size: int, dropout: float = 0.0, drop_path: float = 0.0
) -> Config:
    """Return the network that a fine-tune of `config` trains: the same body under one linear layer for
    `num_classes`.

    A masked patch model becomes a plain one. Raises RecipeError where the family has no dropout or no
    stochastic depth and some is wanted. Paper: Section 3.2, Appendix B.1.1
    """
    changes: dict[str, Any] = {"num_classes": num_classes, "image_size": image_size, "head_bias": 0.0}
    if isinstance(config, ResNetConfig):
        for name, rate in {"dropout": dropout, "drop_path": drop_path}.items():
            if rate:
                raise RecipeError(f"model: a ResNet has no {name}, and {rate} is asked for; set {name} to 0")
        return replace(config, **changes)
    changes |= {"representation_size": 0, "dropout": dropout, "drop_path": drop_path}
    if isinstance(config, MaskedPatchConfig):
        body: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(ViTConfig)}
        return ViTConfig(**{**body, **changes})
    return replace(config, **changes)


def to_dict(config: Config) -> dict[str, Any]:
    """Return `config` as a JSON-able dictionary whose `family` says what kind of model it describes."""
    values = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()
    }
    return {"family": family(config), **values}


def family(config: Config) -> str:
    """Return the word for the kind of model that `config` describes: vit, hybrid, resnet ..."""
    return next(name for name, kind in _FAMILIES.items() if type(config) is kind)


def from_dict(stored: Mapping[str, Any]) -> Config:
    """Return the configuration that `to_dict` stored. A field that is younger than the file keeps its
    default.

    Raises CheckpointError on anything missing, unknown or wrong.
    """
    name = stored.get("family")
    kind = _FAMILIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise CheckpointError(f"stored model: unknown family {name!r}, known are {', '.join(_FAMILIES)}")
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in stored.items() if key != "family"
    }
    if unknown := sorted(values.keys() - {field.name for field in fields(kind)}):
        raise CheckpointError(
            f"stored model: unknown keys {one_line(', '.join(unknown))}; a newer vitctl may have written them"
        )
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if missing := sorted(required - values.keys()):
        raise CheckpointError(f"stored model: missing keys {', '.join(missing)}")
    try:
        return kind(**values)
    except RecipeError as error:
        raise CheckpointError(f"stored {error}") from error


def _did_you_mean(word: str, known: list[str]) -> str:
    plain = {_plain(name): name for name in known}
    close = [_plain(word)] if _plain(word) in plain else nearest(_plain(word), plain, 1)
    return f", did you mean {plain[close[0]]!r}?" if close else ""


def _plain(name: str) -> str:
    """A name without case, signs and the word ViT: people write b/16, B16, vit_b_16."""
    return re.sub(r"[^a-z0-9.]", "", name.lower()).removeprefix("vit")
