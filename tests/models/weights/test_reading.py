"""Reading any format: our own beside the others, the name of the model, and where remote files come from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.configs import HybridConfig, ResNetConfig, ViTConfig
from vitctl.models.weights.load import Weights, read_weights, save_weights
from vitctl.models.weights.write import write_weights

Make = Callable[..., Weights]


def test_read__our_own_file_and_folder(
    plain: ViTConfig, make_weights: Make, meta: dict[str, Any], tmp_path: Path
) -> None:
    weights = make_weights(plain)
    written = write_weights(weights, tmp_path, "safetensors")
    assert written.files == (tmp_path / "model.safetensors",)
    for source in (tmp_path, str(tmp_path / "model.safetensors")):
        found = read_weights(source)
        assert (found.config, found.meta) == (plain, meta)
        assert all(torch.equal(found.state[name], tensor) for name, tensor in weights.state.items())
    assert (
        written.files[0].read_bytes()
        == save_weights(tmp_path / "again.safetensors", *_parts(weights)).read_bytes()
    )


def _parts(weights: Weights) -> tuple[Any, Any, Any]:
    return weights.state, weights.config, weights.meta


@pytest.mark.parametrize("to", ["google", "timm", "hf", "torchvision"])
def test_read__every_format_from_a_folder_without_a_word(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: Any
) -> None:
    config = replace(plain, gelu="tanh") if to == "google" else plain
    weights = make_weights(config)
    found = read_weights(write_weights(weights, tmp_path, to).files[0])
    assert found.meta["format"] == ("google-vit" if to == "google" else to)
    assert found.config == config
    assert found.has_head
    own = read_weights(save_weights(tmp_path / "own.safetensors", *_parts(found)))
    assert (own.config, own.meta, own.has_head) == (found.config, found.meta, True)


def test_read__a_folder_with_one_npz(plain: ViTConfig, make_weights: Make, tmp_path: Path) -> None:
    write_weights(make_weights(replace(plain, gelu="tanh")), tmp_path, "google")
    with pytest.raises(
        CheckpointError, match=r"no such weights file; give a .safetensors file or a folder with"
    ):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("Ti/8", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3, image_size=16), ""),
        ("Ti/16", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3, image_size=16),
         "not a Ti/16, it has patch_size 8 instead of 16"),
        ("S/8", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3, image_size=16),
         "not a S/8, it has hidden_size 192 instead of 384, mlp_size 768 instead of 1536, num_heads 3 "
         "instead of 6"),
        ("R50x1", ResNetConfig(stage_depths=(1, 1), version="v2", num_classes=3),
         "not a R50x1, it has stage_depths (1, 1) instead of (3, 4, 6, 3)"),
        ("R+Ti/16", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3, image_size=16),
         "not a R+Ti/16, it has stage_depths none instead of (), width none instead of 64"),
        ("R+Ti/16", HybridConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3, image_size=64,
         stage_depths=()), ""),
    ],
)  # fmt: skip
def test_read__the_name_must_fit(
    name: str, config: Any, words: str, make_weights: Make, tmp_path: Path
) -> None:
    path = write_weights(make_weights(config), tmp_path, "google").files[0]
    if not words:
        assert read_weights(path, model=name).config == config
        return
    with pytest.raises(CheckpointError) as error:
        read_weights(path, model=name)
    assert str(error.value) == f"{path}: {words}"


def test_read__the_name_tells_the_heads(make_weights: Make, tmp_path: Path) -> None:
    """A file of timm's does not tell them, and its folder may claim others."""
    config = ViTConfig(
        patch_size=8,
        hidden_size=192,
        depth=12,
        mlp_size=768,
        num_heads=4,
        image_size=16,
        num_classes=5,
        gelu="erf",
    )
    folder = write_weights(make_weights(config), tmp_path / "four", "timm").files[0]
    assert read_weights(folder).config == config
    assert read_weights(folder, model="Ti/8").config == replace(config, num_heads=3)
    with pytest.raises(RecipeError, match="unknown model 'Tiny/8'"):
        read_weights(folder, model="Tiny/8")


def test_write__unknown_format(plain: ViTConfig, make_weights: Make, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="unknown format 'onnx', known are safetensors, google, timm, hf, torchvision"
    ):
        write_weights(make_weights(plain), tmp_path / "x", "onnx")  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["google", "timm", "torchvision"])
def test_write__equal_weights_give_equal_files(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: Any
) -> None:
    config = replace(plain, gelu="tanh") if to == "google" else plain
    first, second = (write_weights(make_weights(config), tmp_path / name, to).files for name in ("a", "b"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


@pytest.mark.parametrize("to", ["google", "timm"])
def test_write__a_failure_leaves_the_old_file_and_nothing_else(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    config = replace(plain, gelu="tanh")
    old = {file: file.read_bytes() for file in write_weights(make_weights(config), tmp_path, to).files}

    def broken(_source: Path, _target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_weights(make_weights(config, seed=1), tmp_path, to)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == old
