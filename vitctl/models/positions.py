"""Positions of tokens: tables, relative positions, rotary angles."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitctl.models.variants import ViTConfig

Grid = tuple[int, int]


def grid_table(rows: Tensor, columns: Tensor, prefix_tokens: int) -> Tensor:
    """Return the 2-D embedding of every token: its column's, then its row's; zeros for prefix tokens.

    The paper does not say what a class token gets; it has no coordinates. From `[L, rows, D / 2]` and
    `[L, columns, D / 2]` to `[L, prefix_tokens + rows * columns, D]`. Paper: Appendix D.4
    """
    along_x = columns[:, None].expand(-1, rows.shape[1], -1, -1)  # [L, rows, columns, D / 2]
    along_y = rows[:, :, None].expand(-1, -1, columns.shape[1], -1)
    return F.pad(torch.cat([along_x, along_y], dim=-1).flatten(1, 2), (0, 0, prefix_tokens, 0))


def relative_logits(query: Tensor, offsets: Tensor) -> Tensor:
    """Return query . embedding of the offset p_q - p_k for all pairs of tokens, before any scaling.

    The paper specifies neither the class token's position nor which layers share a table. Here tokens are
    numbered in the encoder's order, class token first, and each layer has a table, split into heads like
    keys. From queries `[B, H, N, Dh]` and `[2 N - 1, H * Dh]`, offsets 1 - N to N - 1, to `[B, H, N, N]`,
    queries before keys. Paper: Appendix D.4
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
    """Return cosine and sine `[2, N, Dh]` of the angle by which each token's queries and keys are rotated.

    Both rules use half of a head's angles for the row, half for the column. DINOv3's coordinates are
    between -1 and 1 at any size, and its periods grow from 1 to almost 100; an angle is shared by elements
    half a head apart. EVA-02's coordinates count patches, as if there were 16 x 16, and its frequencies
    fall from 1 to almost 1 / 10,000; an angle is shared by neighbours. Prefix tokens are not rotated.
    `like` gives the device, and float64 if it has it, else float32; `scale` multiplies all coordinates.

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
    """Return queries or keys `[..., N, Dh]` rotated by `turns` `[2, N, Dh]`, computed in their precision."""
    cosine, sine = turns.unbind(0)
    wide = vectors.to(torch.promote_types(vectors.dtype, turns.dtype))
    if rule == "dinov3":
        first, second = wide.chunk(2, dim=-1)
        crossed = torch.cat([-second, first], dim=-1)
    else:
        pairs = torch.unflatten(wide, -1, (-1, 2))
        crossed = torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    return (wide * cosine + crossed * sine).to(vectors.dtype)


CLASS_ROWS = 3  # class token to patches, patches to class token, class token to itself


def num_offsets(grid: Grid) -> int:
    """Return the rows of a relative position bias table: one per offset, and three for the class token."""
    return (2 * grid[0] - 1) * (2 * grid[1] - 1) + CLASS_ROWS


def offset_bias(table: Tensor, grid: Grid, has_token: bool) -> Tensor:
    """Return the bias added to the logits, `[H, N, N]`, queries before keys.

    The table `[num_offsets(grid), H]` has the offsets p_q - p_k, rows slowest, from the most negative one;
    then class token to patches, patches to class token, class token to itself. Source: BEiT,
    modeling_finetune.py
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
