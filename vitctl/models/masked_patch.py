"""Masked patch prediction: corrupted patches, the three targets, the loss, and the model that predicts them.

The paper does not specify the bins of colours, or whether the number of corrupted patches is fixed.
Here the bins are uniform over [-1, 1], after augmentation, and every image has the same number, so that a
loss averaged over micro-batches is the loss of the batch. Paper: Appendix B.1.2
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.models.blocks import Generator, draw, normal
from vitctl.models.kernels import Head
from vitctl.models.variants import MaskedPatchConfig
from vitctl.models.vit import VisionTransformer
from vitctl.models.vit import initialise as initialise_transformer

MASK = -1
_LEVELS = 8  # 3 bits for each channel
_OF_MASKED, _OF_REPLACED = 0.8, 0.1  # the remaining corrupted patches stay as they are


class Corruption(NamedTuple):
    """The corruption of patches, for one image `[N]` or a batch `[B, N]`.

    `corrupted` marks the patches to predict; `source` is the patch whose embedding replaces each, or MASK.
    """

    corrupted: Tensor
    source: Tensor


def draw_corruption(num_patches: int, rng: np.random.Generator, rate: float = 0.5) -> Corruption:
    """Corrupt round(`rate` * `num_patches`) patches of one image, at least 1, chosen and treated at random.

    Of these 80 % become the mask embedding, 10 % another patch of the image and 10 % stay, drawn
    independently. `num_patches` is at least 2. Paper: Appendix B.1.2
    """
    chosen = rng.permutation(num_patches)[: max(1, round(rate * num_patches))]
    fate = rng.random(len(chosen))
    other = (chosen + rng.integers(1, num_patches, len(chosen))) % num_patches
    source = np.arange(num_patches)
    source[chosen] = np.where(
        fate < _OF_MASKED, MASK, np.where(fate < _OF_MASKED + _OF_REPLACED, other, chosen)
    )
    corrupted = np.zeros(num_patches, dtype=bool)
    corrupted[chosen] = True
    return Corruption(torch.from_numpy(corrupted), torch.from_numpy(source))


def corrupt(patches: Tensor, source: Tensor, mask_embedding: Tensor) -> Tensor:
    """Return patch embeddings `[B, N, D]` replaced by those of `source` `[B, N]`, or by `mask_embedding`."""
    moved = patches.gather(1, source.clamp(min=0)[..., None].expand_as(patches))
    return torch.where((source == MASK)[..., None], mask_embedding.to(patches.dtype), moved)


def targets(images: Tensor, config: MaskedPatchConfig) -> Tensor:
    """Return what to predict for every patch of `images` `[B, 3, H, W]` in [-1, 1], by `config.target`.

    Returns:
        `mean_color`: classes 0 to 511, `[B, N, 1]`; `downsized`: those of a 4x4 version of the patch, row by
        row, `[B, N, 16]`; `pixels`: the pixels, `[B, N, 3 * patch_size**2]`, colours slowest.
    """
    (rows, columns), patch = config.grid, config.patch_size
    images = images[:, :, : rows * patch, : columns * patch]
    if config.target == "mean_color":
        return _color_class(F.avg_pool2d(images, patch)).flatten(1)[..., None]
    if config.target == "downsized":
        classes = _color_class(F.avg_pool2d(images, patch // 4))  # [B, 4 * rows, 4 * columns]
        by_patch = torch.unflatten(torch.unflatten(classes, 2, (columns, 4)), 1, (rows, 4)).transpose(2, 3)
        return by_patch.flatten(3).flatten(1, 2)
    return F.unfold(images, patch, stride=patch).transpose(1, 2)


def masked_patch_loss(
    predictions: Tensor,
    targets: Tensor,
    corrupted: Tensor,
    config: MaskedPatchConfig,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the loss of each image `[B]`, averaged over its corrupted patches, in float32 or wider; with
    `weights` `[B]` their weighted sum.

    Cross-entropy over 512 colours, averaged over the 16 of a downsized patch; or the mean squared error of
    the pixels. `predictions` are `[B, N, outputs]`, `targets` from `targets`; `corrupted` `[B, N]` is true
    where the loss counts, the same number in every image.
    """
    predictions = predictions if predictions.dtype == torch.float64 else predictions.float()
    if config.target == "pixels":
        each = (predictions - targets).square().mean(dim=-1)  # [B, N]
    else:
        logits = torch.unflatten(predictions, -1, (-1, _LEVELS**3)).movedim(-1, 1)  # [B, 512, N, places]
        each = F.cross_entropy(logits, targets, reduction="none").mean(dim=-1)
    each = (each * corrupted).sum(dim=1) / corrupted.sum(dim=1)
    return each if weights is None else (each * weights.to(each.dtype)).sum()


class MaskedPatchTransformer(VisionTransformer):
    """A `VisionTransformer` with a linear head on every patch, and an embedding for hidden patches.

    A class token sees everything and predicts nothing. Paper: Appendix B.1.2
    """

    compiled_parts = ("embed", "begin", "answer")

    def __init__(self, config: MaskedPatchConfig) -> None:
        super().__init__(config)
        self.mask_embedding = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.head = Head(config.hidden_size, config.patch_outputs)

    def forward(self, images: Tensor, source: Tensor | None = None) -> Tensor:
        """Return the predictions `[B, N, outputs]` for every patch of `images` `[B, 3, H, W]` in [-1, 1].

        `source` `[B, N]` is from a `Corruption`; without it no patch is corrupted.
        """
        patches = self.embed(images)
        if source is not None:
            patches = corrupt(patches, source, self.mask_embedding)
        return self.answer(self.tokens(patches))

    def answer(self, tokens: Tensor) -> Tensor:
        """Return the predictions of the last block's tokens."""
        assert self.head is not None
        encoded = self.norm(tokens) if self.config.norm_at == "tokens" else tokens
        predictions: Tensor = self.head(encoded[:, self.config.prefix_tokens :])
        return predictions


@torch.no_grad()
def initialise(model: MaskedPatchTransformer, generator: Generator) -> None:
    """Draw every weight of `model` in place, as `vit.initialise`; the mask embedding like positions."""
    initialise_transformer(model, generator)
    draw(model.mask_embedding, normal, generator, std=0.02)


def _color_class(colors: Tensor) -> Tensor:
    """Return red + 8 green + 64 blue of `colors` `[B, 3, h, w]` in [-1, 1], in 8 levels, as `[B, h, w]`."""
    levels = ((colors + 1) * (_LEVELS / 2)).long().clamp(0, _LEVELS - 1)
    return levels[:, 0] + _LEVELS * levels[:, 1] + _LEVELS**2 * levels[:, 2]
