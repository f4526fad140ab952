"""Weights in and out: our file, the files of others, the name of the model, digests."""

import hashlib
import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.weights.conftest import refused
from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.build import build
from vitctl.models.variants import HybridConfig, ResNetConfig, ViTConfig, to_dict
from vitctl.models.weights.containers import read_tensors
from vitctl.models.weights.weights_file import (
    Weights,
    read_weights,
    save_weights,
    weights_digest,
    write_weights,
)

Make = Callable[..., Weights]


META: dict[str, Any] = {
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "class_names": ["tench", "goldfish, Carassius auratus", "große Eule", "a", "b"],
    "resample": "bilinear",
    "eval_resize": 384,
}


@pytest.fixture
def saved(tiny: ViTConfig, tmp_path: Path) -> Path:
    return save_weights(tmp_path / "model.safetensors", build(tiny), tiny, META)


def test_save__round_trip_is_exact(tiny: ViTConfig, saved: Path) -> None:
    state = build(tiny).state_dict()
    for path in (saved, saved.parent, str(saved)):
        weights = read_weights(path)
        assert (weights.config, weights.meta) == (tiny, META)
        assert weights.state.keys() == state.keys()
        assert all(torch.equal(weights.state[name], tensor) for name, tensor in state.items())


def test_save__keeps_every_dtype_shape_and_stride(tiny: ViTConfig, tmp_path: Path) -> None:
    state = {
        "bf16": torch.randn(3, 4).bfloat16(),
        "float64": torch.randn(2, dtype=torch.float64),
        "scalar": torch.tensor(3),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "empty": torch.zeros(0, 4),
    }
    loaded = read_tensors(save_weights(tmp_path / "own.safetensors", state, tiny, {}))
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert (loaded[name].dtype, loaded[name].is_contiguous()) == (tensor.dtype, True)
        assert torch.equal(loaded[name], tensor)
    assert weights_digest(loaded) == weights_digest(state)


def test_save__equal_weights_give_equal_bytes(tiny: ViTConfig, saved: Path, tmp_path: Path) -> None:
    state = build(tiny).state_dict()
    backwards = {name: state[name] for name in reversed(list(state))}
    meta = {key: META[key] for key in reversed(list(META))}
    again = save_weights(tmp_path / "again.safetensors", backwards, tiny, meta)
    assert again.read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("to", ["safetensors", "google", "timm"])
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


def test_load__missing_file_and_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none.safetensors", "no such weights file; give a .safetensors file or a folder with")
    refused(tmp_path, f"{tmp_path}/model.safetensors: no such weights file")


def header(tiny: ViTConfig, **change: object) -> dict[str, str]:
    return {"vitctl": json.dumps({"format": "vitctl/1", "config": to_dict(tiny), "meta": {}, **change})}


def test_load__wrong_metadata(tiny: ViTConfig, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    cases = [
        ({"vitctl": "{"}, "its vitctl metadata is not JSON"),
        ({"vitctl": "[1]"}, "format None, this vitctl reads 'vitctl/1'"),
        (header(tiny, format="vitctl/2"), "format 'vitctl/2', this vitctl reads 'vitctl/1'"),
        (header(tiny, meta=None), "its vitctl metadata lacks config or meta"),
        (header(tiny, config={"family": "mixer"}), "stored model: unknown family 'mixer'"),
        (header(tiny, config={**to_dict(tiny), "alibi": 1}), "stored model: unknown keys alibi"),
    ]
    for metadata, words in cases:
        save_file({"x": torch.ones(1)}, path, metadata)
        refused(path, words)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("Ti/8", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3, image_size=16),
         ""),
        ("Ti/16", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3,
                            image_size=16),
         "not a Ti/16, it has patch_size 8 instead of 16"),
        ("S/8", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3, image_size=16),
         "not a S/8, it has hidden_size 192 instead of 384, mlp_size 768 instead of 1536, num_heads 3 "
         "instead of 6"),
        ("R50x1", ResNetConfig(stage_depths=(1, 1), version="v2", num_classes=3),
         "not a R50x1, it has stage_depths (1, 1) instead of (3, 4, 6, 3)"),
        ("R+Ti/16", ViTConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3,
                              image_size=16),
         "not a R+Ti/16, it has stage_depths none instead of (), width none instead of 64"),
        ("R+Ti/16", HybridConfig(patch_size=8, hidden_size=192, depth=12, mlp_size=768, num_heads=3,
                                 image_size=64,
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
    refused(path, f"{re.escape(str(path))}: {re.escape(words)}$", model=name)


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


def test_digest__is_sha256_of_names_dtypes_shapes_and_bytes() -> None:
    state = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(7)}
    plain = (
        b"a torch.int64 []\n" + struct.pack("<q", 7) + b"b torch.float32 [1, 2]\n" + struct.pack("<2f", 1, 2)
    )
    assert weights_digest(state) == hashlib.sha256(plain).hexdigest()


def test_digest__sees_every_change_and_no_other() -> None:
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16()}
    same = {"b": base["b"].clone(), "a": torch.arange(6.0).reshape(2, 3).T.contiguous().T}
    assert weights_digest(same) == weights_digest(base)
    changes = [
        {"a": base["a"].reshape(3, 2)},
        {"a": base["a"].double()},
        {"a": base["a"].nextafter(torch.tensor(9.0))},
        {"b": base["b"].half()},
        {"c": base["b"]},
    ]
    digests = {weights_digest({**base, **change}) for change in changes}
    assert len(digests | {weights_digest(base)}) == len(changes) + 1


HYBRID = HybridConfig(
    patch_size=1, hidden_size=24, depth=1, mlp_size=8, num_heads=2, image_size=32, stage_depths=(1,), width=32
)


@pytest.mark.parametrize(
    ("to", "change"),
    [
        *(("timm", change) for change in ({}, {"gelu": "tanh"}, {"num_classes": 0}, {"norm_eps": 1e-12})),
        *(("timm", change) for change in ({"classifier": "gap"}, {"position_embedding": "none"})),
        ("timm", {"hidden_size": 192, "num_heads": 3, "mlp_size": 100}),
        *(
            ("hf", change)
            for change in ({"norm_eps": 1e-12}, {"gelu": "tanh", "num_heads": 4}, {"dropout": 0.1})
        ),
        ("hf", {"num_classes": 0, "representation_size": 48}),
        *(("torchvision", change) for change in ({}, {"representation_size": 24})),
    ],
    ids=str,
)
def test_write__then_read_is_exact(
    plain: ViTConfig,
    make_weights: Make,
    meta: dict[str, Any],
    tmp_path: Path,
    to: str,
    change: dict[str, Any],
) -> None:
    weights = make_weights(replace(plain, **change))
    again = read_weights(write_weights(weights, tmp_path, to).files[0])
    assert again.config == weights.config
    assert again.state.keys() == weights.state.keys()
    assert all(torch.equal(again.state[name], tensor) for name, tensor in weights.state.items())
    if to != "torchvision":  # which has no JSON file
        assert {**again.meta, **meta} == again.meta


TITLES = {"timm": "timm", "hf": "Hugging Face ViT", "torchvision": "torchvision", "google": "Google ViT"}


@pytest.mark.parametrize(
    ("to", "change", "words"),
    [
        ("timm", {"position_embedding": "relative"}, "it has no position_embedding 'relative'"),
        ("timm", None, "it has no place for a Hybrid model"),
        ("hf", {"representation_size": 48}, "its classifier has no pre-logits layer"),
        ("hf", {"position_embedding": "none"}, "it has no position_embedding 'none'"),
        (
            "torchvision",
            {"gelu": "tanh"},
            "its GELU is exact and these weights were trained with the tanh form",
        ),
        ("torchvision", {"classifier": "gap"}, "it has no classifier 'gap'"),
        ("torchvision", {"num_classes": 0}, "it always has a head"),
        ("torchvision", {"image_size": 36}, "image_size 36 has to be a multiple of patch_size 8 there"),
    ],
)
def test_write__refuses_what_a_layout_cannot_hold(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: str, change: dict[str, Any] | None, words: str
) -> None:
    config = HYBRID if change is None else replace(plain, **change)
    with pytest.raises(CheckpointError, match=re.escape(f"{TITLES[to]} cannot hold this model: {words}")):
        write_weights(make_weights(config), tmp_path / "x", to)
    assert list(tmp_path.iterdir()) == []


def test_write__hugging_face_is_a_folder(plain: ViTConfig, make_weights: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a folder with several files; give the name of a folder"):
        write_weights(make_weights(plain), tmp_path / "x.safetensors", "hf")
