"""transformers' own models of each family: what it saves is read, computes the same, and goes back."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.matrix import spread
from tests.models.weights.conftest import refused
from tests.trained import do
from vitctl.errors import CheckpointError
from vitctl.models.build import build, load_state, resized
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

transformers = pytest.importorskip("transformers")
_BODY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_SIZES = {**_BODY, "intermediate_size": 96}
_DINOV2 = {**_BODY, "mlp_ratio": 2}
_DINOV3 = {**_SIZES, "num_register_tokens": 4}  # 0 by default, which no released model has
_BEIT = {**_SIZES, "use_relative_position_bias": True, "layer_norm_eps": 1e-6}
_TEXTS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
          "vocab_size": 20}  # fmt: skip
_TWO = {"vision_config": _SIZES, "text_config": _TEXTS}


def _hidden(output: Any) -> Tensor:
    """The class token of a body that pools nothing."""
    return output.last_hidden_state[:, 0]


def _pooled(output: Any) -> Tensor:
    return output.pooler_output


def _logits(output: Any) -> Tensor:
    return output.logits


Answer = Callable[[Any], Tensor]
# Class, its configuration, what it answers, fields that tensors do not tell, and how its table is resized.
CASES: dict[str, tuple[str, str, dict[str, Any], Answer, dict[str, Any], str]] = {
    "vit head": (
        "ViTForImageClassification", "ViTConfig", {**_SIZES, "num_labels": 5}, _logits,
        {"gelu": "erf", "norm_eps": 1e-12}, "bicubic",
    ),
    "vit": ("ViTModel", "ViTConfig", _SIZES, _pooled, {"representation_size": 64}, "bicubic"),
    "dinov2": ("Dinov2Model", "Dinov2Config", _DINOV2, _pooled, {"layer_scale": 1e-5}, "bicubic"),
    "dinov2 head": (
        "Dinov2ForImageClassification", "Dinov2Config", {**_DINOV2, "num_labels": 5}, _logits,
        {"classifier": "token_patches"}, "bicubic",
    ),
    "dinov2 swiglu": (
        "Dinov2Model", "Dinov2Config", {**_DINOV2, "use_swiglu_ffn": True}, _pooled,
        {"mlp": "swiglu", "mlp_size": 88}, "bicubic",
    ),
    "dinov2 registers": (
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", _DINOV2, _pooled, {"registers": 4},
        "bicubic_antialias",
    ),
    "dinov2 registers head": (
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig",
        {**_DINOV2, "num_labels": 5, "use_swiglu_ffn": True}, _logits,
        {"classifier": "token_patches", "registers": 4}, "bicubic_antialias",
    ),
    "dinov3": (
        "DINOv3ViTModel", "DINOv3ViTConfig", _DINOV3, _pooled,
        {"rotary": "dinov3", "rotary_rescale": 2.0, "norm_eps": 1e-5, "qkv_bias": "qv"}, "",
    ),
    "dinov3 gated": (
        "DINOv3ViTModel", "DINOv3ViTConfig", {**_DINOV3, "use_gated_mlp": True, "hidden_act": "silu"},
        _pooled,
        {"mlp": "swiglu", "mlp_size": 96}, "",
    ),
    "dinov3 no bias": (
        "DINOv3ViTModel", "DINOv3ViTConfig",
        {**_DINOV3, "query_bias": False, "value_bias": False, "num_register_tokens": 0}, _pooled,
        {"qkv_bias": "none", "registers": 0}, "",
    ),
    "siglip": (
        "SiglipVisionModel", "SiglipVisionConfig", _SIZES, _pooled,
        {"classifier": "attention", "gelu": "tanh"},
        "bicubic",
    ),
    "siglip head": (
        "SiglipForImageClassification", "SiglipConfig", {**_TWO, "num_labels": 5}, _logits,
        {"classifier": "gap", "gelu": "tanh"}, "bicubic",
    ),
    "clip": (
        "CLIPVisionModel", "CLIPVisionConfig", _SIZES, _pooled,
        {"gelu": "quick", "norm_eps": 1e-5, "norm_pre": True, "patch_bias": False}, "bicubic",
    ),
    "clip erf": ("CLIPVisionModel", "CLIPVisionConfig", {**_SIZES, "hidden_act": "gelu"}, _pooled,
                 {"gelu": "erf"}, "bicubic"),
    "beit": (
        "BeitModel", "BeitConfig", _BEIT, _pooled,
        {"norm_at": "pooled", "classifier": "patches", "qkv_bias": "qv", "norm_eps": 1e-6}, "bilinear",
    ),
    "beit head": (
        "BeitForImageClassification", "BeitConfig", {**_BEIT, "num_labels": 5}, _logits,
        {"norm_at": "pooled"}, "bilinear",
    ),
    "beit token": (
        "BeitForImageClassification", "BeitConfig", {**_BEIT, "num_labels": 5, "use_mean_pooling": False},
        _logits,
        {"norm_at": "tokens", "classifier": "token"}, "bilinear",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _drawn(model: nn.Module, seed: int = 0) -> Any:
    """The model with noise on every parameter, so that a mistake anywhere shows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    return model.eval()


def _peer(kind: str, configuration: str, values: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return _drawn(getattr(transformers, kind)(getattr(transformers, configuration)(**values)))


def _saved(case: str, folder: Path) -> Any:
    """Their model of a case, written by transformers."""
    peer = _peer(*CASES[case][:3])
    peer.save_pretrained(folder)
    return peer


def _ours(weights: Weights, images: Tensor) -> Tensor:
    """The answer of our model at the size of the images."""
    model = build(replace(weights.config, image_size=images.shape[-1])).eval()
    state, _ = resized(model, weights.config, weights.state, weights.meta["position_resize"])
    load_state(model, state)
    with torch.inference_mode():
        return model(images)


def _theirs(model: Any, answer: Answer, images: Tensor) -> Tensor:
    name = type(model).__name__
    more = {"interpolate_pos_encoding": True} if name.startswith(("Siglip", "CLIP", "ViT")) else {}
    with torch.inference_mode():
        return answer(model(pixel_values=images, **more))


def _images(side: int) -> Tensor:
    return torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(side)) * 2 - 1


def _agree(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.01
    assert (found - expected).abs().max() < 1e-5 * expected.std()


@pytest.mark.parametrize("case", spread(7, CASES))
def test_family__reads_computes_and_goes_back(case: str, tmp_path: Path) -> None:
    kind, _, _, answer, fields, method = CASES[case]
    peer = _saved(case, tmp_path / "theirs")
    weights = read_weights(tmp_path / "theirs")
    assert isinstance(weights.config, ViTConfig)
    found = {name: getattr(weights.config, name) for name in fields}
    assert found == fields
    assert not {"gelu", "norm_eps", "num_heads"} & set(weights.meta["assumed"])
    assert not method or weights.meta["position_resize"] == method
    for side in (32, 48):
        _agree(_ours(weights, _images(side)), _theirs(peer, answer, _images(side)))

    # Other weights of the same network go back: transformers misses nothing, and answers the same.
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: tensor + torch.randn(tensor.shape, generator=generator) * 0.1
        for name, tensor in weights.state.items()
    }
    other = replace(weights, state=changed)
    write_weights(other, tmp_path / "ours", "hf")
    kinds = {getattr(transformers, kind)} if weights.config.num_classes else {transformers.AutoModel}
    for opened in (*kinds, getattr(transformers, kind)):
        again, info = opened.from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(info.values()), info
        _agree(_ours(other, _images(32)), _theirs(again.eval(), answer, _images(32)))
    back = read_weights(tmp_path / "ours")
    assert back.config == other.config
    assert all(torch.equal(back.state[name], tensor) for name, tensor in changed.items())


@pytest.mark.parametrize("case", spread(3, CASES, 1))
def test_family__reads_the_names_in_memory(case: str, tmp_path: Path) -> None:
    peer = _saved(case, tmp_path)
    expected = read_weights(tmp_path)
    save_file(peer.state_dict(), tmp_path / "model.safetensors")
    found = read_weights(tmp_path)
    assert found.config == expected.config
    assert all(torch.equal(found.state[name], tensor) for name, tensor in expected.state.items())


@pytest.mark.parametrize("family", ["Siglip", "CLIP"])
def test_two_towers__that_of_images_is_read(family: str, tmp_path: Path) -> None:
    whole = _peer(f"{family}Model", f"{family}Config", _TWO)
    whole.save_pretrained(tmp_path / "both")
    tower = getattr(transformers, f"{family}VisionModel").from_pretrained(tmp_path / "both").eval()
    weights = read_weights(tmp_path / "both")
    assert weights.config.norm_eps == (1e-6 if family == "Siglip" else 1e-5)
    _agree(_ours(weights, _images(32)), _theirs(tower, _pooled, _images(32)))
    said = "; ".join(weights.meta.get("remarks", ()))
    assert ("projection" in said) == (family == "CLIP")


def test_clip__its_class_with_a_head_has_no_norm_and_is_refused(tmp_path: Path) -> None:
    _peer("CLIPForImageClassification", "CLIPConfig", {**_TWO, "num_labels": 5}).save_pretrained(tmp_path)
    refused(tmp_path, "averages patches that no norm has seen")


def test_siglip__linear_patches_are_refused_by_shape(tmp_path: Path) -> None:
    values = {name: value for name, value in _SIZES.items() if name != "image_size"}
    model = _peer("Siglip2VisionModel", "Siglip2VisionConfig", {**values, "num_patches": 16})
    model.save_pretrained(tmp_path)
    refused(tmp_path, "any aspect ratio")


@pytest.mark.parametrize("kind", ["ViTMAEModel", "ViTMAEForPreTraining"])
def test_mae__encoder_is_read_with_its_colours(kind: str, tmp_path: Path) -> None:
    decoder = {f"decoder_{name}": value for name, value in _TEXTS.items() if name != "vocab_size"}
    peer = _peer(kind, "ViTMAEConfig", {**_SIZES, **decoder, "mask_ratio": 0.0})
    peer.save_pretrained(tmp_path)
    weights = read_weights(tmp_path)
    assert weights.meta["mean"] == [0.485, 0.456, 0.406]  # the layout is the one of ViT, whose mean is 0.5
    assert {"mean", "std"} <= set(weights.meta["assumed"])
    encoder = peer.vit if kind == "ViTMAEForPreTraining" else peer
    with torch.inference_mode():  # with this noise the patches keep their order
        output = encoder(_images(32), noise=torch.arange(16.0).expand(4, -1))
    _agree(_ours(weights, _images(32)), _hidden(output))
    write_weights(weights, tmp_path / "ours", "hf")
    body = transformers.ViTModel.from_pretrained(tmp_path / "ours", add_pooling_layer=False).eval()
    _agree(_ours(weights, _images(32)), _theirs(body, _hidden, _images(32)))


def test_beit__pre_training_has_one_table_for_all_blocks(tmp_path: Path) -> None:
    shared = {**_SIZES, "use_shared_relative_position_bias": True, "use_mask_token": True, "vocab_size": 11}
    peer = _peer("BeitForMaskedImageModeling", "BeitConfig", shared)
    peer.save_pretrained(tmp_path)
    weights = read_weights(tmp_path)
    assert (weights.config.norm_eps, weights.config.classifier) == (1e-12, "token")  # as config.json says
    tables = [tensor for name, tensor in weights.state.items() if name.endswith("relative_bias")]
    assert len(tables) == 2
    assert torch.equal(*tables)
    with torch.inference_mode():
        tokens = peer.layernorm(peer.beit(_images(32)).last_hidden_state)
    _agree(_ours(weights, _images(32)), tokens[:, 0])
    save_file(peer.state_dict(), tmp_path / "model.safetensors")
    again = read_weights(tmp_path).state
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.state.items())


# What is assumed where nothing but tensors is there: activation, eps, mean, classifier.
ALONE: dict[str, tuple[str, float, float, str]] = {
    "vit": ("erf", 1e-12, 0.5, "token"),
    "dinov2": ("erf", 1e-6, 0.485, "token"),
    "dinov2 registers": ("erf", 1e-6, 0.485, "token"),
    "dinov3": ("erf", 1e-5, 0.485, "token"),
    "siglip": ("tanh", 1e-6, 0.5, "attention"),
    "clip": ("quick", 1e-5, 0.48145466, "token"),
    "beit": ("erf", 1e-6, 0.485, "patches"),  # transformers' own default for eps is 1e-12
}


@pytest.mark.parametrize("case", ALONE)
def test_family__without_its_json_files_lists_what_it_assumes(case: str, tmp_path: Path) -> None:
    _saved(case, tmp_path)
    (tmp_path / "config.json").unlink()
    weights = read_weights(tmp_path)
    gelu, eps, mean, classifier = ALONE[case]
    config = weights.config
    assert (config.gelu, config.norm_eps, weights.meta["mean"][0], config.classifier) == (
        gelu, eps, mean, classifier,
    )  # fmt: skip
    assert {"gelu", "norm_eps", "mean", "std", "resample"} <= set(weights.meta["assumed"])
    assert ("num_heads" in weights.meta["assumed"]) == (case != "beit")  # its tables have a column for each
    assert ("classifier" in weights.meta["assumed"]) == case.startswith("dino")


def _processor(**values: Any) -> dict[str, Any]:
    return {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_resize": True, **values}


def test_processor__another_size_than_the_table_is_said(tmp_path: Path) -> None:
    # DINOv2's table is that of 518 pixels, its processor crops 224 of 256
    peer = _peer("Dinov2Model", "Dinov2Config", {**_DINOV2, "image_size": 64})
    peer.save_pretrained(tmp_path)
    cropped = _processor(
        size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56}, do_center_crop=True
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(cropped))
    meta = read_weights(tmp_path).meta
    assert (meta["image_size"], meta["eval_resize"]) == (56, 64)
    assert "the positions, of 64 pixels, are resized; data.image_size = 64 keeps" in "; ".join(
        meta["remarks"]
    )


@pytest.mark.parametrize("case", ["dinov3", "siglip", "clip", "dinov2"])
def test_write__a_head_that_no_class_of_theirs_has_is_refused(case: str, tmp_path: Path) -> None:
    _saved(case, tmp_path)
    body = read_weights(tmp_path)
    headed = replace(body.config, num_classes=5)
    with pytest.raises(
        CheckpointError, match="no class of transformers puts a head on its classifier"
    ) as error:
        write_weights(Weights(headed, build(headed).state_dict(), body.meta), tmp_path / "out", "hf")
    assert "\n" not in str(error.value)
    assert "write it to timm or safetensors" in str(error.value)


def test_export__a_body_with_its_licence_and_its_card(tmp_path: Path) -> None:
    peer = _saved("dinov3", tmp_path / "theirs")
    (tmp_path / "theirs" / "README.md").write_text("---\nlicense: other\nlicense_name: dinov3-license\n---\n")
    source = {"weights.source": str(tmp_path / "theirs"), "export.to": ("hf",)}
    result = do("export", tmp_path / "run", **source)
    assert result["metrics"]["max_difference"]["hf"] < 1e-5
    again = transformers.AutoModel.from_pretrained(tmp_path / "run/hf").eval()
    _agree(_theirs(again, _pooled, _images(32)), _theirs(peer, _pooled, _images(32)))
    card = (tmp_path / "run/hf/README.md").read_text()
    assert "pipeline_tag: image-feature-extraction" in card and "A body without a head" in card
    assert "transformers.DINOv3ViTModel.from_pretrained(folder)" in card and "pipeline(" not in card
    assert read_weights(tmp_path / "run/hf").meta["licence"] == "dinov3-license"


def test_write__a_body_keeps_how_it_pools(tmp_path: Path) -> None:
    _saved("dinov3", tmp_path)
    body = read_weights(tmp_path)
    joined = replace(body, config=replace(body.config, classifier="token_patches"))
    notes = write_weights(joined, tmp_path / "out", "hf").notes
    assert "the class token beside the mean of the patches of last_hidden_state" in notes[1]
    assert read_weights(tmp_path / "out").config.classifier == "token_patches"


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("dinov2", {"model_type": "vit"}, "model_type 'vit', only 'dinov2' is read"),
        ("dinov3", {"rope_theta": 10.0}, "rope_theta is 10.0, only 100.0 is supported"),
        ("dinov3 gated", {"hidden_act": "gelu"}, "hidden_act 'gelu', known are silu"),
        ("clip", {"hidden_act": "relu"}, "hidden_act 'relu', known are gelu, "),
    ],
)
def test_read__refuses_what_it_would_compute_otherwise(
    case: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _saved(case, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(tmp_path, words)


LOST = [
    *(
        (name, r"\blayers?\.1\.", "num_hidden_layers is 2")
        for name in ("dinov2", "dinov3", "siglip", "clip", "beit")
    ),
    ("dinov3", "cls_token", "a class token"),
    ("dinov3", "register_tokens", "num_register_tokens is 4"),
    ("dinov3", "layer_scale", "LayerScale"),
    ("dinov2", "layer_scale", "LayerScale"),
    ("beit", "lambda_", "LayerScale"),
    ("dinov3", r"[qv]_proj\.bias", "biases of queries and values"),
    ("siglip", r"^(vision_model\.)?head\.", "attention pooling"),
    ("beit", "relative_position_bias_table", "relative position biases"),
    ("dinov2 head", "^classifier", "a classifier"),
]


@pytest.mark.parametrize(("name", "pattern", "words"), spread(5, LOST))
def test_read__a_file_without_what_its_config_states_is_refused(
    name: str, pattern: str, words: str, tmp_path: Path
) -> None:
    """Else a damaged file would be another network, silently."""
    _saved(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    kept = {key: tensor for key, tensor in tensors.items() if not re.search(pattern, key)}
    assert len(kept) < len(tensors)
    save_file(kept, file, {"format": "pt"})
    refused(tmp_path, words)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("part", ["layer.0.attention.q_proj.weight", "norm.weight"])
def test_read__numbers_of_8_bits_and_integers_are_refused(
    dtype: torch.dtype, part: str, tmp_path: Path
) -> None:
    _saved("dinov3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[part] = tensors[part].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refused(tmp_path, "should hold floating-point numbers")


@pytest.mark.parametrize("lost", ["gate_proj.weight", "up_proj.bias"])
def test_read__half_of_a_gate_is_refused(lost: str, tmp_path: Path) -> None:
    _saved("dinov3 gated", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"layer.0.mlp.{lost}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refused(tmp_path)
