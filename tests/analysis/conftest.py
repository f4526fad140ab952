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
from vitctl.models.variants import AxialConfig, Config, ViTConfig

FAMILIES: dict[str, Config] = {**TINY, "masked patch": MASKED["mean_color"]}
# Those whose tokens keep their places: their attention is a matrix over all tokens.
TRANSFORMERS = {
    name: TINY[name]
    for name in ("vit", "gap", "every layer", "2d", "no position", "relative", "hybrid", "axial")
}


def noisy_model(config: Config) -> Model:
    """A float64 model in evaluation mode with noise on every number: attention is far from uniform."""
    model = build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def uniform(model: Model) -> Model:
    """The same model with queries, keys and relative positions of zero: every attention is uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".qkv." in name or name.endswith("relative_position"):
                parameter.zero_()
    return model


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
    """Of each layer, over all tokens `[B, H, N, N]`; where an axial layer does not look, 0."""
    config = model.config
    assert isinstance(config, ViTConfig)
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
        if not isinstance(config, AxialConfig):
            yield _weights(config, w, name, x, np.arange(x.shape[1])[None])
            x = reference.block(config, w, name, x, reference.NO_DROPOUT)
            continue
        places = np.arange(x.shape[1]).reshape(config.grid)
        for half, groups in (("row", places), ("column", places.T)):
            yield _weights(config, w, f"{name}.{half}", x, groups)
            after = x.copy()
            for group in groups:
                after[:, group] = reference.block(
                    config, w, f"{name}.{half}", x[:, group], reference.NO_DROPOUT
                )
            x = after


def _weights(config: ViTConfig, w: Weights, name: str, x: Array, groups: Array) -> Array:
    """Attention of the tokens of each group among themselves."""
    size = config.hidden_size // config.num_heads
    projected = reference.dense(reference.norm(x, w, f"{name}.norm1"), w, f"{name}.attention.qkv")
    offsets = w.get(f"{name}.attention.relative_position")
    found = np.zeros((len(x), config.num_heads, x.shape[1], x.shape[1]))
    for head in range(config.num_heads):
        query = projected[..., head * size : (head + 1) * size]
        key = projected[..., config.hidden_size + head * size : config.hidden_size + (head + 1) * size]
        for group in groups:
            for image in range(len(x)):
                for q in group:
                    logits = np.array([query[image, q] @ key[image, k] for k in group])
                    if offsets is not None:
                        middle, own = len(offsets) // 2, slice(head * size, (head + 1) * size)
                        logits += [query[image, q] @ offsets[middle + q - k, own] for k in group]
                    powers = np.exp(logits / np.sqrt(size))
                    found[image, head, q, group] = powers / powers.sum()
    return found
