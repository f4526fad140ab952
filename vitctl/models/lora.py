"""Low-rank adaptation: frozen linear layers plus trained products of two small matrices.

Source: Hu et al. 2021, LoRA, Section 4.1
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.models.blocks import Values, draw, zero
from vitctl.models.kernels import Linear
from vitctl.models.variants import LORA_TARGETS

ADAPTERS = "adapters"
_CLASSES: dict[str, type] = {}
Factors = Mapping[str, tuple[Tensor, Tensor]]  # by target: A [rank, in], B [out, rank]


class Adapter(nn.Module):
    """scale * B A dropout(x), `[..., in]` to `[..., out]`."""

    def __init__(self, inputs: int, outputs: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.empty(outputs, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(F.linear(self.dropout(inputs), self.a), self.b)


class Adapted(Linear):
    """A frozen linear layer with adapters for the parts stacked along its rows, by target.

    In training they are computed separately; in evaluation they are merged, as in files.
    """

    adapters: nn.ModuleDict
    scale: float

    @classmethod
    def made_of(cls, layer: Linear, adapters: Mapping[str, Adapter], scale: float) -> None:
        """Add adapters to a layer in place; its parameters, and references to it, stay valid."""
        layer.adapters = nn.ModuleDict(adapters)
        layer.scale = scale  # type: ignore[assignment]  # no tensor
        # One class for all layers of a kind: torch compiles a layer again for each class.
        name, plain = f"Adapted{type(layer).__name__}", type(layer)
        layer.__class__ = _CLASSES.setdefault(name, type(name, (cls, plain), {}))

    def multiplied(self) -> Tensor:
        weight = super().multiplied()
        pairs = {
            target: (adapter.a, adapter.b)
            for target, adapter in self.adapters.items()
            if isinstance(adapter, Adapter)
        }
        return weight if self.training else merged(weight, pairs, self.scale)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        if not self.training:
            return outputs
        parts = list(outputs.chunk(stacked(self.adapters), dim=-1))
        for target, adapter in self.adapters.items():
            part = LORA_TARGETS[target][1]
            parts[part] = parts[part] + self.scale * adapter(inputs)
        return torch.cat(parts, dim=-1)


def stacked(targets: Iterable[str]) -> int:
    """Return how many parts are stacked along the rows of the targets' layer."""
    layer = LORA_TARGETS[next(iter(targets))][0]
    return sum(where == layer for where, _ in LORA_TARGETS.values())


def merged(weight: Tensor, factors: Factors, scale: float) -> Tensor:
    """Return weight `[out, in]` + scale * B A, added in float64 and rounded once to the weight's type.

    `factors` are those of some parts of its rows; a negative scale removes them.
    """
    rows = list(weight.double().chunk(stacked(factors)))
    for name, (a, b) in factors.items():
        part = LORA_TARGETS[name][1]
        rows[part] = rows[part] + scale * (b.double() @ a.double())
    return torch.cat(rows).to(weight.dtype)


@torch.no_grad()
def adapt(
    model: nn.Module,
    targets: Sequence[str],
    blocks: Sequence[int],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    seed: int,
) -> None:
    """Freeze every weight of a Transformer except the head, and add adapters to layers of its blocks.

    A is drawn as torch draws a linear layer, uniform within 1 / sqrt(in), and B is 0, so outputs do not
    change. The draws of an adapter depend on seed, block and target alone.

    Args:
        targets: keys of `LORA_TARGETS`.
        blocks: numbers of blocks from 0; none: all.
        rank: columns of B, rows of A.
        alpha: scale times rank; 0: the rank.
        dropout: of the inputs of adapters, in training.

    Source: LoRA, Section 4.1
    """
    model.requires_grad_(False)
    model.get_submodule("head").requires_grad_(True)
    of_block = model.get_submodule("blocks")
    layers = dict.fromkeys(LORA_TARGETS[name][0] for name in targets)
    for number in blocks or range(len(list(of_block.children()))):
        block = of_block.get_submodule(str(number))
        for path in layers:
            layer = block.get_submodule(path)
            assert isinstance(layer, Linear)
            own = [name for name in LORA_TARGETS if name in targets and LORA_TARGETS[name][0] == path]
            rows = layer.out_features // stacked(own)
            adapters = {name: Adapter(layer.in_features, rows, rank, dropout) for name in own}
            for name, adapter in adapters.items():
                adapter.to(layer.weight.dtype)  # on the CPU, even if the weights are read later
                stream = seed, number, list(LORA_TARGETS).index(name)
                draw(adapter.a, _uniform, np.random.default_rng(stream))
                zero(adapter.b)
            Adapted.made_of(layer, adapters, (alpha or rank) / rank)


def _uniform(shape: Sequence[int], generator: np.random.Generator) -> Values:
    drawn = generator.random(tuple(shape), dtype=np.float32)
    drawn *= 2
    drawn -= 1
    drawn *= np.float32(math.sqrt(1 / shape[-1]))
    return drawn


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Return the layers that have adapters, by the names of their weights."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, Adapted))
    return {f"{name}.weight": module for name, module in found}


def stored(
    model: nn.Module,
    state: Mapping[str, Tensor],
    full: Callable[[Tensor], Tensor],
    like: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[tuple[bool, str, Tensor]]:
    """Yield (is of an adapter, name, tensor) of a state in stored form: adapters merged, and separately.

    `full` gathers a sharded tensor, `like` shards a full one.
    """
    layers, pairs = adapted_layers(model), factors_of(state)
    for name, tensor in state.items():
        stored = tensor
        if name in layers:
            gathered = {target: (full(a), full(b)) for target, (a, b) in pairs[name].items()}
            stored = like(merged(full(tensor), gathered, layers[name].scale), tensor)
        yield f".{ADAPTERS}." in name, name, stored


def factors_of(state: Mapping[str, Tensor]) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """Return the A and B in a state by the name of their layer's weight, then by target."""
    found: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, a in state.items():
        layer, _, rest = name.partition(f".{ADAPTERS}.")
        if rest.endswith(".a"):
            found.setdefault(f"{layer}.weight", {})[rest.removesuffix(".a")] = a, state[f"{name[:-1]}b"]
    return found
