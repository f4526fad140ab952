"""The network of an ONNX graph in fewer operations: constants are folded into weights."""

import copy
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from vitctl.export.graph import Raw
from vitctl.models.configs import MaskedPatchConfig
from vitctl.models.vit import Attention, EncoderBlock, VisionTransformer

M = TypeVar("M", bound=nn.Module)


class FoldedAttention(nn.Module):
    """`Attention` in plain products, for some of the tokens as queries: `[B, Q, D]` and all `[B, N, D]` to
    `[B, Q, D]`.

    Three products instead of one whose result has to be cut, with 1 / sqrt(Dh) in the weights of the query.
    The bias of the key adds the same number to all logits of a query, which softmax takes away again; that of
    the value passes through weights that sum to 1, into the bias of the output.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        width, self.num_heads = attention.out.in_features, attention.num_heads
        weights = attention.qkv.weight.detach().double().chunk(3)
        biases = attention.qkv.bias.detach().double().chunk(3)
        scale = (width // self.num_heads) ** -0.5
        out = attention.out.weight.detach()
        self.query = _linear(scale * weights[0], scale * biases[0])
        self.key = _linear(weights[1], None)
        self.value = _linear(weights[2], None)
        self.out = _linear(out, attention.out.bias.detach().double() + out.double() @ biases[2])

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        query, key, value = (
            self._heads(self.query(queries)),
            self._heads(self.key(tokens)),
            self._heads(self.value(tokens)),
        )
        mixed = (query @ key.transpose(-2, -1)).softmax(dim=-1) @ value  # [B, H, Q, Dh]
        outputs: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return outputs

    def _heads(self, tokens: Tensor) -> Tensor:
        return torch.unflatten(tokens, -1, (self.num_heads, -1)).transpose(-3, -2)


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


def folded(raw: Raw) -> Raw:
    """The same graph with `FoldedBlock`s.

    Args:
        raw: in evaluation mode; it stays as it is, and shares the weights that are not folded.
    """
    model = raw.model
    if not isinstance(model, VisionTransformer) or isinstance(model.config, MaskedPatchConfig):
        return raw
    blocks = [FoldedBlock(block) if _can_be_folded(block) else block for block in model.blocks]
    network = raw.network
    return _with(
        raw, "network", _with(network, "model", _with(model, "blocks", nn.ModuleList(blocks)))
    ).eval()


def _can_be_folded(block: nn.Module) -> TypeGuard[EncoderBlock]:
    """Relative positions add to the logits what depends on the query."""
    return type(block) is EncoderBlock and block.attention.relative_position is None


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(torch.float32), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(torch.float32), requires_grad=False)
    return layer


def _with(module: M, name: str, child: nn.Module) -> M:
    """The same module with another child; all else is shared."""
    own = copy.copy(module)
    own.__dict__["_modules"] = {**module._modules, name: child}
    return own
