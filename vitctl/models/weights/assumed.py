"""What the tensors of a weights file do not tell: the values that a layout's authors document, and those that
are assumed.

A JSON file beside the tensors takes precedence over both. What is assumed is listed as `meta["assumed"]`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vitctl.models.configs import Config

HALF = (0.5, 0.5, 0.5)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
Resize = Callable[[int], int]  # image size to eval_resize, in pixels
# The key of a recipe that sets each value. The two without one are read from a config.json beside the
# tensors.
KEYS = {
    "mean": "weights.mean",
    "std": "weights.std",
    "gelu": "weights.gelu",
    "norm_eps": "weights.norm_eps",
    "position_resize": "weights.position_resize",
    "classifier": "classifier",
    "num_heads": "num_heads",
    "eval_method": "data.eval_method",
    "eval_resize": "data.eval_resize",
    "resample": "data.eval_resample",
}
OF_SCORING = (
    "eval_method",
    "eval_resize",
    "resample",
)  # the jobs that train or draw shots have rules of their own
_STORED = ("mean", "std", "eval_method", "resample", "position_resize")


def squash(_size: int) -> int:
    """The eval_resize of images that are squashed to the image size."""
    return 0


def crop(share: float) -> Resize:
    """The eval_resize of which a centre crop keeps this share of the side."""
    return lambda size: math.floor(size / share)


@dataclass(frozen=True)
class Layout:
    """What nothing in a file of this layout records: values that hold for every such file, and values that
    may not.
    """

    documented: Mapping[str, Any]
    assumed: Mapping[str, Any]


LAYOUTS = {
    # vit_jax, AugReg and BiT: one code base, one value range. How images are cut depends on the head, see
    # google.py.
    "google": Layout({"mean": HALF, "std": HALF, "resample": "bilinear", "position_resize": "zoom"}, {}),
    # Also the authors' files of MAE, DINO and DeiT, which were trained with ImageNet's mean and std. Assumed
    # are timm's defaults for Vision Transformers.
    "timm": Layout(
        {},
        {
            "mean": HALF,
            "std": HALF,
            "gelu": "erf",
            "norm_eps": 1e-6,
            "position_resize": "bicubic_antialias",
            "classifier": "token",
            "num_heads": "hidden size / 64",
            "eval_method": "shorter_side",
            "eval_resize": crop(0.9),
            "resample": "bicubic_antialias",
        },
    ),
    # config.json tells gelu and norm_eps, preprocessor_config.json the rest; assumed are the defaults of
    # transformers.
    "hf": Layout(
        {"position_resize": "bicubic"},
        {
            "mean": HALF,
            "std": HALF,
            "gelu": "erf",
            "norm_eps": 1e-12,
            "num_heads": "hidden size / 64",
            "eval_method": "square",
            "eval_resize": squash,
            "resample": "bilinear_antialias",
        },
    ),
    # All published files have ImageNet's mean and std. At 224 pixels there are three presets: resize 256 or
    # 242 and bilinear, 224 and bicubic (SWAG); at other sizes SWAG's alone.
    "torchvision": Layout(
        {
            **IMAGENET,
            "gelu": "erf",
            "norm_eps": 1e-6,
            "position_resize": "bicubic_aligned",
            "eval_method": "shorter_side",
        },
        {"num_heads": "hidden size / 64", "eval_resize": crop(224 / 256), "resample": "bilinear_antialias"},
    ),
}


def settle(layout: str, recorded: Mapping[str, Any], marked: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a layout, and as `assumed` the names of those that nothing records.

    Args:
        layout: a row of LAYOUTS.
        recorded: by the tensors or JSON files; None: not recorded.
        marked: names that an export of ours recorded as assumed.
    """
    row, found = LAYOUTS[layout], {name: value for name, value in recorded.items() if value is not None}
    assumed = [name for name in KEYS if (name in row.assumed and name not in found) or name in marked]
    return {**row.documented, **row.assumed, **found, "assumed": assumed}


def stored_meta(model: Config, values: Mapping[str, Any], class_names: Iterable[str] = ()) -> dict[str, Any]:
    """Return the metadata of weights from the values of `settle`."""
    names = list(class_names)
    meta = {name: values[name] for name in _STORED}
    return {
        **meta,
        "image_size": model.image_size,
        "mean": list(values["mean"]),
        "std": list(values["std"]),
        "eval_resize": values["eval_resize"](model.image_size),
        **({"class_names": names} if names else {}),
        **({"assumed": values["assumed"]} if values["assumed"] else {}),
    }


def assumed_values(meta: Mapping[str, Any], config: Config, *, scoring: bool) -> dict[str, Any]:
    """Return what is assumed about weights: recipe key -> value.

    Args:
        meta, config: of the weights.
        scoring: whether their evaluation pre-processing is used.
    """
    names = [name for name in meta.get("assumed") or () if scoring or name not in OF_SCORING]
    return {KEYS[name]: meta[name] if name in meta else getattr(config, name) for name in names}


def assumed_line(values: Mapping[str, Any]) -> str:
    """Return one line that names every assumed value and the key that sets it; "" where nothing is assumed."""
    shown = ", ".join(f"{key}={str(value).replace(', ', ',')}" for key, value in values.items())
    of_config = " and ".join(key for key in values if key in ("num_heads", "classifier"))
    elsewhere = f" ({of_config}: in a config.json beside the file)" if of_config else ""
    return (
        f"assumed, not recorded with the weights: {shown}; set what differs with --set KEY=VALUE{elsewhere}"
        if shown
        else ""
    )
