"""open_clip's layout, made by renaming transformers' CLIP; both hold the same network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitctl.errors import CheckpointError
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.layouts import rules_for, to_theirs
from vitctl.models.weights.openclip import LAYOUT
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

transformers = pytest.importorskip("transformers")
_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
          "patch_size": 8, "intermediate_size": 96}  # fmt: skip
_TEXTS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
          "vocab_size": 20}  # fmt: skip
_RENAMED = {
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.pre_layrnorm.": "visual.ln_pre.",
    "vision_model.post_layernorm.": "visual.ln_post.",
    "vision_model.encoder.layers.": "visual.transformer.resblocks.",
    ".layer_norm1.": ".ln_1.",
    ".layer_norm2.": ".ln_2.",
    ".self_attn.out_proj.": ".attn.out_proj.",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
    "text_model.encoder.layers.": "transformer.resblocks.",
    "text_model.embeddings.token_embedding.": "token_embedding.",
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _both(act: str) -> Any:
    torch.manual_seed(0)
    config = transformers.CLIPConfig(vision_config={**_SIZES, "hidden_act": act}, text_config=_TEXTS)
    model = transformers.CLIPModel(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.2
    return model


def _as_open_clip(model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    named = {"visual.proj": state.pop("visual_projection.weight").T.contiguous()}
    for name in list(state):
        if ".self_attn.q_proj." in name:
            parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            state[name.replace("self_attn.q_proj.", "attn.in_proj_")] = torch.cat(parts)
    for name, tensor in state.items():
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours)
        named[name] = tensor.contiguous()
    return named


def _answer(weights: Weights, images: Tensor) -> Tensor:
    model = build(weights.config).eval()
    model.load_state_dict(weights.state)
    with torch.inference_mode():
        return model(images)


_IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("spelling", ["both towers", "prefix", "bare"])
@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_read__the_image_tower(act: str, spelling: str, tmp_path: Path) -> None:
    peer = _both(act)
    tensors = _as_open_clip(peer)
    if spelling != "both towers":
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("visual.")}
    if spelling == "bare":
        tensors = {name.removeprefix("visual."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    described = {"model_cfg": {"vision_cfg": {"image_size": 32, "layers": 2, "width": 128, "patch_size": 8},
                               **({"quick_gelu": True} if act == "quick_gelu" else {})},
                 "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6],
                                    "interpolation": "bilinear", "resize_mode": "squash"}}  # fmt: skip
    (tmp_path / "open_clip_config.json").write_text(json.dumps(described))
    weights = read_weights(tmp_path / "open_clip_model.safetensors")
    config, meta = weights.config, weights.meta
    assert isinstance(config, ViTConfig)
    assert (config.gelu, config.norm_eps) == ("quick" if act == "quick_gelu" else "erf", 1e-5)
    assert (meta["mean"], meta["std"], meta["resample"]) == (
        [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], "bilinear_antialias",
    )  # fmt: skip
    assert (meta["eval_method"], meta["eval_resize"], meta["position_resize"]) == (
        "square", 0, "bicubic_antialias",
    )  # fmt: skip
    assert "assumed" not in meta
    assert "without the projection" in meta["remarks"][0]
    with torch.inference_mode():
        expected = peer.vision_model(_IMAGES).pooler_output
    assert (_answer(weights, _IMAGES) - expected).abs().max() < 1e-5 * expected.std()
    # the rules are two-way
    written = to_theirs(weights.state, rules_for(LAYOUT.table(2), weights.state))
    whole = _as_open_clip(peer)
    assert written.keys() == {name for name in whole if name.startswith("visual.")} - {"visual.proj"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in written.items())


def test_read__says_what_it_assumes_of_tensors_alone(tmp_path: Path) -> None:
    save_file(_as_open_clip(_both("gelu")), tmp_path / "model.safetensors")
    weights = read_weights(tmp_path)
    assert (weights.config.gelu, weights.meta["mean"][0]) == ("erf", 0.48145466)
    assert {"gelu", "mean", "std", "eval_method", "num_heads"} <= set(weights.meta["assumed"])


def test_read__transformers_configuration_beside_decides_the_activation(tmp_path: Path) -> None:
    peer = _both("quick_gelu")
    peer.save_pretrained(tmp_path)
    save_file(_as_open_clip(peer), tmp_path / "model.safetensors")
    weights = read_weights(tmp_path)
    assert weights.config.gelu == "quick"
    assert "gelu" not in weights.meta["assumed"]


def test_read__a_resize_mode_it_lacks_is_refused(tmp_path: Path) -> None:
    save_file(_as_open_clip(_both("gelu")), tmp_path / "model.safetensors")
    described = {"preprocess_cfg": {"resize_mode": "longest"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="resize_mode 'longest' is not supported, known are shortest"):
        read_weights(tmp_path)


def test_read__a_timm_tower_is_timms(
    plain: ViTConfig, make_weights: Any, meta: dict[str, Any], tmp_path: Path
) -> None:
    file = write_weights(make_weights(plain, meta), tmp_path / "timm.safetensors", "timm").files[0]
    expected = read_weights(file)
    named = {f"visual.trunk.{name}": tensor for name, tensor in _timm(expected).items()}
    save_file({**named, "text.token_embedding.weight": torch.zeros(3, 4)}, tmp_path / "both.safetensors")
    found = read_weights(tmp_path / "both.safetensors")
    assert found.config == expected.config
    assert all(torch.equal(found.state[name], tensor) for name, tensor in expected.state.items())


def _timm(weights: Weights) -> dict[str, Tensor]:
    from vitctl.models.weights.timm import LAYOUT as TIMM

    return to_theirs(weights.state, rules_for(TIMM.table(2), weights.state))
