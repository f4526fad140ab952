"""Equality with torchvision's ViT, an independent implementation, on the same random weights in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from vitctl.models.variants import ViTConfig
from vitctl.models.vit import VisionTransformer

RENAMED = {
    "class_token": "class_token",
    "position_embedding": "encoder.pos_embedding",
    "patch_embedding": "conv_proj",
    "norm": "encoder.ln",
    "pre_logits": "heads.pre_logits",
    "head": "heads.head",
}
RENAMED_IN_BLOCK = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention.qkv": "self_attention.in_proj_",
    "attention.out": "self_attention.out_proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
}


def torchvision_name(name: str) -> str:
    if name in RENAMED:
        return RENAMED[name]
    module, kind = name.rsplit(".", 1)
    if module in RENAMED:
        return f"{RENAMED[module]}.{kind}"
    _, index, inner = module.split(".", 2)
    renamed = f"encoder.layers.encoder_layer_{index}.{RENAMED_IN_BLOCK[inner]}"
    return renamed + kind if renamed.endswith("_") else f"{renamed}.{kind}"


def torchvision_twin(config: ViTConfig, state: dict[str, Tensor]) -> nn.Module:
    from torchvision.models import VisionTransformer as TorchvisionTransformer

    twin = TorchvisionTransformer(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.hidden_size,
        mlp_dim=config.mlp_size,
        num_classes=config.num_classes,
        representation_size=config.representation_size or None,
        norm_layer=partial(nn.LayerNorm, eps=config.norm_eps),
    )
    twin.double().load_state_dict({torchvision_name(name): tensor for name, tensor in state.items()})
    return twin.eval()


@pytest.mark.parametrize("representation_size", [0, 13])
@pytest.mark.parametrize("training", [False, True])
def test_forward__equals_torchvision_with_the_exact_gelu(
    tiny: ViTConfig, random_model: Callable[..., VisionTransformer], representation_size: int, training: bool
) -> None:
    config = replace(tiny, representation_size=representation_size, gelu="erf")
    model = random_model(config)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    twin = torchvision_twin(config, model.state_dict())
    # In evaluation torchvision takes torch's fused attention path, in training the plain one; there is no
    # dropout here.
    logits, expected = model.train(training)(images), twin.train(training)(images)
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-12
