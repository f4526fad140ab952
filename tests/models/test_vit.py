"""The forward pass: against an independent NumPy model, by its invariances, and wherever it has to run."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.fake_card import CARD, FakeCard
from tests.models.numpy_reference import Array, forward
from tests.models.tiny_models import TINY
from vitctl.models.build import build
from vitctl.models.variants import ViTConfig
from vitctl.models.vit import DropPath, EncoderBlock, VisionTransformer

MakeModel = Callable[..., VisionTransformer]
MakeImages = Callable[..., torch.Tensor]


def weights_of(model: VisionTransformer) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


CHANGES: list[dict[str, object]] = [
    {},
    {"classifier": "gap"},
    {"representation_size": 11},
    {"classifier": "gap", "representation_size": 11, "position_embedding": "none"},
    {"position_embedding": "none", "num_heads": 1},
    {"image_size": 37, "num_classes": 0},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_forward__equals_an_independent_numpy_model(
    tiny: ViTConfig, random_model: MakeModel, change: dict[str, object], images_for: MakeImages
) -> None:
    config = replace(tiny, **change)
    model, images = random_model(config), images_for(config)
    expected = forward(config, weights_of(model), images.numpy())
    logits = model(images).detach().numpy()
    assert logits.shape == (3, config.num_classes or config.feature_size)
    assert np.abs(expected).std() > 0.01
    assert np.abs(logits - expected).max() < 1e-12


def dropouts(model: VisionTransformer) -> Iterator[tuple[int, torch.nn.Dropout]]:
    """Every dropout module with the index of the site it stands for."""
    yield 0, model.dropout
    for block in model.blocks:
        assert isinstance(block, EncoderBlock)
        yield from ((1, block.dropout), (2, block.mlp.dropout1), (3, block.mlp.dropout2))


def test_dropout__is_at_the_four_places_and_no_other(
    tiny: ViTConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    config = replace(tiny, dropout=0.3)
    model, images = random_model(config), images_for(config)
    factors = (0.9, 1.3, 0.7, 1.1)
    found = list(dropouts(model))
    assert len(found) == 1 + 3 * config.depth
    assert len(found) == sum(isinstance(module, torch.nn.Dropout) for module in model.modules())
    assert {module.p for _, module in found} == {0.3}
    for site, module in found:
        module.register_forward_hook(lambda *call, factor=factors[site]: call[-1] * factor)
    expected = forward(config, weights_of(model), images.numpy(), factors)
    assert np.abs(model(images).detach().numpy() - expected).max() < 1e-12


def test_forward__drops_the_pixels_beyond_the_last_patch(
    tiny: ViTConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    wide = replace(tiny, image_size=39)
    images = images_for(wide)
    assert torch.equal(random_model(wide)(images), random_model(tiny)(images[:, :, :32, :32]))


def test_encode__keeps_the_residual_stream_wide_in_autocast(tiny: ViTConfig, images_for: MakeImages) -> None:
    model = build(replace(tiny, classifier="gap", position_embedding="none"))
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(images_for(tiny, dtype=torch.float32))
    assert seen == [torch.float32] * tiny.depth


@pytest.mark.parametrize(
    "values", [{}, {"position_at": "every_layer"}, {"position_embedding": "relative"}, {"classifier": "gap"}]
)
def test_forward__the_last_block_computes_what_is_read(
    tiny: ViTConfig, random_model: MakeModel, images_for: MakeImages, values: dict[str, Any]
) -> None:
    """Outputs and gradients are those of the whole block; of its tokens only the class token is computed
    where the rest is not read.
    """
    config = replace(tiny, **values)
    model, images, found, shapes = random_model(config), images_for(config), [], []
    model.blocks[-1].register_forward_hook(lambda _module, _inputs, output: shapes.append(output.shape[1]))
    for every_token in (False, True):
        model.every_token = every_token
        outputs = model(images)
        found.append([outputs, *torch.autograd.grad(outputs.square().sum(), list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()
    assert shapes == [
        config.num_tokens if values.get("classifier") or "relative" in values.values() else 1,
        config.num_tokens,
    ]


def test_drop_path__grows_linearly_with_depth(tiny: ViTConfig) -> None:
    model = build(replace(tiny, depth=5, drop_path=0.2))
    rates = [block.drop_path.rate.item() for block in list(model.blocks)[1:]]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2])
    for one in (model, build(replace(tiny, depth=1, drop_path=0.2))):
        assert isinstance(one.blocks[0].drop_path, nn.Identity)
    assert "rate" not in "".join(model.state_dict())


def test_drop_path__drops_each_branch_for_whole_images_and_scales_the_rest(tiny: ViTConfig) -> None:
    model = build(replace(tiny, drop_path=0.5), dtype=torch.float64)
    block = model.blocks[1]
    assert isinstance(block, EncoderBlock)
    torch.manual_seed(0)
    tokens = torch.randn(1, 17, 24, dtype=torch.float64).expand(400, -1, -1)
    found = block(tokens)
    after_attention = [tokens[0] + scale * block.attention(block.norm1(tokens[:1]))[0] for scale in (0, 2)]
    outcomes = [x + scale * block.mlp(block.norm2(x)) for x in after_attention for scale in (0, 2)]
    counts = [sum(torch.allclose(image, outcome, atol=1e-12) for image in found) for outcome in outcomes]
    assert sum(counts) == 400
    assert min(counts) > 60


def test_drop_path__its_rate_follows_to_the_device_and_stays_exact() -> None:
    """A compiled block with a number of the CPU is no CUDA graph; in float32, `1 - rate` would be another
    number.
    """
    layer = DropPath(0.1)
    for moved in (
        layer.to(torch.bfloat16),
        copy.deepcopy(layer).half(),
        layer.to("meta"),
        layer.to_empty(device="cpu"),
    ):
        assert (moved.rate.dtype, moved.rate.device.type, moved.rate.item()) == (torch.float64, "cpu", 0.1)
    assert not [*layer.buffers(), *layer.state_dict()]
    with FakeCard() as card:
        block = card.put(nn.ModuleList([layer]).to(CARD))
        assert layer.rate.device == CARD
        branch = torch.ones(4, 17, 24, device=CARD)
        with card.watched():
            assert block[0](branch).device == CARD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_drop_path__gives_the_bits_of_its_equation(dtype: torch.dtype) -> None:
    layer, branch = DropPath(0.3), torch.randn(50, 3, 4).to(dtype)
    torch.manual_seed(0)
    found = layer(branch)
    torch.manual_seed(0)
    wanted = branch * ((torch.rand(50, 1, 1) >= layer.rate) / (1 - layer.rate)).to(dtype)
    assert found.dtype == dtype and torch.equal(found, wanted)


def test_drop_path__acts_in_training_alone_and_draws_nothing_at_rate_0(
    tiny: ViTConfig, random_model: MakeModel, images_for: MakeImages
) -> None:
    model, plain = random_model(replace(tiny, drop_path=0.5)), random_model(tiny)
    images = images_for(tiny)
    assert torch.equal(model(images), plain(images))
    before = torch.get_rng_state()
    assert torch.equal(plain.train()(images), plain.eval()(images))
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    assert not torch.equal(model(images), model(images))


@pytest.mark.parametrize("name", ["vit", "hybrid"])
def test_as_product__is_the_patch_convolution(name: str) -> None:
    """By values and gradients, also of a map, and where the last rows and columns fill no patch."""
    model = build(TINY[name]).double()
    layer = model.patch_embedding
    images = torch.randn(2, layer.in_channels, 3 * layer.kernel_size[0] + 1, 33, dtype=torch.float64)
    found = []
    for embed in (model.as_product, partial(VisionTransformer.embed, model)):
        inputs = images.clone().requires_grad_()
        patches = embed(inputs)
        needed = torch.autograd.grad(patches.square().sum(), (inputs, layer.weight, layer.bias))
        found.append([patches, *needed])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-12 * other.abs().max()


def test_embed__on_a_gpu_is_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = build(TINY["vit"]), []
    monkeypatch.setattr(model, "as_product", seen.append)
    images = SimpleNamespace(device=torch.device("cuda"))
    model.embed(images)
    assert seen == [images]
