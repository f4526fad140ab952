"""Attention layers, their weights during a forward pass, mean attention distance and attention rollout.

The weights are recomputed from the input of each attention during the forward pass, so the model, its kernel
and its output stay the same.

Mean attention distance corresponds to a convolution's receptive field. Per head: the distance in pixels from
each query patch to every patch in the image, weighted by attention; then the mean over query patches and
images. A patch is 0 pixels away from itself. The class token has no position: it is neither query nor key,
and the weights over the patches are rescaled to sum 1. Paper: Section 4.5, Figure 7 right; Appendix D.7,
Figure 11

Attention rollout measures each patch's contribution to the output over all layers. With A_l the weights of
layer l `[N, N]`, averaged over its heads, the rollout is A_L ... A_2 A_1. The paper describes this product.
Abnar and Zuidema 2020, cited there, and the authors' code add the residual connection: each A_l becomes
(A_l + I) / 2, which is A_l + I with rows normalised to sum 1. Both are offered. Paper: Section 4.5, Figure 6;
Appendix D.8, Figure 14
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.models.build import Model
from vitctl.models.kernels import attention_weights
from vitctl.models.variants import HybridConfig, ViTConfig
from vitctl.models.vit import Attention, EncoderBlock, VisionTransformer

_ROOT_STRIDE = 4  # of a ResNet's root


class AttentionLayer(NamedTuple):
    """One attention of a network.

    Args:
        depth: number of its block, from 1.
        grid: rows and columns of patches.
        prefix_tokens: tokens before the patches: 1 with a class token.
        stride: image pixels between neighbours of the grid.
    """

    depth: int
    grid: tuple[int, int]
    prefix_tokens: int
    stride: int


Watch = Callable[[int, AttentionLayer, Tensor], None]


def attention_layers(model: Model) -> list[tuple[AttentionLayer, Attention]]:
    """Return each attention over all tokens, in execution order; none for a ResNet or an axial network."""
    if not isinstance(model, VisionTransformer):
        return []
    config, stride = model.config, pixels_per_patch(model.config)
    return [
        (AttentionLayer(depth, config.grid, config.prefix_tokens, stride), block.attention)
        for depth, block in enumerate(model.blocks, 1)
        if isinstance(block, EncoderBlock)
    ]


@contextmanager
def watch_attention(model: Model, seen: Watch) -> Iterator[None]:
    """Call `seen(number of the layer, layer, weights)` in every forward pass inside the block.

    The weights of each query over the keys, `[B, H, N, N]`, are float32 or wider, regardless of autocast.
    Output and gradients of the model stay the same, bit by bit. Only one layer's weights are in memory at a
    time, unless `seen` keeps them.

    Paper: Appendix A, equation 6
    """
    handles = [
        module.register_forward_pre_hook(partial(_tell, seen, number, layer))
        for number, (layer, module) in enumerate(attention_layers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pixels_per_patch(config: ViTConfig) -> int:
    """Return the pixels between neighbouring patches; for a hybrid, backbone stride times patch size."""
    if not isinstance(config, HybridConfig):
        return config.patch_size
    halvings = max(0, len(config.stage_depths) - 1)
    return int(config.patch_size * _ROOT_STRIDE * 2**halvings)


@torch.no_grad()
def _tell(
    seen: Watch, number: int, layer: AttentionLayer, module: Attention, inputs: tuple[Any, ...]
) -> None:
    tokens: Tensor = inputs[0]
    with torch.autocast(tokens.device.type, enabled=False):
        turns = inputs[2] if len(inputs) > 2 else None
        query, key, _ = module.project(tokens.to(module.out.weight.dtype), turns)
        seen(number, layer, attention_weights(query, key, module.bias(query)))


def patch_distances(layer: AttentionLayer) -> Tensor:
    """Return the pixel distances between grid positions: float64 `[N, N]`, N without prefix tokens."""
    places = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float64) for side in layer.grid))
    return layer.stride * torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


def attention_distance(weights: Tensor, layer: AttentionLayer) -> Tensor:
    """Return the mean attention distance of every image and head, in pixels.

    Args:
        weights: from `watch_attention`, rows of sum 1.

    Returns:
        float64 `[B, H]` on the CPU.

    Paper: Appendix D.7
    """
    among_patches = weights[..., layer.prefix_tokens :, layer.prefix_tokens :].double()
    total = among_patches.sum(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)  # [..., H, N]
    weighted = torch.einsum("...qk,qk->...q", among_patches, patch_distances(layer).to(weights.device))
    return (weighted / total).mean(dim=-1).cpu()


def uniform_distance(layer: AttentionLayer) -> float:
    """Return the mean attention distance of a head with uniform attention over the patches, in pixels."""
    return float(patch_distances(layer).mean())


def roll(rolled: Tensor | None, weights: Tensor, *, identity: bool) -> Tensor:
    """Return the rollout after one more layer.

    Args:
        rolled: `[B, N, N]` of the layers before it; None for the first.
        weights: of this layer, from `watch_attention`.
        identity: include the residual connection.

    Returns:
        `[B, N, N]`: share of each input token in each output token; rows of sum 1.

    Paper: Appendix D.8
    """
    mixed = weights.mean(dim=1)
    if identity:
        mixed = (mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)) / 2
    return mixed if rolled is None else mixed @ rolled


def patch_mask(rolled: Tensor, layer: AttentionLayer) -> Tensor:
    """Return each patch's share in the representation before the head: the class token, or the mean token.

    Args:
        rolled: `[B, N, N]`, of all layers.

    Returns:
        `[B, rows, columns]`. With a class token the sum is below 1: the rest is the initial class token's
            share.
    """
    of_output = rolled[:, 0] if layer.prefix_tokens else rolled.mean(dim=1)  # [B, N]
    return torch.unflatten(of_output[:, layer.prefix_tokens :], 1, layer.grid)


def overlay(images: Tensor, masks: Tensor, stride: int) -> Tensor:
    """Multiply the images by their interpolated masks over the mask maximum: bright where attended.

    Args:
        images: uint8 `[B, 3, S, S]`.
        masks: `[B, rows, columns]`, interpolated bilinearly.
        stride: pixels between neighbouring patches; pixels that no patch covers become black.

    Returns:
        uint8 `[B, 3, S, S]`.

    Source: google-research/vision_transformer, issue 27, which takes the maximum before interpolating
    """
    rows, columns, side = *masks.shape[1:], images.shape[-1]
    size = (rows * stride, columns * stride)
    fine = F.interpolate(masks[:, None], size=size, mode="bilinear", align_corners=False)[..., :side, :side]
    light = fine / fine.amax(dim=(2, 3), keepdim=True).clamp(min=torch.finfo(masks.dtype).tiny)
    light = F.pad(light, (0, side - light.shape[-1], 0, side - light.shape[-2]))
    return (images * light).round().to(torch.uint8)
