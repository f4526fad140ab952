"""open_clip's layout, made by renaming transformers' CLIP; both hold the same network."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.matrix import slow
from tests.models.weights.conftest import refused
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
    refused(tmp_path, "resize_mode 'longest' is not supported, known are shortest")


def test_read__a_timm_tower_is_timms(
    plain: ViTConfig, make_weights: Any, meta: dict[str, Any], tmp_path: Path
) -> None:
    file = write_weights(make_weights(plain, meta), tmp_path / "timm.safetensors", "timm").files[0]
    expected = read_weights(file)
    expected = replace(
        expected,
        config=replace(expected.config, num_classes=0),  # its head projects, and is left out
        state={name: one for name, one in expected.state.items() if not name.startswith("head.")},
    )
    named = {f"visual.trunk.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**named, "text.token_embedding.weight": torch.zeros(3, 4)}, tmp_path / "both.safetensors")
    found = read_weights(tmp_path / "both.safetensors")
    assert found.config == expected.config
    assert all(torch.equal(found.state[name], tensor) for name, tensor in expected.state.items())


_TOWER = {"image_size": 32, "layers": 2, "width": 128, "patch_size": 8}


@pytest.mark.parametrize("first_norm", [True, False])
@pytest.mark.parametrize(
    ("pool", "last"), [("tok", True), ("avg", False), *slow(("tok", False), ("avg", True))]
)
def test_read__switches_of_the_tower_are_followed(
    first_norm: bool, pool: str, last: bool, tmp_path: Path
) -> None:
    peer = _both("gelu_pytorch_tanh")
    tensors = _as_open_clip(peer)
    vision = peer.vision_model
    vision.post_layernorm.eps = vision.pre_layrnorm.eps = 1e-2
    for layer in vision.encoder.layers:
        layer.layer_norm1.eps = layer.layer_norm2.eps = 1e-2
    if not first_norm:
        vision.pre_layrnorm = torch.nn.Identity()
        tensors = {name: tensor for name, tensor in tensors.items() if ".ln_pre." not in name}
    with torch.inference_mode():
        tokens = vision.encoder(vision.pre_layrnorm(vision.embeddings(_IMAGES))).last_hidden_state
        tokens = tokens if last else vision.post_layernorm(tokens)
        expected = tokens[:, 0] if pool == "tok" else tokens[:, 1:].mean(dim=1)
        expected = vision.post_layernorm(expected) if last else expected
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    tower = {**_TOWER, "no_ln_pre": not first_norm, "pool_type": pool, "final_ln_after_pool": last}
    tower |= {"norm_kwargs": {"eps": 1e-2}, "act_kwargs": {"approximate": "tanh"}}
    path = tmp_path / "open_clip_config.json"
    path.write_text(json.dumps({"model_cfg": {"vision_cfg": tower}}))
    answer = _answer(read_weights(tmp_path), _IMAGES)
    assert (answer - expected).abs().max() < 1e-5 * expected.std()
    path.write_text(json.dumps({"model_cfg": {"vision_cfg": {**tower, "no_ln_pre": first_norm}}}))
    refused(tmp_path, "no_ln_pre is not that of the tensors")


@pytest.mark.parametrize("key", ["attentional_pool", "qk_norm", "scale_heads", "a_key_of_next_year"])
def test_read__another_switch_is_refused(key: str, tmp_path: Path) -> None:
    save_file(_as_open_clip(_both("gelu")), tmp_path / "model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": {"vision_cfg": {**_TOWER, key: True}}})
    )
    refused(tmp_path, rf"open_clip_config\.json: model_cfg\.vision_cfg\.{key} is true, ")


def test_read__json_of_a_timm_tower_is_read(
    plain: ViTConfig, make_weights: Any, meta: dict[str, Any], tmp_path: Path
) -> None:
    body = make_weights(replace(plain, num_classes=0, classifier="patches"), meta)
    file = write_weights(body, tmp_path / "timm.safetensors", "timm").files[0]
    trunk = {f"visual.trunk.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(trunk, tmp_path / "open_clip_model.safetensors")
    tower = {"timm_model_name": "vit_tall_clip_of_mine", "timm_pool": "avg", "image_size": 32}
    images = {"mean": [0.1, 0.2, 0.3], "resize_mode": "squash", "interpolation": "random"}
    path = tmp_path / "open_clip_config.json"
    path.write_text(json.dumps({"model_cfg": {"vision_cfg": tower}, "preprocess_cfg": images}))
    found = read_weights(tmp_path / "open_clip_model.safetensors")
    assert (found.config.classifier, found.config.norm_eps) == ("patches", 1e-5)  # by the name of its network
    expected = {"mean": [0.1, 0.2, 0.3], "eval_method": "square", "eval_resize": 0}
    assert expected.items() <= found.meta.items()
    assert (found.meta["resample"], found.meta["std"][0]) == ("bicubic_antialias", 0.26862954)
    assert found.meta["assumed"] == ["num_heads"]
    for odd in ({"timm_pool": "rot_attn"}, {"a_key_of_next_year": 3}):
        path.write_text(json.dumps({"model_cfg": {"vision_cfg": {**tower, **odd}}}))
        refused(
            tmp_path / "open_clip_model.safetensors",
            r"rot_attn|next_year is 3, a key that vitctl does not know",
        )
