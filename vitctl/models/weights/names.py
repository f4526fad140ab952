"""Published weights by short names, for --from and `vitctl weights`."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vitctl.errors import CheckpointError
from vitctl.models.variants import Config, ViTConfig
from vitctl.system.text import did_you_mean, one_edit_away

TERMS = {"DINOv3 License": "https://ai.meta.com/resources/models-and-libraries/dinov3-license/"}
_MAE_FT = "% fine-tuned on ImageNet: FINETUNE.md of facebookresearch/mae"


class Published(NamedTuple):
    """Published weights.

    `parameters` are millions, without a classifier; `image_size` pixels; `feature` is the input of a new
    head; `number` is a published result with its source. Gated ones need a login.
    """

    address: str
    trained: str
    parameters: float
    image_size: int
    feature: str
    licence: str
    number: str = ""
    gated: bool = False

    @property
    def page(self) -> str:
        return self.address.replace("hf://", "https://huggingface.co/")


_CLS, _MEAN, _POOL = "class token", "mean of patches", "attention pooling"
_BOTH = f"{_CLS} and {_MEAN}"
_APACHE, _MIT, _NC = "Apache-2.0", "MIT", "CC-BY-NC-4.0, not for commercial use"
_LVD, _SELF = "DINO and iBOT on LVD-1689M", "DINO and iBOT on LVD-142M"
_MAE, _EVA = "MAE on ImageNet", "masked CLIP features, ImageNet-22k"
_BEIT = "masked tokens on ImageNet, labels of 22k"
_DEIT3, _AUG = "labels of ImageNet-22k, then 1k", "labels of ImageNet-21k, AugReg"
_SIG = "texts of WebLI, SigLIP 2"


def _dinov3(name: str, parameters: float, real: float) -> Published:
    address = f"hf://facebook/dinov3-vit{name}-pretrain-lvd1689m"
    number = f"linear classifier {real} % on ImageNet-ReaL: model card of facebookresearch/dinov3"
    return Published(address, _LVD, parameters, 224, _BOTH, "DINOv3 License", number, gated=True)


def _dinov2(name: str, parameters: float, linear: float, knn: float) -> Published:
    number = f"linear classifier {linear} %, k-NN {knn} % on ImageNet: README.md of facebookresearch/dinov2"
    return Published(f"hf://facebook/dinov2-{name}", _SELF, parameters, 518, _BOTH, _APACHE, number)


def _timm(
    name: str, trained: str, parameters: float, feature: str, licence: str, number: str = "", size: int = 224
) -> Published:
    return Published(f"hf://timm/{name}", trained, parameters, size, feature, licence, number)


def _deit3(name: str, parameters: float, score: float) -> Published:
    number = f"{score} % on ImageNet: README_revenge.md of facebookresearch/deit"
    return _timm(f"deit3_{name}_224.fb_in22k_ft_in1k", _DEIT3, parameters, _CLS, _APACHE, number)


PUBLISHED = {
    "dinov3_s16": _dinov3("s16", 21.6, 87.0),
    "dinov3_s16plus": _dinov3("s16plus", 28.7, 88.0),
    "dinov3_b16": _dinov3("b16", 85.7, 89.3),
    "dinov3_l16": _dinov3("l16", 303.1, 90.2),
    "dinov3_h16plus": _dinov3("h16plus", 840.6, 90.3),
    "dinov2_s14": _dinov2("small", 22.1, 81.1, 79.0),
    "dinov2_b14": _dinov2("base", 86.6, 84.5, 82.1),
    "dinov2_l14": _dinov2("large", 304.4, 86.3, 83.5),
    "dinov2_g14": _dinov2("giant", 1136.5, 86.5, 83.5),
    "dinov2_s14_reg": _dinov2("with-registers-small", 22.1, 80.9, 79.1),
    "dinov2_b14_reg": _dinov2("with-registers-base", 86.6, 84.6, 82.0),
    "dinov2_l14_reg": _dinov2("with-registers-large", 304.4, 86.7, 83.8),
    "dinov2_g14_reg": _dinov2("with-registers-giant", 1136.5, 87.1, 83.7),
    "siglip2_b16": _timm("vit_base_patch16_siglip_224.v2_webli", _SIG, 92.9, _POOL, _APACHE),
    "siglip2_l16": _timm("vit_large_patch16_siglip_256.v2_webli", _SIG, 316.0, _POOL, _APACHE, size=256),
    "siglip2_so400m14": _timm("vit_so400m_patch14_siglip_224.v2_webli", _SIG, 427.7, _POOL, _APACHE),
    "clip_b32_openai": Published(
        "hf://openai/clip-vit-base-patch32", "texts, OpenAI's CLIP", 87.5, 224, _CLS, _MIT
    ),
    "clip_b16_openai": Published(
        "hf://openai/clip-vit-base-patch16", "texts, OpenAI's CLIP", 85.8, 224, _CLS, _MIT
    ),
    "clip_l14_openai": Published(
        "hf://openai/clip-vit-large-patch14", "texts, OpenAI's CLIP", 303.2, 224, _CLS, _MIT
    ),
    "clip_b16_laion": _timm("vit_base_patch16_clip_224.laion2b", "texts of LAION-2B", 85.8, _CLS, _APACHE),
    "clip_l14_laion": _timm("vit_large_patch14_clip_224.laion2b", "texts of LAION-2B", 303.2, _CLS, _APACHE),
    "mae_b16": _timm("vit_base_patch16_224.mae", _MAE, 85.8, _MEAN, _NC, f"83.57 {_MAE_FT}"),
    "mae_l16": _timm("vit_large_patch16_224.mae", _MAE, 303.3, _MEAN, _NC, f"85.87 {_MAE_FT}"),
    "mae_h14": _timm("vit_huge_patch14_224.mae", _MAE, 630.8, _MEAN, _NC, f"86.93 {_MAE_FT}"),
    "deit3_s16": _deit3("small_patch16", 21.7, 83.07),
    "deit3_b16": _deit3("base_patch16", 85.8, 85.70),
    "deit3_l16": _deit3("large_patch16", 303.3, 86.98),
    "deit3_h14": _deit3("huge_patch14", 630.8, 87.18),
    "eva02_ti14": _timm("eva02_tiny_patch14_224.mim_in22k", _EVA, 5.5, _MEAN, _MIT),
    "eva02_s14": _timm("eva02_small_patch14_224.mim_in22k", _EVA, 21.6, _MEAN, _MIT),
    "eva02_b14": _timm("eva02_base_patch14_224.mim_in22k", _EVA, 85.8, _MEAN, _MIT),
    "eva02_l14": _timm("eva02_large_patch14_224.mim_in22k", _EVA, 303.3, _MEAN, _MIT),
    "beit2_b16": _timm("beitv2_base_patch16_224.in1k_ft_in22k", _BEIT, 85.8, _MEAN, _APACHE),
    "beit2_l16": _timm("beitv2_large_patch16_224.in1k_ft_in22k", _BEIT, 303.4, _MEAN, _APACHE),
    "augreg_ti16": _timm("vit_tiny_patch16_224.augreg_in21k", _AUG, 5.5, _CLS, _APACHE),
    "augreg_s16": _timm("vit_small_patch16_224.augreg_in21k", _AUG, 21.7, _CLS, _APACHE),
    "augreg_b32": _timm("vit_base_patch32_224.augreg_in21k", _AUG, 87.5, _CLS, _APACHE),
    "augreg_b16": _timm("vit_base_patch16_224.augreg_in21k", _AUG, 85.8, _CLS, _APACHE),
    "augreg_b8": _timm("vit_base_patch8_224.augreg_in21k", _AUG, 85.8, _CLS, _APACHE),
    "augreg_l16": _timm("vit_large_patch16_224.augreg_in21k", _AUG, 303.3, _CLS, _APACHE),
}  # fmt: skip


class Family(NamedTuple):
    """Start weights that one way to fine-tune suits.

    `named` is a pattern in the names of its files and repositories, `recipes` the recipe from each hidden
    size on, `network` what its networks have and a plain ViT has not.
    """

    title: str
    named: str
    recipes: Mapping[int, str]
    network: Mapping[str, Any] = MappingProxyType({})


_RELATIVE: dict[str, Any] = {
    "position_embedding": "relative_bias", "layer_scale": 0.1, "qkv_bias": "qv", "norm_at": "pooled",
    "classifier": "patches",
}  # fmt: skip
# The first whose pattern a name has. One recipe of DINO's for all sizes: its authors published none.
FAMILIES = {
    "dinov3": Family("DINOv3", "dinov3", {0: "dinov2_finetune"}, {
        "rotary": "dinov3", "position_embedding": "none", "registers": 4, "layer_scale": 1e-5,
        "qkv_bias": "qv", "norm_eps": 1e-5,
    }),
    "dinov2": Family("DINOv2", "dinov2", {0: "dinov2_finetune"}, {"layer_scale": 1.0}),
    "eva02": Family(
        "EVA-02",
        "eva_?02",
        {0: "eva02_ti14", 384: "eva02_s14", 768: "eva02_b14", 1024: "eva02_l14"},
        {"rotary": "eva", "qkv_bias": "qv", "mlp": "swiglu", "norm_at": "pooled", "classifier": "patches"},
    ),
    "siglip2": Family(
        "SigLIP 2",
        "siglip",
        {0: "siglip2_b16", 1024: "siglip2_l16"},
        {"classifier": "attention", "gelu": "tanh"},
    ),
    "clip": Family("CLIP", "clip", {0: "clip_b16", 1024: "clip_l14"}, {
        "norm_pre": True, "patch_bias": False, "norm_eps": 1e-5,
    }),
    "mae": Family("MAE", r"(^|[._/-])mae[._-]|\.mae$", {0: "mae_b16", 1024: "mae_l16", 1280: "mae_h14"}),
    "deit3": Family("DeiT III", "deit_?3", {
        0: "deit3_s16_finetune", 768: "deit3_b16_finetune", 1024: "deit3_l16_finetune",
        1280: "deit3_h14_finetune",
    }, {"layer_scale": 1e-4, "position_class_row": False}),
    "beit2_21k": Family(
        "BEiT v2 tuned on labels", "beit.*ft|beit2.*21k", {0: "beit2_b16_in21k", 1024: "beit2_l16_in21k"},
        _RELATIVE,
    ),
    "beit2": Family("BEiT v2", "beit", {0: "beit2_b16", 1024: "beit2_l16"}, _RELATIVE),
    "": Family("supervised training", "augreg|imagenet21k|in21k|^vit[-_]", {0: "finetune"}),
}  # fmt: skip
# Layouts of files of one family, and timm's words for structures.
_STRUCTURES = {
    "mae": "mae", "dinov3": "dinov3", "dinov3 swiglu": "dinov3", "swiglu": "dinov2", "dinov2": "dinov2",
    "eva": "eva02", "siglip": "siglip2", "deit3": "deit3",
}  # fmt: skip


def family_of(*names: str) -> str | None:
    """Return the key of the first family that a name tells; None where none does."""
    return next(
        (key for key, row in FAMILIES.items() if any(re.search(row.named, name.lower()) for name in names)),
        None,
    )


def stored_family(config: Config, layout: str, *names: str) -> str | None:
    """Return the key of the family of another program's weights, by structure, and of a plain ViT by its
    layout or one of its recorded names.
    """
    from vitctl.models.weights import timm

    structure = timm.structure(config) if isinstance(config, ViTConfig) else ""
    if structure == "beit":
        return "beit2_21k" if config.num_classes else "beit2"
    if structure == "clip" and getattr(config, "norm_pre", False):
        return "clip"
    known = _STRUCTURES.get(layout) or _STRUCTURES.get(structure)
    return known or ("mae" if family_of(*names) == "mae" else "")


_WORDS = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}
_SHORT = re.compile(r"([a-z]+\d?)_(ti|s|b|l|h|g|so400m)(\d+)(plus)?(_\w+)?")


def named_network(address: str) -> ViTConfig | None:
    """Return the network of published weights, by their name alone; None where it does not tell it.

    `address` is as `full_address` gives it. Source: the pages in `PUBLISHED`, timm's names
    """
    from vitctl.models.weights.timm import named_size

    short = next((name for name, row in PUBLISHED.items() if row.address == address), "")
    key = family_of(short or address.removeprefix("hf://timm/"))
    name, size = address.removeprefix("hf://timm/"), 518 if key == "dinov2" else 224
    if found := re.search(r"_(\d{3})(\.|$)", name):
        size = int(found[1])
    if parts := _SHORT.fullmatch(short):
        size = PUBLISHED[short].image_size
        start = "eva02" if key == "eva02" else "vit"
        plus = "_plus" * bool(parts[4])
        name = (
            f"{start}_{_WORDS.get(parts[2], parts[2])}{plus}_patch{parts[3]}_{'dinov2' * (key == 'dinov2')}"
        )
    elif not address.startswith("hf://timm/"):
        return None
    sizes = named_size(name)
    if key is None or not sizes or re.search("_rope|_pe_|_gap_|_clip_.*eva|eva.*_clip", name):
        return None
    width, gated = sizes["hidden_size"], key == "dinov3" and "plus" in address
    more = (
        ("registers", 4, key == "dinov2" and "reg" in address),
        ("mlp", "swiglu", gated or (key == "dinov2" and width == 1536)),
        ("mlp_norm", True, key == "eva02" and width >= 768),
    )
    values = {"gelu": "erf", **FAMILIES[key].network} | {name: value for name, value, has in more if has}
    return ViTConfig(**sizes, image_size=size, num_classes=0, **values)


def model_in(address: str) -> str:
    """Return the model that a file name of Google's says, L/16 of `ViT-L_16.npz`; else B/16 as an example."""
    found = re.search(r"/((?:R50\+)?(?:ViT-)?(?:Ti|S|B|L|H))_(\d+)[-.]", address)
    return f"{found[1].replace('ViT-', '')}/{found[2]}" if found else "B/16"


_PREFIXES = {"timm": r"[\w.-]+", "hf": r"[\w.-]+/[\w.-]+(/[\w./-]+)?"}
_OF_TIMM_NAME = re.compile(r"(vit|deit3?|eva02|beit(v2)?|flexivit|tiny_vit|samvit)_\w+(\.\w+)?")


def full_address(source: str) -> str:
    """Return the address for a short name, `timm:NAME` or `hf:ORG/NAME`; anything else unchanged.

    An existing file or folder of the same name takes precedence.
    """
    if source in PUBLISHED and not Path(source).exists():
        return PUBLISHED[source].address
    prefix, _, name = source.partition(":")
    is_name = prefix in _PREFIXES and re.fullmatch(_PREFIXES[prefix], name)
    return f"hf://{'timm/' * (prefix == 'timm')}{name}" if is_name else source


def find_published(name: str) -> Published:
    if name not in PUBLISHED:
        raise CheckpointError(
            f"no weights are called '{name}'", fix=meant(name) or "`vitctl weights` lists them"
        )
    return PUBLISHED[name]


def meant(source: str) -> str:
    """Return a "did you mean" question about other weights; "" for none."""
    if _OF_TIMM_NAME.fullmatch(source):
        return did_you_mean([f"timm:{source}"])
    if re.fullmatch(_PREFIXES["hf"], source) and family_of(source.partition("/")[2]) is not None:
        return did_you_mean([f"hf:{source}"] * (not Path(source).parent.exists()))
    return did_you_mean(one_edit_away(source, PUBLISHED)[:3])
