"""Mean attention distance: how far away, in pixels of the image, the patches are that a head attends to.

The receptive field of attention, as the size of a kernel is that of a convolution. Per head: for each patch
that asks, the distance to every patch in the image, weighted by attention; then the mean over the patches
that ask, and over images. A patch is 0 pixels away from itself. The class token has no place in the image: it
neither asks nor is asked, and the weights over the patches are scaled to sum 1. Paper: Section 4.5, Figure 7
right; Appendix D.7, Figure 11
"""

import torch
from torch import Tensor

from vitctl.analysis.attention import AttentionLayer


def patch_distances(layer: AttentionLayer) -> Tensor:
    """Distances between the places that attend to each other, in pixels.

    Args:
        layer: a grid, of which all places count; or the places of one row or column.

    Returns:
        float64 `[N, N]`, N without prefix tokens.
    """
    rows, columns = layer.grid
    if layer.along != "grid":
        places = torch.arange(columns if layer.along == "row" else rows, dtype=torch.float64)[:, None]
    else:
        places = torch.cartesian_prod(torch.arange(rows, dtype=torch.float64), torch.arange(columns).double())
    return layer.stride * torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


def attention_distance(weights: Tensor, layer: AttentionLayer) -> Tensor:
    """The mean attention distance of every image and head, in pixels.

    Args:
        weights: as `watch_attention` gives them, each row of sum 1.
        layer: whose weights they are.

    Returns:
        float64 `[B, H]` on the CPU.

    Paper: Appendix D.7
    """
    among_patches = weights[..., layer.prefix_tokens :, layer.prefix_tokens :].double()
    total = among_patches.sum(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)  # [..., H, N]
    weighted = torch.einsum("...qk,qk->...q", among_patches, patch_distances(layer).to(weights.device))
    of_queries = (weighted / total).mean(dim=-1)  # [B, H], or [B, rows, H] of sequences
    return (of_queries if of_queries.dim() == 2 else of_queries.mean(dim=1)).cpu()


def uniform_distance(layer: AttentionLayer) -> float:
    """The mean attention distance of a head that attends to all patches alike, in pixels."""
    return float(patch_distances(layer).mean())
