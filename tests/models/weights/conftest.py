"""What the tests of weights share: images, and weights whose every number matters, for any model."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.models.build import build
from vitctl.models.variants import Config, ViTConfig
from vitctl.models.weights.weights_file import Weights, read_weights

META: dict[str, Any] = {
    "image_size": 32,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.5, 0.6, 0.7],
    "eval_method": "square",
    "eval_resize": 0,
    "resample": "bilinear_antialias",
    "class_names": ["tench", "goldfish, Carassius auratus", "große Eule", "crane", "crane"],
}


@pytest.fixture
def meta() -> dict[str, Any]:
    return dict(META)


@pytest.fixture
def plain() -> ViTConfig:
    """A ViT that every program can hold; its 64 channels for each head are what files do not tell."""
    return ViTConfig(
        patch_size=8,
        hidden_size=128,
        depth=2,
        mlp_size=96,
        num_heads=2,
        image_size=32,
        num_classes=5,
        gelu="erf",
    )


@pytest.fixture
def make_weights() -> Callable[..., Weights]:
    """Return weights with noise on every number, so that a mistake anywhere shows in the logits."""

    def make(config: Config, meta: dict[str, Any] | None = None, seed: int = 0) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        state = build(config).state_dict()
        noisy = {
            name: tensor + torch.randn(tensor.shape, generator=generator) * 0.1
            for name, tensor in state.items()
        }
        return Weights(config, noisy, META if meta is None else meta)

    return make


@pytest.fixture
def logits_of() -> Callable[[Weights, Tensor], Tensor]:
    """Return the logits that our model computes."""

    def run(weights: Weights, images: Tensor) -> Tensor:
        model = build(weights.config, dtype=images.dtype).eval()
        model.load_state_dict(weights.state)
        with torch.inference_mode():
            return model(images)

    return run


@pytest.fixture
def images() -> Tensor:
    """Four images `[4, 3, 32, 32]` in [-1, 1], float64."""
    generator = torch.Generator().manual_seed(7)
    return torch.rand(4, 3, 32, 32, generator=generator, dtype=torch.float64) * 2 - 1


def hollow(path: Path) -> None:
    """Leave of a safetensors file its header and its size: the bytes of the tensors are a hole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
    os.truncate(path, end)
    os.truncate(path, size)


def refused(path: Path, *words: str, **how: Any) -> None:
    """Check that weights are refused in one line that names the file and says each of the words."""
    with pytest.raises(CheckpointError) as error:
        read_weights(path, **how)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text
    for one in words:
        assert one in text or re.search(one, text), text


@torch.inference_mode()
def assert_equal_logits(
    theirs: Callable[[Tensor], Tensor],
    ours: Callable[[Weights, Tensor], Tensor],
    weights: Weights,
    images: Tensor,
) -> None:
    """Compare answers to images in float64 and in float32."""
    spread = theirs(images).std()
    assert spread > 0.1
    for pixels, close in ((images, 1e-12), (images.float(), 1e-5)):
        assert (ours(weights, pixels) - theirs(pixels)).abs().max() < close * spread
