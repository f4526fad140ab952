"""Position embeddings: the tables of Appendix D.4, and moving them from one grid of patches to another."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.errors import CheckpointError

Grid = tuple[int, int]


def grid_table(rows: Tensor, columns: Tensor, prefix_tokens: int) -> Tensor:
    """Return the 2-D embedding of every token: that of its column, then that of its row; zeros for prefix
    tokens.

    The paper does not say what a class token gets; it has no coordinates.

    Args:
        rows, columns: `[L, rows, D / 2]` and `[L, columns, D / 2]`.

    Returns `[L, prefix_tokens + rows * columns, D]`.
    Paper: Appendix D.4
    """
    along_x = columns[:, None].expand(-1, rows.shape[1], -1, -1)  # [L, rows, columns, D / 2]
    along_y = rows[:, :, None].expand(-1, -1, columns.shape[1], -1)
    return F.pad(torch.cat([along_x, along_y], dim=-1).flatten(1, 2), (0, 0, prefix_tokens, 0))


def relative_logits(query: Tensor, offsets: Tensor) -> Tensor:
    """Return query . embedding of the offset p_q - p_k for all pairs of tokens, before any scaling.

    The paper does not say where the class token stands, nor who shares a table. Here tokens are numbered as
    the encoder sees them, class token first, and each layer has its own table, split into heads as keys are.

    Args:
        query: `[B, H, N, Dh]`.
        offsets: `[2 N - 1, H * Dh]`, from offset 1 - N to N - 1.

    Returns `[B, H, N, N]`, queries before keys.
    Paper: Appendix D.4
    """
    heads, tokens = query.shape[-3], query.shape[-2]
    by_offset: Tensor = query @ torch.unflatten(offsets, -1, (heads, -1)).permute(
        1, 2, 0
    )  # [B, H, N, 2 N - 1]
    place = torch.arange(tokens, device=query.device)
    offset = place[:, None] - place + tokens - 1
    return by_offset.gather(-1, offset.expand(*by_offset.shape[:-1], -1))


def resize_position_embedding(
    table: Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int, method: str = "zoom"
) -> Tensor:
    """Interpolate a learned table so that it fits another resolution; prefix tokens keep their rows.

    Args:
        table: `[L, prefix_tokens + rows * columns, D]`, patches in row-major order; L is 1, or one table per
            layer.
        old_grid, new_grid: rows and columns of patches.
        prefix_tokens: tokens before the patches (1 with a class token).
        method: `zoom`, bilinear with aligned corners, is `scipy.ndimage.zoom(order=1)` of the authors' code;
            `bicubic` is Hugging Face's, `bicubic_aligned` torchvision's, `bicubic_antialias` timm's.

    Returns `[L, prefix_tokens + new rows * new columns, D]` in the dtype of `table`. Raises CheckpointError
    when the old grid is not square or the table does not fit it, or the method is unknown. Paper: Section 3.2
    """
    rows, columns = old_grid
    if rows != columns:
        raise CheckpointError(
            f"position embedding: the stored grid is {rows}x{columns}, only square ones are resized"
        )
    expected = prefix_tokens + rows * columns
    if table.dim() != 3 or table.shape[1] != expected:
        raise CheckpointError(
            f"position embedding: shape {list(table.shape)} does not fit a {rows}x{columns} grid "
            f"with {prefix_tokens} prefix tokens, which needs [layers, {expected}, hidden_size]"
        )
    if old_grid == new_grid:
        return table
    prefix, patches = torch.split(table, [prefix_tokens, rows * columns], dim=1)
    image = torch.unflatten(patches, 1, (rows, columns)).permute(0, 3, 1, 2)  # [L, D, rows, columns]
    resized = F.interpolate(image.double(), size=new_grid, **_method(method)[0]).to(table.dtype)
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)


def resize_axis(table: Tensor, new_length: int) -> Tensor:
    """Interpolate the tables `[L, n, D]` of one axis linearly, both ends kept, and return `[L, new_length,
    D]`.

    The rule is ours. It fits rows, columns, and relative offsets along one axis, of which offset 0 stays in
    the middle; offsets of a raster order have no such meaning.
    """
    resized = F.interpolate(
        table.double().transpose(1, 2), size=new_length, mode="linear", align_corners=True
    )
    return resized.transpose(1, 2).to(table.dtype)


def say_method(method: str) -> str:
    """Return the words for a resize method. Raises CheckpointError for a name that is none."""
    return _method(method)[1]


# What torch is asked for, and the words for it.
_METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "zoom": ({"mode": "bilinear", "align_corners": True}, "bilinear, corners aligned"),
    "bicubic": ({"mode": "bicubic", "align_corners": False}, "bicubic"),
    "bicubic_aligned": ({"mode": "bicubic", "align_corners": True}, "bicubic, corners aligned"),
    "bicubic_antialias": (
        {"mode": "bicubic", "align_corners": False, "antialias": True},
        "bicubic, antialiased",
    ),
}


def _method(name: str) -> tuple[dict[str, Any], str]:
    if name not in _METHODS:
        raise CheckpointError(
            f"position embedding: unknown resize method {name!r}, known are {', '.join(_METHODS)}"
        )
    return _METHODS[name]
