import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.matrix import few
from tests.models.tiny_models import OF_EACH_KIND, TINY
from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.build import Model, build, draw_parts, resize_axis, resize_position_embedding, transfer
from vitctl.models.positions import grid_table
from vitctl.models.variants import Config, ViTConfig, variant, with_fresh_norm

MakeModel = Callable[..., Model]


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


@pytest.mark.parametrize("name", TINY)
def test_build__without_a_seed_draws_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded next would be drawn for nothing, a second of a core for L/16."""
    drawn, empty = build(TINY[name]).state_dict(), torch.empty
    monkeypatch.setattr(np.random, "default_rng", None)
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))
    loaded = build(TINY[name], seed=None).state_dict()
    constant = [key for key, tensor in drawn.items() if len(tensor.unique()) == 1]
    assert constant and all(torch.equal(loaded[key], drawn[key]) for key in constant)
    assert all(loaded[key].isnan().all() for key in drawn if key not in constant)


def test_transfer__does_not_touch_the_source(
    tiny: ViTConfig, source: ViTConfig, random_model: MakeModel
) -> None:
    state = random_model(source).state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    transfer(build(replace(tiny, image_size=56)), source, state)
    assert state.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


def test_transfer__names_every_mismatch_in_one_line(tiny: ViTConfig, source: ViTConfig) -> None:
    state = {
        name: tensor for name, tensor in build(source).state_dict().items() if "blocks.1.mlp" not in name
    }
    state["norm.weight"] = torch.zeros(3)
    state["ema.decay"] = torch.zeros(1)
    model = build(tiny)
    before = model.patch_embedding.weight.clone()
    with pytest.raises(CheckpointError) as error:
        transfer(model, source, state)
    assert str(error.value) == (
        "the weights do not fit the model: missing: blocks.1.mlp.fc1.weight, blocks.1.mlp.fc1.bias, "
        "blocks.1.mlp.fc2.weight, blocks.1.mlp.fc2.bias; unexpected: ema.decay; wrong shape: norm.weight is "
        "[3], the model has [24]"
    )
    assert torch.equal(model.patch_embedding.weight, before)


def test_transfer__refuses_a_position_embedding_of_another_grid(tiny: ViTConfig, source: ViTConfig) -> None:
    state = build(replace(source, image_size=56)).state_dict()
    with pytest.raises(CheckpointError, match="does not fit a 4x4 grid with 1 prefix tokens"):
        transfer(build(tiny), source, state)


def test_transfer__moves_the_body_of_every_family(
    family: Config, random_model: MakeModel, images_for: Callable[..., torch.Tensor]
) -> None:
    rep = {"representation_size": 0} if isinstance(family, ViTConfig) else {}
    source, target = replace(family, num_classes=9), replace(family, num_classes=7, **rep)
    pretrained, model = random_model(source), build(target, dtype=torch.float64).eval()
    lines = transfer(model, source, pretrained.state_dict())
    assert lines[0] == f"body: {len(model.state_dict()) - 2} tensors loaded"
    assert lines[-1].endswith("dropped, new zero head with 7 classes")
    images = images_for(family)
    assert torch.equal(model(images), torch.zeros(3, 7, dtype=torch.float64))
    if not (rep and family.representation_size):
        assert torch.equal(model.features(images), pretrained.features(images))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("every layer", "position embedding 4x4 -> 7x7 (bilinear, corners aligned)"),
        ("2d every layer", "position embedding 4x4 -> 7x7 (linear along each axis)"),
        ("hybrid", "position embedding 4x4 -> 7x7 (bilinear, corners aligned)"),
        ("axial", "position embedding 4x4 -> 7x7 (bilinear, corners aligned)"),
        ("axial resnet", "relative positions of 6 attentions resized along their axes (linear)"),
    ],
)
def test_transfer__resizes_the_positions_of_every_family(
    name: str, line: str, random_model: MakeModel
) -> None:
    source = TINY[name]
    pretrained, model = (
        random_model(source).state_dict(),
        build(replace(source, image_size=56), dtype=torch.float64),
    )
    lines = transfer(model, source, pretrained)
    assert lines[1] == line
    state = model.state_dict()
    moved = [key for key in state if state[key].shape != pretrained[key].shape]
    assert len(moved) == {"2d every layer": 2, "axial resnet": 6}.get(name, 1)
    for key in moved:
        if key == "position_embedding":
            expected = resize_position_embedding(pretrained[key], (4, 4), (7, 7), source.prefix_tokens)
        elif key.endswith("relative_position"):
            expected = resize_axis(pretrained[key][None], len(state[key]))[0]
        else:
            expected = resize_axis(pretrained[key], 7)
        assert torch.equal(state[key], expected)
    assert all(
        torch.equal(state[key], pretrained[key]) for key in state if key not in moved and "head" not in key
    )
    assert model.eval()(torch.zeros(1, 3, 56, 56, dtype=torch.float64)).shape == (1, 5)


def test_transfer__2d_positions_stay_a_product_of_rows_and_columns(random_model: MakeModel) -> None:
    """Resizing the two tables is resizing the table they make, away from the class token."""
    model = random_model(TINY["2d"])
    rows, columns = model.position_rows.detach(), model.position_columns.detach()
    whole = resize_position_embedding(grid_table(rows, columns, 1), (4, 4), (7, 5), 1)
    assert (grid_table(resize_axis(rows, 7), resize_axis(columns, 5), 1) - whole).abs().max() < 1e-12


def test_transfer__raster_offsets_are_kept_on_their_grid_and_refused_on_another(
    random_model: MakeModel,
) -> None:
    source = TINY["relative"]
    state = random_model(source).state_dict()
    assert transfer(build(source), source, state)[1] == "relative positions 4x4 kept"
    with pytest.raises(CheckpointError) as error:
        transfer(build(replace(source, image_size=56)), source, state)
    assert str(error.value) == "relative positions of a 4x4 grid do not fit 7x7: keep image_size 32"


def test_transfer__method_is_the_one_that_is_named(
    tiny: ViTConfig, source: ViTConfig, random_model: MakeModel
) -> None:
    state, model = random_model(source).state_dict(), build(replace(tiny, image_size=56), dtype=torch.float64)
    assert transfer(model, source, state, method="bicubic")[1] == "position embedding 4x4 -> 7x7 (bicubic)"
    expected = resize_position_embedding(state["position_embedding"], (4, 4), (7, 7), 1, "bicubic")
    assert torch.equal(model.state_dict()["position_embedding"], expected)


@pytest.mark.parametrize(
    ("source", "target", "change", "words"),
    [
        ("vit", "vit", {"num_heads": 4}, "num_heads is 3, the model has 4"),
        ("vit", "vit", {"gelu": "erf"}, "gelu is 'tanh', the model has 'erf'"),
        ("vit", "vit", {"depth": 3}, "depth is 2, the model has 3"),
        ("resnet v1", "vit", {}, "family is 'resnet', the model is 'vit'"),
        ("vit", "axial", {}, "family is 'vit', the model is 'axial'"),
        ("resnet v1", "resnet v2", {}, "version is 'v1', the model has 'v2'"),
        ("hybrid", "hybrid, root alone", {}, "patch_size is 1, the model has 4"),
        ("vit", "every layer", {}, "position_at is 'stem'"),
    ],
)
def test_transfer__refuses_another_body_even_where_the_shapes_fit(
    source: str, target: str, change: dict[str, object], words: str
) -> None:
    model = build(replace(TINY[target], **change))
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(CheckpointError, match=re.escape(words)):
        transfer(model, TINY[source], build(TINY[source]).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", few([*TINY], *OF_EACH_KIND))
def test_draw_parts__together_are_the_weights_of_build(name: str, count: int) -> None:
    whole = build(TINY[name], seed=3).state_dict()
    digests, drawn = set(), {key: list[torch.Tensor]() for key in whole}
    for number in range(count):
        parts = {}
        for key, tensor in whole.items():
            rows = -(-len(tensor) // count)
            first = min(len(tensor), number * rows)
            part = torch.full_like(tensor[first : first + rows], float("nan"))
            parts[key] = part, first
            drawn[key].append(part)
        digests.add(draw_parts(TINY[name], 3, parts))
    assert len(digests) == 1
    assert all(torch.equal(torch.cat(drawn[key]), tensor) for key, tensor in whole.items())
    assert draw_parts(TINY[name], 4, {key: (tensor, 0) for key, tensor in whole.items()}) not in digests


def test_transfer__a_fresh_norm_is_behind_the_mean_as_maes() -> None:
    """The stored norm goes, and the mean of what the last block gives is normalised without weights."""
    stored = replace(variant("Ti/4", image_size=16, num_classes=0), depth=2, classifier="patches")
    pretrained, config = build(stored, seed=1), with_fresh_norm(stored)
    with torch.no_grad():
        pretrained.norm.weight.uniform_(0.5, 2.0)
        pretrained.norm.bias.normal_()
    model, blocks = build(replace(config, num_classes=3), seed=2).eval(), []
    transfer(model, config, pretrained.state_dict(), fresh_norm=True)
    model.blocks[-1].register_forward_hook(lambda _module, _inputs, tokens: blocks.append(tokens))
    found = model.features(torch.rand(4, 3, 16, 16))
    mean = blocks[0][:, 1:].mean(dim=1)
    assert torch.equal(found, torch.nn.functional.layer_norm(mean, mean.shape[1:], eps=stored.norm_eps))
    assert torch.equal(model.blocks[1].mlp.fc1.weight, pretrained.blocks[1].mlp.fc1.weight)
    assert torch.equal(model.norm.weight, torch.ones(stored.hidden_size))
    with pytest.raises(RecipeError, match="needs the mean of the patches"):
        with_fresh_norm(replace(stored, classifier="token"))
