"""The axial networks of Appendix D.6; their forward passes are compared in test_families.py."""

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.models.tiny_models import TINY
from vitctl.models.build import Model, build
from vitctl.models.variants import AxialConfig, AxialResNetConfig, variant

MakeModel = Callable[..., Model]


def test_axial_block__drops_paths_for_whole_images() -> None:
    model = build(replace(TINY["axial"], drop_path=0.5, depth=2)).train()
    block = model.blocks[1]
    torch.manual_seed(0)
    tokens = torch.randn(1, 16, 24).expand(64, -1, -1)
    outcomes = block(tokens).detach().flatten(1).unique(dim=0)
    assert 4 < len(outcomes) <= 2**4  # four branches, each kept or not for an image as a whole


def test_axial_variants__are_those_of_the_paper() -> None:
    config = variant("Axial-B/32")
    assert isinstance(config, AxialConfig)
    assert (config.depth, config.hidden_size, config.grid, config.classifier) == (12, 768, (7, 7), "gap")
    assert config == variant("Axial-ViT-B/32")
    resnet = variant("AxialR50")
    assert isinstance(resnet, AxialResNetConfig)
    assert (resnet.stage_depths, resnet.width, resnet.num_heads) == ((3, 4, 6, 3), 64, 8)
