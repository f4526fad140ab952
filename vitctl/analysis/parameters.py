"""Observations of weights: principal components of the colour filters, similarity of position embeddings.

Paper: Section 4.5, Figure 7 left and centre; Appendix D.4, Figure 10
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitctl.models.build import Model
from vitctl.models.resnet import ResNet, RootV1, RootV2, standardise
from vitctl.models.variants import HybridConfig
from vitctl.models.vit import Attention, HybridTransformer, VisionTransformer

PAPERS = 28  # components in Figure 7


class Components(NamedTuple):
    """Principal components of filters.

    Args:
        images: float64 `[k, 3, h, w]` of length 1 each, by decreasing variance; the entry of largest
            magnitude in each is positive, because a component's sign is arbitrary.
        shares: float64 `[k]`, the fraction of the filters' variance that each explains, 0..1.
    """

    images: Tensor
    shares: Tensor


def color_filters(model: Model) -> tuple[Tensor, str]:
    """Return the filters that see red, green and blue, `[filters, 3, h, w]`, as applied, and their name.

    These are the patch embedding's; of hybrids and ResNets the standardised root convolution's.
    """
    if isinstance(model, VisionTransformer) and not isinstance(model.config, HybridConfig):
        return model.patch_embedding.weight.detach(), "patch embedding"
    assert isinstance(model, HybridTransformer | ResNet)
    root = model.backbone.root
    assert isinstance(root, RootV1 | RootV2)
    return standardise(root.conv.weight.detach(), root.conv.numerics), "root convolution"


def principal_components(filters: Tensor, count: int = PAPERS) -> Components:
    """Return the first principal components of filters: the directions in which they vary most.

    Args:
        filters: `[filters, 3, h, w]`; each is one observation of 3 * h * w numbers.
        count: maximum; there are at most 3 * h * w components, or filters less one.

    Paper: Figure 7 left
    """
    flat = filters.double().cpu().flatten(1)
    centred = flat - flat.mean(dim=0)
    _, deviations, directions = torch.linalg.svd(centred, full_matrices=False)
    kept = max(1, min(count, flat.shape[1], len(flat) - 1))
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    variances = deviations.square()
    shares = variances / variances.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return Components(directions[:kept].unflatten(1, tuple(filters.shape[1:])), shares[:kept])


@torch.no_grad()
def patch_positions(model: VisionTransformer) -> Tensor | None:
    """Return the patches' position embeddings, `[tables, patches, D]`; None unless they are added to tokens.

    There is one table, or one for each layer, of learned (1-D) or 2-D embeddings.
    """
    tables = model.positions()
    return None if tables is None else tables[:, model.config.prefix_tokens :]


@torch.no_grad()
def relative_offsets(model: VisionTransformer) -> Tensor | None:
    """Return relative position embeddings, `[layers, 2 N - 1, D]`, from offset 1 - N on; None without any."""
    found: list[Tensor] = [
        module.relative_position
        for module in model.modules()
        if isinstance(module, Attention) and module.relative_position is not None
    ]
    return torch.stack(found) if found else None


def similarity(embeddings: Tensor) -> Tensor:
    """Return the cosine similarity of all pairs of embeddings.

    Args:
        embeddings: `[..., N, D]`; one of length 0 has similarity 0 to all.

    Returns:
        float64 `[..., N, N]` between -1 and 1, on the CPU.

    Paper: Figure 7 centre
    """
    wide = embeddings.detach().double().cpu()
    unit = wide / wide.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.clamp(unit @ unit.transpose(-2, -1), -1, 1)


def by_offset(similarities: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the mean similarity of patches by their offset in rows and columns.

    Args:
        similarities: `[N, N]` of the patches of `grid`, row by row.

    Returns:
        `[2 rows - 1, 2 columns - 1]`; the middle is a patch with itself, below it the patch of the next row.
    """
    rows, columns = grid
    sums, counts = (torch.zeros(2 * rows - 1, 2 * columns - 1, dtype=torch.float64) for _ in range(2))
    row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    place = (row - row[:, None] + rows - 1, column - column[:, None] + columns - 1)
    sums.index_put_(place, similarities.double(), accumulate=True)
    counts.index_put_(place, torch.ones((), dtype=torch.float64), accumulate=True)
    return sums / counts
