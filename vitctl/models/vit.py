"""The Vision Transformer and the hybrids, with the numerics and the initialisation of the authors' code."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.models.blocks import (
    Block,
    Generator,
    draw,
    grid_table,
    lecun_normal,
    normal,
    plain_norm,
    relative_logits,
    run,
    xavier_uniform,
    zero,
)
from vitctl.models.kernels import Head, Linear, attend
from vitctl.models.resnet import backbone_v1, initialise_backbone
from vitctl.models.variants import HybridConfig, ViTConfig, skips_unused_tokens


class Attention(nn.Module):
    """Multi-head self-attention, `[..., N, D]` to `[..., N, D]`. Paper: Appendix A."""

    def __init__(self, hidden_size: int, num_heads: int, relative_tokens: int = 0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(hidden_size, 3 * hidden_size)  # rows: query, key, value; within each, head by head
        self.out = Linear(hidden_size, hidden_size)
        offsets = torch.empty(2 * relative_tokens - 1, hidden_size) if relative_tokens else None
        self.relative_position = nn.Parameter(offsets) if offsets is not None else None

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key, value, each `[..., num_heads, N, D / num_heads]`, of `tokens` `[..., N, D]`."""
        heads = (
            self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).transpose(-4, -2)
        )  # [..., num_heads, 3, N, Dh]
        query, key, value = heads.unbind(-3)
        return query, key, value

    def bias(self, query: Tensor) -> Tensor | None:
        """Return what relative positions add to the logits, `[B, num_heads, N, N]`; None without them."""
        if self.relative_position is None:
            return None
        scale: float = query.shape[-1] ** 0.5
        return relative_logits(query, self.relative_position) / scale

    def forward(self, tokens: Tensor, first: int | None = None) -> Tensor:
        """Return the outputs of the tokens, or of the `first` of them alone, which relative positions do not
        allow.
        """
        query, key, value = self.project(tokens)
        mixed = attend(query[..., :first, :], key, value, self.bias(query))
        outputs: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return outputs


class GELU(nn.GELU):
    """The activation of the MLP."""

    def forward(self, inputs: Tensor) -> Tensor:
        if (
            self.approximate == "tanh"
            and torch.compiler.is_dynamo_compiling()
            and not torch.compiler.is_exporting()
        ):
            # 0.5 x (1 + tanh(u)) = x sigmoid(2 u), and compiled code has a fast exponential, but no fast
            # tanh.
            return inputs * torch.sigmoid(math.sqrt(8 / math.pi) * (inputs + 0.044715 * inputs**3))
        return super().forward(inputs)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, `[..., N, D]` to `[..., N, D]`."""

    def __init__(self, hidden_size: int, mlp_size: int, dropout: float, gelu: str) -> None:
        super().__init__()
        self.fc1 = Linear(hidden_size, mlp_size)
        self.gelu = GELU(approximate="tanh" if gelu == "tanh" else "none")
        self.dropout1 = nn.Dropout(dropout)
        self.fc2 = Linear(mlp_size, hidden_size)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout1(self.gelu(self.fc1(tokens)))
        outputs: Tensor = self.dropout2(self.fc2(hidden))
        return outputs


class DropPath(nn.Module):
    """Stochastic depth: in training, a branch is dropped for whole images at `rate`, and scaled up for the
    others.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.active = rate > 0
        # A tensor, because a float would be compiled again for each value. No buffer: DDP would send it, and
        # `to` change its type.
        self.rate = torch.tensor(rate, dtype=torch.float64, device="cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Let the rate follow to the device: compiled code that takes a number of the CPU can be no CUDA
        graph.
        """
        device = fn(torch.empty(0, device=self.rate.device)).device
        self.rate = self.rate if device.type == "meta" else self.rate.to(device)
        apply: Any = super()._apply  # it has no types
        return apply(fn, recurse)

    def forward(self, branch: Tensor) -> Tensor:
        if not (self.active and self.training):
            return branch
        drawn = torch.rand(branch.shape[0], *[1] * (branch.dim() - 1), device=branch.device)
        return branch * ((drawn >= self.rate) / (1 - self.rate)).to(branch.dtype)


class EncoderBlock(Block):
    """One pre-norm Transformer block, `[..., N, D]` to `[..., N, D]`.

    Paper: Section 3.1, equations 2 and 3.
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        relative_tokens = config.num_tokens if config.position_embedding == "relative" else 0
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config.hidden_size, config.num_heads, relative_tokens)
        self.dropout = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.mlp_size, config.dropout, config.gelu)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor, first: int | None = None) -> Tensor:
        """Return all tokens, or the `first` of them alone."""
        mixed = self.attention(self.norm1(tokens), first)
        tokens = tokens[..., :first, :] + self.drop_path(self.dropout(mixed))
        outputs: Tensor = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return outputs


class VisionTransformer(nn.Module):
    """Images to logits. The weights mean nothing before `initialise` or `load_state_dict`: use `build.build`.

    `checkpoint_blocks` trades memory for time in training, and changes no result. Where only the class token
    is read, the last block computes no other, unless `every_token`. Paper: Section 3.1, Figure 1
    """

    class_token: nn.Parameter | None
    position_embedding: nn.Parameter | None
    head: nn.Linear | None

    def __init__(self, config: ViTConfig, block: Callable[[ViTConfig, float], Block] = EncoderBlock) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.config = config
        self.checkpoint_blocks = self.every_token = False
        self.patch_embedding = nn.Conv2d(config.map_channels, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if config.prefix_tokens else None
        tables = config.depth if config.position_at == "every_layer" else 1
        learned = config.position_embedding == "learned"
        self.position_embedding = (
            nn.Parameter(torch.empty(tables, config.num_tokens, width)) if learned else None
        )
        if config.position_embedding == "2d":
            rows, columns = config.grid
            self.position_rows = nn.Parameter(torch.empty(tables, rows, width // 2))
            self.position_columns = nn.Parameter(torch.empty(tables, columns, width // 2))
        self.dropout = nn.Dropout(config.dropout)
        last = max(1, config.depth - 1)
        self.blocks = nn.ModuleList(
            block(config, config.drop_path * index / last) for index in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.pre_logits = Head(width, config.representation_size) if config.representation_size else None
        self.head = Head(config.feature_size, config.num_classes) if config.num_classes else None

    def embed(self, images: Tensor) -> Tensor:
        """Return the patch embeddings `[B, rows * columns, D]`, row-major, of `images` `[B, 3, H, W]` in [-1,
        1].
        """
        patches: Tensor = self.patch_embedding(images)  # [B, D, rows, columns]
        return patches.flatten(2).transpose(1, 2)

    def positions(self) -> Tensor | None:
        """Return the tables that are added to the tokens, `[1, N, D]` or one for each layer, or nothing."""
        if self.config.position_embedding == "2d":
            return grid_table(self.position_rows, self.position_columns, self.config.prefix_tokens)
        return self.position_embedding

    def encode(self, patches: Tensor, first: int | None = None) -> Tensor:
        """Return the normalised output `[B, N, D]`, class token first, for `patches` `[B, rows * columns,
        D]`.

        `first`: of so many tokens alone, `[B, first, D]`.
        """
        tokens, positions = patches, self.positions()
        if self.class_token is not None:
            tokens = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        if positions is not None:
            tokens = tokens + positions[:1]
        # Under autocast the patches arrive rounded; the residual stream keeps the precision of the weights.
        tokens = self.dropout(tokens.to(self.norm.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index and positions is not None and self.config.position_at != "stem":
                tokens = tokens + positions[index % len(positions)]
            last = () if first is None or index + 1 < len(self.blocks) else (first,)
            tokens = run(block, (tokens, *last), self.checkpoint_blocks)
        encoded: Tensor = self.norm(tokens)
        return encoded

    def features(self, images: Tensor) -> Tensor:
        """Return the representation `[B, R]` that feeds the head, of `images` `[B, 3, H, W]` in [-1, 1]."""
        reads_one = skips_unused_tokens(self.config) and not self.every_token
        encoded = self.encode(self.embed(images), 1 if reads_one else None)
        pooled = encoded[:, 0] if self.config.classifier == "token" else encoded.mean(dim=1)  # [B, D]
        return pooled if self.pre_logits is None else torch.tanh(self.pre_logits(pooled))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `[B, K]` of `images` `[B, 3, H, W]` in [-1, 1]; without a head, their
        representation.
        """
        features = self.features(images)
        return features if self.head is None else self.head(features)


class HybridTransformer(VisionTransformer):
    """A `VisionTransformer` whose patches are cut from the feature map of a ResNet V1 without head.

    Paper: Section 3.1, Hybrid Architecture; Section 4.1
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.backbone = backbone_v1(config)

    def embed(self, images: Tensor) -> Tensor:
        """Return the patch embeddings of the backbone's map."""
        return super().embed(self.backbone(images, self.checkpoint_blocks))


@torch.no_grad()
def initialise(model: VisionTransformer, generator: Generator) -> None:
    """Draw every weight of `model` in place, as the authors' code does; those of a hybrid's backbone first.

    With the same seed every dtype, device and processor receives the same float32 draws, rounded.
    Source: google-research/vision_transformer, models_vit.py
    """
    if isinstance(model, HybridTransformer):
        initialise_backbone(model.backbone, generator)
    draw(model.patch_embedding.weight, lecun_normal, generator)
    zero(model.patch_embedding.bias, model.class_token)
    if model.position_embedding is not None:
        draw(model.position_embedding, normal, generator, std=0.02)
    if model.config.position_embedding == "2d":
        for table in (model.position_rows, model.position_columns):
            draw(table, normal, generator, std=0.02)
    for block in model.blocks.modules():
        if isinstance(block, EncoderBlock):
            _initialise_block(block, generator)
    plain_norm(model.norm)
    if model.pre_logits is not None:
        draw(model.pre_logits.weight, lecun_normal, generator)
        zero(model.pre_logits.bias)
    if model.head is not None:
        zero(model.head.weight)
        model.head.bias.fill_(model.config.head_bias)


def _initialise_block(block: EncoderBlock, generator: Generator) -> None:
    attention = block.attention
    # Fused in one matrix, but query, key and value are drawn as three: the fan-out is that of each alone.
    for weight in (*attention.qkv.weight.chunk(3), attention.out.weight):
        draw(weight, xavier_uniform, generator)
    zero(attention.qkv.bias, attention.out.bias)
    if attention.relative_position is not None:
        draw(attention.relative_position, normal, generator, std=0.02)
    for dense in (block.mlp.fc1, block.mlp.fc2):
        draw(dense.weight, xavier_uniform, generator)
        draw(dense.bias, normal, generator, std=1e-6)
    plain_norm(block.norm1, block.norm2)
