"""What configurations refuse, and the sizes that follow from them. Names are tested in test_variants.py."""

from dataclasses import replace

import pytest

from tests.matrix import each
from tests.models.tiny_models import MASKED, TINY
from vitctl.errors import RecipeError
from vitctl.models.variants import ViTConfig, variant

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
        ("B/16", {"num_heads": 5}, "model: hidden_size 768 is not a multiple of num_heads 5"),
        ("B/16", {"image_size": 8}, "model: patch_size 16 is larger than image_size 8"),
        ("B/16", {"dropout": 1.0}, "model: dropout must lie in [0, 1), not 1.0"),
        ("B/16", {"dropout": float("nan")}, "model: dropout must be a finite number, not nan"),
        ("B/16", {"norm_eps": 0}, "model: norm_eps must be positive, not 0"),
        ("B/16", {"depth": 0}, "model: depth must be a whole number from 1 to 1,000, not 0"),
        ("B/16", {"depth": True}, "model: depth must be a whole number from 1 to 1,000, not True"),
        (
            "B/16",
            {"num_classes": -1},
            "model: num_classes must be a whole number from 0 to 16,777,216, not -1",
        ),
        ("B/16", {"patch_size": "16"}, "model: patch_size must be a whole number from 1 to 4,096, not '16'"),
        (
            "B/16",
            {"classifier": "map"},
            "model: classifier must be one of token, gap, patches, token_patches, attention, not 'map'",
        ),
        ("B/16", {"head_bias": "low"}, "model: head_bias must be a finite number, not 'low'"),
        (
            "B/16",
            {"gelu": "x", "depth": 1.5},
            "from 1 to 1,000, not 1.5; gelu must be one of tanh, erf, quick, not 'x'",
        ),
        (
            "Axial-B/32",
            {"classifier": "token"},
            "model: an axial model has no class token: classifier must be gap",
        ),
        ("Axial-B/32", {"position_embedding": "relative"}, "no relative positions"),
        ("AxialR50", {"version": "v2"}, "model: an axial ResNet is v1, not v2"),
        ("AxialR50", {"num_heads": 64}, "model: width 64 is not a multiple of twice num_heads 64"),
        ("mean_color", {"num_classes": 5}, "masked patch prediction has no classes"),
        (
            "mean_color",
            {"target": "hog"},
            "target must be one of mean_color, downsized, pixels, not 'hog'",
        ),
        ("mean_color", {"target": "downsized", "patch_size": 6}, "and patch_size 6 is not a multiple of 4"),
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
        replace({**TINY, **MASKED}.get(name) or variant(name), **wrong)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
