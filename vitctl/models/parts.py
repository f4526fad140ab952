"""The parts of a network that are trained, and those that are frozen."""

from torch import nn

from vitctl.models.blocks import Block
from vitctl.models.places import num_blocks, place


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, in the order of the model."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def freeze(model: nn.Module, frozen: int) -> None:
    """Train no parameter up to this `place`; none is before 0."""
    depth = num_blocks([name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        if place(name, depth) <= frozen:
            parameter.requires_grad_(False)


def train_mode(model: nn.Module) -> None:
    """Put a network, wrapped or not, into training mode, but for the layers and blocks that are frozen.

    Where nothing is trained, dropout and stochastic depth would only add noise. A layer without parameters,
    as a dropout, follows the layer before it.
    """
    model.train()
    _quieten(model)


def _quieten(module: nn.Module) -> None:
    trains = True
    for child in module.children():
        own = [p.requires_grad for p in child.parameters()]
        trains = any(own) if own else trains
        if not trains:
            child.eval()
        elif not isinstance(child, Block):
            _quieten(child)
