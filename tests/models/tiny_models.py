"""A small configuration of every family, and of every way to place positions."""

from dataclasses import replace

from vitctl.models.variants import (
    AxialConfig,
    AxialResNetConfig,
    Config,
    HybridConfig,
    MaskedPatchConfig,
    ResNetConfig,
    ViTConfig,
)

VIT = ViTConfig(patch_size=8, hidden_size=24, depth=2, mlp_size=40, num_heads=3, image_size=32, num_classes=5)
_BODY = {name: value for name, value in vars(VIT).items() if name != "classifier"}
_HYBRID = HybridConfig(**{**_BODY, "patch_size": 1}, stage_depths=(2, 1), width=8, num_groups=4)
_RESNET = ResNetConfig(stage_depths=(2, 1), width=8, num_groups=4, image_size=32, num_classes=5)
_AXIAL_RESNET = {**vars(_RESNET), "width": 16, "num_heads": 2}

TINY: dict[str, Config] = {
    "vit": VIT,
    "gap": replace(VIT, classifier="gap", representation_size=11),
    "every layer": replace(VIT, position_at="every_layer"),
    "every layer, shared": replace(VIT, position_at="every_layer_shared"),
    "2d": replace(VIT, position_embedding="2d"),
    "2d every layer": replace(VIT, position_embedding="2d", position_at="every_layer"),
    "2d every layer, shared": replace(
        VIT, position_embedding="2d", position_at="every_layer_shared", classifier="gap"
    ),
    "no position": replace(VIT, position_embedding="none"),
    "relative": replace(VIT, position_embedding="relative"),
    "dinov3": replace(
        VIT,
        classifier="token_patches",
        representation_size=7,
        position_embedding="none",
        gelu="erf",
        registers=2,
        layer_scale=0.1,
        qkv_bias="qv",
        rotary="dinov3",
        norm_eps=1e-5,
    ),
    "dinov2 linear": replace(VIT, classifier="token_patches", token_blocks=2, registers=1),
    "two tokens": replace(VIT, token_blocks=2, position_at="every_layer"),
    "eva": replace(
        VIT, classifier="patches", norm_at="pooled", mlp="swiglu", mlp_norm=True, qkv_bias="qv", rotary="eva"
    ),
    "beit": replace(
        VIT,
        classifier="patches",
        norm_at="pooled",
        position_embedding="relative_bias",
        layer_scale=0.1,
        qkv_bias="none",
    ),
    "siglip": replace(VIT, classifier="attention", position_embedding="sincos", registers=1, mlp="swiglu"),
    "clip": replace(VIT, gelu="quick", norm_pre=True, patch_bias=False, position_class_row=False),
    "hybrid": _HYBRID,
    "hybrid, root alone": replace(_HYBRID, stage_depths=(), patch_size=4, image_size=38),
    "axial": AxialConfig(**_BODY),
    "resnet v1": _RESNET,
    "resnet v1, odd image": replace(_RESNET, image_size=37, stage_depths=(1, 1, 1)),
    "resnet v2": replace(_RESNET, version="v2"),
    "resnet v2, odd image": replace(_RESNET, version="v2", image_size=37, stage_depths=(1, 1, 1)),
    "axial resnet": AxialResNetConfig(**_AXIAL_RESNET),
    "axial resnet, odd image": AxialResNetConfig(**{**_AXIAL_RESNET, "image_size": 35}),
}
MASKED = {
    target: MaskedPatchConfig(**{**vars(VIT), "num_classes": 0, "target": target})
    for target in ("mean_color", "downsized", "pixels")
}
OF_EACH_KIND = ("vit", "dinov3", "hybrid", "axial", "resnet v1", "axial resnet")
