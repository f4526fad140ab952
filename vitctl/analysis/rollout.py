"""Attention rollout: how much each patch contributes to what a network puts out, over all of its layers.

With A_l the weights of layer l `[N, N]`, averaged over its heads, the rollout is A_L ... A_2 A_1. The paper
describes this product. Abnar and Zuidema, whom it cites, and the authors' code add the residual connection:
each A_l becomes (A_l + I) / 2, which is A_l + I with its rows scaled to sum 1. Both are offered. Paper:
Section 4.5, Figure 6; Appendix D.8, Figure 14; Abnar and Zuidema 2020
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.analysis.attention import AttentionLayer


def roll(rolled: Tensor | None, weights: Tensor, layer: AttentionLayer, *, identity: bool) -> Tensor:
    """The rollout after one more layer.

    Args:
        rolled: `[B, N, N]` of the layers before it; None for the first.
        weights: of this layer, as `watch_attention` gives them.
        layer: whose weights they are; within rows or columns, other pairs of tokens have weight 0.
        identity: whether the residual connection counts.

    Returns:
        `[B, N, N]`: what each token of the output has of each token of the input; rows of sum 1.

    Paper: Appendix D.8
    """
    mixed = _over_all_tokens(weights.mean(dim=-3), layer)
    if identity:
        mixed = (mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)) / 2
    return mixed if rolled is None else mixed @ rolled


def patch_mask(rolled: Tensor, layer: AttentionLayer) -> Tensor:
    """What the representation in front of the head has of each patch.

    The representation is the class token, or without one the mean of all tokens.

    Args:
        rolled: `[B, N, N]`, of all layers.
        layer: any of the network's.

    Returns:
        `[B, rows, columns]`; with a class token less than 1 in sum: the rest is what the class token had at
        the start.
    """
    of_output = rolled[:, 0] if layer.prefix_tokens else rolled.mean(dim=1)  # [B, N]
    return torch.unflatten(of_output[:, layer.prefix_tokens :], 1, layer.grid)


def overlay(images: Tensor, masks: Tensor, stride: int) -> Tensor:
    """Images that are as bright as the network attends to them: multiplied by their mask, interpolated, over
    its maximum.

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


def _over_all_tokens(weights: Tensor, layer: AttentionLayer) -> Tensor:
    """Weights without heads as `[B, N, N]`, from `[B, rows, columns, columns]` or `[B, columns, rows, rows]`
    too.
    """
    if layer.along == "grid":
        return weights
    rows, columns = layer.grid
    whole = weights.new_zeros(len(weights), rows, columns, rows, columns)
    # A diagonal is a view whose last axis is the number of the row or column.
    if layer.along == "row":
        whole.diagonal(dim1=1, dim2=3).copy_(weights.movedim(1, -1))
    else:
        whole.diagonal(dim1=2, dim2=4).copy_(weights.movedim(1, -1))
    return whole.flatten(3).flatten(1, 2)
