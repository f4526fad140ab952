"""The Vision Transformer and the hybrids, with the numerics and the initialisation of the authors' code."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.models.blocks import (
    Block,
    Generator,
    draw,
    lecun_normal,
    normal,
    plain_norm,
    run,
    xavier_uniform,
    zero,
)
from vitctl.models.kernels import QKV, Attending, Head, Linear, attend
from vitctl.models.positions import (
    grid_table,
    num_offsets,
    offset_bias,
    relative_logits,
    rotary_turns,
    sincos_table,
    turned,
)
from vitctl.models.resnet import backbone_v1, initialise_backbone
from vitctl.models.variants import HybridConfig, Recomputed, ViTConfig, is_checkpointed, skips_unused_tokens


class Attention(Attending):
    """Multi-head self-attention, `[..., N, D]` to `[..., N, D]`. Paper: Appendix A."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_heads
        # rows: query, key, value; within each, head by head
        only_keys_lack_one = config.qkv_bias == "qv"
        self.qkv = QKV(width) if only_keys_lack_one else Linear(width, 3 * width, config.qkv_bias == "qkv")
        self.out = Linear(width, width)
        self.rotary, self.grid, self.has_token = config.rotary, config.grid, config.has_class_token
        relative = config.position_embedding == "relative"
        offsets = torch.empty(2 * config.num_tokens - 1, width) if relative else None
        self.relative_position = nn.Parameter(offsets) if offsets is not None else None
        by_offset = config.position_embedding == "relative_bias"
        table = torch.empty(num_offsets(config.grid), self.num_heads) if by_offset else None
        self.relative_bias = nn.Parameter(table) if table is not None else None
        self.recomputed = False

    def project(self, tokens: Tensor, turns: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key, value `[..., num_heads, N, D / num_heads]` of tokens; see `rotary_turns`."""
        # Three parts, and then heads: the gradients are put together in the order of the product.
        parts = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # [..., N, num_heads, Dh]
        query, key, value = (part.transpose(-3, -2) for part in parts)
        if turns is not None:
            query, key = (turned(one, turns, self.rotary) for one in (query, key))
        return query, key, value

    def bias(self, query: Tensor) -> Tensor | None:
        """Return what relative positions add to the logits, `[B, num_heads, N, N]`; None without them."""
        if self.relative_bias is not None:
            by_pair = offset_bias(self.relative_bias, self.grid, self.has_token).to(query.dtype)
            return by_pair.expand(*query.shape[:-3], -1, -1, -1)
        if self.relative_position is None:
            return None
        scale: float = query.shape[-1] ** 0.5
        return relative_logits(query, self.relative_position) / scale

    def forward(self, tokens: Tensor, first: int | None = None, turns: Tensor | None = None) -> Tensor:
        """Return the outputs of all tokens, or only the `first`, which relative positions do not support."""
        query, key, value = self.project(tokens, turns)
        mixed = attend(query[..., :first, :], key, value, self.bias(query), self.kernel)
        outputs: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return outputs


class GELU(nn.GELU):
    is_compiled = False  # by `compile_blocks`; torch 2.11 takes an ordinary compilation for an export

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_compiled and self.approximate == "tanh" and torch.compiler.is_dynamo_compiling():
            # 0.5 x (1 + tanh(u)) = x sigmoid(2 u); compiled code has a fast exponential, but no fast tanh.
            return inputs * torch.sigmoid(math.sqrt(8 / math.pi) * (inputs + 0.044715 * inputs**3))
        return super().forward(inputs)


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), the activation of OpenAI's CLIP."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.sigmoid(1.702 * inputs)


class SwiGLU(nn.Module):
    """SiLU of the first half of the features, times the second half, `[..., 2 M]` to `[..., M]`."""

    def forward(self, inputs: Tensor) -> Tensor:
        gate, hidden = inputs.chunk(2, dim=-1)
        return F.silu(gate) * hidden


class MLP(nn.Module):
    """Two linear layers with a GELU or SwiGLU between them, `[..., N, D]` to `[..., N, D]`.

    The first layer of a SwiGLU has the gate's rows, then the rows that it multiplies.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, inner, gated = config.hidden_size, config.mlp_size, config.mlp == "swiglu"
        self.fc1 = Linear(width, inner * (1 + gated))
        plain = QuickGELU() if config.gelu == "quick" else GELU("tanh" if config.gelu == "tanh" else "none")
        self.gelu = SwiGLU() if gated else plain
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(inner, eps=config.norm_eps) if config.mlp_norm else nn.Identity()
        self.fc2 = Linear(inner, width)
        self.dropout2 = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.dropout1(self.fc1.then(tokens, self.gelu)))
        outputs: Tensor = self.dropout2(self.fc2(hidden))
        return outputs


class DropPath(nn.Module):
    """Stochastic depth: in training, drops a branch of an image with probability `rate`, or rescales it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        # A tensor, because each float value would be compiled anew. Not a buffer: DDP would send it, and
        # `to` would change its type.
        self.rate = torch.tensor(rate, dtype=torch.float64, device="cpu")
        factor = 1 / (1 - self.rate)
        self.factor = {factor.dtype: factor}
        self.factor |= {torch.float32: factor.float(), torch.bfloat16: factor.bfloat16()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the numbers to the device too: compiled code that takes a CPU's cannot be a CUDA graph."""
        device = fn(torch.empty(0, device=self.rate.device)).device
        if device.type != "meta":
            self.rate = self.rate.to(device)
            self.factor = {dtype: factor.to(device) for dtype, factor in self.factor.items()}
        apply: Any = super()._apply  # untyped
        return apply(fn, recurse)

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training:
            return branch
        drawn = torch.rand(branch.shape[0], *[1] * (branch.dim() - 1), device=branch.device)
        return branch * ((drawn >= self.rate) * self.factor[branch.dtype])


class EncoderBlock(Block):
    """One pre-norm Transformer block, `[..., N, D]` to `[..., N, D]`.

    Paper: Section 3.1, equations 2 and 3.
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.dropout = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        scaled = config.layer_scale > 0
        self.scale1 = nn.Parameter(torch.empty(config.hidden_size)) if scaled else None
        self.scale2 = nn.Parameter(torch.empty(config.hidden_size)) if scaled else None

    def forward(self, tokens: Tensor, first: int | None = None, turns: Tensor | None = None) -> Tensor:
        """Return all tokens, or only the `first`; `turns` as in `Attention.project`."""
        mixed = self.dropout(
            run(self.attention, (self.norm1(tokens), first, turns), self.attention.recomputed)
        )
        mixed = mixed if self.scale1 is None else mixed * self.scale1
        tokens = tokens[..., :first, :] + self.drop_path(mixed)
        changed = self.mlp(self.norm2(tokens))
        changed = changed if self.scale2 is None else changed * self.scale2
        outputs: Tensor = tokens + self.drop_path(changed)
        return outputs


class AttentionPool(Attending):
    """One learned query attends to all tokens; then an MLP: `[B, N, D]` to `[B, D]`. Source: SigLIP's MAP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.qkv = Linear(width, 3 * width)  # rows: query, key, value
        self.out = Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(replace(config, dropout=0.0))

    def forward(self, tokens: Tensor) -> Tensor:
        probe = self.probe.expand(tokens.shape[0], -1, -1)
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        query, key, value = (
            torch.unflatten(F.linear(one, weight, bias), -1, (self.num_heads, -1)).transpose(-3, -2)
            for one, weight, bias in zip((probe, tokens, tokens), weights, biases, strict=True)
        )
        pooled = self.out(attend(query, key, value, kernel=self.kernel).transpose(-3, -2).flatten(-2))[:, 0]
        outputs: Tensor = pooled + self.mlp(self.norm(pooled))
        return outputs


class VisionTransformer(nn.Module):
    """Images to logits. Weights are undefined before `initialise` or `load_state_dict`: use `build.build`.

    `checkpoint_blocks` (one in so many, or "attention") trades memory for time in training, and changes no
    result. If only the class token is read, the last block computes no other, unless `every_token`. Paper:
    Section 3.1, Figure 1
    """

    class_token: nn.Parameter | None
    position_embedding: nn.Parameter | None
    head: nn.Linear | None
    compiled_parts: tuple[str, ...] = ("embed", "begin", "represent", "answer")  # see `compile_blocks`

    def __init__(self, config: ViTConfig, block: Callable[[ViTConfig, float], Block] = EncoderBlock) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.config = config
        self.every_token = False
        self._recomputed: Recomputed = 0
        self.patch_embedding = nn.Conv2d(
            config.map_channels, width, kernel_size=patch, stride=patch, bias=config.patch_bias
        )
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if config.has_class_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, width)) if config.registers else None
        tables = config.depth if config.position_at == "every_layer" else 1
        learned = config.position_embedding == "learned"
        positions = config.num_tokens - config.prefix_tokens + config.prefix_rows
        self.position_embedding = nn.Parameter(torch.empty(tables, positions, width)) if learned else None
        if config.position_embedding == "2d":
            rows, columns = config.grid
            self.position_rows = nn.Parameter(torch.empty(tables, rows, width // 2))
            self.position_columns = nn.Parameter(torch.empty(tables, columns, width // 2))
        self.dropout = nn.Dropout(config.dropout)
        last = max(1, config.depth - 1)
        self.blocks = nn.ModuleList(
            block(config, config.drop_path * index / last) for index in range(config.depth)
        )
        self.norm_pre = nn.LayerNorm(width, eps=config.norm_eps) if config.norm_pre else nn.Identity()
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.pool = AttentionPool(config) if config.classifier == "attention" else None
        self.pre_logits = (
            Head(config.pooled_size, config.representation_size) if config.representation_size else None
        )
        self.head = Head(config.feature_size, config.num_classes) if config.num_classes else None

    def embed(self, images: Tensor) -> Tensor:
        """Return patch embeddings `[B, rows * columns, D]`, row-major, of `[B, 3, H, W]` in [-1, 1]."""
        if images.device.type == "cuda":  # a convolution's weight gradient adds in any order there
            return self.as_product(images)
        patches: Tensor = self.patch_embedding(images)  # [B, D, rows, columns]
        return patches.flatten(2).transpose(1, 2)

    def as_product(self, images: Tensor) -> Tensor:
        """Return the patch embeddings by one matrix product, up to rounding those of the convolution."""
        layer, patch = self.patch_embedding, self.config.patch_size
        rows, columns = (length // patch for length in images.shape[-2:])
        cut = torch.unflatten(images[..., : rows * patch, : columns * patch], -1, (columns, patch))
        pixels = torch.unflatten(cut, 2, (rows, patch)).permute(
            0, 2, 4, 1, 3, 5
        )  # [B, rows, columns, C, P, P]
        # pixels: [B, rows, columns, C, P, P]
        return F.linear(pixels.flatten(3).flatten(1, 2), layer.weight.flatten(1), layer.bias)

    def positions(self) -> Tensor | None:
        """Return the tables added to the tokens, `[1, N, D]` or one per layer, or None.

        Tokens without a position have rows of zeros.
        """
        config = self.config
        if config.position_embedding == "2d":
            return grid_table(self.position_rows, self.position_columns, config.prefix_tokens)
        if config.position_embedding == "sincos":
            fixed = sincos_table(config.grid, config.hidden_size, self.norm.weight.device)
            return F.pad(fixed[None], (0, 0, config.prefix_tokens, 0)).to(self.norm.weight.dtype)
        table, rows = self.position_embedding, config.prefix_rows
        if table is None or rows == config.prefix_tokens:
            return table
        none = table.new_zeros(len(table), config.prefix_tokens - rows, config.hidden_size)
        return torch.cat([table[:, :rows], none, table[:, rows:]], dim=1)

    def turns(self) -> Tensor | None:
        """Return the rotations of queries and keys in this pass, `[2, N, Dh]`, see `rotary_turns`."""
        config, scale = self.config, None
        if config.rotary == "none":
            return None
        if self.training and config.rotary_rescale > 1:  # one number for all images, as in the authors' code
            drawn = 2 * torch.rand((), dtype=torch.float64, device=self.norm.weight.device) - 1
            scale = torch.exp(drawn * math.log(config.rotary_rescale))
        return rotary_turns(config, self.norm.weight, scale)

    def encode(self, patches: Tensor, first: int | None = None) -> Tensor:
        """Return the normalised output `[B, N, D]`, class token first, for `[B, rows * columns, D]` patches.

        With `token_blocks`, the class tokens of `token_blocks - 1` earlier blocks precede it. With `first`
        the last block outputs only so many tokens.
        """
        encoded = self.tokens(patches, first)
        return self.norm(encoded) if self.config.norm_at == "tokens" else encoded

    def begin(self, patches: Tensor, positions: Tensor | None) -> Tensor:
        """Return the input of the first block, `[B, N, D]`: with prefix tokens and positions."""
        tokens = patches
        prefix = [one for one in (self.class_token, self.registers) if one is not None]
        if prefix:
            tokens = torch.cat([*(one.expand(patches.shape[0], -1, -1) for one in prefix), patches], dim=1)
        if positions is not None:
            tokens = tokens + (positions if len(positions) == 1 else positions[:1])
        # Under autocast the patches arrive in bf16; the residual stream has the precision of the weights.
        begun: Tensor = self.norm_pre(self.dropout(tokens.to(self.norm.weight.dtype)))
        return begun

    def tokens(self, patches: Tensor, first: int | None = None) -> Tensor:
        """Return the output of the last block, see `encode`."""
        positions, turns = self.positions(), self.turns()
        tokens = self.begin(patches, positions)
        earlier: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            if index and positions is not None and self.config.position_at != "stem":
                tokens = tokens + positions[index % len(positions)]
            only = None if index + 1 < len(self.blocks) else first
            more = (only, turns) if turns is not None else () if only is None else (only,)
            tokens = run(block, (tokens, *more), is_checkpointed(index, self.checkpoint_blocks))
            if 0 < len(self.blocks) - 1 - index < self.config.token_blocks:
                earlier.append(tokens[:, :1])
        return torch.cat([*earlier, tokens], dim=1) if earlier else tokens

    @property
    def checkpoint_blocks(self) -> Recomputed:
        return self._recomputed

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, recomputed: Recomputed) -> None:
        self._recomputed = recomputed
        for module in self.blocks.modules():
            if isinstance(module, Attention):
                module.recomputed = recomputed == "attention"

    def features(self, images: Tensor) -> Tensor:
        """Return the representation `[B, R]` that feeds the head, of `images` `[B, 3, H, W]` in [-1, 1]."""
        reads_one = skips_unused_tokens(self.config) and not self.every_token
        return self.represent(self.tokens(self.embed(images), 1 if reads_one else None))

    def represent(self, tokens: Tensor) -> Tensor:
        """Return the representation `[B, R]` of the last block's tokens."""
        encoded = self.norm(tokens) if self.config.norm_at == "tokens" else tokens
        pooled = self.pooled(encoded)
        pooled = self.norm(pooled) if self.config.norm_at == "pooled" else pooled
        return pooled if self.pre_logits is None else torch.tanh(self.pre_logits(pooled))

    def pooled(self, encoded: Tensor) -> Tensor:
        """Return one vector per image, `[B, pooled_size]`, from the output of `encode`."""
        joined = self.config.token_blocks
        token = (encoded if encoded.shape[1] == joined else encoded[:, :joined]).flatten(1)
        if self.config.classifier == "token":
            return token
        if self.pool is not None:
            return cast(Tensor, self.pool(encoded))
        mean = encoded[:, joined - 1 + self.config.prefix_tokens :].mean(dim=1)
        return torch.cat([token, mean], -1) if self.config.classifier == "token_patches" else mean

    def answer(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, K]` of the last block's tokens."""
        assert self.head is not None
        logits: Tensor = self.head(VisionTransformer.represent(self, tokens))  # one graph of both
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[B, K]` of `[B, 3, H, W]` in [-1, 1]; without a head, their representation."""
        if self.head is None:
            return self.features(images)
        if self.head._forward_pre_hooks:  # compiled code would not call what listens to the head
            logits: Tensor = self.head(self.features(images))
            return logits
        reads_one = skips_unused_tokens(self.config) and not self.every_token
        return self.answer(self.tokens(self.embed(images), 1 if reads_one else None))


class HybridTransformer(VisionTransformer):
    """A `VisionTransformer` on the feature map of a headless ResNet V1. Paper: Sections 3.1 and 4.1"""

    compiled_parts = ("begin", "represent", "answer")  # the backbone has blocks of its own

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.backbone = backbone_v1(config)

    def embed(self, images: Tensor) -> Tensor:
        return super().embed(self.backbone(images, self.checkpoint_blocks))


@torch.no_grad()
def initialise(model: VisionTransformer, generator: Generator) -> None:
    """Draw every weight of `model` in place, as the authors' code does, a hybrid's backbone first.

    With the same seed every dtype, device and processor receives the same float32 draws, rounded.
    Source: google-research/vision_transformer, models_vit.py
    """
    if isinstance(model, HybridTransformer):
        initialise_backbone(model.backbone, generator)
    draw(model.patch_embedding.weight, lecun_normal, generator)
    zero(model.patch_embedding.bias, model.class_token)
    if model.registers is not None:
        draw(model.registers, normal, generator, std=0.02)
    if model.position_embedding is not None:
        draw(model.position_embedding, normal, generator, std=0.02)
    if model.config.position_embedding == "2d":
        for table in (model.position_rows, model.position_columns):
            draw(table, normal, generator, std=0.02)
    for block in model.blocks.modules():
        if isinstance(block, EncoderBlock):
            _initialise_block(block, generator, model.config.layer_scale)
    plain_norm(*(one for one in (model.norm_pre, model.norm) if isinstance(one, nn.LayerNorm)))
    if model.pool is not None:
        for weight in (model.pool.probe[0], *model.pool.qkv.weight.chunk(3), model.pool.out.weight):
            draw(weight, xavier_uniform, generator)
        zero(model.pool.qkv.bias, model.pool.out.bias)
        plain_norm(model.pool.norm)
        _initialise_mlp(model.pool.mlp, generator)
    if model.pre_logits is not None:
        draw(model.pre_logits.weight, lecun_normal, generator)
        zero(model.pre_logits.bias)
    if model.head is not None:
        zero(model.head.weight)
        model.head.bias.fill_(model.config.head_bias)


def _initialise_block(block: EncoderBlock, generator: Generator, layer_scale: float) -> None:
    attention = block.attention
    # Query, key and value are fused in one matrix, but drawn separately, each with its own fan-out.
    for weight in (*attention.qkv.weight.chunk(3), attention.out.weight):
        draw(weight, xavier_uniform, generator)
    zero(attention.qkv.bias, attention.out.bias, attention.relative_bias)
    if isinstance(attention.qkv, QKV):
        zero(attention.qkv.query_bias, attention.qkv.value_bias)
    if attention.relative_position is not None:
        draw(attention.relative_position, normal, generator, std=0.02)
    _initialise_mlp(block.mlp, generator)
    plain_norm(block.norm1, block.norm2)
    for scale in (block.scale1, block.scale2):
        if scale is not None:
            scale.fill_(float(np.float32(layer_scale)))


def _initialise_mlp(mlp: MLP, generator: Generator) -> None:
    # Gate and hidden are fused in the same way as query, key and value.
    fused = mlp.fc1.out_features // mlp.fc2.in_features
    weights = *mlp.fc1.weight.chunk(fused), mlp.fc2.weight
    biases = *mlp.fc1.bias.chunk(fused), mlp.fc2.bias
    for weight, bias in zip(weights, biases, strict=True):
        draw(weight, xavier_uniform, generator)
        draw(bias, normal, generator, std=1e-6)
    if isinstance(mlp.norm, nn.LayerNorm):
        plain_norm(mlp.norm)
