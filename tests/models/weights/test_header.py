"""The network of a weights file from its header, with no number read."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.weights.conftest import hollow
from vitctl.errors import CheckpointError
from vitctl.models.variants import HybridConfig, ViTConfig
from vitctl.models.weights import containers
from vitctl.models.weights.download import locate
from vitctl.models.weights.header import own_header
from vitctl.models.weights.network import read_network
from vitctl.models.weights.weights_file import Weights, read_weights, save_weights, write_weights

Make = Callable[..., Weights]


@pytest.mark.parametrize("to", ["safetensors", "google", "timm", "hf", "torchvision"])
def test_read_network__of_every_format_without_its_numbers(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(plain, gelu="tanh") if to == "google" else plain
    path = locate(write_weights(make_weights(config), tmp_path, to).files[0], lambda _: tmp_path)
    expected = read_weights(path).config
    if path.suffix == ".safetensors":
        hollow(path)
    monkeypatch.setattr(containers, "_read_npz", None)
    assert read_network(path)[0] == expected == config


HYBRID = HybridConfig(
    patch_size=1,
    hidden_size=64,
    depth=1,
    mlp_size=32,
    num_heads=1,
    stage_depths=(1, 1),
    width=32,
    image_size=64,
)


def test_read_network__of_a_torch_file_and_a_hybrid(
    plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    path = write_weights(make_weights(plain), tmp_path, "timm").files[0]
    torch.save({"state_dict": containers.read_tensors(path)}, tmp_path / "w.pth")
    for one in (tmp_path / "w.pth", write_weights(make_weights(HYBRID), tmp_path / "of", "google").files[0]):
        assert read_network(one)[0] == read_weights(one).config


@pytest.mark.parametrize("change", [-1, 1])
def test_read_network__of_a_file_of_another_size(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, change: int
) -> None:
    weights = make_weights(plain)
    path = save_weights(tmp_path / "own.safetensors", weights.state, weights.config, weights.meta)
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CheckpointError, match=r"damaged or truncated safetensors file .*copy it again"):
        read_network(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8 + b"?}", b"<html>", b"\x08" + 7 * b"\0" + b"{nonsens"])
def test_read_network__of_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    if b"{" not in content:
        assert own_header(tmp_path / "x") is None
    with pytest.raises(CheckpointError):
        read_network(tmp_path / "x")
