"""What holds for every family: the forward pass against NumPy, gradients, learning, and every place it has to
run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.matrix import slow
from tests.models.numpy_reference import Array, forward
from vitctl.models.build import Model, build
from vitctl.models.variants import Config, ViTConfig

MakeModel = Callable[..., Model]
MakeImages = Callable[..., Tensor]


def weights_of(model: Model) -> dict[str, Array]:
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-10), *slow((torch.float32, 1e-5))])
def test_forward__equals_an_independent_numpy_model(
    family: Config, random_model: MakeModel, images_for: MakeImages, dtype: torch.dtype, share: float
) -> None:
    model, images = random_model(family, dtype), images_for(family, dtype=dtype)
    expected = forward(family, weights_of(model), images.double().numpy())
    logits = model(images).detach().double().numpy()
    assert logits.shape == (3, 5)
    assert expected.std() > 0.05
    assert np.abs(logits - expected).max() < share * expected.std()


def test_forward__is_the_head_of_the_features(
    kind: Config, random_model: MakeModel, images_for: MakeImages
) -> None:
    model, images = random_model(kind), images_for(kind)
    features = model.features(images)
    assert features.shape == (3, kind.feature_size)
    assert model.head is not None
    assert torch.equal(model(images), model.head(features))
    bare = random_model(replace(kind, num_classes=0))
    bare.load_state_dict({name: w for name, w in model.state_dict().items() if not name.startswith("head.")})
    assert torch.equal(bare(images), features)


def test_backward__reaches_every_weight_with_finite_gradients(
    kind: Config, random_model: MakeModel, images_for: MakeImages
) -> None:
    model = random_model(kind, torch.float32).train()
    model(images_for(kind, dtype=torch.float32)).square().sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert len(gradients) == len(model.state_dict())
    assert [
        name
        for name, grad in gradients.items()
        if grad is None or not grad.any() or not grad.isfinite().all()
    ] == []


def test_backward__is_finite_from_the_first_step_on(kind: Config, images_for: MakeImages) -> None:
    model = build(kind)
    F.cross_entropy(model(images_for(kind, dtype=torch.float32)), torch.tensor([0, 1, 2])).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_checkpoint_blocks__changes_neither_loss_nor_gradients(kind: Config, images_for: MakeImages) -> None:
    if isinstance(kind, ViTConfig):
        kind = replace(kind, dropout=0.2, drop_path=0.3)
    images = images_for(kind)
    found = []
    for checkpointed in (0, 1, 2, *(["attention"] if isinstance(kind, ViTConfig) else [])):
        model: Any = build(kind, dtype=torch.float64)
        assert model.checkpoint_blocks == 0
        model.checkpoint_blocks = checkpointed
        torch.manual_seed(3)
        logits = model(images)
        (logits + model.features(images).sum(dim=1, keepdim=True)).square().sum().backward()
        found.append([logits, *(weight.grad for weight in model.parameters())])
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


def test_checkpoint_blocks__keeps_less(kind: Config, images_for: MakeImages) -> None:
    def kept(checkpointed: bool) -> int:
        model, sizes = build(kind), {}
        model.checkpoint_blocks = checkpointed

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        images = images_for(kind, batch=8, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(images).sum()
        assert loss.requires_grad
        return sum(sizes.values())

    assert kept(True) < 0.9 * kept(False)


def test_forward__in_bf16_autocast_stays_near_float32(
    kind: Config, random_model: MakeModel, images_for: MakeImages
) -> None:
    model, images = random_model(kind, torch.float32), images_for(kind, dtype=torch.float32)
    exact = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(images)
    assert 0 < (rounded.float() - exact).abs().max() < 0.1 * exact.std() + 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["axial", "relative", "hybrid", "2d", "dinov3", "beit", "siglip", "resnet v2", "axial resnet"],
    indirect=True,
)
def test_forward__compiles_as_one_graph(
    family: Config, random_model: MakeModel, images_for: MakeImages
) -> None:
    torch.compiler.reset()
    model, images = random_model(family), images_for(family)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert (compiled(images) - model(images)).abs().max() < 1e-12


# The ones that ONNX Runtime or the exporter once got wrong, then all others.
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "relative",
        *slow("dinov3"),
        # tests/export/ has some of them as files.
        *slow("2d", "hybrid", "axial", "axial resnet", "resnet v2", "eva", "beit", "siglip", "clip"),
    ],
    indirect=True,
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # by the exporter of torch 2.11
def test_forward__exports_to_onnx_with_any_batch(
    family: Config, random_model: MakeModel, images_for: MakeImages
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = random_model(family, torch.float32)
    example, batch = images_for(family, 2, torch.float32), torch.export.Dim("batch", min=1, max=64)
    program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for size in (1, 2, 5):
        images = images_for(family, size, torch.float32)
        (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        assert np.abs(logits - model(images).detach().numpy()).max() < 1e-4


def test_build__draws_the_same_weights_in_every_dtype(kind: Config) -> None:
    single, double = (
        build(kind, seed=5).state_dict(),
        build(kind, seed=5, dtype=torch.float64).state_dict(),
    )
    assert single.keys() == double.keys()
    assert all(torch.equal(weight.double(), double[name]) for name, weight in single.items())
    other = build(kind, seed=6).state_dict()
    assert any(not torch.equal(weight, other[name]) for name, weight in single.items())


def test_build__on_meta_draws_nothing_and_has_shapes(kind: Config) -> None:
    model = build(kind, device="meta")
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert model(torch.empty(2, 3, kind.image_size, kind.image_size, device="meta")).shape == (2, 5)
