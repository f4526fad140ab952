import json
from dataclasses import replace

import pytest

from tests.matrix import each
from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.variants import (
    HYBRIDS,
    RESNETS,
    VARIANTS,
    AxialConfig,
    AxialResNetConfig,
    HybridConfig,
    MaskedPatchConfig,
    ResNetConfig,
    downstream,
    family,
    from_dict,
    names,
    to_dict,
    unseen_pixels,
    variant,
)

# Table 1, and AugReg's two small models: layers, width, MLP, heads.
SHAPES = {
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "b": (12, 384, 1536, 6),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "H": (32, 1280, 5120, 16),
}


def test_variants__hold_the_table_of_the_paper() -> None:
    assert set(VARIANTS) == set(SHAPES)
    for name, shape in SHAPES.items():
        config = variant(f"{name}/32")
        assert (config.depth, config.hidden_size, config.mlp_size, config.num_heads) == shape


def test_variants__b_is_base_halved() -> None:
    for field in ("hidden_size", "mlp_size", "num_heads"):
        assert VARIANTS["b"][field] * 2 == VARIANTS["B"][field]


@pytest.mark.parametrize("name", ["H/14", "ViT-H/14"])
def test_variant__reads_name_and_overrides(name: str) -> None:
    config = variant(name, image_size=518, num_classes=10)
    assert (config.patch_size, config.hidden_size, config.image_size, config.num_classes) == (
        14,
        1280,
        518,
        10,
    )
    assert variant(name) == variant(name, image_size=224, num_classes=1000)


def test_variant__takes_any_patch_and_is_case_sensitive() -> None:
    assert variant("B/56").grid == (4, 4)
    assert variant("b/32").hidden_size == 384
    assert variant("B/32").hidden_size == 768


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("B16", "did you mean 'B/16'?"),
        ("vit_b_16", "did you mean 'B/16'?"),
        ("l/16", "did you mean 'L/16'?"),
        ("B/0", "unknown model 'B/0'"),
        ("jft", "unknown model 'jft': a model is size/patch"),
        ("R50+B16", "did you mean 'R50+B/16'?"),
        ("r50x1", "did you mean 'R50x1'?"),
        ("AxialR152", "did you mean 'AxialR50'?"),
    ],
)
def test_variant__unknown_name_says_what_would_be_right(name: str, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        variant(name)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_variant__unknown_override_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"model B/16: unknown field 'drop_out' \(did you mean 'dropout'\?\)"
    ):
        variant("B/16", drop_out=0.1)


@pytest.mark.parametrize(
    ("size", "patch", "grid"),
    [(384, 16, 24), (384, 32, 12), (512, 16, 32), (518, 14, 37), (384, 14, 27), (224, 14, 16), (224, 16, 14)],
)
def test_config__grid_drops_the_remainder(size: int, patch: int, grid: int) -> None:
    config = variant(f"B/{patch}", image_size=size)
    assert config.grid == (grid, grid)
    assert config.num_tokens == grid * grid + 1
    assert replace(config, classifier="gap").num_tokens == grid * grid


@each(
    ("wrong", "words"),
    [
        ({"num_heads": 5}, "model: hidden_size 768 is not a multiple of num_heads 5"),
        ({"image_size": 8}, "model: patch_size 16 is larger than image_size 8"),
        ({"dropout": 1.0}, "model: dropout must lie in [0, 1), not 1.0"),
        ({"dropout": float("nan")}, "model: dropout must be a finite number, not nan"),
        ({"norm_eps": 0}, "model: norm_eps must be positive, not 0"),
        ({"depth": 0}, "model: depth must be a whole number from 1 to 1,000, not 0"),
        ({"depth": True}, "model: depth must be a whole number from 1 to 1,000, not True"),
        ({"num_classes": -1}, "model: num_classes must be a whole number from 0 to 16,777,216, not -1"),
        ({"patch_size": "16"}, "model: patch_size must be a whole number from 1 to 4,096, not '16'"),
        (
            {"classifier": "map"},
            "model: classifier must be one of token, gap, patches, token_patches, attention, not 'map'",
        ),
        ({"head_bias": "low"}, "model: head_bias must be a finite number, not 'low'"),
        (
            {"gelu": "x", "depth": 1.5},
            "from 1 to 1,000, not 1.5; gelu must be one of tanh, erf, quick, not 'x'",
        ),
    ],
)
def test_config__wrong_value_is_refused_in_one_line(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError) as error:
        variant("B/16", **wrong)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_to_dict__survives_json() -> None:
    config = variant(
        "S/32", classifier="gap", representation_size=7, dropout=0.1, head_bias=-10.0, gelu="erf"
    )
    stored = json.loads(json.dumps(to_dict(config)))
    assert stored["family"] == "vit"
    assert from_dict(stored) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "mixer"}, "stored model: unknown family 'mixer', known are vit, hybrid, axial"),
        ({"family": ["vit"]}, "stored model: unknown family"),
        ({"stride": 8, "alibi": 1}, "stored model: unknown keys alibi, stride"),
        ({"depth": "12"}, "stored model: depth must be a whole number from 1 to 1,000, not '12'"),
    ],
)
def test_from_dict__refuses_what_it_does_not_know(change: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        from_dict({**to_dict(variant("B/16")), **change})
    assert words in str(error.value)


def test_from_dict__missing_key_is_named() -> None:
    stored = to_dict(variant("B/16"))
    del stored["mlp_size"]
    with pytest.raises(CheckpointError, match="stored model: missing keys mlp_size"):
        from_dict(stored)


# Section 4.1: (3, 4, 6, 3) with the output of stage 4, or stage 4 moved into stage 3; paper.md 1.2 for
# AugReg's.
BACKBONES = {
    "R50+B/32": ((3, 4, 6, 3), "B/32", 7),
    "R50+B/16": ((3, 4, 9), "B/16", 14),
    "R50+L/32": ((3, 4, 6, 3), "L/32", 7),
    "R50+L/16": ((3, 4, 9), "L/16", 14),
    "R26+S/32": ((2, 2, 2, 2), "S/32", 7),
    "R26+B/32": ((2, 2, 2, 2), "B/32", 7),
    "R+Ti/16": ((), "Ti/16", 7),
}


def test_hybrids__are_a_backbone_and_a_named_transformer() -> None:
    assert set(HYBRIDS) == set(BACKBONES)
    for name, (stage_depths, plain, side) in BACKBONES.items():
        config = variant(name)
        assert isinstance(config, HybridConfig)
        assert config == variant(name.replace("+", "+ViT-"))
        assert (config.stage_depths, config.grid) == (stage_depths, (side, side))
        for field in VARIANTS["B"]:
            assert getattr(config, field) == getattr(variant(plain), field)


DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


def test_resnets__names_say_depth_and_width() -> None:
    assert set(RESNETS) == {
        "R50x1",
        "R50x2",
        "R50x3",
        "R101x1",
        "R101x3",
        "R152x1",
        "R152x2",
        "R152x4",
        "R200x3",
    }
    for name in RESNETS:
        depth, factor = map(int, name[1:].split("x"))
        config = variant(name)
        assert type(config) is ResNetConfig
        assert (config.stage_depths, config.width, config.version) == (DEPTHS[depth], 64 * factor, "v1")
        assert 3 * sum(config.stage_depths) + 2 == depth
    assert variant("R50x1", version="v2", width=16, num_groups=8).feature_size == 512


def test_names__are_all_known_and_each_survives_json() -> None:
    assert len(names()) == len(set(names())) == 5 * 4 + 1 + 7 + 9 + 3
    families = []
    for name in names():
        config = variant(name)
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
        families.append(family(config))
    assert set(families) == {"vit", "hybrid", "resnet", "axial", "axial_resnet"}
    masked = MaskedPatchConfig(**{**VARIANTS["B"], "patch_size": 16, "target": "pixels"})
    assert from_dict(json.loads(json.dumps(to_dict(masked)))) == masked
    assert family(variant("AxialR50")) == "axial_resnet"
    assert isinstance(variant("AxialR50"), AxialResNetConfig)
    assert isinstance(variant("Axial-S/14"), AxialConfig)


def test_downstream__changes_the_head_and_nothing_of_the_body() -> None:
    changes = {"num_classes": 37, "image_size": 384}
    for name in names():
        config = variant(name, num_classes=21843, head_bias=-10.0)
        assert downstream(config, **changes) == replace(config, **changes, head_bias=0.0)
    pretrained = variant("B/16", representation_size=768, dropout=0.1, drop_path=0.1, gelu="erf")
    assert downstream(pretrained, **changes) == variant("B/16", **changes, gelu="erf")
    kept = {"dropout": 0.1, "drop_path": 0.2}
    assert downstream(pretrained, **changes, **kept) == variant("B/16", **changes, **kept, gelu="erf")
    masked = MaskedPatchConfig(**{**VARIANTS["B"], "patch_size": 16})
    assert downstream(masked, **changes, dropout=0.1) == variant("B/16", **changes, dropout=0.1)
    with pytest.raises(RecipeError, match=r"model: a ResNet has no dropout; set dropout = 0 \(now 0\.1\)"):
        downstream(variant("R50x1"), **changes, dropout=0.1)
    with pytest.raises(RecipeError, match=r"model: a ResNet has no drop_path; set drop_path = 0"):
        downstream(variant("R50x1"), **changes, drop_path=0.2)


def test_from_dict__a_field_younger_than_the_file_has_its_default() -> None:
    stored = to_dict(variant("B/16"))
    del stored["position_at"], stored["drop_path"]
    assert from_dict(stored) == variant("B/16")


@pytest.mark.parametrize(
    ("model", "size", "unseen"),
    [("B/16", 224, 0), ("B/16", 384, 0), ("H/14", 224, 0), ("H/14", 384, 6), ("R50+B/16", 230, 0)],
)
def test_unseen_pixels__are_those_beyond_the_last_whole_patch(model: str, size: int, unseen: int) -> None:
    """The paper's H/14 at 384 has 27 x 27 patches: its VALID convolution drops six rows and columns."""
    warnings = unseen_pixels(variant(model, image_size=size))
    assert warnings == unseen_pixels(variant(model), size)
    assert len(warnings) == bool(unseen)
    if unseen:
        assert f"the last {unseen} rows and columns" in warnings[0]
