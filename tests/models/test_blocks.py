from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.tiny_models import TINY
from vitctl.models.blocks import Block, compile_blocks
from vitctl.models.build import build

# Torch hides this warning of its own tracing, but not from filters that make warnings errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.parametrize(
    ("name", "change", "blocks", "graphs"),
    [
        ("vit", {"depth": 12}, 12, 1),
        # The first block drops nothing; all other rates share a graph.
        ("vit", {"depth": 12, "drop_path": 0.3}, 12, 2),
        ("axial", {"depth": 6}, 6, 1),
        # One for each shape of unit, and one for the Transformer.
        ("hybrid", {"stage_depths": (3, 2)}, 5 + 2, 4 + 1),
        ("resnet v1", {"stage_depths": (3, 4)}, 7, 4),
    ],
)
def test_compile_blocks__equal_blocks_share_a_graph(
    name: str, change: dict[str, Any], blocks: int, graphs: int
) -> None:
    torch.compiler.reset()
    config = replace(TINY[name], **change)
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    plain, model = build(config), build(config)
    assert compile_blocks(model, backend) == blocks
    images = torch.randn(2, 3, 32, 32)
    model(images)
    assert len(compiled) == graphs
    assert torch.equal(model.eval()(images), plain.eval()(images))
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_compile_blocks__leaves_a_block_inside_a_block_to_the_outer_one() -> None:
    model = build(TINY["axial"])
    assert sum(isinstance(module, Block) for module in model.modules()) == 3 * 2
    assert compile_blocks(model, "eager") == 2
