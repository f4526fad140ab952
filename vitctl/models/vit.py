"""The Vision Transformer, with the numerics and the initialisation of the authors' code."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.models.variants import ViTConfig


class Attention(nn.Module):
    """Multi-head self-attention, `[B, N, D]` to `[B, N, D]`. Paper: Appendix A."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)  # rows: query, key, value; within each, head by head
        self.out = nn.Linear(hidden_size, hidden_size)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each `[B, num_heads, N, D / num_heads]`, of `tokens` `[B, N, D]`."""
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.project(tokens))
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, `[B, N, D]` to `[B, N, D]`."""

    def __init__(self, hidden_size: int, mlp_size: int, dropout: float, gelu: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_size)
        self.gelu = nn.GELU(approximate="tanh" if gelu == "tanh" else "none")
        self.dropout1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_size, hidden_size)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout2(self.fc2(self.dropout1(self.gelu(self.fc1(tokens)))))


class EncoderBlock(nn.Module):
    """One pre-norm Transformer block, `[B, N, D]` to `[B, N, D]`. Paper: Section 3.1, equations 2 and 3."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config.hidden_size, config.num_heads)
        self.dropout = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.mlp_size, config.dropout, config.gelu)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.dropout(self.attention(self.norm1(tokens)))
        return tokens + self.mlp(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """Images to logits. The weights mean nothing before `initialise` or `load_state_dict`: use `build.build`.

    Paper: Section 3.1, Figure 1
    """

    class_token: nn.Parameter | None
    position_embedding: nn.Parameter | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.config = config
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if config.prefix_tokens else None
        learned = config.position_embedding == "learned"
        self.position_embedding = nn.Parameter(torch.empty(1, config.num_tokens, width)) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.pre_logits = nn.Linear(width, config.representation_size) if config.representation_size else None
        self.head = nn.Linear(config.feature_size, config.num_classes) if config.num_classes else None

    def embed(self, images: Tensor) -> Tensor:
        """Return the patch embeddings `[B, rows * columns, D]`, row-major, of `images` `[B, 3, H, W]` in [-1, 1]."""
        return self.patch_embedding(images).flatten(2).transpose(1, 2)

    def encode(self, patches: Tensor) -> Tensor:
        """Return the normalised output `[B, N, D]`, class token first, for `patches` `[B, rows * columns, D]`."""
        tokens = patches
        if self.class_token is not None:
            tokens = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        if self.position_embedding is not None:
            tokens = tokens + self.position_embedding
        # Under autocast the patches arrive rounded; the residual stream keeps the precision of the weights.
        tokens = self.dropout(tokens.to(self.norm.weight.dtype))
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)

    def features(self, images: Tensor) -> Tensor:
        """Return the representation `[B, R]` that feeds the head, of `images` `[B, 3, H, W]` in [-1, 1]."""
        encoded = self.encode(self.embed(images))
        pooled = encoded[:, 0] if self.config.classifier == "token" else encoded.mean(dim=1)  # [B, D]
        return pooled if self.pre_logits is None else torch.tanh(self.pre_logits(pooled))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `[B, K]` of `images` `[B, 3, H, W]` in [-1, 1]; without a head, their representation."""
        features = self.features(images)
        return features if self.head is None else self.head(features)


@torch.no_grad()
def initialise(model: VisionTransformer, generator: torch.Generator | None = None) -> None:
    """Draw every weight of `model` in place, as the authors' code does.

    `generator` lives on the CPU; with the same seed every dtype and device receives the same float32 draws, rounded.
    Source: google-research/vision_transformer, models_vit.py
    """

    def draw(weight: Tensor, fill: Callable[..., Tensor], **scale: float) -> None:
        weight.copy_(fill(torch.empty(weight.shape, dtype=torch.float32), generator=generator, **scale))

    draw(model.patch_embedding.weight, _lecun_normal)
    _zero(model.patch_embedding.bias, model.class_token)
    if model.position_embedding is not None:
        draw(model.position_embedding, nn.init.normal_, std=0.02)
    for block in model.blocks:
        assert isinstance(block, EncoderBlock)
        # Fused in one matrix, but query, key and value are drawn as three: the fan-out is that of each alone.
        for weight in (*block.attention.qkv.weight.chunk(3), block.attention.out.weight):
            draw(weight, nn.init.xavier_uniform_)
        _zero(block.attention.qkv.bias, block.attention.out.bias)
        for dense in (block.mlp.fc1, block.mlp.fc2):
            draw(dense.weight, nn.init.xavier_uniform_)
            draw(dense.bias, nn.init.normal_, std=1e-6)
        _plain_norm(block.norm1, block.norm2)
    _plain_norm(model.norm)
    if model.pre_logits is not None:
        draw(model.pre_logits.weight, _lecun_normal)
        _zero(model.pre_logits.bias)
    if model.head is not None:
        _zero(model.head.weight)
        model.head.bias.fill_(model.config.head_bias)


def _lecun_normal(weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill with a normal cut at two standard deviations, then widened so that the variance is 1 / fan-in."""
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


def _plain_norm(*norms: nn.LayerNorm) -> None:
    for norm in norms:
        norm.weight.fill_(1)
        norm.bias.zero_()


def _zero(*weights: Tensor | None) -> None:
    for weight in weights:
        if weight is not None:
            weight.zero_()
