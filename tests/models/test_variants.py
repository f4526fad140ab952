import json
from dataclasses import replace

import pytest

from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.variants import (
    VARIANTS,
    AxialConfig,
    AxialResNetConfig,
    MaskedPatchConfig,
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
    ("change", "words"),
    [
        ({"family": "mixer"}, "stored model: unknown family 'mixer', known are vit, hybrid, axial"),
        ({"family": ["vit"]}, "stored model: unknown family"),
        ({"stride": 8, "alibi": 1}, "stored model: unknown keys alibi, stride"),
        ({"mlp_size": None}, "stored model: missing keys mlp_size"),
        ({"depth": "12"}, "stored model: depth must be a whole number from 1 to 1,000, not '12'"),
    ],
)
def test_from_dict__refuses_what_it_does_not_know(change: dict[str, object], words: str) -> None:
    stored = to_dict(variant("B/16")) | change
    with pytest.raises(CheckpointError) as error:
        from_dict({name: value for name, value in stored.items() if value is not None})
    assert words in str(error.value)


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
