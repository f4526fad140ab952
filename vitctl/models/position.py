"""Position embeddings: moving a learned table from one grid of patches to another."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.errors import CheckpointError

Grid = tuple[int, int]


def resize_position_embedding(
    table: Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int, method: Literal["zoom"] = "zoom"
) -> Tensor:
    """Interpolate a learned table so that it fits another resolution; prefix tokens keep their rows.

    Args:
        table: `[1, prefix_tokens + rows * columns, D]`, patches in row-major order.
        old_grid, new_grid: rows and columns of patches.
        prefix_tokens: tokens before the patches (1 with a class token).
        method: `zoom`, bilinear with aligned corners, is `scipy.ndimage.zoom(order=1)` of the authors' code.

    Returns `[1, prefix_tokens + new rows * new columns, D]` in the dtype of `table`.
    Raises CheckpointError when the old grid is not square or the table does not fit it.
    Paper: Section 3.2
    """
    rows, columns = old_grid
    if rows != columns:
        raise CheckpointError(f"position embedding: the stored grid is {rows}x{columns}, only square ones are resized")
    expected = prefix_tokens + rows * columns
    if table.dim() != 3 or tuple(table.shape[:2]) != (1, expected):
        raise CheckpointError(
            f"position embedding: shape {list(table.shape)} does not fit a {rows}x{columns} grid "
            f"with {prefix_tokens} prefix tokens, which needs [1, {expected}, hidden_size]"
        )
    if old_grid == new_grid:
        return table
    prefix, patches = table.split([prefix_tokens, rows * columns], dim=1)
    image = patches.reshape(1, rows, columns, -1).permute(0, 3, 1, 2)  # [1, D, rows, columns]
    resized = _METHODS[method](image.double(), new_grid).to(table.dtype)
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)


def _zoom(image: Tensor, new_grid: Grid) -> Tensor:
    return F.interpolate(image, size=new_grid, mode="bilinear", align_corners=True)


_METHODS: dict[str, Callable[[Tensor, Grid], Tensor]] = {"zoom": _zoom}
