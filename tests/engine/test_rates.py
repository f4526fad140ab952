"""Rates and weight decay by layer, frozen layers, and LAMB: against timm, and by what must not change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix import each, few, slow
from tests.models.tiny_models import OF_EACH_KIND, TINY
from vitctl.engine.optimizer import (
    Average,
    build_optimizer,
    clip_gradients,
    load_optimizer_tensors,
    optimizer_tensors,
    parameter_groups,
    take_step,
)
from vitctl.models.blocks import freeze, train_mode, trainable
from vitctl.models.build import build
from vitctl.models.flops import count_trained
from vitctl.models.places import decay_exponent, is_matrix, place
from vitctl.models.variants import Config
from vitctl.models.weights.layouts import rule_for
from vitctl.models.weights.timm import TABLE
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.sections import LayerRates, Optimizer
from vitctl.recipe.write import to_toml

OK, BAD = torch.tensor(True), torch.tensor(False)
ADAM: dict[str, Any] = {"name": "adam", "lr": 1e-3, "weight_decay": 0.05}


def timm_name(ours: str) -> str:
    rule = rule_for(TABLE, ours)
    assert rule is not None
    return rule.theirs[0]


def test_groups__are_those_of_timm_name_by_name() -> None:
    from timm.models.vision_transformer import VisionTransformer
    from timm.optim import param_groups_layer_decay

    reference = VisionTransformer(
        patch_size=8, embed_dim=24, depth=2, num_heads=3, mlp_ratio=40 / 24, img_size=32, num_classes=5
    )
    names = {id(p): name for name, p in reference.named_parameters()}
    groups = param_groups_layer_decay(reference, 0.05, reference.no_weight_decay(), layer_decay=0.65)
    theirs = {
        names[id(p)]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]
    }
    model = build(TINY["vit"])
    own = parameter_groups(model, LayerRates(**ADAM, layer_decay=0.65, decay_on="matrices"))
    ours = {id(p): (group["scale"], group["weight_decay"]) for group in own for p in group["params"]}
    assert {timm_name(name): ours[id(p)] for name, p in model.named_parameters()} == theirs
    assert len(own) == len({*theirs.values()}) == 8


def test_groups__by_default_one_of_all_parameters_in_their_order() -> None:
    for family in TINY.values():
        model = build(family)
        (group,) = parameter_groups(model, LayerRates(**ADAM))
        assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
        assert (group["scale"], group["weight_decay"]) == (1.0, 0.05)


@each(
    ("name", "timm", "mae"),
    [
        *((name, 13, 13) for name in ("class_token", "registers", "position_embedding", "norm_pre.weight")),
        *((name, 13, 13) for name in ("patch_embedding.bias", "position_rows", "backbone.root.weight")),
        ("blocks.0.scale1", 12, 12),
        ("blocks.11.attention.qkv.lora_a", 1, 1),
        ("norm.weight", 1, 0),
        *((name, 0, 0) for name in ("pool.probe", "pre_logits.bias", "head.bias")),
    ],
)
def test_decay_exponent__numbering_of_timm_and_of_mae(name: str, timm: int, mae: int) -> None:
    assert (decay_exponent(name, 12, "timm"), decay_exponent(name, 12, "mae")) == (timm, mae)


def test_is_matrix__no_vector_token_or_table() -> None:
    shapes = {name: p.dim() for family in TINY.values() for name, p in build(family).named_parameters()}
    decayed = {name for name, dimensions in shapes.items() if is_matrix(name, dimensions)}
    assert all(shapes[name] in (2, 4) and name.endswith(".weight") for name in decayed - {"pool.probe"})
    left_out = {name for name, dimensions in shapes.items() if dimensions > 1} - decayed
    assert {name.split(".")[-1] for name in left_out} == {
        *("class_token", "position_embedding", "position_rows", "position_columns", "relative_position"),
        *("registers", "relative_bias"),
    }


def test_rates__every_parameter_moves_by_its_own_rate() -> None:
    """Adam's first step moves every number by the learning rate, and the head by its multiple of it."""
    model = build(TINY["vit"], dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chosen = LayerRates(name="adam", lr=1.0, eps=1e-30, layer_decay=0.5, head_lr_multiplier=10.0)
    optimizer = build_optimizer(model, chosen)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * group["scale"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    take_step(optimizer, OK)
    for name, p in model.named_parameters():
        rate = 0.1 * 0.5 ** decay_exponent(name, 2, "timm") * (10 if name.startswith("head.") else 1)
        assert torch.allclose(before[name] - p, torch.full_like(p, rate), rtol=1e-12), name


@pytest.mark.parametrize("family", few(TINY, *OF_EACH_KIND))
def test_freeze__nothing_up_to_there_has_gradient_state_or_average(family: Config) -> None:
    depth = getattr(family, "depth", 0)
    for frozen in {-1, 0, 1, depth, depth + 2} if depth else {-1, 2}:
        model = build(replace(family, representation_size=0) if depth else family)
        freeze(model, frozen)
        wanted = {name for name, _ in model.named_parameters() if place(name, depth) > frozen}
        assert set(trainable(model)) == wanted
        assert sum(p.numel() for p in trainable(model).values()) == count_trained(model.config, frozen)
        optimizer = build_optimizer(model, Optimizer(**ADAM))
        average = Average(model, 0.5)
        train_mode(model)
        model(torch.randn(2, 3, family.image_size, family.image_size)).square().sum().backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == wanted
        still = {name: p.clone() for name, p in model.named_parameters() if name not in wanted}
        optimizer.param_groups[0]["lr"] = 0.1
        take_step(optimizer, OK)
        average.update(model, OK)
        assert {key.split("/")[1] for key in optimizer_tensors(optimizer, model)} == wanted
        assert set(average.tensors) == wanted
        assert all(torch.equal(model.get_parameter(name), p) for name, p in still.items())


def test_freeze__frozen_layers_compute_as_in_evaluation() -> None:
    model = build(replace(TINY["vit"], depth=3, dropout=0.5, drop_path=0.5))
    freeze(model, 2)
    train_mode(nn.Sequential(model))  # as it is wrapped
    assert [model.dropout.training, *(block.mlp.dropout1.training for block in model.blocks)] == [
        False,
        False,
        False,
        True,
    ]
    images, seen = torch.randn(2, 3, 32, 32), []
    model.blocks[1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    model(images)
    model(images)
    assert torch.equal(*seen)
    assert seen[0].grad_fn is None  # nothing is kept of the layers before


def stepped(optimizer: Any, model: nn.Module, lr: float, gradients: list[Tensor], finite: Tensor) -> None:
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.clone()
    for group in optimizer.param_groups:
        group["lr"] = lr
    take_step(optimizer, finite)


def noise(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


@pytest.mark.parametrize(
    ("changes", "options"),
    [({}, {}), ({"clip_norm": 0.0, "eps": 1e-8}, {"max_grad_norm": None, "eps": 1e-8})],
)
@pytest.mark.parametrize("weight_decay", [0.02, *slow(0.0)])
def test_lamb__every_step_is_that_of_timm(
    weight_decay: float, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """As it comes, and without clipping. Gradients are small at first, where eps counts, then clipped."""
    from timm.optim import Lamb

    ours, theirs = build(TINY["vit"]), build(TINY["vit"])
    chosen = Optimizer(name="lamb", lr=1.0, weight_decay=weight_decay, **changes)
    assert changes or (chosen.eps, chosen.clip_norm) == (1e-6, 1.0)
    optimizer = build_optimizer(ours, chosen)
    reference = Lamb(theirs.parameters(), lr=1.0, weight_decay=weight_decay, foreach=False, **options)
    for step in range(20):
        gradients = [gradient * 10.0 ** (step / 3 - 6) for gradient in noise(theirs, step)]
        stepped(reference, theirs, 0.01 * (step % 5), gradients, OK)
        for p, gradient in zip(ours.parameters(), gradients, strict=True):
            p.grad = gradient
        clip_gradients(ours.parameters(), chosen.clip_norm)
        stepped(optimizer, ours, 0.01 * (step % 5), [p.grad for p in ours.parameters()], OK)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7, msg=name)
            assert {"step", *reference.state[q]} == set(optimizer.state[p])


def test_lamb__has_its_defaults_wherever_a_recipe_chooses_it(tmp_path: Path) -> None:
    """What a file or a flag sets is kept, and a resolved recipe is read back as it is."""
    chosen = Override("optimizer.name", "lamb")
    for given, expected in (([], (1e-6, 1.0)), ([Override("optimizer.eps", 1e-8)], (1e-8, 1.0))):
        loaded = load_recipe("in1k_b16", [chosen, *given, Override("optimizer.clip_norm", 1.0)])
        assert (loaded.recipe.optimizer.eps, loaded.recipe.optimizer.clip_norm) == expected
    stored = load_recipe("deit3_b16")
    assert (stored.recipe.optimizer.eps, stored.recipe.optimizer.clip_norm) == (1e-5, 1000.0)
    (tmp_path / "recipe.toml").write_text(to_toml(loaded))
    assert load_recipe(tmp_path / "recipe.toml").recipe == loaded.recipe
    assert (Optimizer(**ADAM).eps, Optimizer(**ADAM).clip_norm) == (1e-8, 0.0)


def test_groups__beits_tables_decay_where_its_authors_decay_them() -> None:
    """BEiT v2, optim_factory.py: what has one dimension or is a bias, class token or position does not."""
    model = build(TINY["beit"])
    chosen = LayerRates(**ADAM, decay_on="matrices_and_relative")
    own = parameter_groups(model, chosen)
    decayed = {id(p) for group in own if group["weight_decay"] for p in group["params"]}
    for name, p in model.named_parameters():
        theirs = (
            p.dim() > 1 and not name.endswith(".bias") and name not in ("class_token", "position_embedding")
        )
        assert (id(p) in decayed) == theirs, name
    tables = [p for name, p in model.named_parameters() if name.endswith("relative_bias")]
    assert tables and all(id(p) in decayed for p in tables)
    plain = parameter_groups(model, LayerRates(**ADAM, decay_on="matrices"))
    assert not {id(p) for group in plain if group["weight_decay"] for p in group["params"]} & {
        id(p) for p in tables
    }


def test_lamb__a_skipped_step_changes_nothing_and_its_state_is_stored() -> None:
    one, two = build(TINY["vit"]), build(TINY["vit"])
    chosen = Optimizer(name="lamb", lr=1.0, weight_decay=0.02)
    plain, skipping = build_optimizer(one, chosen), build_optimizer(two, chosen)
    for step in range(4):
        nothing = [torch.full_like(p, [torch.nan, torch.inf][step % 2]) for p in two.parameters()]
        stepped(skipping, two, 0.1, nothing, BAD)
        for model, optimizer in ((one, plain), (two, skipping)):
            stepped(optimizer, model, 0.1, noise(model, step), OK)
        if step == 1:
            stored = {key: value.clone() for key, value in optimizer_tensors(skipping, two).items()}
            skipping = build_optimizer(two, chosen)
            load_optimizer_tensors(skipping, two, stored)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    states = [optimizer_tensors(o, m) for o, m in ((plain, one), (skipping, two))]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_optimizer__adamw_is_a_name_of_adam() -> None:
    assert Optimizer(**{**ADAM, "name": "adamw"}) == Optimizer(**ADAM)
