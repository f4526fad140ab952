"""Cosine similarity of position embeddings: what a network has learned, or was given, of where patches are.

Paper: Section 4.5, Figure 7 centre; Appendix D.4, Figure 10
"""

import torch
from torch import Tensor

from vitctl.models.vit import Attention, VisionTransformer


@torch.no_grad()
def patch_positions(model: VisionTransformer) -> Tensor | None:
    """The embeddings of the patches' positions, `[tables, patches, D]`; None without any that is added to
    tokens.

    Args:
        model: with learned (1-D) or 2-D embeddings; one table, or one for each layer.
    """
    tables = model.positions()
    return None if tables is None else tables[:, model.config.prefix_tokens :]


@torch.no_grad()
def relative_offsets(model: VisionTransformer) -> Tensor | None:
    """The embeddings of relative positions, `[layers, 2 N - 1, D]` from offset 1 - N to N - 1; None without
    any.
    """
    found: list[Tensor] = [
        module.relative_position
        for module in model.modules()
        if isinstance(module, Attention) and module.relative_position is not None
    ]
    return torch.stack(found) if found else None


def similarity(embeddings: Tensor) -> Tensor:
    """The cosine similarity of all pairs of embeddings.

    Args:
        embeddings: `[..., N, D]`; one of length 0 is similar to none, with 0.

    Returns:
        float64 `[..., N, N]` between -1 and 1, on the CPU.

    Paper: Figure 7 centre
    """
    wide = embeddings.detach().double().cpu()
    unit = wide / wide.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.clamp(unit @ unit.transpose(-2, -1), -1, 1)


def by_offset(similarities: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean similarity of the patches that are so many rows and columns apart.

    Args:
        similarities: `[N, N]` of the patches of `grid`, row by row.
        grid: rows and columns.

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
