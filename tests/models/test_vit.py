"""The forward pass: against an independent NumPy model, by its invariances, and in every place it has to run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitctl.models.build import build
from vitctl.models.variants import ViTConfig
from vitctl.models.vit import EncoderBlock, VisionTransformer

Array = NDArray[np.float64]
MakeModel = Callable[..., VisionTransformer]
# What stands in for dropout at the four sites: a fixed factor shows that each is where it should be, and only there.
NO_DROPOUT = (1.0, 1.0, 1.0, 1.0)


def images_for(config: ViTConfig, batch: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (batch, 3, config.image_size, config.image_size)
    return torch.rand(shape, generator=generator, dtype=torch.float64).mul(2).sub(1).to(dtype)


def norm(x: Array, w: dict[str, Array], name: str) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * w[f"{name}.weight"] + w[f"{name}.bias"]


def dense(x: Array, w: dict[str, Array], name: str) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(x: Array, w: dict[str, Array], name: str, num_heads: int) -> Array:
    width = x.shape[-1]
    size = width // num_heads
    query, key, value = (dense(x, w, f"{name}.qkv")[..., i * width : (i + 1) * width] for i in range(3))
    heads = []
    for head in range(num_heads):
        of_head = slice(head * size, (head + 1) * size)
        scores = query[..., of_head] @ key[..., of_head].swapaxes(1, 2) / np.sqrt(size)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ value[..., of_head])
    return dense(np.concatenate(heads, -1), w, f"{name}.out")


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def reference(config: ViTConfig, w: dict[str, Array], images: Array, factors: tuple[float, ...] = NO_DROPOUT) -> Array:
    """The authors' forward pass in NumPy, with a factor at each of the four dropout sites."""
    after_position, after_attention, after_gelu, after_mlp = factors
    patch, (rows, columns) = config.patch_size, config.grid
    x = np.empty((len(images), rows * columns, config.hidden_size))
    for row, column in product(range(rows), range(columns)):
        pixels = images[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        x[:, row * columns + column] = np.einsum("bchw,dchw->bd", pixels, w["patch_embedding.weight"])
    x += w["patch_embedding.bias"]
    if config.classifier == "token":
        x = np.concatenate([np.repeat(w["class_token"], len(x), 0), x], 1)
    if config.position_embedding == "learned":
        x = x + w["position_embedding"]
    x = x * after_position
    for i in range(config.depth):
        block = f"blocks.{i}"
        x = x + after_attention * attention(norm(x, w, f"{block}.norm1"), w, f"{block}.attention", config.num_heads)
        hidden = after_gelu * gelu_tanh(dense(norm(x, w, f"{block}.norm2"), w, f"{block}.mlp.fc1"))
        x = x + after_mlp * dense(hidden, w, f"{block}.mlp.fc2")
    x = norm(x, w, "norm")
    x = x[:, 0] if config.classifier == "token" else x.mean(1)
    if config.representation_size:
        x = np.tanh(dense(x, w, "pre_logits"))
    return dense(x, w, "head") if config.num_classes else x


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
    tiny: ViTConfig, random_model: MakeModel, change: dict[str, object]
) -> None:
    config = replace(tiny, **change)
    model, images = random_model(config), images_for(config)
    expected = reference(config, weights_of(model), images.numpy())
    logits = model(images).detach().numpy()
    assert logits.shape == (3, config.num_classes or config.feature_size)
    assert np.abs(expected).std() > 0.01
    assert np.abs(logits - expected).max() < 1e-12


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_features__feed_the_head(tiny: ViTConfig, random_model: MakeModel, change: dict[str, object]) -> None:
    config = replace(tiny, **change)
    model, images = random_model(config), images_for(config)
    features = model.features(images)
    assert features.shape == (3, config.feature_size)
    assert torch.equal(model(images), model.head(features) if model.head is not None else features)


def dropouts(model: VisionTransformer) -> Iterator[tuple[int, torch.nn.Dropout]]:
    """Every dropout module with the index of the site it stands for."""
    yield 0, model.dropout
    for block in model.blocks:
        assert isinstance(block, EncoderBlock)
        yield from ((1, block.dropout), (2, block.mlp.dropout1), (3, block.mlp.dropout2))


def test_dropout__is_at_the_four_places_and_no_other(tiny: ViTConfig, random_model: MakeModel) -> None:
    config = replace(tiny, dropout=0.3)
    model, images = random_model(config), images_for(config)
    factors = (0.9, 1.3, 0.7, 1.1)
    found = list(dropouts(model))
    assert len(found) == 1 + 3 * config.depth
    assert len(found) == sum(isinstance(module, torch.nn.Dropout) for module in model.modules())
    assert {module.p for _, module in found} == {0.3}
    for site, module in found:
        module.register_forward_hook(lambda *call, factor=factors[site]: call[-1] * factor)
    expected = reference(config, weights_of(model), images.numpy(), factors)
    assert np.abs(model(images).detach().numpy() - expected).max() < 1e-12


def test_dropout__acts_in_training_and_not_in_evaluation(tiny: ViTConfig, random_model: MakeModel) -> None:
    model, plain = random_model(replace(tiny, dropout=0.3)), random_model(tiny)
    images = images_for(tiny)
    assert torch.equal(model(images), plain(images))
    assert torch.equal(plain.train()(images), plain.eval()(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_forward__drops_the_pixels_beyond_the_last_patch(tiny: ViTConfig, random_model: MakeModel) -> None:
    wide = replace(tiny, image_size=39)
    images = images_for(wide)
    assert torch.equal(random_model(wide)(images), random_model(tiny)(images[:, :, :32, :32]))


def test_encode__without_positions_does_not_see_the_order_of_patches(tiny: ViTConfig, random_model: MakeModel) -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    for position_embedding, sees_order in (("none", False), ("learned", True)):
        model = random_model(replace(tiny, position_embedding=position_embedding))
        patches = model.embed(images_for(tiny))
        change = (model.encode(patches)[:, 0] - model.encode(patches[:, order])[:, 0]).abs().max()
        assert (change > 1e-3) == sees_order
        assert (change < 1e-12) != sees_order


def test_forward__images_do_not_see_each_other(tiny: ViTConfig, random_model: MakeModel) -> None:
    model, images = random_model(tiny), images_for(tiny, batch=4)
    one_by_one = torch.cat([model(image[None]) for image in images])
    assert (model(images) - one_by_one).abs().max() < 1e-12


def test_backward__reaches_every_weight(tiny: ViTConfig, random_model: MakeModel) -> None:
    model = random_model(replace(tiny, representation_size=11, dropout=0.1)).train()
    model(images_for(tiny)).square().sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert len(gradients) == len(model.state_dict())
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []


def test_forward__in_bf16_autocast_stays_near_float32(tiny: ViTConfig, random_model: MakeModel) -> None:
    for change in CHANGES[:4]:
        config = replace(tiny, **change)
        model, images = random_model(config, torch.float32), images_for(config, dtype=torch.float32)
        exact = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(images)
            stream = model.encode(model.embed(images))
        assert rounded.dtype == torch.bfloat16
        assert stream.dtype == torch.float32
        assert 0 < (rounded.float() - exact).abs().max() < 0.05 * exact.std() + 0.05


def test_encode__keeps_the_residual_stream_wide_in_autocast(tiny: ViTConfig) -> None:
    model = build(replace(tiny, classifier="gap", position_embedding="none"))
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(images_for(tiny, dtype=torch.float32))
    assert seen == [torch.float32] * tiny.depth


def test_forward__compiles_as_one_graph(tiny: ViTConfig, random_model: MakeModel) -> None:
    model, images = random_model(tiny), images_for(tiny)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), model(images))


def test_forward__exports_to_onnx_with_any_batch(tiny: ViTConfig, random_model: MakeModel) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = random_model(replace(tiny, representation_size=11), torch.float32)
    example, batch = images_for(tiny, 2, torch.float32), torch.export.Dim("batch", min=1, max=64)
    program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for size in (1, 2, 5):
        images = images_for(tiny, size, torch.float32)
        (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        assert np.abs(logits - model(images).detach().numpy()).max() < 1e-5
