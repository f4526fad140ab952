"""The two axial networks of Appendix D.6, which attend along rows and columns instead of the full grid.

Their code was not published. Where the paper is silent, the docstrings say which reading was chosen.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.models.blocks import Block, Generator, draw, normal, zero
from vitctl.models.kernels import Linear
from vitctl.models.resnet import Backbone, GroupNorm, Numerics, ResNet, RootV1, StdConv, pad_same
from vitctl.models.resnet import initialise as initialise_resnet
from vitctl.models.variants import AxialConfig, AxialResNetConfig, UnitShape, ViTConfig
from vitctl.models.vit import EncoderBlock, VisionTransformer

AXIAL = Numerics(norm_eps=1e-4, std_eps=0.0, variance_eps=1e-5, same_padding=True)


class AxialBlock(Block):
    """Row, then column self-attention, each with an MLP, `[B, N, D]` to `[B, N, D]`. Paper: Appendix D.6"""

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.grid = config.grid
        self.row = EncoderBlock(config, drop_path)
        self.column = EncoderBlock(config, drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.row(torch.unflatten(tokens, 1, self.grid))  # [B, rows, columns, D]
        grid: Tensor = self.column(rows.transpose(1, 2))  # [B, columns, rows, D]
        return grid.transpose(1, 2).flatten(1, 2)


class AxialTransformer(VisionTransformer):
    """A `VisionTransformer` of axial blocks. It averages patches: a class token has no place on a grid.

    Positions are those of the plain model, one learned row for each place of the grid, added at the stem.
    Paper: Appendix D.6
    """

    def __init__(self, config: AxialConfig) -> None:
        super().__init__(config, AxialBlock)


class AxialAttention(nn.Module):
    """Attention within each sequence, with relative positions, `[B, C, L]` to `[B, C, L]`.

    As in Axial-DeepLab, which the paper names as its base: queries and keys are half as wide as values;
    query, key and value each have an embedding of the offset i - j; logits are not scaled. Norms are
    GroupNorm, over a sequence, and all heads share the embeddings. Paper: Appendix D.6
    """

    def __init__(self, width: int, length: int, config: AxialResNetConfig) -> None:
        super().__init__()
        self.num_heads, self.head_size = config.num_heads, width // config.num_heads
        self.qkv = Linear(width, 2 * width, bias=False)  # rows: head by head, each query, key, value
        self.qkv_norm = GroupNorm(config.num_groups, 2 * width, eps=AXIAL.norm_eps)
        self.relative_position = nn.Parameter(torch.empty(2 * length - 1, 2 * self.head_size))
        self.norm = GroupNorm(config.num_groups, width, eps=AXIAL.norm_eps)

    def attention(self, sequences: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights `[B, H, L, L]` (queries before keys), values `[B, H, d, L]`, offsets `[L, L, d]`."""
        parts = [self.head_size // 2, self.head_size // 2, self.head_size]
        projected = self.qkv_norm(self.qkv(sequences.transpose(1, 2)).transpose(1, 2))  # [B, 2 C, L]
        query, key, value = torch.split(
            torch.unflatten(projected, 1, (self.num_heads, -1)), parts, dim=2
        )  # [B, H, d, L]
        place = torch.arange(sequences.shape[-1], device=sequences.device)
        offset = place[:, None] - place + len(place) - 1
        of_query, of_key, of_value = torch.split(self.relative_position[offset], parts, dim=-1)  # [L, L, d]
        logits = torch.einsum("bhdi,bhdj->bhij", query, key)
        logits = (
            logits
            + torch.einsum("bhdi,ijd->bhij", query, of_key)
            + torch.einsum("bhdj,ijd->bhij", key, of_query)
        )
        return logits.softmax(dim=-1), value, of_value

    def forward(self, sequences: Tensor) -> Tensor:
        weights, value, of_value = self.attention(sequences)
        mixed = torch.einsum("bhij,bhdj->bhdi", weights, value) + torch.einsum(
            "bhij,ijd->bhdi", weights, of_value
        )
        outputs: Tensor = self.norm(mixed.flatten(1, 2))
        return outputs


class AxialUnit(Block):
    """A `UnitV1` with row, then column attention for its 3x3 convolution; average pooling does the stride."""

    def __init__(self, shape: UnitShape, config: AxialResNetConfig) -> None:
        super().__init__()
        middle, outputs = shape.middle, shape.outputs
        self.stride, self.projected = shape.stride, shape.projected
        self.conv1 = StdConv(shape.inputs, middle, 1, 1, AXIAL)
        self.norm1 = GroupNorm(config.num_groups, middle, eps=AXIAL.norm_eps)
        self.row = AxialAttention(middle, shape.side, config)
        self.column = AxialAttention(middle, shape.side, config)
        self.conv3 = StdConv(middle, outputs, 1, 1, AXIAL)
        self.norm3 = GroupNorm(config.num_groups, outputs, eps=AXIAL.norm_eps)
        if shape.projected:
            self.projection = StdConv(shape.inputs, outputs, 1, shape.stride, AXIAL)
            self.projection_norm = GroupNorm(config.num_groups, outputs, eps=AXIAL.norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = self.projection_norm(self.projection(images)) if self.projected else images
        inner = F.relu(self.norm1(self.conv1(images)))
        inner = _within_rows(self.row, inner)
        inner = _within_rows(self.column, inner.transpose(2, 3)).transpose(2, 3)
        if self.stride > 1:
            padded, padding = pad_same(inner, self.stride, self.stride)
            inner = F.avg_pool2d(padded, self.stride, self.stride, padding)
        return F.relu(shortcut + self.norm3(self.conv3(F.relu(inner))))


def _within_rows(attention: AxialAttention, images: Tensor) -> Tensor:
    rows = images.transpose(1, 2).flatten(0, 1)  # [B H, C, W]
    return torch.unflatten(attention(rows), 0, (-1, images.shape[2])).transpose(1, 2)


def axial_resnet(config: AxialResNetConfig) -> ResNet:
    """Return a ResNet of axial units without weights, with a v1 root; its positions fix the image size."""
    root = RootV1(config.width, config.num_groups, AXIAL)
    return ResNet(config, Backbone(config, root, lambda shape: AxialUnit(shape, config)))


@torch.no_grad()
def initialise_axial_resnet(model: ResNet, generator: Generator) -> None:
    initialise_resnet(model, generator)
    for module in model.modules():
        if isinstance(module, AxialAttention):
            draw(module.qkv.weight, normal, generator, std=1 / module.qkv.in_features)
            draw(module.relative_position, normal, generator, std=1 / module.head_size)
        elif isinstance(module, AxialUnit):
            zero(module.norm3.weight)
