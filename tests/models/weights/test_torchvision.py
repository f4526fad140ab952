"""torchvision itself reads what we write and computes the same, and we read what it writes."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.weights.conftest import assert_equal_logits
from vitctl.models.build import resize_position_embedding
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

Logits = Callable[[Weights, Tensor], Tensor]
Make = Callable[..., Weights]


def from_note(note: str) -> nn.Module:
    """The model that the first note names."""
    import torchvision

    return eval(note, {"torchvision": torchvision, "functools": functools, "torch": torch}).eval()


@pytest.mark.parametrize("change", [{}, {"representation_size": 24}, {"norm_eps": 1e-5}], ids=str)
def test_file__loads_strictly_with_equal_logits(
    plain: ViTConfig,
    make_weights: Make,
    logits_of: Logits,
    images: Tensor,
    tmp_path: Path,
    change: dict[str, Any],
) -> None:
    weights = make_weights(replace(plain, **change))
    written = write_weights(weights, tmp_path / "model.safetensors", "torchvision")
    model = from_note(written.notes[0])
    assert model.load_state_dict(load_file(written.files[0]), strict=True)
    assert_equal_logits(lambda pixels: model.to(pixels.dtype)(pixels), logits_of, weights, images)


@pytest.mark.parametrize(
    ("image_size", "eval_resize", "resample"), [(224, 256, "bilinear"), (384, 384, "bicubic")]
)
def test_read__their_presets(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, image_size: int, eval_resize: int, resample: str
) -> None:
    config = replace(plain, image_size=image_size, patch_size=32)
    weights = read_weights(write_weights(make_weights(config), tmp_path, "torchvision").files[0])
    assert weights.config == config
    assert weights.meta == {
        "format": "torchvision",
        "image_size": image_size,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "eval_method": "torchvision",
        "eval_resize": eval_resize,
        "resample": f"{resample}_antialias",
        "position_resize": "bicubic_aligned",
        # Two heads of 64 channels; at 224 pixels torchvision has three presets.
        "assumed": ["num_heads"] + (["eval_resize", "resample"] if image_size == 224 else []),
    }


def test_read__position_embeddings_resize_as_in_torchvision(
    plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    from torchvision.models.vision_transformer import interpolate_embeddings

    weights = read_weights(write_weights(make_weights(plain), tmp_path, "torchvision").files[0])
    table = weights.state["position_embedding"]
    for side in (3, 7, 9):
        found = resize_position_embedding(table, (4, 4), (side, side), 1, weights.meta["position_resize"])
        state = interpolate_embeddings(side * 8, 8, OrderedDict({"encoder.pos_embedding": table}))
        assert (found - state["encoder.pos_embedding"]).abs().max() < 1e-6


def test_read__the_oldest_files_name_the_mlp_otherwise(
    plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    weights = make_weights(plain)
    state = load_file(write_weights(weights, tmp_path, "torchvision").files[0])
    old = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t
        for name, t in state.items()
    }
    assert len(old.keys() - state.keys()) == 4 * plain.depth
    save_file(old, tmp_path / "old.safetensors")
    found = read_weights(tmp_path / "old.safetensors")
    assert all(torch.equal(found.state[name], tensor) for name, tensor in weights.state.items())
