"""The network of an ONNX graph in fewer operations computes the same, and leaves the network as it was."""

import copy

import pytest
import torch

from tests.matrix import slow
from vitctl.export.graph import FoldedBlock, Raw, folded
from vitctl.models.build import Model, build
from vitctl.models.variants import variant

META = {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.6, 0.7]}
SMALL = {"image_size": 32, "num_classes": 5, "depth": 3, "hidden_size": 96, "mlp_size": 192, "num_heads": 3}


def network(**values: object) -> Model:
    """Every weight is random, zeros and ones too."""
    model = build(variant("Ti/8", **SMALL | values)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    ("values", "num_folded"),
    [
        ({}, 3),
        ({"position_at": "every_layer"}, 3),
        ({"position_embedding": "2d"}, 3),
        ({"representation_size": 7}, 3),
        ({"classifier": "gap"}, 3),
        ({"position_embedding": "relative"}, 0),
    ],
)
def test_folded__computes_the_same(values: dict[str, object], num_folded: int) -> None:
    model = network(**values)
    raw = Raw(model, META, features=True).eval()
    before = copy.deepcopy(model.state_dict())
    found = folded(raw)
    images = raw.example(3)
    with torch.inference_mode():
        for own, other in zip(found(images), raw(images), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-5 * float(other.std()))
    assert sum(isinstance(block, FoldedBlock) for block in found.model.blocks) == num_folded
    assert not any(module.training for module in found.modules())
    assert raw.model is model and all(
        torch.equal(before[name], own) for name, own in model.state_dict().items()
    )


def test_folded__shares_the_weights_that_it_does_not_fold() -> None:
    raw = Raw(network(), META).eval()
    found = folded(raw)
    assert found.model.blocks[0].mlp is raw.model.blocks[0].mlp
    assert found.model.patch_embedding is raw.model.patch_embedding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["R50x1", *slow("Axial-B/32")])
def test_folded__leaves_other_networks_alone(name: str) -> None:
    model = build(variant(name, image_size=64, num_classes=3)).eval()
    found = folded(Raw(model, META).eval())
    assert not any(isinstance(module, FoldedBlock) for module in found.modules())
