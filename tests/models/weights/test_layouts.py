"""What is assumed about weights of each layout, and that no way through an export turns it into a record."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.weights.conftest import refused
from vitctl.models.variants import ViTConfig, variant
from vitctl.models.weights.meta import KEYS, OF_SCORING, assumed_line, assumed_values
from vitctl.models.weights.weights_file import LAYOUTS, Weights, read_weights, save_weights, write_weights

Make = Callable[..., Weights]
EVERYTHING = list(KEYS)


@pytest.fixture
def published(plain: ViTConfig) -> ViTConfig:
    """Of a published size, so that its heads are known."""
    return replace(plain, hidden_size=192, depth=12, mlp_size=96, num_heads=3)


@pytest.mark.parametrize(
    ("to", "kept", "assumed"),
    [
        ("timm", ("config.json",), []),
        ("timm", (), [name for name in EVERYTHING if name != "num_heads"]),
        ("hf", ("config.json", "preprocessor_config.json"), []),
        ("hf", ("config.json",), ["mean", "std", "eval_method", "eval_resize", "resample"]),
        ("hf", ("preprocessor_config.json",), ["gelu", "norm_eps"]),
        ("google", (), []),
        ("torchvision", (), []),
    ],
)
def test_read__lists_what_no_file_records(
    published: ViTConfig,
    make_weights: Make,
    tmp_path: Path,
    to: str,
    kept: tuple[str, ...],
    assumed: list[str],
) -> None:
    config = replace(published, gelu="tanh") if to == "google" else published
    written = write_weights(make_weights(config), tmp_path, to)
    for file in written.files[1:]:
        if file.name not in kept:
            file.unlink()
    assert read_weights(written.files[0]).meta.get("assumed", []) == assumed


def test_read__what_config_json_leaves_out_is_as_in_timm(
    published: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    file, config = write_weights(make_weights(published), tmp_path, "timm").files
    described = json.loads(config.read_text())
    del described["pretrained_cfg"]["std"], described["pretrained_cfg"]["crop_pct"]
    described["pretrained_cfg"]["crop_mode"] = "center"
    config.write_text(json.dumps(described))
    found = read_weights(file).meta
    assert "assumed" not in found
    assert (found["mean"], found["std"]) == ([0.1, 0.2, 0.3], [0.229, 0.224, 0.225])
    assert found["eval_resize"] == 36  # floor(32 / 0.875)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_read__a_bare_state_dict(published: ViTConfig, make_weights: Make, tmp_path: Path, name: str) -> None:
    weights = make_weights(published)
    file = write_weights(weights, tmp_path / "folder" / "w.safetensors", "timm").files[0]
    if name.endswith("pth"):
        torch.save(dict(_tensors(file)), file.with_name(name))
    found = read_weights(file.with_name(name))
    values = assumed_values(found.meta, found.config, scoring=True)
    assert values == {
        "weights.mean": [0.5, 0.5, 0.5],
        "weights.std": [0.5, 0.5, 0.5],
        "weights.gelu": "erf",
        "weights.norm_eps": 1e-6,
        "weights.position_resize": "bicubic_antialias",
        "weights.classifier": "token",
        "data.eval_method": "torchvision",
        "data.eval_resize": 35,
        "data.eval_resample": "bicubic_antialias",
    }
    line = assumed_line(values)
    assert "\n" not in line
    assert (
        "assumed, not recorded with the weights: --preprocess half (or imagenet, clip), weights.gelu=" in line
    )
    assert all(key in line for key in values if key not in ("weights.mean", "weights.std"))
    assert "weights.mean=" in assumed_line(values | {"weights.mean": [0.5, 0.5, 0.4]})
    assert (
        not {KEYS[name] for name in OF_SCORING}
        & assumed_values(found.meta, found.config, scoring=False).keys()
    )


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def test_read__heads_of_an_unpublished_size_are_assumed_unless_given(
    plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    file = write_weights(make_weights(plain), tmp_path / "w.safetensors", "timm").files[0]
    found = read_weights(file)
    assert "num_heads" in found.meta["assumed"]
    own = save_weights(tmp_path / "ours.safetensors", found.state, found.config, found.meta)
    assert read_weights(own).meta["assumed"] == found.meta["assumed"]
    assert assumed_values(found.meta, found.config, scoring=False)["num_heads"] == 2
    assert "num_heads" not in read_weights(file, num_heads=2).meta["assumed"]


def test_read__refuses_a_mark_that_is_none(plain: ViTConfig, make_weights: Make, tmp_path: Path) -> None:
    weights = make_weights(plain)
    file = save_weights(
        tmp_path / "w.safetensors", weights.state, plain, {**weights.meta, "assumed": ["colour"]}
    )
    refused(file, "assumed")


def test_read__marks_of_an_export_that_make_no_sense_are_no_marks(
    published: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    file, config = write_weights(make_weights(published), tmp_path, "timm").files
    described = json.loads(config.read_text())
    for mark in (["colour", 3, None], "mean"):
        config.write_text(json.dumps(described | {"vitctl": {"preprocessing": {"assumed": mark}}}))
        assert "assumed" not in read_weights(file).meta
    config.write_text(json.dumps(described | {"vitctl": {"preprocessing": {"assumed": ["mean"]}}}))
    assert read_weights(file).meta["assumed"] == ["mean"]


def test_no_layout_of_another_program_holds_joined_blocks() -> None:
    config = replace(variant("Ti/16", image_size=32, num_classes=5), token_blocks=3)
    for row in LAYOUTS:
        assert any("token_blocks" in text or "no place" in text for text in row.misfits(config)), row
