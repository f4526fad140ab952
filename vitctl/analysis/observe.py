"""One forward pass observed: attention, tokens, and two representations of an image compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
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
from vitctl.models.variants import AxialResNetConfig, Config, ResNetConfig, ViTConfig
from vitctl.models.vit import VisionTransformer

# What a network may lack, in the order in which it is shown.
PARTS = ("filters", "position_similarity", "attention_distance", "rollout", "pooling")


def missing_parts(config: Config) -> dict[str, str]:
    """Return which of PARTS a network does not have, each with the reason in one line."""
    if isinstance(config, AxialResNetConfig):
        return {
            "position_similarity": "its positions are offsets within rows and columns, inside each "
            "attention; none belongs to a patch",
            "rollout": "its attentions lie between convolutions that change the map, so that no token keeps "
            "its place",
            "pooling": "it has no class token: the map is averaged",
        }
    if isinstance(config, ResNetConfig):
        return {
            "position_similarity": "a ResNet has no position embedding",
            "attention_distance": "a ResNet has no attention",
            "rollout": "a ResNet has no attention",
            "pooling": "a ResNet has no class token: the map is averaged",
        }
    missing = {}
    if config.position_embedding in ("none", "relative_bias"):
        missing["position_similarity"] = "the network was built without position embedding"
    if not config.has_class_token:
        missing["pooling"] = "the network has no class token: its classifier reads the patches"
    return missing


@dataclass(frozen=True)
class Observed:
    """Observations of a forward pass over B images, on the CPU; empty for parts that the network lacks.

    Args:
        logits: `[B, K]`; empty without classes.
        distances: mean attention distance in pixels, float64 `[B, layers, H]`.
        mask, mask_without_identity: attention rollout `[B, rows, columns]`.
        class_token, patch_mean: of the encoder's output, `[B, D]`.
    """

    logits: Tensor
    distances: Tensor
    mask: Tensor
    mask_without_identity: Tensor
    class_token: Tensor
    patch_mean: Tensor

    @staticmethod
    def joined(parts: "list[Observed]") -> "Observed":
        """Return several batches as one."""
        return Observed(
            *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Observed))
        )


@torch.no_grad()
def observe(model: Model, images: Tensor) -> Observed:
    """Run a network on images, and look at its attention and its tokens on the way.

    Args:
        model: of any family, in evaluation mode.
        images: `[B, 3, S, S]` as the network takes them, on its device.

    Paper: Section 4.5
    """
    distances: list[Tensor] = []
    rolled: dict[bool, Tensor] = {}
    encoded: list[Tensor] = []
    layers = attention_layers(model)
    is_rolled = "rollout" not in missing_parts(model.config)

    def seen(_: int, layer: AttentionLayer, weights: Tensor) -> None:
        distances.append(attention_distance(weights, layer))
        for identity in (True, False) if is_rolled else ():
            rolled[identity] = roll(rolled.get(identity), weights, layer, identity=identity)

    with watch_attention(model, seen), _encoder_kept(model, encoded):
        outputs = model(images)
    none = torch.zeros(len(images), 0)
    masks = [
        patch_mask(rolled[identity], layers[0][0]).cpu() if rolled else none for identity in (True, False)
    ]
    has_token = isinstance(model.config, ViTConfig) and model.config.has_class_token
    prefix = model.config.prefix_tokens if isinstance(model.config, ViTConfig) else 0
    return Observed(
        logits=outputs.float().cpu() if model.config.num_classes else none,
        distances=torch.stack(distances, dim=1) if distances else none,
        mask=masks[0],
        mask_without_identity=masks[1],
        class_token=encoded[0][:, 0].float().cpu() if has_token else none,
        patch_mean=encoded[0][:, prefix:].mean(dim=1).float().cpu() if has_token else none,
    )


@contextmanager
def _encoder_kept(model: Model, found: list[Tensor]) -> Iterator[None]:
    """Append the normalised output of the encoder to a list, in each forward pass inside the block.
    The last block then also computes the tokens that the classifier does not read.
    """
    if not isinstance(model, VisionTransformer):
        yield
        return
    handle = model.blocks[-1].register_forward_hook(lambda *seen: found.append(model.norm(seen[-1])))
    model.every_token = True
    try:
        yield
    finally:
        model.every_token = False
        handle.remove()


class Separation(NamedTuple):
    """Images that the nearest class mean gets right, and those that were counted: of classes with two images
    or more.
    """

    correct: int
    total: int


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine between two representations of each image.

    Args:
        one, other: `[N, D]`.

    Returns:
        float64 `[N]`.
    """
    return torch.nn.functional.cosine_similarity(
        one.double(), other.double(), eps=torch.finfo(torch.float64).tiny
    )


def separation(features: Tensor, labels: Tensor) -> Separation:
    """Return how well a linear classifier without any setting tells the classes apart: the nearest class
    mean.

    Each image is left out of the mean of its own class. An image is right if that mean is nearer (Euclidean)
    than the mean of any other class; of equal distances the lower class wins.

    Args:
        features: `[N, D]`.
        labels: int64 `[N]`; negative: no label, the image is left out.
    """
    features, labels = features[labels >= 0].double(), labels[labels >= 0]
    classes, own = torch.unique(labels, return_inverse=True)  # [K], [N]
    counts = torch.bincount(own, minlength=len(classes))
    counted = counts[own] > 1
    if not bool(counted.any()) or len(classes) < 2:
        return Separation(0, 0)
    sums = features.new_zeros(len(classes), features.shape[1]).index_add_(0, own, features)
    distances = torch.cdist(features, sums / counts[:, None], compute_mode="donot_use_mm_for_euclid_dist")
    others = (sums[own] - features) / (counts[own] - 1).clamp(min=1)[:, None]
    distances.scatter_(1, own[:, None], (features - others).norm(dim=1, keepdim=True))
    hits = distances.argmin(dim=1) == own
    return Separation(int(hits[counted].sum()), int(counted.sum()))


def plane(features: Tensor) -> Tensor:
    """Return the two coordinates in which representations differ most: their first principal components.

    Args:
        features: `[N, D]`.

    Returns:
        float64 `[N, 2]` of mean 0; zeros where there are fewer directions than two.
    """
    centred = features.double() - features.double().mean(dim=0)
    left, deviations, _ = torch.linalg.svd(centred, full_matrices=False)
    found = (left * deviations)[:, :2]
    return torch.nn.functional.pad(found, (0, 2 - found.shape[1]))
