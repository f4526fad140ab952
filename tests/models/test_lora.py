"""Adapters: what they add, what is merged, and peft as the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.matrix import slow
from tests.models.tiny_models import TINY, VIT
from vitctl.engine.checkpoint import parts
from vitctl.engine.optimizer import build_optimizer
from vitctl.errors import RecipeError
from vitctl.models.blocks import compile_blocks, train_mode, trainable
from vitctl.models.build import Model, build
from vitctl.models.lora import adapt, adapted_layers, factors_of
from vitctl.models.variants import LORA_TARGETS, check_lora
from vitctl.models.weights import huggingface
from vitctl.models.weights.layouts import rule_for
from vitctl.models.weights.weights_file import Weights, write_weights
from vitctl.recipe.sections import Optimizer

IMAGES = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (4, 3, 32, 32)))
LABELS = torch.tensor([0, 3, 1, 4])
ALL = tuple(LORA_TARGETS)


def adapted(name: str = "vit", targets: tuple[str, ...] = ("q", "v"), **values: Any) -> Model:
    """A network in float64 with adapters of rank 3, B drawn."""
    model = build(TINY[name], seed=4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.normal_(generator=generator)
        adapt(model, targets, **{"blocks": (), "rank": 3, "alpha": 6.0, "dropout": 0.0, "seed": 7, **values})
        for layer, pairs in factors_of(model.state_dict()).items():
            assert layer in adapted_layers(model)
            for _, b in pairs.values():
                b.normal_(std=0.3, generator=generator)
    return model


def plain(model: Model) -> Model:
    """The network of the stored weights."""
    other = build(model.config, dtype=torch.float64)
    stored: dict[str, dict[str, Tensor]] = {}
    for part, name, tensor in parts(model, None, torch.optim.SGD(model.parameters())):
        stored.setdefault(part, {})[name] = tensor
    assert set(stored) == {"model", "lora"}
    other.load_state_dict(stored["model"])
    return other


@pytest.mark.parametrize("name", ["vit", "hybrid", *slow("gap", "relative")])
@pytest.mark.parametrize("targets", [ALL, *slow((("q", "v"),), (("k",),))], ids=str)
def test_stored_weights__are_merged_and_compute_the_same(name: str, targets: tuple[str, ...]) -> None:
    model = adapted(name, targets)
    merged = plain(model).eval()
    beside = train_mode_logits(model)
    torch.testing.assert_close(merged(IMAGES), beside, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.eval()(IMAGES), merged(IMAGES)), "scored is what is stored"
    frozen = build(model.config, seed=4, dtype=torch.float64).state_dict()
    for weight, tensor in merged.state_dict().items():
        touched = weight in adapted_layers(model) or weight == "head.weight"
        assert torch.equal(tensor, frozen[weight]) != touched, weight


def train_mode_logits(model: Model) -> Tensor:
    train_mode(model)
    return model(IMAGES).detach()


def test_merged__parts_of_the_fused_matrix_in_numpy() -> None:
    """Query and value rows change by alpha / rank * B A, key rows do not."""
    model = adapted()
    name = "blocks.1.attention.qkv.weight"
    before = model.get_parameter(name).detach().numpy()
    after = plain(model).get_parameter(name).detach().numpy()
    pairs = factors_of(model.state_dict())[name]
    for part, target in enumerate("qkv"):
        rows = slice(24 * part, 24 * (part + 1))
        added = np.zeros((24, 24))
        if target in pairs:
            a, b = (tensor.numpy() for tensor in pairs[target])
            added = 6 / 3 * b @ a
        np.testing.assert_allclose(after[rows] - before[rows], added, atol=1e-14)


def test_adapt__starts_as_the_network_without_adapters_and_trains_nothing_else() -> None:
    before = build(VIT, seed=4)
    model = build(VIT, seed=4)
    adapt(model, ("q", "fc1"), (1,), rank=2, alpha=0.0, dropout=0.0, seed=3)
    assert torch.equal(model(IMAGES.float()), before(IMAGES.float()))
    assert set(trainable(model)) == {"head.weight", "head.bias"} | {
        f"blocks.1.{layer}.adapters.{target}.{kind}"
        for layer, target in (("attention.qkv", "q"), ("mlp.fc1", "fc1"))
        for kind in "ab"
    }


def test_adapt__draws_depend_on_seed_block_and_target_alone() -> None:
    """A is uniform within 1 / sqrt(in), as torch draws a linear layer and peft draws A."""
    few, many = (adapted(targets=targets).state_dict() for targets in (("v",), ALL))
    other = adapted(targets=("v",), seed=8).state_dict()
    names = [name for name in few if name.endswith(".v.a")]
    assert len(names) == 2
    for name in names:
        assert torch.equal(few[name], many[name])
        assert not torch.equal(few[name], other[name])
    wide = replace(VIT, hidden_size=192, num_heads=3)
    model = build(wide, device="cpu")
    adapt(model, ("q",), (), rank=64, alpha=0.0, dropout=0.0, seed=0)
    drawn = model.get_parameter("blocks.0.attention.qkv.adapters.q.a").detach()
    nn.init.kaiming_uniform_(reference := torch.empty(64, 192), a=5**0.5)
    assert float(drawn.abs().max()) <= 192**-0.5
    assert float(drawn.std()) == pytest.approx(float(reference.std()), rel=0.02)


def test_dropout__is_of_the_inputs_of_adapters() -> None:
    model = adapted(dropout=0.5)
    torch.manual_seed(0)
    one, two = train_mode_logits(model), train_mode_logits(model)
    assert not torch.equal(one, two)
    assert torch.equal(model.eval()(IMAGES), plain(model).eval()(IMAGES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's tracing
def test_compiled__layers_of_a_kind_share_a_graph() -> None:
    """A class for each layer was a graph for each: 24 for 12 blocks, and L/16 passed torch's limit."""
    torch.compiler.reset()
    model, graphs = build(replace(VIT, depth=6)), list[torch.fx.GraphModule]()
    adapt(model, ("q", "v", "fc1"), (), rank=2, alpha=0.0, dropout=0.0, seed=0)
    compile_blocks(model, lambda graph, _: graphs.append(graph) or graph.forward)
    train_mode(model)
    model(torch.randn(2, 3, 32, 32))
    # Three outside blocks; the first block, whose input needs no gradient; the others; the class token's.
    assert len(graphs) == 3 + 3


@pytest.mark.slow
@torch.no_grad()
def test_compiled__computes_the_same() -> None:
    model, compiled = adapted(), adapted()
    assert compile_blocks(compiled, backend="aot_eager") == 2
    torch.testing.assert_close(train_mode_logits(compiled), train_mode_logits(model), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compiled.eval()(IMAGES), model.eval()(IMAGES), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("targets", [("q", "v"), *slow((ALL,))], ids=str)
def test_peft__the_same_logits_before_and_after_steps(targets: tuple[str, ...], tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = adapted(targets=targets)
    assert model.head is not None
    start = {name: tensor for name, tensor in model.state_dict().items() if "adapters" not in name}
    write_weights(Weights(model.config, start, {}), tmp_path / "hf", "hf")
    theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    modules = {
        (layer, target): huggingface.in_memory(rule.theirs[LORA_TARGETS[target][1]]).removesuffix(".weight")
        for layer, pairs in factors_of(model.state_dict()).items()
        if (rule := rule_for(huggingface.TABLE, layer))
        for target in pairs
    }
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=list(modules.values()), modules_to_save=["classifier"]
    )
    wrapped = peft.get_peft_model(theirs, config).double()
    with torch.no_grad():
        for (layer, target), name in modules.items():
            module = wrapped.base_model.model.get_submodule(name)
            for own, other in zip(
                factors_of(model.state_dict())[layer][target], (module.lora_A, module.lora_B), strict=True
            ):
                other["default"].weight.copy_(own)
    assert sum(p.numel() for p in wrapped.parameters() if p.requires_grad) == sum(
        p.numel() for p in trainable(model).values()
    )
    settings = Optimizer(name="adam", lr=0.1, weight_decay=0.01)
    ours = build_optimizer(model, settings)
    adam = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.1, weight_decay=0.01)
    for group in ours.param_groups:
        group["lr"] = 0.1
    train_mode(model)
    for _ in range(3):
        logits = model(IMAGES), wrapped(IMAGES).logits
        torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)
        for optimizer, one in zip((ours, adam), logits, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(one, LABELS).backward()
            optimizer.step()
    torch.testing.assert_close(plain(model).eval()(IMAGES), wrapped(IMAGES).logits, rtol=1e-6, atol=1e-6)


def test_check_lora__refuses_networks_without_such_layers() -> None:
    check_lora(TINY["hybrid"], (0, 1))
    with pytest.raises(RecipeError, match="for Vision Transformers and hybrids"):
        check_lora(TINY["resnet v2"], ())
    with pytest.raises(RecipeError, match="for Vision Transformers and hybrids"):
        check_lora(TINY["axial"], ())
    with pytest.raises(RecipeError, match=r"lora\.blocks names 2, the network has the blocks 0 to 1"):
        check_lora(VIT, (1, 2))
