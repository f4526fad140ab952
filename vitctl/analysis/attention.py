"""Where the attentions of a network are, and their weights during a forward pass, which stays as it is.

The weights are computed a second time, beside the forward pass, from what each attention receives: the model,
its kernel and its output are the same with and without.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitctl.models.axial import AxialAttention, AxialBlock, AxialUnit
from vitctl.models.build import Model
from vitctl.models.configs import AxialResNetConfig, HybridConfig, ViTConfig, stages
from vitctl.models.kernels.attention import attention_weights
from vitctl.models.vit import Attention, EncoderBlock, VisionTransformer

_ROOT_STRIDE = 4  # of a ResNet's root


@dataclass(frozen=True)
class AttentionLayer:
    """One attention of a network.

    Args:
        depth: which block of the network it belongs to, from 1.
        along: `grid`, over all tokens; or within each `row` or `column` of the grid.
        grid: rows and columns of patches, or of the feature map.
        prefix_tokens: tokens before the patches: 1 with a class token.
        stride: pixels of the image between neighbours of the grid.
    """

    depth: int
    along: Literal["grid", "row", "column"]
    grid: tuple[int, int]
    prefix_tokens: int
    stride: int


Watch = Callable[[int, AttentionLayer, Tensor], None]


def attention_layers(model: Model) -> list[tuple[AttentionLayer, nn.Module]]:
    """The attentions of a network in the order in which they run; none for a ResNet.

    Args:
        model: of any family.

    Returns:
        where each is, and its module.
    """
    if isinstance(model, VisionTransformer):
        return _of_transformer(model)
    return _of_axial_resnet(model) if isinstance(model.config, AxialResNetConfig) else []


@contextmanager
def watch_attention(model: Model, seen: Watch) -> Iterator[None]:
    """Inside the block, every forward pass of `model` calls `seen(number of the layer, the layer, its
    weights)`.

    The weights are those of each query over the keys, `[B, H, N, N]` for `grid`, `[B, rows, H, columns,
    columns]` for `row`, `[B, columns, H, rows, rows]` for `column`, in float32 or wider, whatever autocast
    says. They are not kept: with a `seen` that does not keep them either, one layer's weights are in memory
    at a time.

    Args:
        model: of any family; its output and its gradients stay the same, bit by bit.
        seen: called in the order in which the layers run.

    Paper: Appendix A, equation 6
    """
    handles = [
        module.register_forward_pre_hook(partial(_tell, seen, number, layer))
        for number, (layer, module) in enumerate(attention_layers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pixels_per_patch(config: ViTConfig) -> int:
    """Pixels of the image between neighbouring patches; of a hybrid, the stride of its backbone times its
    patch size.
    """
    if not isinstance(config, HybridConfig):
        return config.patch_size
    halvings = max(0, len(config.stage_depths) - 1)
    return int(config.patch_size * _ROOT_STRIDE * 2**halvings)


@torch.no_grad()
def _tell(
    seen: Watch, number: int, layer: AttentionLayer, module: nn.Module, inputs: tuple[Any, ...]
) -> None:
    tokens: Tensor = inputs[0]
    with torch.autocast(tokens.device.type, enabled=False):
        seen(number, layer, _weights(module, tokens.to(next(module.parameters()).dtype), layer))


def _weights(module: nn.Module, tokens: Tensor, layer: AttentionLayer) -> Tensor:
    if isinstance(module, AxialAttention):  # its sequences are the rows, or the columns, of all images
        weights, _, _ = module.attention(tokens)
        return torch.unflatten(weights, 0, (-1, layer.grid[0]))
    assert isinstance(module, Attention)
    query, key, _ = module.project(tokens)
    return attention_weights(query, key, module.bias(query))


def _of_transformer(model: VisionTransformer) -> list[tuple[AttentionLayer, nn.Module]]:
    config, found = model.config, list[tuple[AttentionLayer, nn.Module]]()
    stride = pixels_per_patch(config)
    for depth, block in enumerate(model.blocks, 1):
        if isinstance(block, AxialBlock):
            found.append((AttentionLayer(depth, "row", config.grid, 0, stride), block.row.attention))
            found.append((AttentionLayer(depth, "column", config.grid, 0, stride), block.column.attention))
        else:
            assert isinstance(block, EncoderBlock)
            found.append(
                (AttentionLayer(depth, "grid", config.grid, config.prefix_tokens, stride), block.attention)
            )
    return found


def _of_axial_resnet(model: Model) -> list[tuple[AttentionLayer, nn.Module]]:
    assert isinstance(model.config, AxialResNetConfig)
    units = [module for module in model.modules() if isinstance(module, AxialUnit)]
    shapes = [shape for stage in stages(model.config) for shape in stage]
    found, stride = list[tuple[AttentionLayer, nn.Module]](), _ROOT_STRIDE
    for depth, (unit, shape) in enumerate(zip(units, shapes, strict=True), 1):
        grid = (shape.side, shape.side)
        found.append((AttentionLayer(depth, "row", grid, 0, stride), unit.row))
        found.append((AttentionLayer(depth, "column", grid, 0, stride), unit.column))
        stride *= shape.stride
    return found
