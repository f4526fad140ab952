"""Networks whose every number matters, and their attention once more in NumPy, straight from the paper's
equations.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tests.models import numpy_reference as reference
from tests.models.numpy_reference import Array, Weights
from tests.models.tiny_models import MASKED, TINY
from vitctl.models.build import Model, build
from vitctl.models.variants import Config, ViTConfig

FAMILIES: dict[str, Config] = {**TINY, "masked patch": MASKED["mean_color"]}
# Those whose tokens keep their places: their attention is a matrix over all tokens.
TRANSFORMERS = {
    name: TINY[name] for name in ("vit", "gap", "every layer", "2d", "no position", "relative", "hybrid")
}


def noisy_model(config: Config) -> Model:
    """A float64 model in evaluation mode with noise on every number: attention is far from uniform."""
    model = build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def random_images(size: int) -> Tensor:
    """Three images `[3, 3, size, size]` in [-1, 1], float64."""
    return (
        torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 - 1
    )


@cache
def expected_attentions(name: str) -> tuple[Model, Tensor, list[Array]]:
    """A network of TRANSFORMERS, images, and the attention of each layer by NumPy."""
    model, images = noisy_model(TRANSFORMERS[name]), random_images(32)
    return model, images, list(_numpy_attentions(model, images))


def _numpy_attentions(model: Model, images: Tensor) -> Iterator[Array]:
    """Of each layer, over all tokens `[B, H, N, N]`."""
    config = model.config
    w = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    pixels = images.numpy()
    if "backbone.root.conv.weight" in w:
        pixels = reference.resnet_v1(config.stage_depths, config.num_groups, w, pixels)
    x = reference.embed(config, w, pixels)
    if config.classifier == "token":
        x = np.concatenate([np.repeat(w["class_token"], len(x), 0), x], 1)
    for layer in range(config.depth):
        if layer == 0 or config.position_at != "stem":
            x = x + reference.position(config, w, layer if config.position_at == "every_layer" else 0)
        name = f"blocks.{layer}"
        yield _weights(config, w, name, x)
        x = reference.block(config, w, name, x, reference.NO_DROPOUT)


def _weights(config: ViTConfig, w: Weights, name: str, x: Array) -> Array:
    """Attention of all tokens among themselves."""
    size = config.hidden_size // config.num_heads
    projected = reference.dense(reference.norm(x, w, f"{name}.norm1"), w, f"{name}.attention.qkv")
    offsets = w.get(f"{name}.attention.relative_position")
    found = np.zeros((len(x), config.num_heads, x.shape[1], x.shape[1]))
    for head in range(config.num_heads):
        query = projected[..., head * size : (head + 1) * size]
        key = projected[..., config.hidden_size + head * size : config.hidden_size + (head + 1) * size]
        for image, q in np.ndindex(len(x), x.shape[1]):
            logits = key[image] @ query[image, q]
            if offsets is not None:
                middle, own = len(offsets) // 2, slice(head * size, (head + 1) * size)
                logits += offsets[middle + q - np.arange(x.shape[1]), own] @ query[image, q]
            powers = np.exp(logits / np.sqrt(size))
            found[image, head, q] = powers / powers.sum()
    return found
