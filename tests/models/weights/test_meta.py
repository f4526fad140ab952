"""Weights that would score, export or train to nonsense are refused when they are read, in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.matrix import each
from tests.models.weights.conftest import refused
from vitctl.errors import CheckpointError
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig, to_dict
from vitctl.models.weights.meta import require_meta
from vitctl.models.weights.weights_file import Weights, read_weights, save_weights, write_weights

GOOD: dict[str, Any] = {
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "image_size": 16,
    "eval_method": "square",
    "eval_resize": 0,
    "resample": "bilinear",
}


@pytest.fixture
def config() -> ViTConfig:
    return ViTConfig(
        patch_size=8, hidden_size=64, depth=1, mlp_size=16, num_heads=1, image_size=16, num_classes=3
    )


def own(path: Path, config: ViTConfig, meta: dict[str, Any]) -> Path:
    """Our own file with any metadata, also such as our writer refuses."""
    header = {"format": "vitctl/1", "config": to_dict(config), "meta": meta}
    save_file(build(config, seed=0).state_dict(), path, {"vitctl": json.dumps(header)})
    return path


BAD = {
    "mean": [
        [1e300, 0, 0],
        [float("inf"), 0, 0],
        [float("nan"), 0, 0],
        [0.5],
        [0.5] * 4,
        "0.5",
        ["0.5"] * 3,
        [[0.5]] * 3,
    ],
    "std": [[0.5, 1e-46, 0.5], [1e300] * 3, [0.5, 0, 0.5], [0.5, -0.5, 0.5], [float("inf")] * 3, [0.5] * 2],
    "image_size": [0, -16, 10**9, 16.5, "16", True, [16]],
    "eval_method": ["", "stretch", 3],
    "eval_resize": [-1, 15, 10**9, "20"],
    "resample": [7, ["bilinear"]],
    "exif_orientation": ["yes", 1],
    "class_names": [["a", "b"], ["a", "b", "c", "d"], ["a", "b", 3], "abc", {"0": "a"}],
    "head": ["one", 0],
}


@each(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_read_weights__metadata_that_make_no_sense(
    tmp_path: Path, config: ViTConfig, name: str, value: Any
) -> None:
    with pytest.raises(
        CheckpointError,
        match=rf"(is not valid: |class names are stored).*{'' if name == 'class_names' else name}",
    ) as caught:
        read_weights(own(tmp_path / "model.safetensors", config, {**GOOD, name: value}))
    assert str(caught.value).startswith(f"{tmp_path / 'model.safetensors'}: ")
    assert "\n" not in str(caught.value)


def test_read_weights__good_metadata_are_as_they_were(tmp_path: Path, config: ViTConfig) -> None:
    more = {
        "class_names": ["a", "b", "c"],
        "exif_orientation": True,
        "of_ours": [1, {"a": None}],
        "head": "zero",
    }
    for meta in (
        {},
        GOOD,
        GOOD | more,
        {"mean": [0, 0, 0], "std": [1, 1, 1]},
        {"eval_resize": 16, "image_size": 16},
    ):
        assert read_weights(own(tmp_path / "model.safetensors", config, meta)).meta == meta


@pytest.mark.parametrize("to", ["timm", "hf"])
@pytest.mark.parametrize("broken", ["mean", "std"])
def test_read_weights__the_files_of_other_programs_too(
    tmp_path: Path, config: ViTConfig, to: Any, broken: str
) -> None:
    write_weights(Weights(config, build(config, seed=0).state_dict(), dict(GOOD)), tmp_path / to, to)
    assert read_weights(tmp_path / to).meta["mean"] == [0.5] * 3
    name = "config.json" if to == "timm" else "preprocessor_config.json"
    fields = json.loads((tmp_path / to / name).read_text())
    place = fields["pretrained_cfg"] if to == "timm" else fields
    place[broken if to == "timm" else f"image_{broken}"] = [0.5, 0.5, float("nan") if broken == "mean" else 0]
    (tmp_path / to / name).write_text(json.dumps(fields))
    expected = "NaN is not a JSON number" if broken == "mean" else r"std is \[0.5, 0.5, 0\], should be"
    refused(tmp_path / to, expected)


@each("value", [float("nan"), float("inf"), -float("inf")])
@each("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_read_weights__tensors_that_are_no_numbers(
    tmp_path: Path, config: ViTConfig, value: float, dtype: torch.dtype
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in build(config, seed=0).state_dict().items()}
    path = save_weights(tmp_path / "model.safetensors", state, config, GOOD)
    assert read_weights(path).config == config
    state["blocks.0.mlp.fc1.bias"][7] = value
    save_weights(path, state, config, GOOD)
    refused(path, r"1 of \d+ tensors hold NaN or infinities \(blocks\.0\.mlp\.fc1\.bias\)")


def test_read_weights__numbers_that_are_infinite_in_float32(tmp_path: Path, config: ViTConfig) -> None:
    state = {name: tensor.double() for name, tensor in build(config, seed=0).state_dict().items()}
    state["head.weight"][0, 0] = 1e300
    path = save_weights(tmp_path / "model.safetensors", state, config, GOOD)
    refused(path, r"1 of \d+ tensors hold NaN or infinities \(head\.weight\)")


def test_require_meta__names_what_is_missing() -> None:
    require_meta(GOOD, ("mean", "std"))
    with pytest.raises(
        CheckpointError, match="mean, eval_method of the images is not stored with the weights"
    ):
        require_meta({"std": [1.0] * 3}, ("mean", "std", "eval_method"))
