"""timm itself reads what we write and computes the same, and we read what it writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.matrix import each
from tests.models.weights.conftest import assert_equal_logits, refused
from vitctl.errors import CheckpointError
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.layouts import known_heads
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

timm = pytest.importorskip("timm")
Logits = Callable[[Weights, Tensor], Tensor]
Make = Callable[..., Weights]

CHANGES: list[dict[str, Any]] = [
    {},
    {"gelu": "tanh"},
    {"num_classes": 0},
    {"classifier": "gap", "gelu": "tanh"},
    {"position_embedding": "none"},
    {"hidden_size": 192, "num_heads": 3, "mlp_size": 100},
]


def twin(config: ViTConfig, **more: Any) -> nn.Module:
    """timm's model of this configuration, told by hand."""
    return timm.models.VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=config.hidden_size,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_size / config.hidden_size + 1e-9,
        num_classes=config.num_classes,
        act_layer=partial(nn.GELU, approximate="tanh") if config.gelu == "tanh" else nn.GELU,
        **more,
    ).eval()


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_folder__is_one_that_timm_opens(
    plain: ViTConfig,
    make_weights: Make,
    logits_of: Logits,
    images: Tensor,
    tmp_path: Path,
    change: dict[str, Any],
) -> None:
    weights = make_weights(replace(plain, **change))
    written = write_weights(weights, tmp_path, "timm")
    assert written.files == (tmp_path / "model.safetensors", tmp_path / "config.json")
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert_equal_logits(lambda pixels: model.to(pixels.dtype)(pixels), logits_of, weights, images)


def test_read__old_files_have_pre_logits(plain: ViTConfig, make_weights: Make, tmp_path: Path) -> None:
    weights = make_weights(replace(plain, representation_size=128))
    with pytest.raises(CheckpointError, match="timm cannot hold this model: it has no pre-logits layer"):
        write_weights(weights, tmp_path, "timm")
    body = Weights(
        plain, {name: t for name, t in weights.state.items() if not name.startswith("pre_logits")}, {}
    )
    state = load_file(write_weights(body, tmp_path / "body.safetensors", "timm").files[0])
    state |= {f"pre_logits.fc.{kind}": weights.state[f"pre_logits.{kind}"] for kind in ("weight", "bias")}
    torch.save(
        {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "old.pth"
    )
    found = read_weights(tmp_path / "old.pth")
    assert found.config == weights.config
    assert all(torch.equal(found.state[name], tensor) for name, tensor in weights.state.items())


def write_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_read__preprocessing_as_timm_means_it(plain: ViTConfig, make_weights: Make, tmp_path: Path) -> None:
    from timm.data import resolve_model_data_config

    weights = make_weights(
        plain, {"eval_method": "shorter_side", "eval_resize": 37, "resample": "bicubic_antialias"}
    )
    path = write_weights(weights, tmp_path, "timm").files[0]
    data = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path}", pretrained=True))
    assert (list(data["mean"]), list(data["std"]), data["interpolation"]) == ([0.5] * 3, [0.5] * 3, "bicubic")
    assert (data["input_size"], data["crop_mode"], int(32 / data["crop_pct"])) == ((3, 32, 32), "center", 37)
    assert read_weights(path).meta["eval_resize"] == 37
    (tmp_path / "config.json").unlink()
    found = read_weights(path).meta  # timm's defaults
    assert (found["mean"], found["eval_resize"], found["resample"]) == ([0.5] * 3, 35, "bicubic_antialias")


@pytest.mark.parametrize(
    ("crop", "expected"),
    [
        ({"crop_pct": 0.9, "crop_mode": "center"}, ("torchvision", 35, 0.9)),
        ({"crop_pct": 0.8, "crop_mode": "squash"}, ("square", 40, 0.8)),
        ({"crop_pct": 1.0, "crop_mode": "squash"}, ("square", 0, 1.0)),
        ({"crop_pct": 1.0, "crop_mode": "border"}, ("letterbox", 0, 1.0)),
    ],
    ids=str,
)
def test_read__crops_as_timm(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, crop: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    path = write_weights(make_weights(plain), tmp_path, "timm").files[0]
    pretrained = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    write_config(tmp_path, pretrained_cfg=pretrained | crop)
    meta = read_weights(path).meta
    assert (meta["eval_method"], meta["eval_resize"], meta["eval_share"]) == expected
    written = make_weights(plain, {"eval_method": meta["eval_method"], "eval_resize": meta["eval_resize"]})
    write_weights(written, tmp_path / "again", "timm")
    again = json.loads((tmp_path / "again" / "config.json").read_text())["pretrained_cfg"]["crop_mode"]
    assert again == crop["crop_mode"]
    for odd in ({"crop_mode": "other"}, {"crop_mode": "border", "crop_pct": 0.9}):
        write_config(tmp_path, pretrained_cfg=pretrained | odd)
        refused(path, f"crop_mode '{odd['crop_mode']}'.* is not supported")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"reg_tokens": 2}, "not a square grid"),
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"scale_attn_norm": True}, "a norm inside attention"),
        ({"final_norm": False}, "missing: norm.weight"),
        ({"norm_layer": "rmsnorm"}, r"missing: .*norm1\.bias"),
    ],
    ids=str,
)
def test_read__refuses_other_architectures(
    plain: ViTConfig, tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    save_file(twin(plain, **more).state_dict(), tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", words)


@each(
    ("hidden_size", "depth", "gated", "heads"),
    [
        *((1280, 32, False, 16), (192, 12, False, 3), (384, 12, False, 6), (1408, 40, False, 16)),
        *((1536, 40, False, 16), (320, 2, False, 5)),
        *((1280, 32, True, 20), (1536, 40, True, 24), (4096, 40, True, 32), (384, 12, True, 6)),
    ],
)
def test_heads__by_published_size_then_64_channels(
    hidden_size: int, depth: int, gated: bool, heads: int
) -> None:
    assert known_heads(hidden_size, depth, gated) == heads


def test_heads__are_asked_for_when_nothing_tells(
    plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    odd = replace(plain, hidden_size=120)
    folder = write_weights(make_weights(odd), tmp_path / "folder", "timm").files[0]
    assert read_weights(folder).config == odd
    path = write_weights(make_weights(odd), tmp_path / "alone.safetensors", "timm").files[0]
    refused(path, "the file does not record the number of attention heads, and hidden size 120 is not a ")


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("vit_base_patch16_224", {}, "hidden_size is 768, and the tensors have 128"),
        ("vit_base_patch16_224", {"embed_dim": 128}, "depth is 12, and the tensors have 2"),
        ("vit_base_patch16_224", {"embed_dim": 128, "depth": 2}, "patch_size is 16, and the tensors have 8"),
        ("vit_tiny_patch8_224", {"embed_dim": 128, "depth": 3}, "depth is 3, and the tensors have 2"),
        ("vit_base_patch8_224", {"embed_dim": 128, "depth": 2}, ""),
        ("vit_of_mine", {}, ""),
    ],
)
def test_read__a_name_that_contradicts_the_tensors_is_refused(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, name: str, args: dict[str, Any], words: str
) -> None:
    path = write_weights(make_weights(plain), tmp_path, "timm").files[0]
    write_config(tmp_path, architecture=name, model_args=args)
    if not words:
        assert read_weights(path).config.hidden_size == 128
        return
    refused(path, words)
