"""Networks whose weights all matter, in files with their pre-processing, and photographs to show them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.tiny_models import TINY
from tests.trained import do
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.models.build import Model, build
from vitctl.models.weights.weights_file import save_weights

NAMES = tuple("abcde")
SIZES = ((40, 56), (75, 50), (64, 64), (33, 47))
NUM_IMAGES = 24
PREPROCESSING = {
    "mean": [0.5, 0.4, 0.6],
    "std": [0.5, 0.3, 0.4],
    "image_size": 32,
    "eval_method": "shorter_side",
    "eval_resize": 36,
    "resample": "bilinear_antialias",
    "class_names": list(NAMES),
}

Saved = Callable[..., Path]
Change = Callable[[Model], None]


def unchanged(model: Model) -> None:
    """Leave the weights as they are drawn."""


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 24 pictures of several sizes to score, and of 16 to calibrate on: smooth like photographs."""
    out = tmp_path_factory.mktemp("photos")
    for split, first, count in (("train", 1000, 16), ("test", 0, NUM_IMAGES)):
        items = [
            Item(f"{n}.png", n % 5, lambda n=n: encode_png(pixels(n))) for n in range(first, first + count)
        ]
        write_split(items, out / split, NAMES, seed=3, source_text="noise", max_samples=30)
    return out


def pixels(number: int) -> np.ndarray:
    """A picture, uint8 [H, W, 3]: coarse noise, and fine noise on it."""
    height, width = SIZES[number % 4]
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3)).repeat(8, axis=0).repeat(8, axis=1)
    return np.clip(coarse[:height, :width] + rng.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)


def normalised(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    """uint8 images [..., 3, S, S] as a network takes them, by hand."""
    mean, std = (torch.tensor(PREPROCESSING[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (torch.as_tensor(images).float() / 255 - mean) / std


def network(family: str, change: Change = unchanged) -> Model:
    """A tiny network of a family, in evaluation mode, whose answers differ between images."""
    model = build(replace(TINY[family], image_size=32), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        change(model)
    return model.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """saved("vit", **{"resample": "area"}) writes a network with its pre-processing, and gives the file."""

    def save(family: str = "vit", change: Change = unchanged, **preprocessing: Any) -> Path:
        model = network(family, change)
        path = tmp_path / "weights.safetensors"
        save_weights(path, model.state_dict(), model.config, PREPROCESSING | preprocessing)
        return path

    return save


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """exported(weights, "onnx", **{"export.features": True}) runs the job in tmp_path/run and gives its
    result.
    """

    def run(weights: Path, *to: str, folder: str = "run", **values: Any) -> dict[str, Any]:
        return do("export", tmp_path / folder, **{"weights.source": str(weights), "export.to": to, **values})

    return run
