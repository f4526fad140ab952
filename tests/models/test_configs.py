"""What configurations refuse, and the sizes that follow from them. Names are tested in test_variants.py."""

from dataclasses import replace

import pytest

from tests.matrix import each
from tests.models.tiny_models import TINY
from vitctl.errors import RecipeError
from vitctl.models.variants import HybridConfig, ResNetConfig, ViTConfig, channels, sides, stages, variant

# Table 8: none and relative have one cell each.
CELLS = {("none", "stem"), ("relative", "stem")} | {
    (kind, at) for kind in ("learned", "2d") for at in ("stem", "every_layer", "every_layer_shared")
}


def test_config__has_the_eight_cells_of_table_8_and_no_other(tiny: ViTConfig) -> None:
    assert len(CELLS) == 8
    for kind in ("none", "learned", "2d", "relative"):
        for at in ("stem", "every_layer", "every_layer_shared"):
            if (kind, at) in CELLS:
                assert replace(tiny, position_embedding=kind, position_at=at)
                continue
            with pytest.raises(RecipeError) as error:
                replace(tiny, position_embedding=kind, position_at=at)
            words = f"model: position_embedding {kind!r} has no table to add in every layer: "
            words += "position_at must be stem"
            assert str(error.value) == words


@each(
    ("name", "wrong", "words"),
    [
        ("vit", {"position_embedding": "rotary"}, "2d, relative, relative_bias, sincos, not 'rotary'"),
        (
            "vit",
            {"position_at": "end"},
            "position_at must be one of stem, every_layer, every_layer_shared, not 'end'",
        ),
        ("2d", {"hidden_size": 27}, "position_embedding '2d' halves hidden_size, and 27 is odd"),
        ("vit", {"drop_path": 1.0}, "drop_path must lie in [0, 1), not 1.0"),
        ("hybrid", {"patch_size": 5}, "patch_size 5 is larger than the backbone's output, 4"),
        ("hybrid", {"width": 6}, "width 6 is not a multiple of num_groups 4"),
        ("hybrid", {"num_heads": 5}, "hidden_size 24 is not a multiple of num_heads 5"),
        ("resnet v1", {"stage_depths": ()}, "stage_depths must name at least one stage"),
        (
            "resnet v1",
            {"stage_depths": [1, 2]},
            "whole numbers of at least 1, such as (3, 4, 6, 3), not [1, 2]",
        ),
        ("resnet v1", {"stage_depths": (1, 0)}, "such as (3, 4, 6, 3), not (1, 0)"),
        ("resnet v1", {"stage_depths": (1,) * 9}, "stage_depths must be a few whole numbers"),
        ("resnet v1", {"version": "v3"}, "version must be one of v1, v2, not 'v3'"),
        ("resnet v1", {"num_groups": 0}, "num_groups must be a whole number from 1 to 8,192, not 0"),
    ],
)
def test_config__wrong_value_is_refused_in_one_line(name: str, wrong: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError) as error:
        replace(TINY[name], **wrong)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("image_size", "expected"),
    [(224, [56, 56, 28, 14, 7]), (384, [96, 96, 48, 24, 12]), (37, [10, 10, 5, 3, 2]), (1, [1, 1, 1, 1, 1])],
)
def test_sides__halve_and_round_up(image_size: int, expected: list[int]) -> None:
    assert sides(image_size, 4) == expected
    assert sides(image_size, 0) == expected[:1]


def test_stages__are_the_units_of_a_resnet50() -> None:
    config = variant("R50x1")
    assert isinstance(config, ResNetConfig)
    found = stages(config)
    assert [len(stage) for stage in found] == [3, 4, 6, 3]
    units = [unit for stage in found for unit in stage]
    assert [unit.side for unit in units] == 3 * [56] + [56] + 3 * [28] + [28] + 5 * [14] + [14] + 2 * [7]
    assert [unit.stride for unit in units] == 3 * [1] + [2, 1, 1, 1] + [2, 1, 1, 1, 1, 1] + [2, 1, 1]
    assert [unit.projected for unit in units] == [index in (0, 3, 7, 13) for index in range(16)]
    assert [units[0].inputs, *(unit.outputs for unit in units)][::4] == [64, 512, 1024, 1024, 2048]
    assert config.feature_size == channels(64, 4) == 2048


def test_hybrid__grid_is_that_of_the_feature_map() -> None:
    for image_size, side in ((224, 14), (384, 24), (225, 15)):
        config = variant("R50+B/16", image_size=image_size)
        assert isinstance(config, HybridConfig)
        assert (config.map_size, config.grid, config.map_channels) == (side, (side, side), 1024)
    root_alone = variant("R+Ti/16", image_size=384)
    assert isinstance(root_alone, HybridConfig)
    assert (root_alone.map_size, root_alone.grid, root_alone.map_channels) == (96, (12, 12), 64)
