"""One forward pass observed: logits, attention distance and rollout."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitctl.analysis.attention_maps import (
    AttentionLayer,
    attention_distance,
    attention_layers,
    patch_mask,
    roll,
    watch_attention,
)
from vitctl.models.build import Model
from vitctl.models.variants import AxialConfig, AxialResNetConfig, Config, ResNetConfig

# Parts that a network may lack, in display order.
OF_IMAGES = ("attention_distance", "rollout")
PARTS = ("filters", "position_similarity", *OF_IMAGES)


def missing_parts(config: Config) -> dict[str, str]:
    """Return the PARTS that a network lacks, each with the reason in one line."""
    missing = {}
    if isinstance(config, AxialResNetConfig):
        missing["position_similarity"] = (
            "its positions are offsets within rows and columns, inside each attention; none belongs to a "
            "patch"
        )
    elif isinstance(config, ResNetConfig):
        missing["position_similarity"] = "a ResNet has no position embedding"
    elif config.position_embedding in ("none", "relative_bias"):
        missing["position_similarity"] = "the network was built without position embedding"
    if isinstance(config, AxialConfig | AxialResNetConfig):
        missing |= dict.fromkeys(OF_IMAGES, "its attention stays within rows and columns of the image")
    elif isinstance(config, ResNetConfig):
        missing |= dict.fromkeys(OF_IMAGES, "a ResNet has no attention")
    return missing


class Observed(NamedTuple):
    """Observations of a forward pass over B images, on the CPU; empty for parts that the network lacks.

    Args:
        logits: `[B, K]`; empty without classes.
        distances: mean attention distance in pixels, float64 `[B, layers, H]`.
        mask, mask_without_identity: attention rollout `[B, rows, columns]`.
    """

    logits: Tensor
    distances: Tensor
    mask: Tensor
    mask_without_identity: Tensor

    @staticmethod
    def joined(parts: "list[Observed]") -> "Observed":
        """Concatenate several batches."""
        return Observed(*map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def observe(model: Model, images: Tensor) -> Observed:
    """Run a network of any family, in evaluation mode, on images `[B, 3, S, S]`, and observe its attention.

    Paper: Section 4.5
    """
    distances: list[Tensor] = []
    rolled: dict[bool, Tensor] = {}
    layers = attention_layers(model)

    def seen(_: int, layer: AttentionLayer, weights: Tensor) -> None:
        distances.append(attention_distance(weights, layer))
        for identity in (True, False):
            rolled[identity] = roll(rolled.get(identity), weights, identity=identity)

    with watch_attention(model, seen):
        outputs = model(images)
    none = torch.zeros(len(images), 0)
    masks = [
        patch_mask(rolled[identity], layers[0][0]).cpu() if rolled else none for identity in (True, False)
    ]
    return Observed(
        logits=outputs.float().cpu() if model.config.num_classes else none,
        distances=torch.stack(distances, dim=1) if distances else none,
        mask=masks[0],
        mask_without_identity=masks[1],
    )
