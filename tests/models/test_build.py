from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vitctl.errors import CheckpointError
from vitctl.models.build import build, load_state, transfer
from vitctl.models.position import resize_position_embedding
from vitctl.models.variants import ViTConfig
from vitctl.models.vit import VisionTransformer

MakeModel = Callable[..., VisionTransformer]


@pytest.fixture
def source(tiny: ViTConfig) -> ViTConfig:
    """A pre-training form of the tiny model: another head, with pre-logits."""
    return replace(tiny, num_classes=9, representation_size=11, head_bias=-10.0, dropout=0.1)


def test_build__leaves_the_global_generator_alone(tiny: ViTConfig) -> None:
    before = torch.get_rng_state()
    model = build(tiny, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(weight.requires_grad and weight.isfinite().all() for weight in model.parameters())


def test_build__on_meta_has_shapes_and_no_weights(tiny: ViTConfig) -> None:
    model = build(tiny, device="meta", dtype=torch.bfloat16)
    assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {("meta", torch.bfloat16)}
    assert model(torch.empty(2, 3, 32, 32, device="meta", dtype=torch.bfloat16)).shape == (2, 5)


def test_build__starts_with_the_head_bias_for_every_image(tiny: ViTConfig) -> None:
    logits = build(replace(tiny, head_bias=-10.0))(torch.randn(2, 3, 32, 32))
    assert torch.equal(logits, torch.full((2, 5), -10.0))


def test_transfer__loads_the_body_and_keeps_its_own_zero_head(
    tiny: ViTConfig, source: ViTConfig, random_model: MakeModel
) -> None:
    pretrained, model = random_model(source), build(tiny, dtype=torch.float64).eval()
    lines = transfer(model, source, pretrained.state_dict())
    assert lines == [
        "body: 30 tensors loaded",
        "position embedding 4x4 kept",
        "head and pre-logits dropped, new zero head with 5 classes",
    ]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(model(images), torch.zeros(2, 5, dtype=torch.float64))
    body = pretrained.encode(pretrained.embed(images))[:, 0]
    assert body.std() > 0.1
    assert torch.equal(model.features(images), body)


def test_transfer__resizes_the_position_embedding(tiny: ViTConfig, source: ViTConfig, random_model: MakeModel) -> None:
    pretrained = random_model(source).state_dict()
    model = build(replace(tiny, image_size=56, num_classes=37))
    lines = transfer(model, source, pretrained)
    assert lines[1:] == [
        "position embedding 4x4 -> 7x7 (bilinear, corners aligned)",
        "head and pre-logits dropped, new zero head with 37 classes",
    ]
    resized = resize_position_embedding(pretrained["position_embedding"], (4, 4), (7, 7), 1)
    state = model.state_dict()
    assert torch.equal(state["position_embedding"], resized.float())
    body = [name for name in state if not name.startswith(("head.", "position_embedding"))]
    assert len(body) == 29
    assert all(torch.equal(state[name], pretrained[name].float()) for name in body)


def test_transfer__does_not_touch_the_source(tiny: ViTConfig, source: ViTConfig, random_model: MakeModel) -> None:
    state = random_model(source).state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    transfer(build(replace(tiny, image_size=56)), source, state)
    assert state.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ({"representation_size": 0}, {}, "head dropped, new zero head with 5 classes"),
        ({"representation_size": 0, "num_classes": 0}, {}, "no head to drop, new zero head with 5 classes"),
        ({}, {"num_classes": 0}, "head and pre-logits dropped, no new head"),
        (
            {},
            {"representation_size": 7},
            "head and pre-logits dropped, new pre-logits, new zero head with 5 classes",
        ),
    ],
)
def test_transfer__says_what_became_of_the_head(
    tiny: ViTConfig, source: ViTConfig, old: dict[str, int], new: dict[str, int], line: str
) -> None:
    source = replace(source, **old)
    assert transfer(build(replace(tiny, **new)), source, build(source).state_dict())[-1] == line


def test_transfer__without_positions_says_nothing_of_them(tiny: ViTConfig) -> None:
    config = replace(tiny, position_embedding="none")
    lines = transfer(build(replace(config, image_size=56)), config, build(config).state_dict())
    assert lines == ["body: 29 tensors loaded", "head dropped, new zero head with 5 classes"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 4}, "num_heads is 3, the model has 4"),
        ({"gelu": "erf"}, "gelu is 'tanh', the model has 'erf'"),
        ({"norm_eps": 1e-5}, "norm_eps is 1e-06, the model has 1e-05"),
        ({"classifier": "gap"}, "classifier is 'token', the model has 'gap'"),
        ({"position_embedding": "none"}, "position_embedding is 'learned', the model has 'none'"),
        ({"depth": 3, "hidden_size": 12}, "hidden_size is 24, the model has 12, depth is 2, the model has 3"),
    ],
)
def test_transfer__refuses_another_body_even_where_the_shapes_fit(
    tiny: ViTConfig, source: ViTConfig, change: dict[str, object], words: str
) -> None:
    model = build(replace(tiny, **change))
    before = model.patch_embedding.weight.clone()
    with pytest.raises(CheckpointError) as error:
        transfer(model, source, build(source).state_dict())
    assert str(error.value) == f"the weights belong to another model\n  configuration: {words}"
    assert torch.equal(model.patch_embedding.weight, before)


def test_transfer__groups_every_mismatch_in_a_few_lines(tiny: ViTConfig, source: ViTConfig) -> None:
    state = {name: tensor for name, tensor in build(source).state_dict().items() if "blocks.1.mlp" not in name}
    state["norm.weight"] = torch.zeros(3)
    state["ema.decay"] = torch.zeros(1)
    model = build(tiny)
    before = model.patch_embedding.weight.clone()
    with pytest.raises(CheckpointError) as error:
        transfer(model, source, state)
    assert str(error.value).split("\n") == [
        "the weights do not fit the model",
        "  missing: blocks.1.mlp.fc1.weight, blocks.1.mlp.fc1.bias, blocks.1.mlp.fc2.weight, and 1 more",
        "  unexpected: ema.decay",
        "  wrong shape: norm.weight is [3], the model has [24]",
    ]
    assert torch.equal(model.patch_embedding.weight, before)


def test_transfer__refuses_a_position_embedding_of_another_grid(tiny: ViTConfig, source: ViTConfig) -> None:
    state = build(replace(source, image_size=56)).state_dict()
    with pytest.raises(CheckpointError, match="does not fit a 4x4 grid with 1 prefix tokens"):
        transfer(build(tiny), source, state)


def test_load_state__copies_everything_and_casts(tiny: ViTConfig, random_model: MakeModel) -> None:
    state, model = random_model(tiny).state_dict(), build(tiny)
    load_state(model, state)
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in state.items())


def test_load_state__wants_the_head_too(tiny: ViTConfig, source: ViTConfig) -> None:
    with pytest.raises(CheckpointError) as error:
        load_state(build(tiny), build(source).state_dict())
    assert "unexpected: pre_logits.weight, pre_logits.bias" in str(error.value)
    assert "wrong shape: head.weight is [9, 11], the model has [5, 24], head.bias is [9]" in str(error.value)
