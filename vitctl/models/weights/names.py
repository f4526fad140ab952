"""Published weights by short names, for --from and `vitctl weights`."""

import re
from pathlib import Path
from typing import NamedTuple

from vitctl.errors import CheckpointError
from vitctl.system.text import did_you_mean, one_edit_away

TERMS = {"DINOv3 License": "https://ai.meta.com/resources/models-and-libraries/dinov3-license/"}
_OF_DINOV3 = "model card of facebookresearch/dinov3"
_OF_DINOV2 = "README.md of facebookresearch/dinov2"
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
    number = f"linear classifier {real} % on ImageNet-ReaL: {_OF_DINOV3}"
    return Published(address, _LVD, parameters, 224, _BOTH, "DINOv3 License", number, gated=True)


def _dinov2(name: str, parameters: float, linear: float, knn: float) -> Published:
    number = f"linear classifier {linear} %, k-NN {knn} % on ImageNet: {_OF_DINOV2}"
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
    return did_you_mean(one_edit_away(source, PUBLISHED)[:3])
