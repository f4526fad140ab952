"""What axial attention may see; the forward passes are compared in test_families.py."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.models.tiny_models import TINY
from vitctl.errors import RecipeError
from vitctl.models.axial import AxialAttention, AxialBlock
from vitctl.models.build import Model, build
from vitctl.models.variants import AxialConfig, AxialResNetConfig, variant

MakeModel = Callable[..., Model]


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(1, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("half", "seen"), [("row", {4, 5, 6, 7}), ("column", {1, 5, 9, 13}), ("", set(range(16)))]
)
def test_axial_block__a_token_sees_its_row_then_its_column(
    random_model: MakeModel, tokens: Tensor, half: str, seen: set[int]
) -> None:
    block = random_model(TINY["axial"]).blocks[0]
    assert isinstance(block, AxialBlock)
    if half:  # the other half passes on what it gets
        other = block.column if half == "row" else block.row
        for weight in (
            other.attention.out.weight,
            other.attention.out.bias,
            other.mlp.fc2.weight,
            other.mlp.fc2.bias,
        ):
            weight.data.zero_()
    tokens.requires_grad_()
    block(tokens)[0, 5].sum().backward()
    assert tokens.grad is not None
    assert set(tokens.grad[0].abs().sum(dim=-1).nonzero().flatten().tolist()) == seen


def test_axial_block__drops_paths_for_whole_images() -> None:
    model = build(replace(TINY["axial"], drop_path=0.5, depth=2)).train()
    block = model.blocks[1]
    torch.manual_seed(0)
    tokens = torch.randn(1, 16, 24).expand(64, -1, -1)
    outcomes = block(tokens).detach().flatten(1).unique(dim=0)
    assert 4 < len(outcomes) <= 2**4  # four branches, each kept or not for an image as a whole


def test_axial_attention__knows_places_by_their_distance_alone(random_model: MakeModel) -> None:
    """A sequence turned around, with the table of offsets turned around, gives the output turned around."""
    module = random_model(TINY["axial resnet"]).backbone.stages[0][0].row
    assert isinstance(module, AxialAttention)
    sequences = torch.randn(2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = module(sequences).flip(-1)
    plain = module(sequences.flip(-1))
    with torch.no_grad():
        module.relative_position.copy_(module.relative_position.flip(0))
    assert (module(sequences.flip(-1)) - expected).abs().max() < 1e-12
    assert (plain - expected).abs().max() > 1e-3


def test_axial_variants__are_those_of_the_paper() -> None:
    config = variant("Axial-B/32")
    assert isinstance(config, AxialConfig)
    assert (config.depth, config.hidden_size, config.grid, config.classifier) == (12, 768, (7, 7), "gap")
    assert config == variant("Axial-ViT-B/32")
    resnet = variant("AxialR50")
    assert isinstance(resnet, AxialResNetConfig)
    assert (resnet.stage_depths, resnet.width, resnet.num_heads) == ((3, 4, 6, 3), 64, 8)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        (
            "Axial-B/32",
            {"classifier": "token"},
            "model: an axial model has no class token: classifier must be gap",
        ),
        ("Axial-B/32", {"position_embedding": "relative"}, "no relative positions"),
        ("AxialR50", {"version": "v2"}, "model: an axial ResNet is v1, not v2"),
        ("AxialR50", {"num_heads": 5}, "model: width 64 is not a multiple of twice num_heads 5"),
    ],
)
def test_axial_config__refuses_what_does_not_exist(name: str, wrong: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError) as error:
        variant(name, **wrong)
    assert words in str(error.value)
