"""What the model tests share: one small configuration, and models whose every weight matters."""

from collections.abc import Callable

import pytest
import torch

from vitctl.models.build import build
from vitctl.models.variants import ViTConfig
from vitctl.models.vit import VisionTransformer


@pytest.fixture
def tiny() -> ViTConfig:
    return ViTConfig(patch_size=8, hidden_size=24, depth=2, mlp_size=40, num_heads=3, image_size=32, num_classes=5)


@pytest.fixture
def random_model() -> Callable[..., VisionTransformer]:
    """Build a model with noise on every weight, so that a mistake anywhere shows in the logits."""

    def make(config: ViTConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> VisionTransformer:
        model = build(config, dtype=dtype).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.2)
        return model

    return make
