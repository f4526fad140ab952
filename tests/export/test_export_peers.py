"""Files that `vitctl export` writes for other programs load there, strictly, and give the same logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vitctl.export.export import export
from vitctl.launch.prepare import prepare_run
from vitctl.models.build import build, load_state
from vitctl.models.variants import variant
from vitctl.models.weights.weights_file import read_weights, save_weights
from vitctl.recipe.load import Override, load_recipe

META = {
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "image_size": 32,
    "eval_method": "square",
    "eval_resize": 0,
    "resample": "bilinear",
}


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, nn.Module]:
    """Ti/16 at 32 pixels with 5 classes, weights that all matter, and the peer's GELU (the authors' is the
    tanh form).
    """
    gelu = "tanh" if "google" in request.node.name else "erf"
    config = variant("Ti/16", image_size=32, num_classes=5, gelu=gelu)
    made = build(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    path = tmp_path / "source.safetensors"
    save_weights(path, made.state_dict(), config, META | {"class_names": list("abcde")})
    return path, made.eval()


def exported(tmp_path: Path, source: Path, to: str, file: Path | None = None) -> Path:
    values = {"weights.source": str(source), "export.to": (to,), "export.file": str(file or "")}
    recipe = load_recipe("export", [Override(key, value) for key, value in values.items()])
    prepare_run(recipe, tmp_path / "run")
    result = export(recipe.recipe, tmp_path / "run")  # type: ignore[arg-type]
    assert result.metrics["max_difference"][to] <= 1e-6
    return Path(result.files[to])


@torch.inference_mode()
def assert_equal(model: nn.Module, peer: nn.Module) -> None:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    expected, got = model(images), peer.eval()(images)
    got = got.logits if hasattr(got, "logits") else got
    assert float(expected.std()) > 0.01
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=0, atol=1e-5 * float(expected.std()))


def test_timm__loads_what_was_exported_as_typed(model: tuple[Path, nn.Module], tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    path = exported(tmp_path, model[0], "timm", tmp_path / "Y.safetensors")
    assert path == tmp_path / "Y.safetensors"
    peer = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, checkpoint_path=str(path))
    assert_equal(model[1], peer)


def test_hugging_face__loads_what_was_exported(model: tuple[Path, nn.Module], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = exported(tmp_path, model[0], "hf").parent
    peer = transformers.ViTForImageClassification.from_pretrained(folder)
    assert peer.config.id2label[4] == "e"
    assert_equal(model[1], peer)


def test_torchvision__loads_what_was_exported(model: tuple[Path, nn.Module], tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torchvision.models import VisionTransformer

    path = exported(tmp_path, model[0], "torchvision")
    peer = VisionTransformer(32, 16, 12, 3, 192, 768, num_classes=5)
    peer.load_state_dict(load_file(path), strict=True)
    assert_equal(model[1], peer)


def test_google__npz_comes_back_bit_for_bit(model: tuple[Path, nn.Module], tmp_path: Path) -> None:
    weights = read_weights(exported(tmp_path, model[0], "google", tmp_path / "Y.npz"))
    again = build(weights.config)
    load_state(again, weights.state)
    for (name, ours), (_, theirs) in zip(
        model[1].state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(ours, theirs), name
