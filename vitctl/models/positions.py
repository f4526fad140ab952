"""Positions of tokens: tables, relative positions, rotary turns, and how they move to another resolution."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.models.variants import ViTConfig

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


def sincos_table(grid: Grid, hidden_size: int, device: torch.device) -> Tensor:
    """Return the fixed table `[rows * columns, D]`, float64: sine and cosine of the column, then of the row.

    The frequencies fall from 1 to 1 / 10,000 over D / 4 steps. Source: big_vision, models/vit.py
    """
    quarter = hidden_size // 4
    place = torch.arange(max(grid), dtype=torch.float64, device=device)
    step = torch.arange(quarter, dtype=torch.float64, device=device) / max(1, quarter - 1)
    angle = place[:, None] * 10_000.0**-step  # [places, D / 4]
    waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
    rows, columns = grid
    by_column = waves[:columns].expand(rows, -1, -1)
    by_row = waves[:rows, None].expand(-1, columns, -1)
    return torch.cat([by_column, by_row], dim=-1).flatten(0, 1)


def rotary_turns(config: ViTConfig, like: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return cosine and sine `[2, N, Dh]` of the angle by which each token's queries and keys are turned.

    Both rules halve a head: half of its angles are the row's, half the column's. DINOv3's coordinates lie
    between -1 and 1 at any size, and its periods grow from 1 to almost 100; an angle is shared by elements
    half a head apart. EVA-02's coordinates count patches, as if there were 16 x 16, and its frequencies fall
    from 1 to almost 1 / 10,000; an angle is shared by neighbours. Prefix tokens are not turned.

    Args:
        config: with `rotary`.
        like: a tensor of the model, for the device; the turns are float32, or float64 as it is.
        scale: of all coordinates, a scalar.

    Source: DINOv3, layers/rope_position_encoding.py; EVA-02, rope.py
    """
    quarter, device = config.hidden_size // config.num_heads // 4, like.device
    step = torch.arange(quarter, dtype=torch.float64, device=device) / quarter
    angles = []
    for count in config.grid:
        place = torch.arange(count, dtype=torch.float64, device=device)
        if config.rotary == "dinov3":
            place = 2 * (place + 0.5) / count - 1
            place = place if scale is None else place * scale
            angles.append(2 * math.pi * place[:, None] / 100.0**step)
        else:
            place = place / count * 16
            place = place if scale is None else place * scale
            angles.append(place[:, None] * 10_000.0**-step)  # [places, Dh / 4]
    (rows, columns), (by_row, by_column) = config.grid, angles
    half = torch.cat(
        [by_row[:, None].expand(-1, columns, -1), by_column.expand(rows, -1, -1)], dim=-1
    ).flatten(0, 1)  # [rows * columns, Dh / 2]
    angle = half.repeat(1, 2) if config.rotary == "dinov3" else half.repeat_interleave(2, dim=1)
    angle = F.pad(angle, (0, 0, config.prefix_tokens, 0))
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.stack([angle.cos(), angle.sin()]).to(wide)


def turned(vectors: Tensor, turns: Tensor, rule: str) -> Tensor:
    """Return queries or keys `[..., N, Dh]` turned by `turns` `[2, N, Dh]`, computed in their precision."""
    cosine, sine = turns.unbind(0)
    wide = vectors.to(torch.promote_types(vectors.dtype, turns.dtype))
    if rule == "dinov3":
        first, second = wide.chunk(2, dim=-1)
        crossed = torch.cat([-second, first], dim=-1)
    else:
        pairs = torch.unflatten(wide, -1, (-1, 2))
        crossed = torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    return (wide * cosine + crossed * sine).to(vectors.dtype)


_CLASS_ROWS = 3  # class token to patches, patches to class token, class token to itself


def num_offsets(grid: Grid) -> int:
    """Return the rows of a table of relative position biases: one for each offset, and three for the class
    token.
    """
    return (2 * grid[0] - 1) * (2 * grid[1] - 1) + _CLASS_ROWS


def offset_bias(table: Tensor, grid: Grid, has_token: bool) -> Tensor:
    """Return what is added to the logits, `[H, N, N]`, queries before keys.

    Args:
        table: `[num_offsets(grid), H]`: the offsets p_q - p_k, rows slowest, from the most negative one; then
            class token to patches, patches to class token, class token to itself.
        grid: rows and columns of patches.
        has_token: whether a class token stands before the patches.

    Source: BEiT, modeling_finetune.py
    """
    (rows, columns), last = grid, len(table)
    row = torch.arange(rows, device=table.device).repeat_interleave(columns)
    column = torch.arange(columns, device=table.device).repeat(rows)
    down, right = (one[:, None] - one + count - 1 for one, count in ((row, rows), (column, columns)))
    index = down * (2 * columns - 1) + right
    if has_token:
        to_token = F.pad(torch.full_like(index[:, :1], last - 2), (0, 0, 1, 0), value=last - 1)
        index = torch.cat([to_token, F.pad(index, (0, 0, 1, 0), value=last - 3)], dim=1)
    return table[index].permute(2, 0, 1)


def resize_offset_bias(table: Tensor, old_grid: Grid, new_grid: Grid, method: str = "zoom") -> Tensor:
    """Return a table of relative position biases for another grid; the class token keeps its three rows.

    An offset of one patch keeps its meaning: the old offsets are spaced geometrically, so that they span the
    new ones, and each new one is interpolated linearly between them, as in timm. The authors' curve between
    them is cubic.

    Args:
        table: `[num_offsets(old_grid), H]`.
        old_grid, new_grid: rows and columns of patches.
        method: `bilinear` is transformers' rule, which aligns no corners; every other name stands for ours.

    Returns `[num_offsets(new_grid), H]`. Source: BEiT, run_class_finetuning.py
    """
    if old_grid == new_grid:
        return table
    if method == "bilinear":
        sides = (tuple(2 * side - 1 for side in grid) for grid in (old_grid, new_grid))
        old, new = sides
        image = torch.unflatten(table[:-_CLASS_ROWS].T, 1, old)[None].double()  # [1, H, rows, columns]
        resized = F.interpolate(image, size=new, **_method(method)[0])[0].flatten(1).T
    else:
        by_row, by_column = (_spread(old, new) for old, new in zip(old_grid, new_grid, strict=True))
        spans = (by_row.shape[1], by_column.shape[1])
        offsets = torch.unflatten(table[:-_CLASS_ROWS].double(), 0, spans)  # [rows, columns, H]
        on_device = (by_row.to(table.device), by_column.to(table.device))
        resized = torch.einsum("ir,jc,rch->ijh", *on_device, offsets).flatten(0, 1)
    return torch.cat([resized.to(table.dtype), table[-_CLASS_ROWS:]])


def _spread(old: int, new: int) -> Tensor:
    """Return the share of each old offset in each new one along an axis, `[2 new - 1, 2 old - 1]`."""
    low, high = 1.01, 1.5  # of the ratio between one step and the next
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if sum(ratio**step for step in range(old - 1)) > new - 1 else (ratio, high)
    steps = torch.tensor([ratio**step for step in range(old - 1)], dtype=torch.float64, device="cpu").cumsum(
        0
    )
    place = torch.cat([-steps.flip(0), steps.new_zeros(1), steps])
    wanted = torch.arange(1 - new, new, dtype=torch.float64, device="cpu")
    right = torch.searchsorted(place, wanted).clamp(max=len(place) - 1)
    left = (right - 1).clamp(min=0)
    share = ((wanted - place[left]) / (place[right] - place[left])).clamp(0, 1).nan_to_num(1)[:, None]
    return share * F.one_hot(right, len(place)) + (1 - share) * F.one_hot(left, len(place))


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
            `bicubic` is Hugging Face's, `bicubic_aligned` torchvision's, `bicubic_antialias` timm's, and
            `bicubic_offset` DINOv2's without registers, whose scale counts a tenth of a patch too many.

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
    size: dict[str, Any] = {"size": new_grid}
    if method == "bicubic_offset":
        size = {"scale_factor": tuple((new + 0.1) / old for old, new in zip(old_grid, new_grid, strict=True))}
    resized = F.interpolate(image.double(), **size, **_method(method)[0]).to(table.dtype)
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
    "bicubic_offset": ({"mode": "bicubic", "align_corners": False}, "bicubic, scaled by (new + 0.1) / old"),
    "bicubic_aligned": ({"mode": "bicubic", "align_corners": True}, "bicubic, corners aligned"),
    "bicubic_antialias": (
        {"mode": "bicubic", "align_corners": False, "antialias": True},
        "bicubic, antialiased",
    ),
    "bilinear": ({"mode": "bilinear", "align_corners": False}, "bilinear"),
}


def _method(name: str) -> tuple[dict[str, Any], str]:
    if name not in _METHODS:
        raise CheckpointError(
            f"position embedding: unknown resize method {name!r}, known are {', '.join(_METHODS)}"
        )
    return _METHODS[name]
