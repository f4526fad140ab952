"""The exported graph: a network with its images' value range, and an equivalent in fewer operations."""

import copy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform
from vitctl.engine.evaluation import flip_averaged
from vitctl.export.preprocess import Preprocess
from vitctl.models.build import Model
from vitctl.models.resnet import StdConv
from vitctl.models.variants import MaskedPatchConfig
from vitctl.models.vit import Attention, EncoderBlock, VisionTransformer

INPUT, LOGITS, FEATURES = "images", "logits", "features"
# Prefixes of layers and weights in a graph, longest first.
SCOPES = ("network.model", "network")
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class _Network(nn.Module):
    """Normalised images to logits [B, K], the representation [B, R], or both; without a head the latter."""

    def __init__(self, model: Model, features: bool, flip_average: bool, temperature: float) -> None:
        super().__init__()
        self.model, self.gives_features, self.flip_average = model, features, flip_average
        self.temperature = temperature

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.model.head is None:
            return self.model.features(images)
        if not self.gives_features:
            logits: Tensor = flip_averaged(self.model, images) if self.flip_average else self.model(images)
            return self._tempered(logits)
        features = self.model.features(images)
        if self.flip_average:
            return self._tempered(flip_averaged(self.model, images)), features
        return self._tempered(self.model.head(features)), features

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1 else logits / self.temperature


class Raw(nn.Module):
    """A model with its value range: uint8 images [B, 3, S, S] to logits [B, K], or without a head to [B, R].

    Args:
        model: in evaluation mode.
        meta: `mean` and `std` of the weights.
        transform: pre-processing inside the graph, which then takes photographs, uint8 [B, H, W, 3], of one
            size per batch.
        features: give the representation [B, R] as a second output.
        flip_average: the logits are the mean over an image and its mirror image, see `flip_averaged`; the
            representation is that of the image.
        temperature: divides the logits.
    """

    def __init__(
        self,
        model: Model,
        meta: dict[str, Any],
        transform: EvalTransform | None = None,
        *,
        features: bool = False,
        flip_average: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.network = _Network(model, features, flip_average, temperature)
        self.preprocess = None if transform is None else Preprocess(transform)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(meta["mean"]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(meta["std"]).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        pixels = images if self.preprocess is None else self.preprocess(images)
        outputs: Tensor | tuple[Tensor, Tensor] = self.network(
            (pixels.float() / 255.0 - self.mean) / self.std
        )
        return outputs

    @property
    def model(self) -> Model:
        return self.network.model

    @property
    def outputs(self) -> list[str]:
        has_head = self.model.head is not None
        return [LOGITS] * has_head + [FEATURES] * (self.network.gives_features or not has_head)

    @property
    def free_axes(self) -> tuple[str, ...]:
        """Names of the input's leading axes of free length."""
        return ("batch",) if self.preprocess is None else ("batch", "height", "width")

    def free_sizes(self) -> dict[int, torch.export.Dim]:
        return {axis: torch.export.Dim(name) for axis, name in enumerate(self.free_axes)}

    def example(self, batch: int, number: int = 0) -> Tensor:
        """Return noise to trace or verify the graph with.

        `number` is the seed and, if sizes are free, also selects the size of the photographs.
        """
        size = self.model.config.image_size
        shape = (batch, 3, size, size)
        if self.preprocess is not None:
            height, width = ((2 * size + 7, size + 11), (size, size), (size + 5, 3 * size))[number % 3]
            shape = (batch, height, width, 3)
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def traced(self) -> "Raw":
        """Return the same model for an exporter: what no image changes is computed once, not in every pass.

        These are standardised kernels, and tables of positions, which some converters lack the float64 for.
        """
        result = self
        if any(isinstance(module, StdConv) for module in self.modules()):
            result = copy.deepcopy(self)
            for module in result.modules():
                if isinstance(module, StdConv):
                    module.standardise_once()
        model = result.model
        if not isinstance(model, VisionTransformer):
            return result
        fixed = copy.copy(model)
        if (turns := model.turns()) is not None:
            fixed.__dict__["turns"] = partial(_same, turns)
        if model.config.position_embedding == "sincos":
            fixed.__dict__["positions"] = partial(_same, model.positions())
        return _with(result, "network", _with(result.network, "model", fixed))


def folded(raw: Raw) -> Raw:
    """Return the same graph with `FoldedBlock`s: constants are folded into weights; `raw` is unchanged."""
    model = raw.model
    if not isinstance(model, VisionTransformer) or isinstance(model.config, MaskedPatchConfig):
        return raw
    blocks = nn.ModuleList(
        # Positions inside the attention add terms to the logits that depend on the query: not foldable.
        FoldedBlock(block) if type(block) is EncoderBlock and _is_plain(block) else block
        for block in model.blocks
    )
    network = _with(raw.network, "model", _with(model, "blocks", blocks))
    return _with(raw, "network", network).eval()


def _is_plain(block: EncoderBlock) -> bool:
    """Return whether a block has nothing but the paper's layers, with all biases."""
    attention = block.attention
    more = (attention.relative_position, attention.relative_bias, block.scale1)
    return attention.qkv.bias is not None and attention.rotary == "none" and more == (None, None, None)


class FoldedBlock(nn.Module):
    """`EncoderBlock` in evaluation mode, `[B, N, D]` to the same, or to `[B, first, D]`."""

    def __init__(self, block: EncoderBlock) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = block.norm1, block.norm2, block.mlp
        self.attention = FoldedAttention(block.attention)

    def forward(self, tokens: Tensor, first: int | None = None) -> Tensor:
        normed = self.norm1(tokens)
        tokens = tokens[:, :first] + self.attention(normed[:, :first], normed)
        outputs: Tensor = tokens + self.mlp(self.norm2(tokens))
        return outputs


class FoldedAttention(nn.Module):
    """`Attention` in plain products: queries `[B, Q, D]` and all tokens `[B, N, D]` to `[B, Q, D]`.

    Three products replace one whose result has to be cut, with 1 / sqrt(Dh) in the query weights. The key
    bias adds the same number to all logits of a query, which softmax cancels. The value bias passes
    through weights that sum to 1, into the output bias.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        width, self.num_heads = attention.out.in_features, attention.num_heads
        query, key, value = attention.qkv.weight.detach().double().chunk(3)
        query_bias, _, value_bias = attention.qkv.bias.detach().double().chunk(3)
        scale = (width // self.num_heads) ** -0.5
        out = attention.out.weight.detach()
        self.query = _linear(scale * query, scale * query_bias)
        self.key = _linear(key, None)
        self.value = _linear(value, None)
        self.out = _linear(out, attention.out.bias.detach().double() + out.double() @ value_bias)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        query = self._heads(self.query(queries))
        key = self._heads(self.key(tokens))
        value = self._heads(self.value(tokens))
        mixed = (query @ key.transpose(-2, -1)).softmax(dim=-1) @ value  # [B, H, Q, Dh]
        outputs: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return outputs

    def _heads(self, tokens: Tensor) -> Tensor:
        return torch.unflatten(tokens, -1, (self.num_heads, -1)).transpose(-3, -2)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(torch.float32), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(torch.float32), requires_grad=False)
    return layer


def _same(value: T) -> T:
    return value


def _with(module: M, name: str, child: nn.Module) -> M:
    result = copy.copy(module)
    result.__dict__["_modules"] = {**module._modules, name: child}
    return result
